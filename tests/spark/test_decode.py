"""Goal: decoding by columns gives the same rows as decoding message by message.

Method: Hypothesis makes messages; batches are encoded, cut and compressed, and the rows compared
with `decode_records`. No Spark.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    BatchBuilder,
    Message,
    check_batch,
    decode_records,
    encode_record,
    stamped_head,
)
from batonmq.errors import BadChecksum, OldTopic
from batonspark.decode import LOST_COUNT, QueueSlice, lost_messages, messages

QUEUE = QueueRef("orders", "broker-0", 3)
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=10)
WORD = st.text(st.characters(categories=("L", "N"), exclude_characters="|"), min_size=1, max_size=8)
MESSAGES = st.lists(
    st.builds(
        Message,
        body=st.binary(max_size=50),
        tag=st.one_of(st.just(""), WORD),
        keys=st.lists(WORD, max_size=3).map(tuple),
        properties=st.dictionaries(TEXT.filter(bool), TEXT, max_size=3),
    ),
    min_size=1,
    max_size=60,
)


def stored(
    sent: Sequence[Message],
    first_offset: int,
    compression: Compression = Compression.NONE,
    records: Sequence[bytes] = (),
) -> bytes:
    builder = BatchBuilder(RecordCompressor(compression))
    for number, message in enumerate(sent):
        builder.add(message, records[number] if records else encode_record(message))
    batch = builder.encode(topic=QUEUE.topic, queue_id=QUEUE.queue_id)
    head = stamped_head(
        batch,
        position=0,
        first_offset=first_offset,
        store_unix_ms=1_700_000_000_000 + first_offset,
        topic_id=7,
        epoch=1,
    )
    return head + batch[len(head) :]


def expected(batches: Sequence[bytes], first: int, after: int) -> list[dict[str, object]]:
    return [
        {
            "offset": record.offset,
            "key": " ".join(record.keys) or None,
            "tag": record.tag or None,
            "properties": list(record.properties.items()),
            "body": record.body,
        }
        for batch in batches
        for header in [check_batch(batch, stamped=True)]
        for record in decode_records(batch, header, range(header.count))
        if first <= record.offset < after
    ]


def decoded(batches: Sequence[bytes], first: int, after: int) -> list[dict[str, object]]:
    rows = messages(batches, QueueSlice(QUEUE, first, after, 7))
    rows.validate(full=True)
    return rows.select(["offset", "key", "tag", "properties", "body"]).to_pylist()  # type: ignore[no-any-return]


@settings(deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=3), st.sampled_from(Compression), st.data())
def test_columns_have_the_values_of_the_records(
    parts: list[list[Message]], compression: Compression, data: st.DataObject
) -> None:
    batches, end = [], 10
    for part in parts:
        batches.append(stored(part, end, compression))
        end += len(part)
    first = data.draw(st.integers(0, end))
    after = data.draw(st.integers(first, end + 5))
    assert decoded(batches, first, after) == expected(batches, first, after)


@pytest.mark.parametrize(
    "properties",
    [b"a\x01b", b"a\x01b\x02c\x01d", b"a\x02b\x01c\x02", b"\xff\x01\xfe\x02", b"a\x01b\x01c\x02"],
)
def test_irregular_properties_are_decoded_as_by_the_client(properties: bytes) -> None:
    head = b"\x00\x00\x00\x00" + len(properties).to_bytes(4, "big")
    record = head + properties + b"body"
    plain = Message(b"x", properties={"n": "1"})
    batch = stored([Message(b""), plain], 0, records=[record, encode_record(plain)])
    assert decoded([batch], 0, 2) == expected([batch], 0, 2)


def test_text_that_is_not_utf_8_is_replaced() -> None:
    record = b"\x00\x02\x00\x01\x00\x00\x00\x00" + b"\xffk" + b"\xfe" + b"body"
    batch = stored([Message(b"")], 0, records=[record])
    (row,) = decoded([batch], 0, 1)
    assert (row["key"], row["tag"], row["body"]) == ("\ufffdk", "\ufffd", b"body")


def test_every_row_has_queue_offset_and_store_time() -> None:
    batches = [stored([Message(b"a"), Message(b"b")], 5), stored([Message(b"c")], 7)]
    rows = messages(batches, QueueSlice(QUEUE, 6, 8, 7)).to_pylist()
    assert [(r["topic"], r["broker"], r["queue_id"], r["offset"]) for r in rows] == [
        ("orders", "broker-0", 3, 6),
        ("orders", "broker-0", 3, 7),
    ]
    assert [int(r["store_time"].timestamp() * 1000) % 100_000 for r in rows] == [5, 7]


def test_messages_of_another_topic_with_the_same_name_are_rejected() -> None:
    with pytest.raises(OldTopic):
        messages([stored([Message(b"a")], 0)], QueueSlice(QUEUE, 0, 1, 6))


def test_flipped_bit_is_detected() -> None:
    batch = bytearray(stored([Message(b"abc")], 0))
    batch[-1] ^= 1
    with pytest.raises(BadChecksum):
        messages([bytes(batch)], QueueSlice(QUEUE, 0, 1, 7))


def test_loss_is_one_row_with_its_size() -> None:
    (row,) = lost_messages(QueueSlice(QUEUE, 10, 35), 1_700_000_000_000).to_pylist()
    assert (row["offset"], row["body"]) == (10, None)
    assert row["properties"] == [(LOST_COUNT, "25")]
