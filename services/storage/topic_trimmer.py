"""Trims the queues of topics with a retention of their own, on the leader.

The leader decides, and stores the decision as an order in the log. Every node of the replica set
carries the order out, so all have the same first offsets.
"""

from __future__ import annotations

import asyncio
import logging

from batonmq.errors import BatonError, DataLoss, Unreachable
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.consumequeue import ConsumeQueue, topic_of
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.purge import TRIMS_MAX, PurgeOrder, QueueTrim, encode_order
from batonmq_server.storage.core.query import MessageQueries
from batonmq_server.storage.core.topic_retention import KeptAge, KeptBytes
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.segment_examiner import SegmentExaminer
from batonmq_server.storage.tier_reader import LocalReads, RemoteReads
from batonmq_server.storage.topic_limits import TopicLimits

log = logging.getLogger(__name__)

INTERVAL_S = 10
QUEUES_AT_ONCE = 64


class TopicTrimmer:
    """Decides which messages are removed by the retention of their topic.

    While an order is not carried out, no other one is stored. On a full disk there may be no room
    for the checkpoint that records an order. Until then only orders are stored that purge a
    segment: such a checkpoint frees more than it needs.
    """

    def __init__(
        self,
        appender: Appender,
        limits: TopicLimits,
        examiner: SegmentExaminer,
        tier: RemoteReads | None = None,
    ) -> None:
        self._tier = tier or LocalReads()
        self._appender, self._limits, self._examiner = appender, limits, examiner
        self._store, self._clock = appender.store, appender.clock
        self._queries = MessageQueries(appender.store)
        self._kept: dict[QueueKey, tuple[KeptAge, KeptBytes]] = {}

    async def run(self) -> None:
        """Trim until cancelled; run it as one task."""
        while True:
            try:
                await self.trim()
            except BatonError as error:  # the node can't write now: see `trim`
                log.warning("topics not trimmed error=%s", error)
            await asyncio.sleep(INTERVAL_S)

    async def trim(self) -> bool:
        """Store an order that trims all queues with expired messages; return whether one was due.

        The order also purges one segment of which no message is kept any more, if there is one.

        Raises:
            NotServing, NotLeader, NoQuorum: the node can't write.
        """
        store = self._store
        if store.due_orders(store.log.next_position):
            return False
        trims: dict[QueueKey, QueueTrim] = {}
        counts: dict[str, int] = {}
        self._limits.refresh()
        self._forget()
        queues = [] if store.purge_orders else list(store.queues.items())
        for number, (key, queue) in enumerate(queues, start=1):
            if number % QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if len(trims) == TRIMS_MAX:
                break
            trim = await self._trim_of(key, queue)
            if trim is not None:
                trims[key] = trim
                name = topic_of(queue.folder)
                counts[name] = counts.get(name, 0) + trim.first_offset - queue.first_offset
        segments = []
        removes = self._kept or self._store.compacted.parts
        examined = await self._examiner.find() if removes else None
        if examined is not None and len(trims) + len(examined.keys) <= TRIMS_MAX:
            segments.append(examined.segment)
            for key in examined.keys - trims.keys():
                if (held := self._store.queues.get(key)) is not None:
                    trims[key] = QueueTrim(*key, held.first_offset, held.first_position)
        if not trims and not segments:
            return False
        names = {
            key[0]: topic_of(held.folder)
            for key in trims
            if (held := self._store.queues.get(key)) is not None
        }
        present = tuple(trim for trim in trims.values() if trim.topic_id in names)
        order = PurgeOrder((), tuple(segments), -1, present, names)
        batch = checked(encode_order(order))
        (outcome,) = self._appender.append([batch], SYSTEM_TOPICS, frees_space=True)
        if isinstance(outcome, BatonError):
            log.warning("topics not trimmed error=%s", outcome)
            return False
        for name, count in counts.items():
            self._appender.metrics.traffic.trimmed(name, count)
            log.info("topic trimmed topic=%s messages=%d", name, count)
        for begin, end in segments:
            log.info("segment of trimmed topics purged position=%d bytes=%d", begin, end - begin)
        return True

    def _forget(self) -> None:
        """Forget the queues that are removed, or have no retention of their own any more."""
        for key in list(self._kept):
            queue = self._store.queues.get(key)
            if queue is None or self._limits.of(key, queue) is None:
                del self._kept[key]

    async def _trim_of(self, key: QueueKey, queue: ConsumeQueue) -> QueueTrim | None:
        """Return how a queue is trimmed; None if all its messages are kept."""
        limits = self._limits.of(key, queue)
        if limits is None:
            return None
        age, bytes_ = self._kept.setdefault(key, (KeptAge(), KeptBytes()))
        keep_from = queue.first_offset
        try:
            if limits.age_ms_max:
                oldest_unix_ms = self._clock.unix_ms() - limits.age_ms_max
                keep_from = await self._tier.reading(
                    lambda: age.keep_from(self._queries, key, queue, oldest_unix_ms)
                )
            if limits.bytes_max:
                for _ in bytes_.steps(queue, keep_from, limits.bytes_max):
                    await asyncio.sleep(0)
                keep_from = max(keep_from, bytes_.first_offset)
            if keep_from <= queue.first_offset:
                return None
            return QueueTrim(*key, keep_from, self._position_of(queue, keep_from))
        except (
            DataLoss,
            Unreachable,
        ) as error:  # repaired or replaced elsewhere; the other queues go on
            log.warning("queue not trimmed topic=%s queue_id=%d %s", queue.folder, key[1], error)
            return None

    def _position_of(self, queue: ConsumeQueue, offset: int) -> int:
        """Return the position of the batch at `offset`, or one between it and the batch before."""
        if offset < queue.visible_offset:
            return int(queue.read(offset, offset + 1).positions[0])
        last = queue.read(offset - 1, offset)
        return int(last.positions[0]) + int(last.sizes[0])
