"""The handler calls of one consumer that have not returned, each with the slot that it takes."""

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


class RunningCalls:
    """The handler calls that run, by queue, oldest first.

    Attributes:
        slots: Calls that may run at once; 1 for a consumer that iterates.
    """

    def __init__(self) -> None:
        self.slots = 1
        self._count = 0
        self._by_queue: dict[QueueRef, dict[RunningCall, None]] = {}

    def __len__(self) -> int:
        return self._count

    def begin(self, queue: QueueRef, offset: int, now_ms: int) -> RunningCall:
        """Add a call."""
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
