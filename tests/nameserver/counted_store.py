"""A store of groups on a real etcd that counts what it writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

from batonmq._common.clock import Clock
from batonmq._core.queues import Incarnation
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap
from batonmq_server.nameserver.core.groups import Heartbeat, Subscription, Terms
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Put

LEASE_MS = 600_000


class CountingSession(EtcdSession):
    """Counts the bytes that its transactions write: keys and values, in all and by the last one."""

    written_bytes = last_bytes = 0

    async def txn(
        self,
        *,
        compare: Sequence[Compare],
        put: Sequence[Put] = (),
        delete: Sequence[str] = (),
    ) -> int | None:
        self.last_bytes = sum(len(one.key) + len(one.value) for one in put) + sum(map(len, delete))
        self.written_bytes += self.last_bytes
        return await super().txn(compare=compare, put=put, delete=delete)


@asynccontextmanager
async def counted_store(
    endpoint: str, cluster: str, queue_count: int = 64, *, write_bytes_per_s: int = 1_000_000_000
) -> AsyncIterator[tuple[CountingSession, GroupStore]]:
    """A store of groups, and a topic."""
    async with CountingSession(endpoint, cluster, Clock(), timeout_ms=60_000) as session:
        swap = CompareAndSwap(Random(1))
        topics = TopicStore(session, swap)
        await topics.create("flights", queue_count, {"broker-a": ""}, _no_progress)
        store = GroupStore(
            session,
            swap,
            topics,
            member_lease_ms=LEASE_MS,
            on_change=lambda _: None,
            write_bytes_per_s=write_bytes_per_s,
        )
        yield session, store


async def _no_progress(topic: str, topic_id: int) -> None:
    return


def member(number: int) -> Heartbeat:
    return Heartbeat(
        group="g",
        client_id=f"host-{number:04}@{number + 4_000}-a1b2c3",
        incarnation_id=2**63 + number,
        host=f"host-{number:04}.example.org",
        owner=1 << 31,
        terms=Terms(subscriptions=(Subscription("flights", "AA||DL"),)),
    )


def incarnation_of(number: int) -> Incarnation:
    joined = member(number)
    return Incarnation(joined.client_id, joined.incarnation_id, joined.owner)


async def join_all(store: GroupStore, count: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(store.join(member(number)))
