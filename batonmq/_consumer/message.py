"""A message as a handler sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, Record
from batonmq._core.retries import Origin


class ReceivedMessage:
    """A message that was delivered.

    Attributes:
        queue: Where it came from.
        offset: Its place in the queue.
        body: The payload.
        tag: Empty without tag.
        keys: Index keys.
        properties: What the producer attached.
        born_unix_ms: Producer's wall clock, of the batch.
        store_unix_ms: Storage's wall clock, of the batch.
        token: Token under which it was delivered.
        redelivered: Whether an earlier owner, or this one before, may have started it.
        attempts: How often it was handed to a handler: by this owner, and in the rounds before it
            was sent back.
        topic_id: Of the queue's topic; a later topic of the name has a greater one.
        lineage: Which ownership it belongs to, for the library's own books.
        extender: Moves the deadline of the handler that has it now, if there is one; as `lineage`.
    """

    __slots__ = (
        "_origin", "_place", "attempts", "body", "born_unix_ms", "extender", "keys", "lineage",
        "offset", "properties", "queue", "redelivered", "store_unix_ms", "tag", "token", "topic_id",
    )  # fmt: skip

    def __init__(
        self, queue: QueueRef, token: int, header: Header, record: Record, *, redelivered: bool
    ) -> None:
        self.queue, self.token, self.redelivered = queue, token, redelivered
        self.offset = record.offset
        self.body = record.body
        self.tag = record.tag
        self.keys = record.keys
        self.properties: Mapping[str, str] = record.properties
        self.born_unix_ms = header.born_unix_ms
        self.store_unix_ms = header.store_unix_ms
        self.topic_id = header.topic_id
        self.attempts = 0
        self.lineage = 0
        self.extender: Callable[[int], None] | None = None
        self._origin: Origin | None = None
        self._place = header.position, record.offset - header.first_offset

    @property
    def topic(self) -> str:
        """Topic name; of a message that was sent back, the one it was sent to at first."""
        return self.queue.topic if self._origin is None else self._origin.queue.topic

    @property
    def message_id(self) -> str:
        """Names the message in the cluster; a copy that was sent back has an id of its own."""
        return f"{self.queue.broker}-{self._place[0]:x}-{self._place[1]:x}"

    @property
    def origin(self) -> Origin:
        """Where it was at first: here, unless it was sent back."""
        return self._origin or Origin(self.queue, self.offset, self.message_id)

    @origin.setter
    def origin(self, origin: Origin) -> None:
        self._origin = origin

    @property
    def broker(self) -> str:
        """Broker name."""
        return self.queue.broker

    @property
    def queue_id(self) -> int:
        """Index of the queue within (topic, broker)."""
        return self.queue.queue_id

    def extend(self, ms: int) -> None:
        """Give the handler that has this message so much more time; from any thread.

        Does nothing once the handler has ended, or its time is over.
        """
        if self.extender is not None:
            self.extender(ms)

    def __repr__(self) -> str:
        return f"<message {self.queue}@{self.offset} tag={self.tag!r} {len(self.body)} bytes>"
