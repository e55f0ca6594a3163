"""The messages of one queue that wait for a handler."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from batonmq._consumer.delivered_run import DeliveredRun
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq._core.flow_control import ByteBudget, QueueBytes
from batonmq._core.ranges import Range

Start = Callable[[int, int], bool]
"""Starts the messages of [first, end); False, without effect, if one of them does not wait."""


class MessageBuffer:
    """Messages that wait, and their bytes in the client's budget.

    Attributes:
        waiting_bytes: Bytes of the messages that wait.
        arrived: Set when a message may wait.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._runs: deque[DeliveredRun] = deque()
        self._count = self._taken = 0
        self.waiting_bytes = QueueBytes(budget)
        self.arrived = asyncio.Event()

    def __len__(self) -> int:
        return self._count

    @property
    def ready(self) -> bool:
        """Whether a message may be taken now."""
        return self._count > 0

    def add(self, run: DeliveredRun) -> None:
        """Append messages that a pull returned."""
        self._runs.append(run)
        self._count += len(run)
        self.waiting_bytes.add(run.bytes_count)

    def take_one(self, start: Start) -> tuple[ReceivedMessage | None, bool]:
        """As `take`, for one message."""
        message, bytes_count = None, 0
        while self._runs and message is None:
            run, number = self._runs[0], self._taken
            self._count -= 1
            self._taken += 1
            bytes_count += run.size(number)
            offset = run.offset(number)
            if start(offset, offset + 1):
                message = run.message(number)
                message.attempts += 1
            if self._taken == len(run):
                self._runs.popleft()
                self._taken = 0
        return message, self.waiting_bytes.remove(bytes_count)

    def peek(self, count_max: int, waits: Start) -> Iterator[ReceivedMessage] | None:
        """Return the next messages, at least one, and leave them in the buffer; see `remove`.

        Args:
            waits: Whether the messages of a range may be started.

        Returns:
            None if one of the messages must not be started, or if there is none.
        """
        if not self._runs:
            return None
        run, begin = self._runs[0], self._taken
        end = min(begin + count_max, len(run))
        if not all(waits(*offsets) for offsets in run.ranges_of(begin, end)):
            return None
        return run.messages(begin, end)

    def remove(self, count: int) -> tuple[Sequence[Range], bool]:
        """Remove the next `count` messages, at least one, of those that `peek` has returned.

        Returns:
            Their offsets, and whether queues that wait for room in the budget may go on.
        """
        run, begin = self._runs[0], self._taken
        self._taken = end = begin + count
        self._count -= count
        if end == len(run):
            self._runs.popleft()
            self._taken = 0
        return run.ranges_of(begin, end), self.waiting_bytes.remove(run.bytes_of(begin, end))

    def take(self, count_max: int, start: Start) -> tuple[MessageBatch | None, bool]:
        """Remove the next messages, in order, and start them.

        A message that has failed before is taken alone: if it fails again, no other message fails
        with it.

        Args:
            start: Starts the messages of a range; False if one of them must not be started.

        Returns:
            The started messages, None if there are none, and whether queues that wait for room in
            the budget may go on.
        """
        if self._taken:
            _, self._runs[0] = self._runs[0].split(self._taken)
            self._taken = 0
        runs, count, bytes_count = list[DeliveredRun](), 0, 0
        while self._runs and count < count_max:
            run = self._runs[0]
            if run.failed_before and runs:
                break
            if len(run) > count_max - count:
                run, self._runs[0] = run.split(count_max - count)
            else:
                self._runs.popleft()
            self._count -= len(run)
            bytes_count += run.bytes_count
            if (started := _started(run, start)) is not None:
                runs.append(started)
                count += len(started)
            if runs and run.failed_before:
                break
        return MessageBatch(runs) if runs else None, self.waiting_bytes.remove(bytes_count)

    def clear(self) -> None:
        """Drop all messages; their bytes leave the budget."""
        self._runs.clear()
        self._count = self._taken = 0
        self.arrived.clear()
        self.waiting_bytes.leave()


def _started(run: DeliveredRun, start: Start) -> DeliveredRun | None:
    """Start the messages of `run`; return those that were started, None if there are none."""
    refused = [(first, end) for first, end in run.ranges if not start(first, end)]
    if not refused:
        return run
    dropped = {
        offset
        for first, end in refused
        for offset in range(first, end)
        if end - first == 1 or not start(offset, offset + 1)
    }
    return run.without(dropped)
