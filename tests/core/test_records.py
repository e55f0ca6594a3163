"""Goal: the bytes of a batch do not change by accident, and no damaged batch is accepted.

Method: a golden batch, Hypothesis round trips, every truncation and every flipped byte.
"""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.records import (
    BODY_BYTES_MAX,
    BODY_FROM,
    HEADER_BYTES,
    RECORD,
    STAMP_FROM,
    STAMP_TO,
    BatchBuilder,
    Message,
    check_stamp,
    decode_properties,
    decode_records,
    encode_properties,
    encode_record,
    key_hash,
    read_header,
    stamped_head,
    tag_hash,
    tag_hashes,
)
from batonmq.errors import BadBatch, BadChecksum, BatonError, LimitExceeded
from tests.core.batch_checks import check_batch

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
    max_size=20,
)

GOLDEN = bytes.fromhex(
    # magic, version, reserved, length; then storage's part, zero
    "42544e31 0001 0000 000000b1" + "00" * 40 +
    # checksum; producer id, epoch, sequence; born; queue, count, extra keys, topic length, flags
    "98ca42d1 0000000000000005 00000001 00000002 0000018bcfe56800 00000003 00000002 00000001 0009"
    "0000 546f70696354657374"
    # lengths, tag hashes, key hashes, extra keys
    "0000001e 0000000a 0027a807 00000000 e0b37fef 00000000 00000000 e8b7be43"
    # records: keys, tag, properties, body
    "0009 0004 00000004 6f726465722d312061 54616741 61013102 68656c6c6f"
    "0000 0000 00000000 6869"
)


def encode(*messages: Message, topic: str = "TopicTest", queue_id: int = 3) -> bytes:
    builder = BatchBuilder()
    for message in messages:
        builder.add(message, encode_record(message))
    return builder.encode(
        topic=topic,
        queue_id=queue_id,
        producer=(5, 1),
        sequence=2,
        born_unix_ms=1_700_000_000_000,
    )


def stamped(batch: bytes, first_offset: int = 100) -> bytes:
    head = stamped_head(
        batch, position=4_096, first_offset=first_offset, store_unix_ms=9, topic_id=7, epoch=1
    )
    return head + batch[BODY_FROM:]


SAMPLE = encode(
    Message(b"hello", tag="TagA", keys=("order-1", "a"), properties={"a": "1"}), Message(b"hi")
)


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("TagA", 2598919), ("TagB", 2598920), ("TagC", 2598921), ("tag1", 3552215),
        ("tag2", 3552216), ("*", 42), ("hello", 99162322), ("Aa", 2112), ("BB", 2112),
        ("订单", 1129459), ("😀", 1772899), ("TopicTest#order-1", -1829193424),
        ("polygenelubricants", -2147483648), ("", 0),
    ],
)  # fmt: skip
def test_tag_hash_is_that_of_java(tag: str, expected: int) -> None:
    assert tag_hash(tag) == expected


def test_key_hashes_are_crc32_and_never_zero() -> None:
    assert key_hash("hello") == 0x3610A686
    assert key_hash("") == 1


@given(MESSAGES, st.integers(0, 1 << 40))
def test_decoded_messages_equal_the_encoded_ones(
    messages: list[Message], first_offset: int
) -> None:
    batch = stamped(encode(*messages), first_offset)
    header = check_batch(batch, stamped=True)
    assert (header.topic, header.queue_id, header.count) == ("TopicTest", 3, len(messages))
    assert (header.first_offset, header.next_offset) == (
        first_offset,
        first_offset + len(messages),
    )
    decoded = list(decode_records(batch, header, range(header.count)))
    assert [(r.body, r.tag, r.keys, dict(r.properties)) for r in decoded] == [
        (m.body, m.tag, m.keys, dict(m.properties)) for m in messages
    ]
    assert [r.offset for r in decoded] == list(range(first_offset, header.next_offset))
    assert tag_hashes(batch, header) == tuple(tag_hash(m.tag) for m in messages)


def test_format_equals_the_golden_batch() -> None:
    assert GOLDEN == SAMPLE
    head = "42544e31 0001 0000 000000b1 91ed9cfe 0000000000001000 0000000000000064 0000000000000009"
    assert stamped(SAMPLE)[:STAMP_TO] == bytes.fromhex(head + "0000000000000007 00000001")


def test_any_subset_of_records_can_be_decoded() -> None:
    batch = stamped(encode(*(Message(b"%d" % n) for n in range(10))))
    header = read_header(batch)
    assert [r.body for r in decode_records(batch, header, [0, 3, 9])] == [b"0", b"3", b"9"]


def test_stamp_changes_only_bytes_of_storage() -> None:
    batch = stamped(SAMPLE)
    assert batch[:12] == SAMPLE[:12]
    assert batch[STAMP_TO:] == SAMPLE[STAMP_TO:]
    assert struct.unpack(">qqqqI", batch[STAMP_FROM:STAMP_TO]) == (4_096, 100, 9, 7, 1)
    check_stamp(batch)


def test_truncated_batch_is_rejected() -> None:
    batch = stamped(SAMPLE)
    for length in range(len(batch)):
        with pytest.raises(BadBatch):
            check_batch(batch[:length], stamped=True)


def test_flipped_byte_is_rejected() -> None:
    batch = stamped(SAMPLE)
    for at in range(len(batch)):
        flipped = bytearray(batch)
        flipped[at] ^= 0x10
        with pytest.raises((BadBatch, BadChecksum, LimitExceeded)):
            check_batch(bytes(flipped), stamped=True)


def test_all_bytes_but_those_of_storage_are_checked_without_the_stamp() -> None:
    for at in range(len(SAMPLE)):
        flipped = bytearray(SAMPLE)
        flipped[at] ^= 0x10
        if 12 <= at < STAMP_TO:
            check_batch(bytes(flipped), stamped=False)
        else:
            with pytest.raises(BatonError):
                check_batch(bytes(flipped), stamped=False)


def test_arbitrary_bytes_are_a_batch_or_rejected() -> None:
    @given(st.binary(max_size=300))
    def refused(junk: bytes) -> None:
        with pytest.raises(BatonError):
            check_batch(junk, stamped=False)

    refused()


def resealed(batch: bytearray) -> bytes:
    """`batch` with a right checksum: what a faulty producer would send."""
    crc = crc32c(bytes(batch[BODY_FROM:]))
    struct.pack_into(">I", batch, STAMP_TO, crc)
    return bytes(batch)


def columns(batch: bytes) -> int:
    return HEADER_BYTES + len(read_header(batch).topic)


@pytest.mark.parametrize(
    ("at", "value", "error", "field"),
    [
        (0, 34, BadBatch, "lengths"),
        (0, 7, BadBatch, "lengths"),
        (24, 2, BadBatch, "extra_keys"),
    ],
)
def test_contradicting_columns_are_rejected(
    at: int, value: int, error: type[BatonError], field: str
) -> None:
    batch = bytearray(SAMPLE)
    struct.pack_into(">I", batch, columns(SAMPLE) + at, value)
    with pytest.raises(error) as refused:
        check_batch(resealed(batch), stamped=False)
    assert refused.value.facts["field"] == field


OTHERS = pytest.mark.parametrize("others", [0, 39, 40, 200])
"""Other records in the batch: a loop checks few records, numpy checks many."""


@OTHERS
@pytest.mark.parametrize(
    ("head", "field"),
    [
        ((2_000, 0, 0), "keys"),
        ((0, 128, 0), "tag"),
        ((0, 0, 48 * 1024 + 1), "properties"),
        ((0, 0, 49_900), "properties"),
    ],
)
def test_limits_of_a_record_are_checked_without_decoding_it(
    head: tuple[int, int, int], field: str, others: int
) -> None:
    batch = bytearray(encode(Message(bytes(50_000)), *[Message(b"x")] * others))
    struct.pack_into(">HHI", batch, columns(bytes(batch)) + 12 * (others + 1), *head)
    with pytest.raises(LimitExceeded) as refused:
        check_batch(resealed(batch), stamped=False)
    assert refused.value.facts["field"] == field


@OTHERS
def test_body_beyond_its_limit_is_rejected_without_decoding(others: int) -> None:
    builder = BatchBuilder()
    for body in (bytes(BODY_BYTES_MAX + 1), *[b"x"] * others):
        builder.add(Message(body), bytes(RECORD.size) + body)
    with pytest.raises(LimitExceeded) as refused:
        check_batch(builder.encode(topic="t", queue_id=0), stamped=False)
    assert refused.value.facts["field"] == "body"
    assert refused.value.facts["actual"] == str(BODY_BYTES_MAX + 1)


@OTHERS
def test_record_with_parts_longer_than_itself_is_rejected(others: int) -> None:
    batch = bytearray(encode(*[Message(b"hello")] * (others + 1)))
    struct.pack_into(">HHI", batch, columns(bytes(batch)) + 12 * (others + 1), 1, 1, 4)
    with pytest.raises(BadBatch) as refused:
        check_batch(resealed(batch), stamped=False)
    assert refused.value.facts["field"] == "record"


@OTHERS
def test_lengths_that_do_not_add_up_are_rejected(others: int) -> None:
    whole = encode(*[Message(b"hello")] * (others + 1))
    for length in (0, 7, 12, 14, 1 << 31):
        batch = bytearray(whole)
        struct.pack_into(">I", batch, columns(whole) + 4 * others, length)
        with pytest.raises(BadBatch) as refused:
            check_batch(resealed(batch), stamped=False)
        assert refused.value.facts["field"] == "lengths"


def test_text_that_is_not_utf8_is_decoded_with_replacements() -> None:
    message = Message(b"hello", "TagA", ("keyA", "k"), {"n": "valA"})
    builder = BatchBuilder()
    builder.add(message, encode_record(message).replace(b"A", b"\xff"))
    builder.add(Message(b"next"), encode_record(Message(b"next")))
    batch = stamped(builder.encode(topic="TopicTest", queue_id=0))
    first, second = decode_records(batch, check_batch(batch, stamped=True), [0, 1])
    assert (first.tag, first.keys) == ("Tag\ufffd", ("key\ufffd", "k"))
    assert (first.properties, first.body) == ({"n": "val\ufffd"}, b"hello")
    assert second.body == b"next"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message(b"", tag="a b"), "tag"),
        (Message(b"", tag="a|b"), "tag"),
        (Message(b"", tag="\x01"), "tag"),
        (Message(b"", keys=("a b",)), "keys"),
        (Message(b"", keys=("",)), "keys"),
        (Message(b"", properties={"": "x"}), "properties"),
        (Message(b"", properties={"a\x01": "x"}), "properties"),
        (Message(b"", properties={"a": "x\x02"}), "properties"),
    ],
)
def test_separators_in_values_are_rejected(message: Message, field: str) -> None:
    with pytest.raises(BadBatch) as refused:
        encode_record(message)
    assert refused.value.facts == {"field": field}


@pytest.mark.parametrize(
    ("message", "field", "limit", "actual"),
    [
        (Message(bytes(4 * 1024 * 1024 + 1)), "body", 4 * 1024 * 1024, 4 * 1024 * 1024 + 1),
        (Message(b"", tag="订" * 43), "tag", 127, 129),
        (Message(b"", keys=("k" * 1_025,)), "keys", 1_024, 1_025),
        (Message(b"", properties={"a": "x" * 32_768}), "properties", 32_768, 32_771),
    ],
)
def test_limit_error_has_the_actual_size(
    message: Message, field: str, limit: int, actual: int
) -> None:
    with pytest.raises(LimitExceeded) as refused:
        encode_record(message)
    assert refused.value.facts == {"field": field, "limit": str(limit), "actual": str(actual)}


def test_batch_without_records_is_rejected() -> None:
    with pytest.raises(BadBatch):
        BatchBuilder().encode(topic="t", queue_id=0)


def test_batch_beyond_its_limit_is_rejected() -> None:
    message = Message(bytes(4 * 1024 * 1024))
    builder = BatchBuilder()
    for _ in range(2):
        builder.add(message, encode_record(message))
    with pytest.raises(LimitExceeded):
        builder.encode(topic="t", queue_id=0)


@given(st.dictionaries(TEXT.filter(bool), TEXT))
def test_decoded_properties_equal_the_encoded_ones(properties: dict[str, str]) -> None:
    raw = encode_properties(properties)
    assert decode_properties(raw) == properties
    assert decode_properties(raw.removesuffix(b"\x02")) == properties


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (Message(b"", tag="two words"), "Use a tag without white space and without '|'."),
        (Message(b"", tag="t" * 128), "Send a tag of 127 bytes at most."),
        (Message(b"", keys=("two words",)), "Use non-empty keys without white space."),
        (Message(b"", properties={"a\x01": ""}), "Use names that are not empty"),
        (Message(b"", tag="\udcff"), "Decode the bytes"),
        (Message(b"", keys=("a", "\udcff")), "Decode the bytes"),
        (Message(b"", properties={"a": "\udcff"}), "Decode the bytes"),
    ],
)
def test_invalid_message_is_rejected_with_a_remedy(message: Message, remedy: str) -> None:
    with pytest.raises(BatonError) as refused:
        encode_record(message)
    assert refused.value.remedy.startswith(remedy)
