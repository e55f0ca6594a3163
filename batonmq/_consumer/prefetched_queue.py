"""One queue of a puller, fetched ahead of `poll`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from batonmq._common.aio import unless
from batonmq._connection.directory import Directory
from batonmq._consumer.batch_decoder import decode_batch
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.flow_control import ByteBudget, FlowLimits, QueueBytes, blocking_limit
from batonmq._core.queues import QueueRef
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
_MAY_BE_NEW = (GroupNotFound, TopicNotFound, QueueNotFound, ModeChanged)
"""Refusals of a storage node that has not learnt yet of a topic or group that was just created."""
_MAY_BE_NEW_TRIES = 5


@dataclass(frozen=True, slots=True)
class KeptOffsets:
    """The offsets that a queue holds: [first_offset, next_offset)."""

    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class FetchedBatches:
    """The messages of [requested offset, next_offset).

    Attributes:
        batches: Stored batches; the first and the last may have messages outside of the range.
        lost_count: Messages of the range that are no longer kept.
        kept: The offsets that the queue holds.
    """

    batches: tuple[bytes, ...]
    next_offset: int
    lost_count: int
    kept: KeptOffsets


@dataclass(frozen=True, slots=True)
class FetchSource:
    """The calls to storage and offsets that a queue needs; all raise `BatonError`.

    Attributes:
        start: Returns the offset to begin at without `move`.
        kept: Returns the offsets that a queue holds.
        fetch: Takes queue, offset, filter and bytes at most; may wait before it returns nothing.
        idle_ms: Time to wait after a fetch that returned nothing.
    """

    start: Callable[[QueueRef], Awaitable[int]]
    kept: Callable[[QueueRef], Awaitable[KeptOffsets]]
    fetch: Callable[[QueueRef, int, Filter, int], Awaitable[FetchedBatches]]
    idle_ms: int


class PrefetchedQueue:
    """Messages of one queue from `position` on.

    Args:
        wanted: Filter; other messages are skipped.
        policy: What to do at an offset that the queue does not hold.
        arrived: Called when there is a message to take, or an error.

    Attributes:
        position: Offset after the last message that was taken; None while the start is not known.
        paused: Whether `poll` leaves this queue out.
        lost_count: Messages that were removed before they were fetched.
        end_offset: The queue's log reaches at least so far; -1 before the first fetch.
        error: Why nothing more is fetched, until the next `move`.
        changed: Set when the next fetch may be due.
        known: Set when `position` or `error` is known.
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
        self._error_raised = False
        self.changed, self.known = asyncio.Event(), asyncio.Event()
        self._moved = asyncio.Event()
        self._buffer: deque[ReceivedMessage] = deque()
        self._next_offset = 0

    def move(self, offset: int) -> None:
        """Continue at `offset`; drop the messages that were fetched ahead."""
        self._drop()
        self.position = self._next_offset = offset
        self.error = None
        self._moved.set()
        self.changed.set()
        self.known.set()

    def take(self, count_max: int) -> list[ReceivedMessage]:
        """Return the next messages, in order, and move `position` behind them."""
        count = min(count_max, len(self._buffer))
        taken = [self._buffer.popleft() for _ in range(count)]
        if taken:
            self._bytes.remove(sum(len(message.body) for message in taken))
            self.position = taken[-1].offset + 1
            self.changed.set()
        self._pass_filtered()
        return taken

    def raise_error(self, *, again: bool) -> None:
        """Raise the error, if there is one, and the messages before it were taken.

        Args:
            again: Whether to raise it also if it was raised before.
        """
        if self.error is not None and not self._buffer and (again or not self._error_raised):
            self._error_raised = True
            raise self.error.with_traceback(None)

    def end(self) -> None:
        """Stop: a caller that waits for the position gets an error."""
        self._fail(InvalidArgument(f"queue {self.queue} is not assigned", facts={"field": "queue"}))

    async def run(self, source: FetchSource, limits: FlowLimits, directory: Directory) -> None:
        """Fetch ahead until cancelled."""
        failures = 0
        self._bytes.join()
        try:
            while True:
                await self._wait_until_due(limits)
                self._moved.clear()
                try:
                    await unless(self._moved, self._fetch(source))
                    failures = 0
                except BatonError as error:
                    if _is_final(error, failures):
                        self._fail(error)
                        continue
                    log.debug("fetch is repeated queue=%s error=%s", self.queue, error)
                    await unless(self._moved, directory.pause(error, failures))
                    failures += 1
        finally:
            self._drop()
            self._bytes.leave()

    async def _wait_until_due(self, limits: FlowLimits) -> None:
        while self.error is not None or blocking_limit(
            limits, self._bytes, waiting_count=len(self._buffer)
        ):
            self.changed.clear()
            await self.changed.wait()

    async def _fetch(self, source: FetchSource) -> None:
        if self.position is None:
            start = await source.start(self.queue)
            if not self._moved.is_set():
                self.move(start)
            return
        offset = self._next_offset
        try:
            fetched = await source.fetch(self.queue, offset, self._wanted, self._budget.share())
        except (OffsetAheadOfLog, OffsetOutOfRange) as error:
            await self._correct_offset(source, error)
            return
        self.end_offset = max(self.end_offset, fetched.kept.next_offset)
        if self._moved.is_set():
            return
        if fetched.lost_count and self._policy != "earliest":
            target = self._inside(offset, fetched.kept)
            self._note_lost(target - offset)
            self._jump(target)
            return
        self._note_lost(fetched.lost_count)
        messages = self._decode(fetched, offset)
        self._next_offset = fetched.next_offset
        self._buffer.extend(messages)
        self._bytes.add(sum(len(message.body) for message in messages))
        self._pass_filtered()
        if messages:
            self._arrived()
        if fetched.next_offset == offset and source.idle_ms:
            await asyncio.sleep(source.idle_ms / 1000)

    def _decode(self, fetched: FetchedBatches, first: int) -> list[ReceivedMessage]:
        return [
            ReceivedMessage(self.queue, 0, header, record, redelivered=False)
            for raw in fetched.batches
            for header, record in decode_batch(raw, first, fetched.next_offset, self._wanted)
        ]

    async def _correct_offset(self, source: FetchSource, error: BatonError) -> None:
        """Apply the policy to an offset that storage refused."""
        kept, offset = await source.kept(self.queue), self._next_offset
        if self._moved.is_set() or kept.first_offset <= offset <= kept.next_offset:
            return  # the queue holds it by now
        if self._policy == "error":
            raise OffsetOutOfRange(
                error.message,
                remedy="Seek, or choose out_of_range earliest or latest.",
                facts=error.facts,
                detail=error.detail,
            ) from error
        target = self._inside(offset, kept)
        if offset < kept.first_offset:
            self._note_lost(target - offset)
        log.warning("offset out of range queue=%s offset=%d new=%d", self.queue, offset, target)
        self._jump(target)

    def _inside(self, offset: int, kept: KeptOffsets) -> int:
        """Return the offset to continue at instead of `offset`, which is not kept."""
        if self._policy == "error":
            raise OffsetOutOfRange(
                f"offset {offset} of queue {self.queue} is no longer kept; the first kept offset "
                f"is {kept.first_offset}",
                remedy="Seek, or choose out_of_range earliest or latest.",
                detail=OffsetOutOfRangeDetail(offset=offset, first_offset=kept.first_offset),
            )
        return kept.first_offset if self._policy == "earliest" else kept.next_offset

    def _note_lost(self, count: int) -> None:
        if count:
            self.lost_count += count
            log.warning(
                "messages were removed or skipped before they were read queue=%s count=%d",
                self.queue,
                count,
            )

    def _jump(self, offset: int) -> None:
        """Fetch from `offset`; messages that wait stay valid."""
        self._next_offset = offset
        self._pass_filtered()

    def _pass_filtered(self) -> None:
        """Move `position` over messages that the filter dropped; they count as read."""
        if not self._buffer and self.position is not None:
            self.position = self._next_offset

    def _fail(self, error: BatonError) -> None:
        self.error, self._error_raised = error, False
        self.known.set()
        self._arrived()

    def _drop(self) -> None:
        self._buffer.clear()
        self._bytes.remove(self._bytes.waiting)


def _is_final(error: BatonError, failures: int) -> bool:
    if isinstance(error, _MAY_BE_NEW):
        return failures >= _MAY_BE_NEW_TRIES
    return error.retry is Retry.NEVER or isinstance(error, OffsetOutOfRange)
