"""Compacts the queues of compacted topics, on the leader.

The leader decides which messages are kept, writes them again at the end of the log, and stores the
decision as an order in the log. Every node of the replica set applies the order once it is safe, so
all have the same messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from batonmq.errors import (
    BatonError,
    DataLoss,
    NoQuorum,
    NotEnoughReplicas,
    NotLeader,
    NotServing,
)
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.blocked_retention import blocking_segment_end
from batonmq_server.storage.compaction_runner import (
    CompactionAbandoned,
    CompactionRunner,
    DueQueue,
)
from batonmq_server.storage.core.compacted import CompactedPart
from batonmq_server.storage.core.compaction_need import DirtyBytes, QueueBytes, compacted_from
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.core.consumequeue import ConsumeQueue, topic_of
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.query import MessageQueries
from batonmq_server.storage.core.retention import SealedSegment
from batonmq_server.storage.topic_limits import TopicLimits, oldest_position

log = logging.getLogger(__name__)

INTERVAL_S = 10
QUEUES_AT_ONCE = 64
SMALL_BYTES, SMALL_INTERVAL_MS = 1024 * 1024, 20_000
"""A queue with fewer new bytes is compacted once in this time, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRetention:
    """Limits of the broker that remove whole segments.

    Attributes:
        age_ms_max: Retention time of messages; 0 for unlimited.
        log_bytes_max: Maximum size of the log; 0 for unlimited.
        newest_unix_ms: Returns a time by which all messages of a segment were stored.
    """

    newest_unix_ms: Callable[[SealedSegment], int]
    age_ms_max: int = 0
    log_bytes_max: int = 0


_NOTHING = DirtyBytes(0, 0)


@dataclass(slots=True)
class _QueueState:
    """What is known about a queue between two rounds.

    Attributes:
        run_ms: When it was compacted last; None if this node has not done so.
        due_ms: Since when it is due; None if it is not.
    """

    bytes: QueueBytes = field(default_factory=QueueBytes)
    run_ms: int | None = None
    due_ms: int | None = None
    needs: DirtyBytes = _NOTHING


class TopicCompactor:
    """Compacts queues, one at a time."""

    def __init__(
        self,
        appender: Appender,
        topics: TopicLimits,
        retention: BrokerRetention,
        runner: CompactionRunner,
    ) -> None:
        self._appender, self._topics = appender, topics
        self._retention, self._runner = retention, runner
        self._store, self._clock = appender.store, appender.clock
        self._metrics = appender.metrics.compaction
        self._queries = MessageQueries(appender.store)
        self._states: dict[QueueKey, _QueueState] = {}
        self._shown: set[str] = set()

    async def run(self) -> None:
        """Compact until cancelled; run it as one task."""
        try:
            while self._runner.limits.bytes_per_s:
                try:
                    await self.compact()
                except BatonError as error:  # the node can't write now: see `compact`
                    log.warning("topics not compacted error=%s", error)
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._metrics.clear()

    async def compact(self) -> int:
        """Compact the queues that are due, those with the most new bytes first; return how many.

        Raises:
            NotServing, NotLeader, NoQuorum, NotEnoughReplicas: the node can't write.
        """
        if self._appender.retention.rejection() is not None:
            return 0
        due = [one async for one in self._due()]
        done = 0
        for one in sorted(due, key=lambda one: -one.ratio):
            queue = self._store.queues.get(one.key)
            if queue is None:
                continue
            name = topic_of(queue.folder)
            begin_ms = self._clock.monotonic_ms()
            try:
                removed = await self._runner.compact(one)
            except (NotServing, NotLeader, NoQuorum, NotEnoughReplicas):
                raise
            except (BatonError, CompactionAbandoned) as error:
                self._metrics.failed(name)
                log.warning("queue not compacted topic=%s queue_id=%d %s", name, one.key[1], error)
                continue
            done += 1
            state, now_ms = self._states[one.key], self._clock.monotonic_ms()
            state.run_ms, state.due_ms = now_ms, None
            self._metrics.done(name, removed, self._clock.unix_ms())
            log.info(
                "queue compacted topic=%s queue_id=%d removed=%d compacted_to=%d ms=%d",
                name,
                one.key[1],
                removed,
                one.compact_to,
                now_ms - begin_ms,
            )
        return done

    async def _due(self) -> AsyncIterator[DueQueue]:
        """Yield the queues that are due."""
        by_topic: dict[str, list[_QueueState]] = {}
        present: set[QueueKey] = set()
        for number, (key, queue) in enumerate(list(self._store.queues.items()), start=1):
            if number % QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)
            policy = self._topics.compaction_of(key, queue)
            if policy is None:
                continue
            present.add(key)
            try:
                one = self._look(key, queue, policy)
            except DataLoss as error:
                name = topic_of(queue.folder)
                self._metrics.failed(name)
                log.warning("queue not compacted topic=%s queue_id=%d %s", name, key[1], error)
                continue
            state = self._states[key]
            by_topic.setdefault(topic_of(queue.folder), []).append(state)
            if one is None:
                state.due_ms = None
            else:
                state.due_ms = state.due_ms or self._clock.monotonic_ms()
                yield one
        self._states = {key: state for key, state in self._states.items() if key in present}
        self._show(by_topic)

    def _show(self, by_topic: Mapping[str, Sequence[_QueueState]]) -> None:
        """Show the state of the compacted topics, and no longer that of others."""
        now_ms = self._clock.monotonic_ms()
        for name, states in by_topic.items():
            dirty, clean = (sum(one.needs[at] for one in states) for at in (0, 1))
            since_ms = min((one.due_ms for one in states if one.due_ms), default=now_ms)
            self._metrics.looked(name, DirtyBytes(dirty, clean).ratio, now_ms - since_ms)
        for name in self._shown - by_topic.keys():
            self._metrics.forget(name)
        self._shown = set(by_topic)

    def _look(
        self, key: QueueKey, queue: ConsumeQueue, policy: CompactionPolicy
    ) -> DueQueue | None:
        """Return a queue if it is due; None otherwise.

        Raises:
            DataLoss: its index, or a batch that had to be read, is damaged.
        """
        state = self._states.setdefault(key, _QueueState())
        part = self._store.compacted.get(key)
        compact_to = self._compactable(key, queue, policy)
        state.needs = state.bytes.count(queue, part, max(compact_to, queue.first_offset))
        moved_before = self._moved_before(key)
        has_new = compact_to > compacted_from(queue, part) and state.needs.dirty > 0
        enough = 100 * state.needs.ratio >= policy.dirty_percent
        small = state.needs.dirty < SMALL_BYTES
        wait_ms = SMALL_INTERVAL_MS if small else 0
        early = state.run_ms is not None and self._clock.monotonic_ms() - state.run_ms < wait_ms
        due = has_new and enough and not early
        if not due and not moved_before and not self._has_old_tombstone(state, part, policy):
            return None
        return DueQueue(key, policy, compact_to, moved_before, state.needs.ratio)

    def _compactable(self, key: QueueKey, queue: ConsumeQueue, policy: CompactionPolicy) -> int:
        """Return the offset below which messages are old enough."""
        if not policy.min_lag_ms:
            return queue.visible_offset
        return self._queries.search_offset(key, self._clock.unix_ms() - policy.min_lag_ms + 1)

    def _moved_before(self, key: QueueKey) -> int:
        """Return the end of the segment that the queue keeps from retention; 0 if it keeps none."""
        position = oldest_position(self._store, key)
        if position is None:
            return 0
        limits = self._retention
        end = blocking_segment_end(
            self._appender,
            position,
            limits.newest_unix_ms,
            age_ms_max=limits.age_ms_max,
            log_bytes_max=limits.log_bytes_max,
        )
        return end or 0

    def _has_old_tombstone(
        self, state: _QueueState, part: CompactedPart | None, policy: CompactionPolicy
    ) -> bool:
        """Return whether a tombstone is to be removed: looked for once in its retention time."""
        times = [one.tombstone_unix_ms for one in part.sections] if part is not None else []
        oldest = min(filter(None, times), default=0)
        if not oldest or self._clock.unix_ms() - oldest < policy.tombstone_retention_ms:
            return False
        wait_ms = max(policy.tombstone_retention_ms, SMALL_INTERVAL_MS)
        now_ms = self._clock.monotonic_ms()
        return state.run_ms is None or now_ms - state.run_ms >= wait_ms
