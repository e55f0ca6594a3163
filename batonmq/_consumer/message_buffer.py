"""The messages of one queue that wait for a handler."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from batonmq._consumer.message import ReceivedMessage
from batonmq._core.flow_control import ByteBudget, QueueBytes


class MessageBuffer:
    """Messages that wait, and their bytes in the client's budget.

    Attributes:
        waiting_bytes: Bytes of the bodies that wait.
        arrived: Set when a message may wait.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._messages: deque[ReceivedMessage] = deque()
        self.waiting_bytes = QueueBytes(budget)
        self.arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, messages: Sequence[ReceivedMessage]) -> None:
        """Append messages that a pull returned."""
        self._messages.extend(messages)
        self.waiting_bytes.add(sum(len(message.body) for message in messages))

    def take(
        self, count_max: int, start: Callable[[int], bool]
    ) -> tuple[list[ReceivedMessage], bool]:
        """Remove the next messages, in order, and start them.

        A message that has failed before is taken alone: if it fails again, no other message fails
        with it.

        Args:
            start: Starts the message of an offset; False if it must not be started: it is dropped.

        Returns:
            The started messages, and whether queues that wait for room in the budget may go on.
        """
        messages, body_bytes = self._messages, 0
        taken: list[ReceivedMessage] = []
        while messages and len(taken) < count_max:
            message = messages[0]
            if message.attempts and taken:
                break
            body_bytes += len(messages.popleft().body)
            if start(message.offset):
                taken.append(message)
                if message.attempts:
                    break
        for message in taken:
            message.attempts += 1
        return taken, self.waiting_bytes.remove(body_bytes)

    def clear(self) -> None:
        """Drop all messages; their bytes leave the budget."""
        self._messages.clear()
        self.arrived.clear()
        self.waiting_bytes.leave()
