"""The credit of a delivery: how much a storage node may send, and when it gets more. Pure."""

from __future__ import annotations

QUEUES_MAX = 8
"""More queues with messages do not make credit later."""


class DeliveryCredit:
    """The credit of one delivery; limits count from its start and never fall.

    More credit is given when half of the window is free, so that a handler that takes one message
    after the other does not cause a call for each. While messages of other queues wait as well, the
    node gets it later, and sends more at once: about one window of messages of all queues together
    keeps the handlers busy until they arrive. The others may be paused or have slow handlers, so a
    part of the window is left in any case.

    Args:
        messages_window: Messages of the queue that may wait in the client.

    Attributes:
        window: See above.
        number: Number of the newest credit; 0 before the first.
        messages_limit, bytes_limit: Its limits.
    """

    def __init__(self, messages_window: int) -> None:
        self.window = messages_window
        self.number = self.messages_limit = self.bytes_limit = 0
        self._messages_received = self._bytes_received = 0

    @property
    def messages_left(self) -> int:
        """Messages that the node may still send, or has sent and are on their way."""
        return self.messages_limit - self._messages_received

    def receive(self, messages_sent: int, bytes_sent: int) -> None:
        """Note what the node has sent since the start, as its newest frame says."""
        self._messages_received, self._bytes_received = messages_sent, bytes_sent

    def offer(
        self,
        messages_room: int,
        bytes_room: int,
        *,
        idle: bool,
        queues: int = 1,
        acks_due: bool = False,
    ) -> bool:
        """Raise the limits if it is worth a call; return whether to send a credit.

        Args:
            messages_room: Messages that the client has room for, without those that wait.
            bytes_room: Bytes that it has room for; 0 if it has to wait for room.
            idle: Whether no message waits for a handler, so that any credit is worth a call.
            queues: Queues of the client with messages that wait.
            acks_due: Whether so many acks wait that they are worth a call.
        """
        messages = max(self.messages_limit, self._messages_received + messages_room)
        size = max(self.bytes_limit, self._bytes_received + bytes_room)
        more_messages, more_bytes = messages - self.messages_limit, size - self.bytes_limit
        due = (
            more_messages >= self._step(queues)
            or 2 * more_bytes >= bytes_room > 0
            or (idle and self.messages_left <= 0 < more_messages)
            or acks_due
        )
        if self.number and not due:
            return False
        self.number += 1
        self.messages_limit, self.bytes_limit = messages, size
        return True

    def due_at(self, queues: int = 1) -> int:
        """Return the number of waiting messages at which more credit is worth a call."""
        return self.window - self.messages_left - self._step(queues)

    def _step(self, queues: int) -> int:
        waiting = self.window // min(max(2, queues), QUEUES_MAX)
        return max(1, self.window - waiting)
