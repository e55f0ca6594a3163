"""The two clusters of a run of mirrors, and what is read from them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import TypeVar

from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, normalize, subtract
from batonmq._core.retries import retry_topic
from batonmq.admin.admin import Admin
from batonmq.admin.reports import queue_from_pb
from batonmq.errors import BatonError, GroupInUse, Retry, Unreachable
from batonmq_server.testing import MemoryBroker
from batonmq_server.testing.memory_network import Faults
from tests.simulation.broker_set import BrokerSet
from tests.simulation.member_processes import MemberProcesses
from tests.simulation.mirror_checks import Log, Progress
from tests.simulation.mirror_processes import MirrorProcesses

TOPIC, GROUP, BROKERS = "orders", "workers", 2
SLOW_S = 10.0
"""Time after which no delayed call arrives."""
FAULTS = Faults(loss=0.004, duplicate=0.02, slow=0.01, slow_ms_max=6_000)
STORAGE: Mapping[str, object] = {
    "segment_bytes": 16_384,
    "transaction_check_first_ms": 1_000,
    "transaction_check_interval_ms": 2_000,
}
T = TypeVar("T")


class Cluster:
    """One of the two clusters, with the members of its group and the mirror to the other one."""

    def __init__(self, name: str, broker: MemoryBroker) -> None:
        self.name, self.broker = name, broker
        self.members: MemberProcesses
        self.mirrors: MirrorProcesses
        self.admin: Admin


def make_cluster(seed: str, random: Random, name: str, *, replicated: bool) -> MemoryBroker:
    if replicated:
        return BrokerSet(f"{seed}/{name}", random, STORAGE, cluster=name)
    settings: dict[str, dict[str, object]] = {
        service: {"cluster": name} for service in ("nameserver", "lockmgr", "offsets", "storage")
    }
    settings["storage"] |= STORAGE
    return MemoryBroker(
        broker_count=BROKERS, seed=f"{seed}/{name}", faults=FAULTS, settings=settings
    )


async def read_log(cluster: Cluster) -> Log:
    """Return all messages of a cluster, by queue."""
    log: defaultdict[QueueRef, list[ReceivedMessage]] = defaultdict(list)
    topic = (await repeat(lambda: cluster.admin.describe_topic(TOPIC))).topic
    for queue in topic.queues:
        log[queue] = []
    for one in await cluster.broker.messages(TOPIC):
        log[one.queue].append(one)
    for messages in log.values():
        messages.sort(key=lambda one: one.offset)
    return log


async def read_progress(admin: Admin) -> Progress:
    """Return the handled offsets of the group on the topic."""
    found: dict[QueueRef, list[Range]] = {}
    for one in await admin.progress(GROUP):
        queue = queue_from_pb(one.queue.queue)
        if queue.topic == TOPIC:
            acked = [(part.first_offset, part.next_offset) for part in one.acked]
            found[queue] = normalize([(0, one.committed_offset), *acked])
    return found


async def read_lag(admin: Admin) -> dict[QueueRef, list[int]]:
    """Return the offsets that the group has not handled, also in its retry topic."""
    queues = [queue for name in (TOPIC, retry_topic(GROUP))
              for queue in (await admin.describe_topic(name)).topic.queues]  # fmt: skip
    extents, problems = await admin.extents(queues)
    if problems:
        raise Unreachable("; ".join(problems))
    progress: dict[QueueRef, list[Range]] = {}
    for one in await admin.progress(GROUP):
        acked = [(part.first_offset, part.next_offset) for part in one.acked]
        progress[queue_from_pb(one.queue.queue)] = normalize([(0, one.committed_offset), *acked])
    lag: dict[QueueRef, list[int]] = {}
    for queue, extent in extents.items():
        left = subtract([extent] if extent[0] < extent[1] else [], progress.get(queue, []))
        if left:
            lag[queue] = [offset for first, end in left for offset in range(first, end)]
    return lag


async def repeat(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until it is answered; members of a group that were killed are gone soon."""
    while True:
        try:
            return await call()
        except BatonError as error:
            if error.retry is Retry.NEVER and not isinstance(error, GroupInUse):
                raise
        await asyncio.sleep(0.5)
