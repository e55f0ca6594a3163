"""Reports of the cluster for one viewer, shared by all of its open pages.

Each report is read at most once per interval, however many pages show it. Pages of viewers with
other credentials never share a report: what a caller may see depends on its grants.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.diagnostics import describe_broker
from batonmq.admin.group_lag import GroupLag, group_lags
from batonmq.admin.replication import replicas
from batonmq.admin.reports import Topic
from batonmq.errors import BatonError, PermissionDenied
from batonmq_server.console.core.cluster_view import ClusterView, cluster_view
from batonmq_server.console.core.topic_view import TopicRow, rates_between, topic_row

Value = TypeVar("Value")
KEYS_MAX = 512
SLOW_MS = 10_000
"""Age of reports that cost more, or change rarely."""


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    read_ms: int | None = None
    value: Any = None


class Reports:
    """Reads and keeps reports with one client.

    Args:
        admin: Client with the credentials of the viewer; the caller closes it.
        age_ms: Age up to which a report is shown again, in milliseconds.
    """

    def __init__(self, admin: Admin, clock: Clock, age_ms: int) -> None:
        self.admin = admin
        self._clock, self._age_ms = clock, age_ms
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._ends: dict[QueueRef, tuple[int, int]] = {}

    async def get(
        self, key: Hashable, read: Callable[[], Awaitable[Value]], age_ms: int | None = None
    ) -> Value:
        """Return the report `key`; read it if it is older than `age_ms`.

        Callers that ask while it is read get the same report.
        """
        limit_ms = self._age_ms if age_ms is None else age_ms
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        async with entry.lock:
            now_ms = self._clock.monotonic_ms()
            if entry.read_ms is None or now_ms - entry.read_ms >= limit_ms:
                entry.value = await read()
                entry.read_ms = self._clock.monotonic_ms()
        while len(self._entries) > KEYS_MAX:
            self._entries.popitem(last=False)
        value: Value = entry.value
        return value

    def forget(self) -> None:
        """Read every report again when it is next needed, as after a change."""
        for entry in self._entries.values():
            entry.read_ms = None

    async def topics(self) -> tuple[Topic, ...]:
        """Return all topics that the viewer may see."""
        return await self.get("topics", self.admin.list_topics)

    async def cluster(self) -> ClusterView:
        """Return the nodes, the replica sets and the disks."""
        return await self.get("cluster", self._cluster)

    async def lags(self, groups: tuple[str, ...]) -> Mapping[str, GroupLag]:
        """Return lag and verdict of groups by name."""
        found = await self.get(("lags", groups), lambda: group_lags(self.admin, groups))
        return {lag.group: lag for lag in found}

    async def topic_rows(self, topics: tuple[Topic, ...]) -> tuple[TopicRow, ...]:
        """Return rows of topics with rates since the look before, and sizes."""
        names = tuple(topic.name for topic in topics)
        return await self.get(("topic rows", names), lambda: self._topic_rows(topics))

    async def _topic_rows(self, topics: tuple[Topic, ...]) -> tuple[TopicRow, ...]:
        queues = [queue for topic in topics for queue in topic.queues]
        extents, _ = await self.admin.extents(queues)
        sized = {topic.name: topic for topic in topics}
        stored, _ = await self.get(
            ("stored", tuple(sized)), lambda: self.admin.stored_bytes(queues), SLOW_MS
        )
        now_ms = self._clock.monotonic_ms()
        rates = dict[QueueRef, float]()
        for queue, extent in extents.items():
            before = self._ends.get(queue)
            if before is not None:
                seconds = (now_ms - before[1]) / 1000
                rates |= rates_between({queue: before[0]}, {queue: extent}, seconds)
        self._ends = {queue: (end, now_ms) for queue, (_, end) in extents.items()}
        return tuple(topic_row(topic, extents, rates, stored) for topic in topics)

    async def _cluster(self) -> ClusterView:
        cluster = await self.admin.cluster()
        notes, problems = list[str](), list[str]()
        copies, found = await replicas(self.admin, cluster.nodes)
        for problem in found:
            denied = f": {PermissionDenied.reason}: " in problem
            (notes if denied else problems).append(problem)
        brokers = []
        for broker in sorted({n.replica_set for n in cluster.nodes if n.service == "storage"}):
            try:
                brokers.append(await describe_broker(self.admin, broker))
            except PermissionDenied as error:
                notes.append(f"storage {broker}: {error.message}")
            except BatonError as error:
                problems.append(f"storage {broker}: {error.reason}: {error.message}")
        now_unix_ms = self._clock.unix_ms()
        return cluster_view(cluster, copies, brokers, problems, notes, now_unix_ms=now_unix_ms)
