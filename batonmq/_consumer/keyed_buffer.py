"""The messages of one queue that wait for a handler, if those of one ordering key go in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from batonmq._consumer.delivered_run import DeliveredRun
from batonmq._consumer.key_schedule import FailedMessage, KeySchedule
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_buffer import Start
from batonmq._core.flow_control import ByteBudget, QueueBytes
from batonmq._core.ranges import Range, of_sorted

Waiting = tuple[DeliveredRun, int] | ReceivedMessage
"""A message that was never taken, by its place in a run; or one that has failed."""


class KeyedBuffer:
    """As `MessageBuffer`, but a message leaves it only when its ordering key is free.

    Attributes:
        waiting_bytes: Bytes of the messages that wait and were never taken.
        arrived: Set when a message may be ready.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._schedule = KeySchedule[Waiting]()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.waiting_bytes = QueueBytes(budget)
        self.arrived = asyncio.Event()

    def __len__(self) -> int:
        return self._schedule.waiting_count

    @property
    def ready(self) -> bool:
        """Whether a message may be taken now."""
        return self._schedule.ready

    @property
    def handled_count(self) -> int:
        """Number of messages in handlers."""
        return self._schedule.taken_count - self._schedule.failed_count

    @property
    def failed_count(self) -> int:
        """Number of messages that are to be handled again, after a delay."""
        return self._schedule.failed_count

    @property
    def lowest_failed(self) -> tuple[ReceivedMessage, FailedMessage[Waiting]] | None:
        """The message with the lowest offset that is to be handled again."""
        found = self._schedule.lowest_failed
        if found is None:
            return None
        assert isinstance(found[1].item, ReceivedMessage)
        return found[1].item, found[1]

    def add(self, run: DeliveredRun) -> None:
        """Add messages that a pull returned, behind all others."""
        add = self._schedule.add
        for number, key in enumerate(run.ordering_keys()):
            add(run.offset(number), key, (run, number))
        self.waiting_bytes.add(run.bytes_count)

    def take_one(self, start: Start) -> tuple[ReceivedMessage | None, bool]:
        """Take the ready message with the lowest offset, and start it.

        Args:
            start: Starts the message of a range; False if it must not be started.

        Returns:
            The message, None if there is none, and whether queues that wait for room in the budget
            may go on.
        """
        message, bytes_count = None, 0
        while message is None and (taken := self._schedule.take()) is not None:
            if isinstance(taken.item, ReceivedMessage):
                message = taken.item
                message.attempts += 1
                continue
            run, number = taken.item
            bytes_count += run.size(number)
            if start(taken.offset, taken.offset + 1):
                message = run.message(number)
                message.attempts += 1
            else:
                self._schedule.finish(taken.offset)
        return message, self.waiting_bytes.remove(bytes_count)

    def peek(self, count_max: int, waits: Start) -> Iterator[ReceivedMessage] | None:
        """As `MessageBuffer.peek`, for ready messages that were never taken.

        They are of different keys, and in the order of their offsets.
        """
        ready = list(self._schedule.peek(count_max))
        if not ready or not all(waits(*one) for one in of_sorted(offset for offset, _ in ready)):
            return None
        return (_message(item) for _, item in ready)

    def remove(self, count: int) -> tuple[Sequence[Range], bool]:
        """As `MessageBuffer.remove`: these messages are taken, and their keys are occupied."""
        offsets, bytes_count = list[int](), 0
        for _ in range(count):
            taken = self._schedule.take()
            assert taken is not None and not isinstance(taken.item, ReceivedMessage)
            run, number = taken.item
            bytes_count += run.size(number)
            offsets.append(taken.offset)
        return of_sorted(offsets), self.waiting_bytes.remove(bytes_count)

    def finish_range(self, first: int, end: int) -> bool:
        """Note that the taken messages of [first, end) are handled.

        Returns:
            Whether others are ready by that.
        """
        return any([self._schedule.finish(offset) for offset in range(first, end)])

    def give_up(self, offset: int, *, comes_again: bool = False) -> None:
        """Note that a taken message is not handled now.

        Args:
            comes_again: Whether it is delivered again under this grant, before later messages of
                its key. Otherwise its key stays occupied until the next grant.
        """
        if comes_again:
            self._schedule.finish(offset)
        else:
            self._schedule.give_up(offset)

    def retry(
        self, message: ReceivedMessage, delay_ms: int, now_ms: int, notify: Callable[[], None]
    ) -> None:
        """Make a message that has failed ready again after a delay; its key stays occupied.

        Args:
            notify: Called when it is ready.
        """
        offset = message.offset

        def due() -> None:
            del self._timers[offset]
            if self._schedule.due(offset):
                notify()

        self._schedule.fail(offset, message, now_ms)
        loop = asyncio.get_running_loop()
        self._timers[offset] = loop.call_later(delay_ms / 1000, due)

    def give_up_failed(self) -> list[ReceivedMessage]:
        """Give up every message that is to be handled again, and return them."""
        self._cancel_timers()
        failed = self._schedule.give_up_failed()
        return [message for message in failed if isinstance(message, ReceivedMessage)]

    def begin_grant(self) -> None:
        """Begin a new grant: the messages that were given up are started again."""
        self._schedule.begin_grant()

    def clear(self) -> None:
        """Drop the messages that were never taken; their bytes leave the budget."""
        self._schedule.drop_waiting()
        self.arrived.clear()
        self.waiting_bytes.leave()

    def forget(self) -> None:
        """Drop all messages, also those in handlers; the caller has no progress of them."""
        self._cancel_timers()
        self._schedule.forget()
        self.waiting_bytes.remove(self.waiting_bytes.waiting)

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


def _message(item: Waiting) -> ReceivedMessage:
    """Return the object of a message."""
    if isinstance(item, ReceivedMessage):
        return item
    run, number = item
    return run.message(number)
