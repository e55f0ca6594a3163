"""What the leader of a replica set does for its followers: hand out the log, and wait for them.

A message is answered for, and seen by readers, once every member of the in-sync set has it on
disk. A follower says how far it has come by asking for what follows (protocol section 12).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batonmq._common.aio import wait_until
from batonmq._common.clock import Clock
from batonmq.errors import DataLoss, NotLeader
from batonmq_server.runtime.keeper import Keeper
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.core import checkpoint, floors
from batonmq_server.storage.core.commitlog import PositionRange
from batonmq_server.storage.core.epochs import EpochHistory, common_point
from batonmq_server.storage.core.log_transfer import read_whole_batches
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.metric_stream import REPLICATION, StorageMetricStream

log = logging.getLogger(__name__)

PRODUCER_QUEUES_MAX = 50_000
"""Of so many pairs of producer and queue a follower that begins anew gets the sequences: 10 MB."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What a follower gets.

    Attributes:
        position: Where `data` begins.
        segment: Holds `position`, or will.
        floors: Set if the follower has to begin anew,
        producers: and what it then has to know of producers, as a checkpoint.
    """

    position: int
    data: bytes
    segment: PositionRange
    floors: bytes | None = None
    producers: bytes = b""


class Leadership:
    """One node's time as leader.

    In the keeper's books positions are one higher than in the log, for those who have the history
    up to this epoch: so even of an empty log it shows who has heard of the epoch.

    Args:
        components: What works on this node's copy; nobody else writes to it meanwhile.
    """

    def __init__(
        self,
        keeper: Keeper,
        components: StorageComponents,
        clock: Clock,
        stream: StorageMetricStream,
    ) -> None:
        self.keeper, self.components, self._clock = keeper, components, clock
        self._stream, self._synced_s = stream, deque[tuple[int, float]]()
        self._node, self._log = components.node, components.node.store.log
        self._grown = asyncio.Event()
        self._over = False

    @property
    def epoch(self) -> int:
        """Of this leadership."""
        return self.keeper.epoch

    @property
    def history(self) -> EpochHistory:
        """Of the log."""
        return self._node.history

    async def begin(self, in_thread: InThread) -> None:
        """Begin the epoch, on this node's disk.

        Raises:
            OSError: it is not known whether it has begun.
        """
        begin: Callable[[Any], None] = lambda _: self._node.begin_epoch(self.epoch)  # noqa: E731
        await in_thread(begin, None)

    async def settled(self) -> None:
        """Return once the in-sync set has the epoch, and all that was before, and etcd knows."""
        self.keeper.on_news.append(self._tell)
        self.components.flusher.on_sync.append(self._synced)
        self._synced(self._log.next_position)
        await self.keeper.begun(self._log.next_position + 1)
        await self.keeper.serve()

    def end(self) -> None:
        """The leadership is over: nothing is confirmed by it any more, nor handed out."""
        self._over = True
        self._grown.set()
        flusher = self.components.flusher
        if self._synced in flusher.on_sync:
            flusher.on_sync.remove(self._synced)
        self.keeper.on_news.clear()

    async def fetch(
        self, name: str, end: int, theirs: EpochHistory, wish: FetchLimits
    ) -> FetchResult:
        """What follower `name` is to do next, whose log with that history ends at `end`.

        Raises:
            NotLeader: the leadership has ended meanwhile.
            DataLoss: the log is damaged there.
        """
        mine, log_ = self.history, self._log
        point = common_point(mine, log_.next_position, theirs, end)
        if point < log_.first_position:
            self.keeper.books.forget(name)
            return self._beginning()
        if point < end:
            self.keeper.books.forget(name)
            return FetchResult(point, b"", (0, 0))
        has_epoch = theirs.epoch == self.epoch
        self.keeper.books.heard(name, end + has_epoch, self._clock.monotonic_ms())
        self.keeper.looked_at()
        grown = self._grown
        if has_epoch and end >= log_.synced_position:
            await wait_until(grown, wish.hold_ms)
            if self._over:  # and somebody else may be at work on the log
                raise NotLeader("this node is not the leader any more", retry_after_ms=200)
        try:
            data = read_whole_batches(log_, self.history, end, wish.bytes_max)
        except DataLoss as error:
            self.components.damage.report_error(error)
            raise
        return FetchResult(end, data, self._segment(end))

    def _beginning(self) -> FetchResult:
        store = self._node.store
        position = store.log.first_position
        known = store.producers.below(position, PRODUCER_QUEUES_MAX)
        return FetchResult(
            position,
            b"",
            self._segment(position),
            floors.encode(store.floors()),
            checkpoint.of_producers(position, known),
        )

    def _segment(self, position: int) -> PositionRange:
        if position >= self._log.end_position:
            return position, self._log.segment_end(position)
        return self._log.segment_of(position)[1:]

    def _synced(self, position: int) -> None:
        if self._stream.hub.watched:
            self._synced_s.append((position, self._stream.now_s()))
        self.keeper.books.wrote(position + 1)
        self.keeper.looked_at()
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def _tell(self) -> None:
        safe = max(self.keeper.safe - 1, 0)
        self.components.flusher.confirmed(safe)
        while self._synced_s and self._synced_s[0][0] <= safe:
            self._stream.observe_since(REPLICATION, self._synced_s.popleft()[1])


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch: time to wait for new bytes, in ms, and the maximum answer size."""

    hold_ms: int
    bytes_max: int
