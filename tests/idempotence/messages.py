"""Received messages for handlers."""

from __future__ import annotations

from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, Record


def message(
    offset: int = 0, *keys: str, position: int = 4_096, topic: str = "payments"
) -> ReceivedMessage:
    """Return the message at `offset` of a queue; `position` is that of its batch in the log."""
    header = Header(
        length=200,
        position=position,
        first_offset=offset,
        store_unix_ms=1_000,
        topic_id=1,
        epoch=1,
        producer_id=7,
        producer_epoch=1,
        sequence=0,
        born_unix_ms=1_000,
        queue_id=3,
        count=1,
        extra_key_count=0,
        topic=topic,
    )
    record = Record(offset, "", keys, {}, b"10 EUR")
    return ReceivedMessage(QueueRef(topic, "broker-0", 3), 5, header, record, redelivered=False)
