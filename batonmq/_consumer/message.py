"""A message as the application receives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, Record
from batonmq._core.retries import Origin


class ReceivedMessage:
    """A message that was delivered to a consumer or a puller.

    Attributes:
        queue: The queue that it was read from.
        offset: Its offset in the queue.
        body: The payload.
        tag: The tag; empty without one.
        keys: The index keys.
        properties: The properties that the producer set.
        born_unix_ms: When its batch was built, by the producer's wall clock.
        store_unix_ms: When its batch was stored, by storage's wall clock.
        token: Fencing token under which it was delivered; 0 without ownership.
        redelivered: Whether an earlier owner, or this consumer before, may have started it.
        attempts: Number of handler calls with it, including those before it was sent back.
        topic_id: Id of the queue's topic; a later topic of the same name has a greater one.
        lineage: The ownership that it belongs to; used by the library.
        extender: Extends the time of the handler that runs with it; used by the library.
    """

    __slots__ = (
        "_origin", "_position", "attempts", "body", "born_unix_ms", "extender", "keys", "lineage",
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
        self._position = header.position, record.offset - header.first_offset

    @property
    def topic(self) -> str:
        """The topic; for a message from the retry topic, the topic that it was first sent to."""
        return self.queue.topic if self._origin is None else self._origin.queue.topic

    @property
    def message_id(self) -> str:
        """Id of the message in the cluster; a copy in the retry topic has an id of its own."""
        return f"{self.queue.broker}-{self._position[0]:x}-{self._position[1]:x}"

    @property
    def origin(self) -> Origin:
        """Queue, offset and id of the first copy; differs for a message from the retry topic."""
        return self._origin or Origin(self.queue, self.offset, self.message_id)

    @origin.setter
    def origin(self, origin: Origin) -> None:
        self._origin = origin

    @property
    def broker(self) -> str:
        """The broker of the queue."""
        return self.queue.broker

    @property
    def queue_id(self) -> int:
        """Id of the queue within its topic and broker."""
        return self.queue.queue_id

    def extend(self, ms: int) -> None:
        """Give the running handler of this message more time; may be called in any thread.

        Does nothing if the handler has ended or its time is over.
        """
        if self.extender is not None:
            self.extender(ms)

    def __repr__(self) -> str:
        return f"<message {self.queue}@{self.offset} tag={self.tag!r} {len(self.body)} bytes>"
