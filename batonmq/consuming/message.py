"""A message as a handler sees it."""

from __future__ import annotations

from collections.abc import Mapping

from batonmq.core.records import Header, Record
from batonmq.core.route import QueueId


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
        attempts: How often it was handed to a handler here.
        lineage: Which ownership it belongs to, for the library's own books.
    """

    __slots__ = (
        "attempts", "body", "born_unix_ms", "keys", "lineage", "offset", "properties", "queue",
        "redelivered", "store_unix_ms", "tag", "token",
    )  # fmt: skip

    def __init__(
        self, queue: QueueId, token: int, header: Header, record: Record, *, redelivered: bool
    ) -> None:
        self.queue, self.token, self.redelivered = queue, token, redelivered
        self.offset = record.offset
        self.body = record.body
        self.tag = record.tag
        self.keys = record.keys
        self.properties: Mapping[str, str] = record.properties
        self.born_unix_ms = header.born_unix_ms
        self.store_unix_ms = header.store_unix_ms
        self.attempts = 0
        self.lineage = 0

    @property
    def topic(self) -> str:
        """Topic name."""
        return self.queue.topic

    @property
    def broker(self) -> str:
        """Broker name."""
        return self.queue.broker

    @property
    def queue_id(self) -> int:
        """Index of the queue within (topic, broker)."""
        return self.queue.queue_id

    def __repr__(self) -> str:
        return f"<message {self.queue}@{self.offset} tag={self.tag!r} {len(self.body)} bytes>"
