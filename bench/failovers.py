"""Unavailability of a service after its leader is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter

from batonmq._consumer.puller import Puller
from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.cluster_state import first_problem, leader_process
from batonmq_server.local.layout import ClusterOptions, highly_available
from bench.figures import Figure, Goal, figure
from bench.setup import TOPIC, Setup

GROUP = "bench"
GOALS_S = (2.5, 4)
"""p50 and worst."""
_LOOK_S = 0.02
_HEAL_S = 60

Work = Callable[[], Awaitable[object]]


async def failovers(setup: Setup) -> list[Figure]:
    """Kill the leader of each service in turn; measure the time until a call succeeds.

    A killed process is started again, and the next one is killed only when all replicas are in
    sync.
    """
    options = highly_available(ClusterOptions(auto_restart=False, log_level="WARNING"))
    rounds = setup.sized(20, 1)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            LocalCluster(setup.folder / "cluster", options, start=start_program)
        )
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
        figure(f"{service} killed to the next answer, {name}", value, "s", Goal(value_max=goal))
        for service, times in found.items()
        for name, value, goal in (
            ("p50", median(times), GOALS_S[0]),
            (f"worst of {rounds}", max(times), GOALS_S[1]),
        )
    ]


async def _killed(
    admin: Admin, cluster: LocalCluster, service: str, broker: str, work: Work
) -> float:
    """Return the seconds from the kill of the leader until `work` is done."""
    await _until(lambda: _whole(admin, cluster))
    name = await leader_process(admin, cluster, service, broker)
    assert name is not None, f"{service} has no leader"
    await cluster.kill(name)
    begin = perf_counter()
    await _until(lambda: _done(work))
    took = perf_counter() - begin
    await cluster.start(name)
    return took


async def _whole(admin: Admin, cluster: LocalCluster) -> bool:
    return not await first_problem(admin, cluster)


async def _done(work: Work) -> bool:
    try:
        await work()
    except BatonError:
        return False
    return True


async def _queues(nameserver: str) -> tuple[QueueRef, ...]:
    async with Puller(nameserver) as puller:
        return await puller.queues(TOPIC)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_HEAL_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(_LOOK_S)
