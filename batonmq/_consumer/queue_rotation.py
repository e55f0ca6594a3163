"""Takes messages one by one for iteration: a run of one queue, then a run of the next."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.running_calls import RunningCall
from batonmq._consumer.session import Session

RUN_MESSAGES_MAX = 64
"""Messages of one queue that are returned in a row, before the next queue and other tasks run."""


class QueueRotation:
    """The queues of one consumer that may have messages, and the message that was returned last.

    The first queue has the turn. A queue without a message leaves, and comes back behind the others
    when one arrives, so queues without messages cost nothing.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: OrderedDict[AssignedQueue, None] = OrderedDict()
        self._left = RUN_MESSAGES_MAX
        self._current: tuple[AssignedQueue, ReceivedMessage, RunningCall] | None = None

    def add(self, queue: AssignedQueue) -> None:
        """Include a queue that has no message yet."""
        queue.on_arrived = partial(self._waiting.setdefault, queue)

    def remove(self, queue: AssignedQueue) -> None:
        """Leave a queue out."""
        self._waiting.pop(queue, None)

    @property
    def run_ended(self) -> bool:
        """Whether a run has ended, so that other tasks should run now."""
        return self._left == 0

    def take(self) -> ReceivedMessage | None:
        """Start the next message; return None if none waits."""
        while self._waiting:
            queue = next(iter(self._waiting))
            if self._left == 0:
                self._left = RUN_MESSAGES_MAX
                self._waiting.move_to_end(queue)
            elif (message := queue.take_one()) is not None:
                self._left -= 1
                now_ms = self._session.clock.monotonic_ms()
                call = self._session.running.begin(queue.ref, message.offset, now_ms)
                self._current = queue, message, call
                return message
            else:
                self._left = RUN_MESSAGES_MAX
                del self._waiting[queue]
        return None

    def finish(self) -> ReceivedMessage | None:
        """Acknowledge the message that was returned last, and return it; None if there is none."""
        if self._current is None:
            return None
        queue, message = self._end()
        queue.finish([message])
        return message

    def give_up(self) -> None:
        """Do not acknowledge the message that was returned last: it is delivered again."""
        if self._current is not None:
            queue, message = self._end()
            queue.give_up(message)

    def _end(self) -> tuple[AssignedQueue, ReceivedMessage]:
        assert self._current is not None
        queue, message, call = self._current
        self._current = None
        self._session.running.end(call)
        return queue, message
