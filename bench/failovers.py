"""How long a service is away when whoever leads it is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter

from batonmq.admin import Admin
from batonmq.common.errors import BatonError
from batonmq.core.route import QueueId
from batonmq.local.cluster import LocalCluster
from batonmq.local.layout import ClusterOptions, highly_available
from batonmq.producer import Producer
from batonmq.puller import Puller
from batonmq.replication import replicas_of
from bench.figures import Figure, Goal, figure
from bench.setup import TOPIC, Setup

GROUP = "bench"
GOAL_S = 5
_LOOK_S = 0.02
_HEAL_S = 60

Work = Callable[[], Awaitable[object]]


async def failovers(setup: Setup) -> list[Figure]:
    """The leader of each service in turn is killed, and asked for something at that moment.

    Measured until somebody answers. A killed process comes back, and nobody is killed before all
    copies are in sync again.
    """
    options = highly_available(ClusterOptions(auto_restart=False, log_level="WARNING"))
    rounds = setup.sized(20, 1)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(setup.folder / "cluster", options))
        admin = await stack.enter_async_context(Admin(cluster.nameserver))
        await admin.create_topic(TOPIC, 1)
        (queue,) = await _queues(cluster.nameserver)
        await admin.update_group(GROUP, ownership="off")
        producer = await stack.enter_async_context(Producer(cluster.nameserver))
        puller = await stack.enter_async_context(Puller(cluster.nameserver, GROUP))
        offset = (await producer.send(TOPIC, b"first")).offset

        asked: Mapping[str, Work] = {
            "storage": lambda: producer.send(TOPIC, b"x"),
            "offsets": lambda: puller.commit({queue: offset + 1}),
            "lockmgr": lambda: admin.list_locks(GROUP),
            "nameserver": admin.list_topics,
        }
        found: dict[str, list[float]] = {service: [] for service in asked}
        for number in range(rounds):
            for service, work in asked.items():
                setup.say(f"{service} {number + 1} of {rounds}")
                broker = queue.broker if service == "storage" else ""
                found[service].append(await _killed(admin, cluster, service, broker, work))
    return [
        figure(f"{service} killed to the next answer, {name}", value, "s", Goal(value_max=GOAL_S))
        for service, times in found.items()
        for name, value in (("p50", median(times)), (f"worst of {rounds}", max(times)))
    ]


async def _killed(
    admin: Admin, cluster: LocalCluster, service: str, broker: str, work: Work
) -> float:
    """Seconds from the death of who leads until `work` is done."""
    await _until(lambda: _whole(admin, cluster))
    name = await _leader(admin, cluster, service, broker)
    await cluster.kill(name)
    begin = perf_counter()
    await _until(lambda: _done(work))
    took = perf_counter() - begin
    await cluster.start(name)
    return took


async def _done(work: Work) -> bool:
    try:
        await work()
    except BatonError:
        return False
    return True


async def _leader(admin: Admin, cluster: LocalCluster, service: str, broker: str) -> str:
    """Name of the process that leads; of services without a leader any one."""
    nodes = [
        node
        for node in (await admin.cluster()).nodes
        if node.service == service and node.leader and broker in ("", node.replica_set)
    ]
    newest = max(nodes, key=lambda node: node.epoch)
    names = cluster.options.names_of(service)
    return next(name for name in names if cluster.addresses[name] == newest.address)


async def _whole(admin: Admin, cluster: LocalCluster) -> bool:
    """Whether every process serves, somebody leads each service, and all copies are in sync."""
    try:
        nodes = (await admin.cluster()).nodes
        kept = [node for node in nodes if node.service in ("storage", "offsets")]
        sets = {(node.service, node.replica_set) for node in kept}
        copies = [await replicas_of(admin, *one) for one in sorted(sets)]
    except BatonError:
        return False
    there = {node.address for node in nodes}
    return (
        there.issuperset(cluster.addresses[name] for name in cluster.options.names)
        and any(node.service == "lockmgr" and node.leader for node in nodes)
        and all(found and all(one.in_sync for one in found) for found in copies)
    )


async def _queues(nameserver: str) -> tuple[QueueId, ...]:
    async with Puller(nameserver) as puller:
        return await puller.queues(TOPIC)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_HEAL_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(_LOOK_S)
