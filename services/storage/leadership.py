"""What the leader of a replica set does for its followers: it sends the log and counts progress.

A message is acknowledged, and visible to consumers, once every replica of the in-sync set has it on
disk. The position in a follower's fetch tells how far its log has come (protocol section 12).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batonmq._common.aio import wait_until
from batonmq._common.clock import Clock
from batonmq.errors import DataLoss, NotLeader
from batonmq_server.runtime.replication.in_sync_set import InSyncSet
from batonmq_server.runtime.replication.leadership import Leadership
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.core import checkpoint, floors
from batonmq_server.storage.core.commitlog import PositionRange
from batonmq_server.storage.core.epochs import EpochHistory, common_point
from batonmq_server.storage.core.log_transfer import read_whole_batches
from batonmq_server.storage.core.producers import states_below
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.metric_stream import REPLICATION, StorageMetricStream

log = logging.getLogger(__name__)

PRODUCER_QUEUES_MAX = 50_000
"""A follower that starts an empty copy gets the sequences of at most this many pairs of producer
and queue, about 10 MB."""
EXAMINED_BYTES = 16 * 1024 * 1024
"""A leader examines at most so many bytes for a follower that got damaged bytes: one fetch."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The answer to one fetch of a follower.

    Attributes:
        position: Position of `data`; less than the follower's end if it must cut its log.
        segment: The segment that contains, or will contain, `position`.
        floors: Set if the follower must discard its copy: the next offsets of the queues.
        producers: With `floors`: the state of the producers, as a checkpoint.
    """

    position: int
    data: bytes
    segment: PositionRange
    floors: bytes | None = None
    producers: bytes = b""


class StorageLeadership(Leadership):
    """One leadership of this node, from its election to its end.

    In the tracker a replica that has adopted this epoch counts one position more than its log has.
    So even with an empty log the tracker shows which replicas have adopted the epoch.

    Args:
        components: The components of this node's copy; nothing else writes to it meanwhile.
        in_thread: Runs blocking calls outside the event loop.

    Attributes:
        with_room: Followers whose disk has room for a leader, by their last report.
    """

    def __init__(
        self,
        in_sync_set: InSyncSet,
        components: StorageComponents,
        clock: Clock,
        stream: StorageMetricStream,
        in_thread: InThread,
    ) -> None:
        super().__init__(in_sync_set, clock)
        self.components, self._in_thread = components, in_thread
        self._stream, self._synced_s = stream, deque[tuple[int, float]]()
        self._node, self._log = components.node, components.node.store.log
        self._ended = False
        self._examined: dict[str, int] = {}
        self.with_room: set[str] = set()

    @property
    def history(self) -> EpochHistory:
        """Epoch history of the log."""
        return self._node.history

    async def begin(self) -> None:
        """Record the start of the epoch on this node's disk.

        Raises:
            OSError: the disk has failed; it is unknown whether the epoch is recorded.
        """
        begin: Callable[[Any], None] = lambda _: self._node.begin_epoch(self.epoch)  # noqa: E731
        await self._in_thread(begin, None)

    async def wait_settled(self) -> None:
        """Wait until the in-sync set has this epoch and everything before it, and etcd says so."""
        self.in_sync_set.on_change.append(self._confirm)
        self.components.flusher.on_sync.append(self._synced)
        self._synced(self._log.next_position)
        await self.in_sync_set.begun(self._log.next_position + 1)
        await self.in_sync_set.record_serving()

    def end(self) -> None:
        """End the leadership: nothing more is confirmed, and no log is sent to followers."""
        self._ended = True
        self._new_data.set()
        flusher = self.components.flusher
        if self._synced in flusher.on_sync:
            flusher.on_sync.remove(self._synced)
        self.in_sync_set.on_change.clear()

    async def fetch(self, follower: FollowerReport, limits: FetchLimits) -> FetchResult:
        """Return what a follower must do next.

        Raises:
            NotLeader: the leadership has ended meanwhile.
            DataLoss: the leader's log is damaged at the end of the follower's log.
        """
        mine, log_ = self.history, self._log
        name, end, theirs = follower.name, follower.end, follower.history
        point = log_.cut_position(common_point(mine, log_.next_position, theirs, end))
        if point < log_.first_position:
            self._follower_resets(name)
            return await self._reset_result()
        if point < end:
            self._follower_resets(name)
            return FetchResult(point, b"", (0, 0))
        has_epoch = theirs.epoch == self.epoch
        self._follower_has(name, end + has_epoch)
        (self.with_room.add if follower.has_room else self.with_room.discard)(name)
        if follower.damaged_position is not None:
            await self._examine(follower, follower.damaged_position)
        new_data = self._new_data
        if has_epoch and end >= log_.synced_position:
            await wait_until(new_data, limits.hold_ms)
            self._check_not_ended()
        try:
            data = await self.components.tier.reading(
                lambda: read_whole_batches(log_, self.history, end, limits.bytes_max)
            )
        except DataLoss as error:
            self.components.damage.report_error(error)
            await self._examine(follower, error.detail.position or end)
            raise
        self._check_not_ended()  # while the object store was read
        return FetchResult(end, data, self._segment(end))

    async def _examine(self, follower: FollowerReport, position: int) -> None:
        """Check this copy between the end of a follower and `position`, at which damage was found.

        The background scrub would find it too, but days later. It is done once for a position.
        """
        if self._examined.get(follower.name) == position:
            return
        self._examined[follower.name] = position
        await self.components.examine(follower.end, min(position, follower.end + EXAMINED_BYTES))

    async def _reset_result(self) -> FetchResult:
        store = self._node.store
        position, known = store.log.first_position, store.producers.snapshot()
        segment, kept = self._segment(position), floors.encode(store.floors())
        encoded: list[bytes] = []

        def encode(_: object) -> None:  # with many producers it takes seconds
            below = states_below(known, position, PRODUCER_QUEUES_MAX)
            encoded.append(checkpoint.of_producers(position, below))

        await self._in_thread(encode, None)
        self._check_not_ended()
        return FetchResult(position, b"", segment, kept, encoded[0])

    def _check_not_ended(self) -> None:
        """Check that the leadership continues; else a new leader may have the log cut.

        Raises:
            NotLeader: it has ended.
        """
        if self._ended:
            raise NotLeader("this node is no longer the leader", retry_after_ms=200)

    def _segment(self, position: int) -> PositionRange:
        if position >= self._log.end_position:
            return position, self._log.segment_end(position)
        return self._log.segment_of(position)[1:]

    def _synced(self, position: int) -> None:
        if self._stream.hub.watched:
            self._synced_s.append((position, self._stream.now_s()))
        self._leader_has(position + 1)
        self.in_sync_set.tracker_changed()

    def _confirm(self) -> None:
        safe = max(self.in_sync_set.safe - 1, 0)
        self.components.flusher.confirmed(safe)
        while self._synced_s and self._synced_s[0][0] <= safe:
            self._stream.observe_since(REPLICATION, self._synced_s.popleft()[1])


@dataclass(frozen=True, slots=True)
class FollowerReport:
    """What a follower reports of its log.

    Attributes:
        end: End of its log.
        damaged_position: Where the last bytes that it got were damaged; None if they were not.
        has_room: Whether its disk has room for a leader.
    """

    name: str
    end: int
    history: EpochHistory
    damaged_position: int | None = None
    has_room: bool = False


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch: time to wait for new bytes, in ms, and the maximum answer size."""

    hold_ms: int
    bytes_max: int
