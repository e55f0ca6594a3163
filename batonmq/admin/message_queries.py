"""Reads stored messages by id, key or offset, without locks and without committing progress."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.storage.v1 import query_service_pb2 as pb
from batonmq._common.aio import without_group
from batonmq._core.outputs import OutputOrigin, origins_of
from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, Record, check_batch, decode_records, record_lengths
from batonmq._core.transactions import COMMITTED_PRODUCER_ID
from batonmq.admin.admin import Admin
from batonmq.admin.reports import queue_to_pb
from batonmq.errors import InvalidArgument, MessageNotFound


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as storage has it.

    Attributes:
        message_id: Id of the message, as in the producer's receipt.
        born_unix_ms: Time of the batch by the producer's wall clock.
        store_unix_ms: Time of the batch by storage's wall clock.
        topic_id: Id of the topic; a later topic with the same name has a greater id.
        producer_id: Producer id of the batch, as `producer_epoch` and `sequence`. 0 for none;
            negative for a scheduled message or one of a transaction.
        record_bytes: Size of the whole message in its batch before compression.
        batch_count: Number of messages in the batch.
        made_from: The input from which a transformer has made it; None if none has.
    """

    message_id: str
    queue: QueueRef
    offset: int
    born_unix_ms: int
    store_unix_ms: int
    tag: str
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    body: bytes
    topic_id: int = 0
    producer_id: int = 0
    producer_epoch: int = 0
    sequence: int = 0
    record_bytes: int = 0
    batch_count: int = 1
    made_from: OutputOrigin | None = None

    @property
    def scheduled_unix_ms(self) -> int | None:
        """Scheduled time of delivery; None if the message was not scheduled."""
        return -self.producer_id if COMMITTED_PRODUCER_ID < self.producer_id < 0 else None

    @property
    def transaction_id(self) -> str | None:
        """Id of the transaction that stored the message here; None without a transaction."""
        if self.producer_id > COMMITTED_PRODUCER_ID:
            return None
        return f"{self.queue.broker}-{self.producer_epoch << 32 | self.sequence:x}"


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Consecutive messages of a queue; the next page starts at `next_offset`."""

    messages: tuple[StoredMessage, ...]
    next_offset: int


@dataclass(frozen=True, slots=True)
class KeyMatches:
    """Messages with a key, newest first; `more` if there may be further messages."""

    messages: tuple[StoredMessage, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class StoreTimeRange:
    """The store times [from_unix_ms, to_unix_ms); 0 means no bound."""

    from_unix_ms: int = 0
    to_unix_ms: int = 0


class MessageQueries:
    """Reads messages from storage. Failures raise classes of `batonmq.errors`.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def message(self, message_id: str) -> StoredMessage:
        """Return the message with an id.

        Raises:
            MessageNotFound: The message does not exist or is no longer stored.
            InvalidArgument: `message_id` is malformed.
        """
        broker, *numbers = message_id.rsplit("-", 2)
        if len(numbers) != 2 or not broker:
            raise InvalidArgument(
                f"{message_id!r} is not a message id",
                remedy="Use the id of a producer's receipt: broker-position-index.",
                facts={"field": "message_id"},
            )
        request = pb.GetMessageRequest(message_id=message_id)

        async def ask(limit_s: float) -> pb.GetMessageResponse:
            stub = await self._admin.directory.query(broker)
            return await stub.GetMessage(request, timeout=limit_s)

        answer = await self._admin.ask(ask)
        return _decoded(broker, answer.message.batch, answer.message.index)

    async def with_key(
        self, topic: str, key: str, span: StoreTimeRange = StoreTimeRange(), count_max: int = 0
    ) -> KeyMatches:
        """Return the messages of a topic that have a key, from all brokers, newest first.

        Args:
            span: Only messages stored in this time range.
            count_max: Maximum number of messages, up to 1,000; 0 means 64.

        Raises:
            TopicNotFound: The topic does not exist.
        """
        detail = await self._admin.describe_topic(topic)
        request = pb.FindByKeyRequest(
            topic=topic,
            key=key,
            from_unix_ms=span.from_unix_ms,
            to_unix_ms=span.to_unix_ms,
            messages_max=count_max,
        )
        brokers = sorted({queue.broker for queue in detail.topic.queues})
        with without_group():
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(self._with_key(broker, request)) for broker in brokers]
        parts = [task.result() for task in calls]
        messages = sorted(
            (message for part in parts for message in part.messages),
            key=lambda message: message.store_unix_ms,
            reverse=True,
        )
        limit = count_max or 64
        more = len(messages) > limit or any(part.more for part in parts)
        return KeyMatches(tuple(messages[:limit]), more)

    async def at_offset(self, queue: QueueRef, offset: int) -> StoredMessage:
        """Return the message at an offset of a queue.

        Raises:
            MessageNotFound: The offset is the end of the queue.
            OffsetOutOfRange: The offset is beyond the end, or no longer stored.
        """
        for message in (await self.page(queue, offset, count_max=1)).messages:
            return message
        raise MessageNotFound(
            f"queue {queue} has no message at offset {offset} yet", facts={"offset": offset}
        )

    async def page(self, queue: QueueRef, offset: int, count_max: int = 1_000) -> MessagePage:
        """Return messages of a queue from an offset on, at most about 1 MiB; none at its end.

        Raises:
            OffsetOutOfRange: The offset is beyond the end, or no longer stored.
        """
        request = pb.ReadRequest(queue=queue_to_pb(queue), offset=offset, messages_max=count_max)

        async def ask(limit_s: float) -> pb.ReadResponse:
            stub = await self._admin.directory.query(queue.broker)
            return await stub.Read(request, timeout=limit_s)

        answer = await self._admin.ask(ask)
        messages = (
            message
            for batch in answer.batches
            for message in _decoded_from(queue.broker, batch, offset)
            if message.offset < answer.next_offset
        )
        return MessagePage(tuple(messages), answer.next_offset)

    async def offset_at(self, queue: QueueRef, unix_ms: int) -> int:
        """Return the first offset stored at or after a time; the end of the queue if none was."""
        request = pb.SearchOffsetRequest(queue=queue_to_pb(queue), unix_ms=unix_ms)

        async def ask(limit_s: float) -> pb.SearchOffsetResponse:
            stub = await self._admin.directory.query(queue.broker)
            return await stub.SearchOffset(request, timeout=limit_s)

        return (await self._admin.ask(ask)).offset

    async def _with_key(self, broker: str, request: pb.FindByKeyRequest) -> KeyMatches:
        async def ask(limit_s: float) -> pb.FindByKeyResponse:
            stub = await self._admin.directory.query(broker)
            return await stub.FindByKey(request, timeout=limit_s)

        answer = await self._admin.ask(ask)
        return KeyMatches(_decoded_all(broker, answer.messages), answer.more)


def _decoded_all(broker: str, messages: Sequence[pb.StoredMessage]) -> tuple[StoredMessage, ...]:
    return tuple(_decoded(broker, message.batch, message.index) for message in messages)


def _decoded(broker: str, batch: bytes, index: int) -> StoredMessage:
    header = check_batch(batch, stamped=True)
    (record,) = decode_records(batch, header, [index])
    made_from = origins_of(batch, header)[index]
    return _message(broker, header, record, record_lengths(batch, header)[index], made_from)


def _decoded_from(broker: str, batch: bytes, offset: int) -> Iterator[StoredMessage]:
    """Yield the messages of a batch from `offset` on."""
    header = check_batch(batch, stamped=True)
    indexes = range(max(offset - header.first_offset, 0), header.count)
    lengths, origins = record_lengths(batch, header), origins_of(batch, header)
    for record in decode_records(batch, header, indexes):
        index = record.offset - header.first_offset
        yield _message(broker, header, record, lengths[index], origins[index])


def _message(
    broker: str,
    header: Header,
    record: Record,
    record_bytes: int,
    made_from: OutputOrigin | None,
) -> StoredMessage:
    return StoredMessage(
        message_id=f"{broker}-{header.position:x}-{record.offset - header.first_offset:x}",
        queue=QueueRef(header.topic, broker, header.queue_id),
        offset=record.offset,
        born_unix_ms=header.born_unix_ms,
        store_unix_ms=header.store_unix_ms,
        tag=record.tag,
        keys=record.keys,
        properties=record.properties,
        body=record.body,
        topic_id=header.topic_id,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        sequence=header.sequence,
        record_bytes=record_bytes,
        batch_count=header.count,
        made_from=made_from,
    )
