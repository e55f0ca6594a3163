"""A message as the application receives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from batonmq._core.ordering_key import ORDERING_KEY
from batonmq._core.queues import QueueRef
from batonmq._core.records import BARE, Header, Record, decode_record
from batonmq._core.requests import request_header
from batonmq._core.retries import Origin


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """A stored batch as it was delivered.

    Attributes:
        lineage: The ownership that its messages belong to.
        records: Bytes that contain the records.
        begins: Where each record begins in them, and the end of the last one.
        tag_hashes: Hash of each tag; None if the filter does not need it.
        is_redelivered: Returns whether an earlier owner may have started an offset; None if no
            offset was started.
    """

    queue: QueueRef
    token: int
    lineage: int
    header: Header
    records: bytes
    begins: Sequence[int]
    tag_hashes: Sequence[int] | None
    is_redelivered: Callable[[int], bool] | None

    def record(self, index: int) -> Record:
        """Decode a record.

        Raises:
            BadBatch: The record is truncated.
        """
        return decode_record(
            self.records,
            self.begins[index],
            self.begins[index + 1],
            self.header.first_offset + index,
        )


Extender = Callable[["ReceivedMessage", int], None]
"""Extends the time of the handler that runs with a message, in ms."""

_DECODED = frozenset(("body", "keys", "properties", "tag"))
"""Attributes that may have no value before the record is decoded."""


class ReceivedMessage:
    """A message that was delivered to a consumer or a puller.

    Attributes:
        queue: The queue that it was read from.
        offset: Its offset in the queue.
        body: The payload.
        tag: The tag; empty without one.
        keys: The index keys.
        properties: The properties that the producer set, and those that it added.
        token: Fencing token under which it was delivered; 0 without ownership.
        redelivered: Whether an earlier owner, or this consumer before, may have started it.
        attempts: Number of handler calls with it, including those before it was sent back.
        lineage: The ownership that it belongs to; used by the library.
        extender: Extends the time of the handler that runs with it; used by the library.
    """

    __slots__ = (
        "_columns", "_header", "_index", "_origin", "attempts", "body", "extender", "keys",
        "lineage", "offset", "properties", "queue", "redelivered", "tag", "token",
    )  # fmt: skip

    body: bytes
    tag: str
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    _columns: BatchColumns | None
    _index: int

    def __init__(
        self, queue: QueueRef, token: int, header: Header, record: Record, *, redelivered: bool
    ) -> None:
        self.queue, self.token, self.redelivered = queue, token, redelivered
        self.offset, self.body, self.tag = record.offset, record.body, record.tag
        self.keys, self.properties = record.keys, record.properties
        self._header = header
        self.attempts = self.lineage = 0
        self.extender: Extender | None = None
        self._origin: Origin | None = None

    @classmethod
    def _of_columns(cls, columns: BatchColumns, index: int) -> ReceivedMessage:
        """Return the message at `index` of a batch; its parts are decoded when they are read."""
        return next(cls._all_of_columns(columns, (index,)))

    @classmethod
    def _all_of_columns(
        cls, columns: BatchColumns, indexes: Iterable[int]
    ) -> Iterator[ReceivedMessage]:
        """Create the messages at `indexes` of a batch, one by one, at the cost of a small object.

        A record that has only a body is decoded here: that costs less than to do it later.
        """
        queue, token, lineage = columns.queue, columns.token, columns.lineage
        header, records, begins = columns.header, columns.records, columns.begins
        first_offset, flagged = header.first_offset, columns.is_redelivered
        new, bare_bytes = cls.__new__, len(BARE)
        for index in indexes:
            message = new(cls)
            message.queue, message.token, message.lineage = queue, token, lineage
            message.offset = offset = first_offset + index
            message.redelivered = flagged is not None and flagged(offset)
            message.attempts = 0
            message.extender = message._origin = None
            message._header, begin = header, begins[index]
            body_at = begin + bare_bytes
            if records[begin:body_at] == BARE:
                message.body, message._columns = records[body_at : begins[index + 1]], None
            else:
                message._columns, message._index = columns, index
            yield message

    def __getattr__(self, name: str) -> object:
        """Decode the record; Python calls this when an attribute has no value yet.

        Raises:
            BadBatch: The record is damaged.
            AttributeError: Messages have no such attribute.
        """
        if name not in _DECODED:
            raise AttributeError(f"a message has no attribute {name!r}", name=name, obj=self)
        if self._columns is None:
            self.tag, self.keys, self.properties = "", (), {}
        else:
            record = self._columns.record(self._index)
            _, self.tag, self.keys, self.properties, self.body = record
            self._columns = None  # a message that is kept must not keep its batch
        value: object = object.__getattribute__(self, name)
        return value

    @property
    def born_unix_ms(self) -> int:
        """When its batch was built, by the producer's wall clock."""
        return self._header.born_unix_ms

    @property
    def store_unix_ms(self) -> int:
        """When its batch was stored, by storage's wall clock."""
        return self._header.store_unix_ms

    @property
    def topic_id(self) -> int:
        """Id of the queue's topic; a later topic of the same name has a greater one."""
        return self._header.topic_id

    @property
    def topic(self) -> str:
        """The topic; for a message from the retry topic, the topic that it was first sent to."""
        return self.queue.topic if self._origin is None else self._origin.queue.topic

    @property
    def message_id(self) -> str:
        """Id of the message in the cluster; a copy in the retry topic has an id of its own."""
        header = self._header
        return f"{self.queue.broker}-{header.position:x}-{self.offset - header.first_offset:x}"

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

    @property
    def ordering_key(self) -> str | None:
        """The ordering key with which it was sent; None without one."""
        return self.properties.get(ORDERING_KEY)

    @property
    def is_request(self) -> bool:
        """Whether its producer waits for a reply, or has waited for one."""
        return request_header(self.properties) is not None

    def extend(self, ms: int) -> None:
        """Give the running handler of this message more time; may be called in any thread.

        Does nothing if the handler has ended or its time is over.
        """
        extender = self.extender
        if extender is not None:
            extender(self, ms)

    def __repr__(self) -> str:
        return f"<message {self.queue}@{self.offset} tag={self.tag!r} {len(self.body)} bytes>"
