"""Messages one by one, for who iterates: a run of one queue, then a run of the next."""

from __future__ import annotations

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.message import ReceivedMessage

FAIR_RUN = 64
"""Messages of one queue handed out before another queue, and the rest of the loop, have a turn."""


class QueueRotation:
    """The queues of one consumer in turn, and the message that was handed out last."""

    def __init__(self) -> None:
        self._runners: list[AssignedQueue] = []
        self._left = 0
        self._current: tuple[AssignedQueue, ReceivedMessage] | None = None

    def add(self, runner: AssignedQueue) -> None:
        """A queue is there."""
        self._runners.append(runner)

    def remove(self, runner: AssignedQueue) -> None:
        """It is gone."""
        self._runners.remove(runner)

    @property
    def ended(self) -> bool:
        """Whether a run has ended, so that the loop should have its turn."""
        return self._left == 0

    def take(self) -> ReceivedMessage | None:
        """The next message; None if none waits."""
        for _ in range(len(self._runners) + 1):
            if self._left > 0 and self._runners:
                runner = self._runners[0]
                for message in runner.take():
                    self._left -= 1
                    self._current = runner, message
                    return message
            self._runners = self._runners[1:] + self._runners[:1]
            self._left = FAIR_RUN
        return None

    def finish(self) -> ReceivedMessage | None:
        """The message that was handed out last is handled; None if there is none."""
        if self._current is None:
            return None
        runner, message = self._current
        self._current = None
        runner.finish([message])
        return message

    def give_up(self) -> None:
        """Nobody knows whether it is: it comes again."""
        if self._current is not None:
            runner, message = self._current
            self._current = None
            runner.give_up(message)
