"""Appends batches to the store: checks, group commit, metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from batonmq._common.clock import Clock
from batonmq.errors import BatonError, DiskFull, Overloaded
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic
from batonmq_server.storage.core.compaction_order import Relocation
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.retention import DiskState, DiskUsage, Retention
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.metric_stream import StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node_role import NodeRole

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Appender:
    """Appends batches to the store of a node.

    Attributes:
        broker: Broker name: the replica set, or a node without replicas.
        space: Returns used and free bytes of the disk; does not block.
    """

    broker: str
    store: MessageStore
    space: Callable[[], tuple[int, int]]
    flusher: Flusher
    retention: Retention
    role: NodeRole
    metrics: StorageMetrics
    stream: StorageMetricStream
    clock: Clock

    def append(
        self,
        batches: Sequence[CheckedBatch],
        topics: Mapping[str, LocalTopic | BatonError],
        members_min: int = 1,
        *,
        frees_space: bool = False,
    ) -> list[StoreReceipt | BatonError]:
        """Write `batches` and return one outcome each, in order. Nothing is safe until a sync.

        Args:
            topics: Every topic of `batches`, or the error that makes it unusable.
            members_min: Reject all batches if fewer replicas are in sync.
            frees_space: Write them to a full disk too, if they fit.

        Raises:
            NotServing: the disk has failed.
            NotLeader: this node is not the leader.
        """
        if not batches:
            return []
        self.flusher.check()
        rejection = self.role.rejection(members_min)
        if rejection is None and not frees_space:
            rejection = self.disk_rejection()
        try:
            outcomes = self.store.append(batches, topics, self.clock.unix_ms(), rejection)
        except Exception as error:
            self.flusher.fail(error)  # log and indexes may differ now: only recovery can tell
            if isinstance(error, OSError):
                self.flusher.check()  # raises the same error as in waiting calls
            raise
        self.flusher.notify_written()
        return [self._with_disk_numbers(one) for one in outcomes]

    def relocate(self, relocated: Sequence[Relocation]) -> list[int]:
        """Write messages of compacted queues again; return the positions of the batches.

        Raises:
            NotServing: the disk has failed.
            NotLeader, NoQuorum, NotEnoughReplicas: this node may not write.
            DiskFull, Overloaded: there is no room; nothing was written.
        """
        self.flusher.check()
        if (rejection := self.role.rejection(1) or self.disk_rejection()) is not None:
            raise rejection
        try:
            positions = self.store.relocate(relocated, self.clock.unix_ms())
        except (DiskFull, Overloaded):
            raise
        except Exception as error:
            self.flusher.fail(error)
            if isinstance(error, OSError):
                self.flusher.check()
            raise
        self.flusher.notify_written()
        return positions

    def roll(self) -> None:
        """Close the current segment of the log unless it is empty.

        Raises:
            NotServing: the disk has failed.
            NotLeader, NoQuorum, NotEnoughReplicas: this node may not write.
        """
        self.flusher.check()
        if (rejection := self.role.rejection(1)) is not None:
            raise rejection
        try:
            self.store.log.roll()
        except OSError as error:
            self.flusher.fail(error)
            self.flusher.check()
        self.flusher.notify_written()

    def count_appended(
        self, batches: Sequence[CheckedBatch], outcomes: Sequence[StoreReceipt | BatonError]
    ) -> None:
        """Count the stored batches in the metrics, per topic and queue."""
        messages: dict[tuple[str, int], tuple[int, int, int]] = {}
        for checked, outcome in zip(batches, outcomes, strict=True):
            if not isinstance(outcome, StoreReceipt):
                continue
            if outcome.duplicate:
                self.metrics.duplicate_batches.inc()
                continue
            header = checked.header
            count, size, _ = messages.get((header.topic, header.queue_id), (0, 0, 0))
            messages[header.topic, header.queue_id] = (
                count + header.count,
                size + header.length,
                outcome.first_offset + header.count,
            )
        for (topic, queue_id), sums in messages.items():
            self.metrics.appended_messages.inc(sums[0])
            self.metrics.appended_bytes.inc(sums[1])
            self.metrics.traffic.stored(topic, sums[0], sums[1])
            if self.stream.hub.watched:
                self.stream.appended(topic, queue_id, sums)

    def _with_disk_numbers(self, outcome: StoreReceipt | BatonError) -> StoreReceipt | BatonError:
        """Return `outcome`; a DiskFull of this write gets the numbers of the disk."""
        if not isinstance(outcome, DiskFull) or outcome.facts:
            return outcome
        self.retention.record_no_space()
        return self.disk_rejection() or outcome

    def disk_rejection(self) -> DiskFull | None:
        """Return why nothing may be written, by the disk as it is now; None if writes are ok."""
        if self.retention.state is DiskState.FULL:
            self.retention.remeasure(DiskUsage(*self.space()))
            if self.retention.state is not DiskState.FULL:
                log.info(
                    "disk has room again, writes are accepted used_percent=%.1f free_bytes=%d",
                    self.retention.usage.used_percent,
                    self.retention.usage.free_bytes,
                )
        return self.retention.rejection()
