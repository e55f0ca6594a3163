"""One queue of a puller: fetched ahead, a little, from the place where its caller wants it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from batonmq._common.aio import unless
from batonmq._connection.directory import Directory
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.flow_control import ByteBudget, FlowLimits, QueueBytes, blocking_limit
from batonmq._core.queues import QueueRef
from batonmq._core.records import check_batch, decode_records, tag_hashes
from batonmq._core.subscription import Filter
from batonmq.errors import (
    BatonError,
    GroupNotFound,
    InvalidArgument,
    ModeChanged,
    OffsetAheadOfLog,
    OffsetOutOfRange,
    OffsetOutOfRangeDetail,
    QueueNotFound,
    Retry,
    TopicNotFound,
)

log = logging.getLogger(__name__)

OutOfRangePolicy = Literal["earliest", "latest", "error"]
_NEWS = (GroupNotFound, TopicNotFound, QueueNotFound, ModeChanged)
_NEWS_TRIES = 5
"""What was just created or changed is refused until storage has heard of it."""


@dataclass(frozen=True, slots=True)
class KeptOffsets:
    """A queue holds [first_offset, next_offset)."""

    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class FetchedBatches:
    """What storage holds of [offset asked for, next_offset).

    Attributes:
        batches: Stored batches; the ends may lie outside.
        lost_count: Messages of it that are no longer kept.
        extent: Of the queue.
    """

    batches: tuple[bytes, ...]
    next_offset: int
    lost_count: int
    extent: KeptOffsets


@dataclass(frozen=True, slots=True)
class FetchSource:
    """Where a lane gets its queue from; all raise `BatonError`.

    Attributes:
        begin: Where to begin if nobody says.
        extent: What the queue holds.
        fetch: Queue, offset, filter and bytes in; returns at once, or after a while with nothing.
        idle_ms: Time to wait after a fetch that has brought nothing.
    """

    begin: Callable[[QueueRef], Awaitable[int]]
    extent: Callable[[QueueRef], Awaitable[KeptOffsets]]
    fetch: Callable[[QueueRef, int, Filter, int], Awaitable[FetchedBatches]]
    idle_ms: int


class PrefetchedQueue:
    """Messages of one queue from `position` on.

    Args:
        arrived: Called when there is something to take, or an error to see.

    Attributes:
        position: Offset after the last message that was taken; None while that is not known.
        paused: Whether the caller wants nothing of it now.
        lost_count: Messages that were no longer kept when their turn came.
        end_offset: The queue reaches so far at least; -1 while nobody has looked.
        error: Why nothing more is fetched; until the next `move`.
    """

    def __init__(
        self,
        queue: QueueRef,
        wanted: Filter,
        policy: OutOfRangePolicy,
        budget: ByteBudget,
        arrived: Callable[[], None],
    ) -> None:
        self.queue, self._wanted, self._policy, self._arrived = queue, wanted, policy, arrived
        self._budget, self._bytes = budget, QueueBytes(budget)
        self.position: int | None = None
        self.paused = False
        self.lost_count, self.end_offset = 0, -1
        self.error: BatonError | None = None
        self.changed, self.known = asyncio.Event(), asyncio.Event()
        self._moved = asyncio.Event()
        self._buffer: deque[ReceivedMessage] = deque()
        self._next_offset = 0

    def move(self, offset: int) -> None:
        """Go on at `offset`; what was fetched ahead is dropped."""
        self._drop()
        self.position = self._next_offset = offset
        self.error = None
        self._moved.set()
        self.changed.set()
        self.known.set()

    def take(self, count_max: int) -> list[ReceivedMessage]:
        """The next messages, in order, up to so many; `position` moves behind them."""
        count = min(count_max, len(self._buffer))
        taken = [self._buffer.popleft() for _ in range(count)]
        if taken:
            self._bytes.remove(sum(len(message.body) for message in taken))
            self.position = taken[-1].offset + 1
            self.changed.set()
        self._skip()
        return taken

    def end(self) -> None:
        """The lane is not read any more; who waits for its position hears of it."""
        self._fail(InvalidArgument(f"queue {self.queue} is not assigned", facts={"field": "queue"}))

    async def run(self, source: FetchSource, limits: FlowLimits, directory: Directory) -> None:
        """Fetch ahead for ever."""
        failures = 0
        self._bytes.join()
        try:
            while True:
                await self._due(limits)
                self._moved.clear()
                try:
                    await unless(self._moved, self._step(source))
                    failures = 0
                except BatonError as error:
                    if _final(error, failures):
                        self._fail(error)
                        continue
                    log.debug("fetch is repeated queue=%s error=%s", self.queue, error)
                    await unless(self._moved, directory.pause(error, failures))
                    failures += 1
        finally:
            self._drop()
            self._bytes.leave()

    async def _due(self, limits: FlowLimits) -> None:
        while self.error is not None or blocking_limit(
            limits, self._bytes, waiting_count=len(self._buffer), span=0
        ):
            self.changed.clear()
            await self.changed.wait()

    async def _step(self, source: FetchSource) -> None:
        if self.position is None:
            begin = await source.begin(self.queue)
            if not self._moved.is_set():
                self.move(begin)
            return
        offset = self._next_offset
        try:
            found = await source.fetch(self.queue, offset, self._wanted, self._budget.share())
        except (OffsetAheadOfLog, OffsetOutOfRange) as error:
            await self._go_back_inside(source, error)
            return
        self.end_offset = max(self.end_offset, found.extent.next_offset)
        if self._moved.is_set():
            return
        if found.lost_count and self._policy != "earliest":
            to = self._outside(offset, found.extent)
            self._note_lost(to - offset)
            self._jump(to)
            return
        self._note_lost(found.lost_count)
        messages = list(_decoded(self.queue, found, offset, self._wanted))
        self._next_offset = found.next_offset
        self._buffer.extend(messages)
        self._bytes.add(sum(len(message.body) for message in messages))
        self._skip()
        if messages:
            self._arrived()
        if found.next_offset == offset and source.idle_ms:
            await asyncio.sleep(source.idle_ms / 1000)

    async def _go_back_inside(self, source: FetchSource, error: BatonError) -> None:
        extent, offset = await source.extent(self.queue), self._next_offset
        if self._moved.is_set() or extent.first_offset <= offset <= extent.next_offset:
            return  # by now it is inside
        if self._policy == "error":
            raise OffsetOutOfRange(
                error.message,
                remedy="Seek, or choose out_of_range earliest or latest.",
                facts=error.facts,
                detail=error.detail,
            ) from error
        to = self._outside(offset, extent)
        if offset < extent.first_offset:
            self._note_lost(to - offset)
        log.warning("offset is out of range queue=%s offset=%d goes to %d", self.queue, offset, to)
        self._jump(to)

    def _outside(self, offset: int, extent: KeptOffsets) -> int:
        if self._policy == "error":
            raise OffsetOutOfRange(
                f"offset {offset} of queue {self.queue} is no longer kept; the first is "
                f"{extent.first_offset}",
                remedy="Seek, or choose out_of_range earliest or latest.",
                detail=OffsetOutOfRangeDetail(offset=offset, first_offset=extent.first_offset),
            )
        return extent.first_offset if self._policy == "earliest" else extent.next_offset

    def _note_lost(self, count: int) -> None:
        if count:
            self.lost_count += count
            log.warning(
                "messages not read before they were removed, or skipped queue=%s count=%d",
                self.queue,
                count,
            )

    def _jump(self, offset: int) -> None:
        """Fetch from there; what was fetched before is still good."""
        self._next_offset = offset
        self._skip()

    def _skip(self) -> None:
        """What the filter has dropped counts as read."""
        if not self._buffer and self.position is not None:
            self.position = self._next_offset

    def _fail(self, error: BatonError) -> None:
        self.error = error
        self.known.set()
        self._arrived()

    def _drop(self) -> None:
        self._buffer.clear()
        self._bytes.remove(self._bytes.waiting)


def _final(error: BatonError, failures: int) -> bool:
    if isinstance(error, _NEWS):
        return failures >= _NEWS_TRIES
    return error.retry is Retry.NEVER or isinstance(error, OffsetOutOfRange)


def _decoded(
    queue: QueueRef, found: FetchedBatches, first: int, wanted: Filter
) -> Iterator[ReceivedMessage]:
    for raw in found.batches:
        header = check_batch(raw, stamped=True)
        begin = max(first - header.first_offset, 0)
        stop = min(found.next_offset - header.first_offset, header.count)
        indexes: Sequence[int] = range(begin, stop)
        if wanted.hashes is not None:
            hashes = tag_hashes(raw, header)
            indexes = [index for index in indexes if hashes[index] in wanted.hashes]
        for record in decode_records(raw, header, indexes):
            if wanted.accepts(record.tag, record.keys, record.properties):
                yield ReceivedMessage(queue, 0, header, record, redelivered=False)
