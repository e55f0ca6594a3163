"""The handler calls of one consumer that have not returned, each with the slot that it takes.

And the messages that have failed and wait to be handled again in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from batonmq._core.queues import QueueRef


@dataclass(slots=True, eq=False)
class RunningCall:
    """A handler call that has not returned.

    Attributes:
        queue: The queue of its messages.
        offset: Offset of its first message.
        begin_ms: When it began, by the monotonic clock.
        ordering_key: Ordering key of its message, if messages are handled in the order of keys.
        abandoned: Whether its result is discarded. Only a plain function runs on then, as a thread
            can't be cancelled, and a coroutine that ignores its cancellation.
    """

    queue: QueueRef
    offset: int
    begin_ms: int
    abandoned: bool = False
    ordering_key: str | None = None


@dataclass(frozen=True, slots=True)
class FailedCall:
    """The last call of a message that waits to be handled again.

    Attributes:
        count: Calls that have failed.
        failed_ms: When the last one failed, by the monotonic clock.
        refused: See `HandlingFailure`.
    """

    offset: int
    count: int
    failed_ms: int
    refused: str


class RunningCalls:
    """The handler calls that run, by queue, oldest first.

    Attributes:
        slots: Calls that may run at once; 1 for a consumer that iterates.
    """

    def __init__(self) -> None:
        self.slots = 1
        self._count = 0
        self._by_queue: dict[QueueRef, dict[RunningCall, None]] = {}
        self._failed: dict[QueueRef, dict[int, FailedCall]] = {}

    def __len__(self) -> int:
        return self._count

    def begin(self, queue: QueueRef, offset: int, now_ms: int) -> RunningCall:
        """Add a call."""
        self.forget_failed(queue, offset)
        call = RunningCall(queue, offset, now_ms)
        self._by_queue.setdefault(queue, {})[call] = None
        self._count += 1
        return call

    def end(self, call: RunningCall) -> None:
        """Remove a call that has returned."""
        calls = self._by_queue[call.queue]
        del calls[call]
        self._count -= 1
        if not calls:
            del self._by_queue[call.queue]

    def fail(self, queue: QueueRef, failed: FailedCall) -> None:
        """Note that a message waits to be handled again, until its next call begins."""
        self._failed.setdefault(queue, {})[failed.offset] = failed

    def forget_failed(self, queue: QueueRef, offset: int | None = None) -> None:
        """Note that a message of a queue, or none of them, waits to be handled again any more."""
        failed = self._failed.get(queue)
        if failed is None:
            return
        if offset is not None:
            failed.pop(offset, None)
        if offset is None or not failed:
            del self._failed[queue]

    def failed_at(self, queue: QueueRef, offset: int) -> FailedCall | None:
        """Return the last call of a message that waits to be handled again."""
        return self._failed.get(queue, {}).get(offset)

    def lowest_failed(self, queue: QueueRef) -> FailedCall | None:
        """Return the last call of the first message that waits to be handled again."""
        failed = self._failed.get(queue)
        return failed[min(failed)] if failed else None

    def abandon(self, queue: QueueRef) -> int:
        """Note that the results of a queue's calls are discarded; return how many there were."""
        calls = [call for call in self._by_queue.get(queue, ()) if not call.abandoned]
        for call in calls:
            call.abandoned = True
        return len(calls)

    def of_queue(self, queue: QueueRef) -> RunningCall | None:
        """Return the oldest call of a queue with a result that counts."""
        calls = self._by_queue.get(queue, ())
        return next((call for call in calls if not call.abandoned), None)

    def lowest_of_queue(self, queue: QueueRef) -> RunningCall | None:
        """Return the call of a queue with the lowest offset of those with a result that counts."""
        calls = [call for call in self._by_queue.get(queue, ()) if not call.abandoned]
        return min(calls, key=lambda call: call.offset, default=None)

    def delaying(self, queue: QueueRef) -> RunningCall | None:
        """Return the call that a queue waits for; None if the next message may be started.

        It is the queue's own oldest call. Without one, and if every slot is taken, it is the
        consumer's oldest call, of any queue.
        """
        own = self.of_queue(queue)
        if own is not None or self._count < self.slots:
            return own
        every = (call for calls in self._by_queue.values() for call in calls)
        return min(every, key=lambda call: call.begin_ms)
