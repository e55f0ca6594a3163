"""Goal: a filter on properties delivers exactly the messages for which its condition is true,
within its limits, and the cost of one request is bounded, whatever the log contains.

Method: real batches, small and large; Hypothesis compares with a loop that decodes every message;
also bytes that this client library never writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.records import (
    RECORD,
    BatchBuilder,
    Message,
    decode_properties,
    decode_records,
    encode_record,
    read_header,
    stamped_head,
)
from batonmq._core.subscription import SqlFilter, parse_filter
from batonmq_server.storage.core.property_filter import STEPS_MAX, PropertyMatches, find_passing
from batonmq_server.storage.core.tag_filter import batch_starts
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import TOPIC, TOPIC_ID, batch, open_store, read_spec, stored

KEY = (TOPIC_ID, 0)


def condition(text: str) -> SqlFilter:
    parsed = parse_filter(f"sql: {text}")
    assert isinstance(parsed, SqlFilter)
    return parsed


def message(value: str = "", tag: str = "", keys: Sequence[str] = ()) -> Message:
    properties = {"other": "1", "a": value, "aa": "2"} if value else {}
    return Message(value.encode(), tag, tuple(keys), properties)


def stamped(raw: bytes, first_offset: int) -> bytes:
    head = stamped_head(
        raw, position=0, first_offset=first_offset, store_unix_ms=1, topic_id=TOPIC_ID, epoch=1
    )
    return head + raw[len(head) :]


def placed(batches: Sequence[bytes], offset: int) -> Iterator[tuple[int, bytes]]:
    """Return the stored batches from `offset` on, and the end of each relative to `offset`."""
    first_offset = 0
    for raw in batches:
        next_offset = first_offset + read_header(raw).count
        if next_offset > offset:
            yield next_offset - offset, stamped(raw, first_offset)
        first_offset = next_offset


def found_in(
    batches: Sequence[bytes],
    text: str,
    *,
    offset: int = 0,
    bytes_max: int = 1 << 20,
    messages_max: int = 1_000,
) -> PropertyMatches:
    return find_passing(
        placed(batches, offset),
        offset,
        condition(text),
        bytes_max=bytes_max,
        messages_max=messages_max,
    )


def counts(matches: PropertyMatches) -> tuple[int, int, int]:
    return len(matches.batches), matches.scanned_count, matches.kept_count


def test_only_batches_with_a_passing_message_are_sent() -> None:
    batches = [batch(message("1"), message("9")), batch(message("2")), batch(message("8"))]
    matches = found_in(batches, "a > 5")
    assert [read_header(raw).first_offset for raw in matches.batches] == [0, 3]
    assert counts(matches) == (2, 4, 2)


def test_messages_before_the_offset_do_not_count() -> None:
    batches = [batch(message("9"), message("9"), message("1"))]
    assert counts(found_in(batches, "a > 5", offset=1)) == (1, 2, 1)
    assert counts(found_in(batches, "a > 5", offset=2)) == (0, 1, 0)


def test_message_limit_ends_before_the_next_one_that_passes() -> None:
    batches = [batch(*map(message, "9191")), batch(*map(message, "119"))]
    assert counts(found_in(batches, "a > 5", messages_max=1)) == (1, 2, 1)
    assert counts(found_in(batches, "a > 5", messages_max=2)) == (1, 6, 2)


def test_byte_limit_ends_before_the_next_batch_and_the_first_one_fits() -> None:
    batches = [batch(*map(message, "91")), batch(message("1")), batch(*map(message, "19"))]
    assert counts(found_in(batches, "a > 5", bytes_max=1)) == (1, 4, 1)


@pytest.mark.parametrize("count", [3, 40])
def test_messages_without_properties_have_one_result(count: int) -> None:
    batches = [batch(*[message()] * count)]
    assert counts(found_in(batches, "a > 5")) == (0, count, 0)
    assert counts(found_in(batches, "NOT a > 5")) == (0, count, 0)
    assert counts(found_in(batches, "a IS NULL")) == (1, count, count)
    mixed = [batch(*[message()] * count, message("1"), *[message()] * count)]
    assert counts(found_in(mixed, "a IS NULL")) == (1, 2 * count + 1, 2 * count)
    assert counts(found_in(mixed, "a IS NULL", messages_max=count)) == (1, count + 1, count)


@pytest.mark.parametrize("count", [2, 40])
def test_tag_and_keys_are_found_without_properties(count: int) -> None:
    batches = [batch(*[message(tag="paid", keys=("k1", "k2"))] * count, message("1"))]
    assert counts(found_in(batches, "TAGS = 'paid'")) == (1, count + 1, count)
    assert counts(found_in(batches, "KEYS = 'k1 k2'")) == (1, count + 1, count)
    assert counts(found_in(batches, "TAGS IS NULL AND a = 1")) == (1, count + 1, 1)


def raw_batch(*properties: bytes) -> bytes:
    """Return a batch with properties that this client library never writes."""
    builder = BatchBuilder()
    for text in properties:
        builder.add(Message(b"", "", (), {}), RECORD.pack(0, 0, len(text)) + text)
    return builder.encode(topic="orders", queue_id=0)


ODD = [
    b"a\x017",
    b"a\x017\x02a\x018\x02",
    b"ba\x017\x02",
    b"ba\x01a\x017\x02",
    b"b\x01xa\x02a\x017\x02",
    b"a\x02a\x017\x02",
    b"\x02\x02a\x017\x02",
    b"a\x01\x02",
    b"a\x01a\x01b\x02",
    b"\xff\xfea\x017\x02a\x01\xff7\x02",
    b"a\x01\xff\x02b\x01\xc3",
    b"\x01a\x017",
    b"aa\x017\x02aaa\x017\x02a\x019",
]


@pytest.mark.parametrize("text", ["a = '7'", "a = ''", "a IS NULL", "a CONTAINS '\ufffd'", "b > a"])
def test_unusual_properties_are_read_as_by_the_client(text: str) -> None:
    wants = condition(text)
    expected = [i for i, raw in enumerate(ODD) if wants.accepts("", (), decode_properties(raw))]
    for index, raw in enumerate(ODD):
        assert counts(found_in([raw_batch(raw)], text))[2] == (index in expected)
    assert counts(found_in([raw_batch(*ODD * 3)], text))[2] == 3 * len(expected)


MESSAGES = st.builds(
    lambda value, tag, keys, fill: (
        Message(
            b"a\x019\x02" * fill,
            tag,
            keys,
            {"aa": "9"} | ({"a": value, "b" * fill + "a": "9"} if value else {}),
        )
        if fill
        else Message(b"", tag, keys, {})
    ),
    st.sampled_from(["", "1", "9", "7.5", "x"]),
    st.sampled_from(["", "paid", "open"]),
    st.sampled_from([(), ("k1",), ("k1", "k2")]),
    st.integers(0, 3),
)
TEXTS = st.sampled_from(
    ["a > 5", "NOT a > 5", "a IS NULL", "TAGS = 'paid'", "KEYS IS NULL", "TRUE", "FALSE",
     "a > 5 OR KEYS = 'k1 k2'", "a > 5 AND TAGS IS NOT NULL", "ba IS NOT NULL"],
)  # fmt: skip


@given(
    st.lists(st.lists(MESSAGES, min_size=1, max_size=20), min_size=1, max_size=6),
    TEXTS,
    st.integers(0, 5),
    st.integers(1, 900),
    st.integers(1, 40),
)
def test_result_equals_a_loop_over_messages(
    groups: list[list[Message]], text: str, offset: int, bytes_max: int, messages_max: int
) -> None:
    batches = [batch(*group) for group in groups]
    offset = min(offset, sum(map(len, groups)) - 1)
    matches = found_in(batches, text, offset=offset, bytes_max=bytes_max, messages_max=messages_max)
    expected: list[bytes] = []
    scanned = kept_count = 0
    for raw, one in _messages(batches, offset):
        if condition(text).accepts(one.tag, one.keys, one.properties):
            fresh = raw not in expected
            too_big = fresh and expected and sum(map(len, expected)) + len(raw) > bytes_max
            if kept_count == messages_max or too_big:
                break
            expected += [raw] if fresh else []
            kept_count += 1
        scanned += 1
    assert (matches.batches, matches.scanned_count, matches.kept_count) == (
        expected,
        scanned,
        kept_count,
    )


def _messages(batches: Sequence[bytes], offset: int) -> Iterator[tuple[bytes, Message]]:
    """Yield stored batch and message of each offset from `offset` on."""
    for _, raw in placed(batches, offset):
        header = read_header(raw)
        begin = max(offset - header.first_offset, 0)
        for one in decode_records(raw, header, range(begin, header.count)):
            yield raw, Message(one.body, one.tag, one.keys, one.properties)


def test_scan_without_a_match_ends_at_its_bound_and_the_next_one_continues() -> None:
    batches = [batch(*[message("1")] * 1_000) for _ in range(20)]
    read_offsets: list[int] = []

    def noting(offset: int) -> Iterator[tuple[int, bytes]]:
        for end, raw in placed(batches, offset):
            read_offsets.append(read_header(raw).first_offset)
            yield end, raw

    offset, requests = 0, 0
    while offset < 20_000:
        matches = find_passing(
            noting(offset), offset, condition("a > 5"), bytes_max=1 << 20, messages_max=1_000
        )
        assert counts(matches) == (0, matches.scanned_count, 0)
        assert (
            4_000 < matches.scanned_count <= STEPS_MAX or offset + matches.scanned_count == 20_000
        )
        offset, requests = offset + matches.scanned_count, requests + 1
    assert requests <= 5
    assert len(read_offsets) <= 20 + requests, "a batch was read and not scanned"


def test_request_that_ends_at_a_bound_counts_each_message_once() -> None:
    batches = [batch(*[message("1"), message(), message("9")] * 4_000)]
    for text, expected in (("a IS NULL", 4_000), ("a > 5", 4_000), ("NOT a > 5", 4_000)):
        offset, kept_count, requests = 0, 0, 0
        while offset < 12_000:
            matches = found_in(batches, text, offset=offset, messages_max=60_000)
            offset += matches.scanned_count
            kept_count += matches.kept_count
            requests += 1
        assert (kept_count, requests > 1) == (expected, True)


def test_condition_with_more_comparisons_covers_fewer_messages() -> None:
    batches = [batch(*[message("1")] * 1_000) for _ in range(20)]
    one = found_in(batches, "a > 5").scanned_count
    four = found_in(batches, " OR ".join(["a > 5"] * 4)).scanned_count
    most = found_in(batches, " OR ".join(["a > 5"] * 64)).scanned_count
    assert STEPS_MAX // 2 < one <= STEPS_MAX
    assert STEPS_MAX // 8 < four <= STEPS_MAX // 4
    assert STEPS_MAX // 128 < most <= STEPS_MAX // 64


def test_long_properties_cover_fewer_messages_but_at_least_one() -> None:
    long = Message(b"", "", (), {"long": "x" * 32_000, "a": "1"})
    batches = [batch(*[long] * 100) for _ in range(5)]
    one = found_in(batches, "a > 5").scanned_count
    most = found_in(batches, " OR ".join(["a > 5"] * 64)).scanned_count
    names = found_in(batches, " OR ".join(["a = b"] * 64)).scanned_count
    assert 50 < one < 500
    assert 1 <= most <= 2
    assert names == 1, "the message alone takes more than the limit"


def test_messages_that_need_no_test_are_covered_in_one_request() -> None:
    batches = [batch(*[message()] * 1_000) for _ in range(16)]
    assert counts(found_in(batches, "a > 5")) == (0, 16_000, 0)


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
@pytest.mark.parametrize("count", [3, 40])
def test_compressed_batches_are_filtered_like_plain_ones_and_sent_compressed(
    compression: Compression, count: int
) -> None:
    builder = BatchBuilder(RecordCompressor(compression))
    for value in ["1", "9", ""] * count:
        one = message(value)
        builder.add(one, encode_record(one))
    packed = builder.encode(topic=TOPIC, queue_id=0)
    assert read_header(packed).compression == compression
    matches = found_in([packed], "a > 5")
    assert counts(matches) == (1, 3 * count, count)
    assert matches.batches == [stamped(packed, 0)]


def test_large_bodies_cost_steps() -> None:
    batches = [batch(*[Message(b"x" * 1_000_000)] * 4) for _ in range(4)]
    assert found_in(batches, "a > 5").scanned_count == 4


def test_store_reads_by_properties_and_returns_the_scanned_count() -> None:
    opened = open_store(MemoryDisk(), segment_bytes=1 << 20)
    batches = [batch(*map(message, "19")), batch(message("1")), batch(message("8"), message())]
    stored(opened.store, *batches)
    reading = opened.store.read(KEY, read_spec(1, filter=condition("a > 5")))
    assert reading is not None
    assert [read_header(raw).first_offset for raw in reading.batches] == [0, 3]
    assert (reading.next_offset, reading.message_count, reading.filtered_count) == (5, 2, 2)
    nothing = opened.store.read(KEY, read_spec(0, filter=condition("a > 50")))
    assert nothing is not None
    assert (nothing.batches, nothing.next_offset, nothing.filtered_count) == ([], 5, 5)
    assert opened.store.read(KEY, read_spec(5, filter=condition("a > 5"))) is None


def test_batches_begin_where_the_position_changes() -> None:
    assert batch_starts(np.array([5, 5, 9, 11, 11])).tolist() == [0, 2, 3]
