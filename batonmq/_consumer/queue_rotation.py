"""Takes messages one by one for iteration: a run of one queue, then a run of the next."""

from __future__ import annotations

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.running_calls import RunningCall
from batonmq._consumer.session import Session

RUN_MESSAGES_MAX = 64
"""Messages of one queue that are returned in a row, before the next queue and other tasks run."""


class QueueRotation:
    """The queues of one consumer in turn, and the message that was returned last."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queues: list[AssignedQueue] = []
        self._left = 0
        self._current: tuple[AssignedQueue, ReceivedMessage, RunningCall] | None = None

    def add(self, queue: AssignedQueue) -> None:
        """Include a queue."""
        self._queues.append(queue)

    def remove(self, queue: AssignedQueue) -> None:
        """Leave a queue out."""
        self._queues.remove(queue)

    @property
    def run_ended(self) -> bool:
        """Whether a run has ended, so that other tasks should run now."""
        return self._left == 0

    def take(self) -> ReceivedMessage | None:
        """Start the next message; return None if none waits."""
        for _ in range(len(self._queues) + 1):
            if self._left > 0 and self._queues:
                queue = self._queues[0]
                if (message := queue.take_one()) is not None:
                    self._left -= 1
                    now_ms = self._session.clock.monotonic_ms()
                    call = self._session.running.begin(queue.ref, message.offset, now_ms)
                    self._current = queue, message, call
                    return message
            self._queues = self._queues[1:] + self._queues[:1]
            self._left = RUN_MESSAGES_MAX
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
