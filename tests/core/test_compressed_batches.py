"""Goal: a compressed batch decodes like a plain one, and malformed records are rejected.

Malformed records never take more memory than their lengths state.
Method: golden batches, Hypothesis round trips, replaced records under a correct checksum, and
measured allocations.
"""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Sequence

import lz4.block
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.records import (
    BATCH_BYTES_MAX,
    BODY_BYTES_MAX,
    BODY_FROM,
    HEADER_BYTES,
    RECORD,
    STAMP_TO,
    BatchBuilder,
    Message,
    decode_records,
    encode_record,
    read_header,
    record_lengths,
    record_section,
    tag_hashes,
)
from batonmq.errors import BadBatch, BatonError, LimitExceeded
from tests.core.batch_checks import check_batch
from tests.core.test_records import MESSAGES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


PACKED = pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
FEW_AND_MANY = pytest.mark.parametrize("count", [1, 40, 41, 500])
"""Other records in the batch: a loop checks few records, numpy checks many."""
GOLDEN_MESSAGES = (Message(b"hello" * 8, tag="TagA", keys=("order-1",)), Message(b"hello" * 8))
GOLDEN_COLUMNS = (
    # topic; lengths, tag hashes, key hashes
    "546f70696354657374 0000003b 00000030 0027a807 00000000 e0b37fef 00000000"
)
GOLDEN = {
    Compression.LZ4: bytes.fromhex(
        "42544e31 0001 0000 000000ac" + "00" * 40 + "f7196926 0000000000000005 00000001 00000002"
        "0000018bcfe56800 00000003 00000002 00000000 0009 0001" + GOLDEN_COLUMNS +
        # one LZ4 block
        "ff0900070004000000006f726465722d315461674168656c6c6f050010130001000f2b00105068656c6c6f"
    ),
    Compression.ZSTD: bytes.fromhex(
        "42544e31 0001 0000 000000b3" + "00" * 40 + "b47b0d34 0000000000000005 00000001 00000002"
        "0000018bcfe56800 00000003 00000002 00000000 0009 0002" + GOLDEN_COLUMNS +
        # one Zstandard frame that names 0x6b bytes
        "28b52ffd206b4d0100f000070004000000006f726465722d315461674168656c6c6f0068656c6c6f03009c22"
        "80732f409631"
    ),
}  # fmt: skip


def encode(packing: RecordCompressor, *messages: Message) -> bytes:
    builder = BatchBuilder(packing)
    for message in messages:
        builder.add(message, encode_record(message))
    return builder.encode(
        topic="TopicTest", queue_id=3, producer=(5, 1), sequence=2, born_unix_ms=1_700_000_000_000
    )


def contents(batch: bytes) -> list[tuple[bytes, str, tuple[str, ...], dict[str, str]]]:
    header = check_batch(batch, stamped=False)
    records = decode_records(batch, header, range(header.count))
    return [(r.body, r.tag, r.keys, dict(r.properties)) for r in records]


def repacked(batch: bytes, packed: bytes, lengths: Sequence[int] = ()) -> bytes:
    """`batch` with other packed records, and other lengths, as a faulty producer would seal it."""
    header = read_header(batch)
    columns_at = HEADER_BYTES + len(header.topic)
    columns = bytearray(batch[columns_at : columns_at + 12 * header.count])
    if lengths:
        struct.pack_into(f">{header.count}I", columns, 0, *lengths)
    whole = bytearray(batch[:columns_at] + columns + packed)
    struct.pack_into(">I", whole, 8, len(whole))
    crc = crc32c(bytes(whole[BODY_FROM:]))
    struct.pack_into(">I", whole, STAMP_TO, crc)
    return bytes(whole)


def pack(compression: Compression, records: bytes) -> bytes:
    if compression is Compression.LZ4:
        return bytes(lz4.block.compress(records, store_size=False))
    return zstd.compress(records)


@PACKED
@given(messages=MESSAGES)
def test_decoded_messages_equal_the_encoded_ones(
    compression: Compression, messages: list[Message]
) -> None:
    messages = messages * 5  # long enough to be compressed
    plain, packed = (
        encode(RecordCompressor(), *messages),
        encode(RecordCompressor(compression), *messages),
    )
    assert contents(packed) == contents(plain)
    assert len(packed) <= len(plain)


@PACKED
def test_format_equals_the_golden_batch(compression: Compression) -> None:
    golden = GOLDEN[compression]
    assert read_header(golden).compression is compression
    assert contents(golden) == [(m.body, m.tag, m.keys, {}) for m in GOLDEN_MESSAGES]
    encoded = encode(RecordCompressor(compression), *GOLDEN_MESSAGES)
    assert encoded[:8] == golden[:8], "another release of the library may compress differently"
    assert encoded[BODY_FROM : HEADER_BYTES + 33] == golden[BODY_FROM : HEADER_BYTES + 33]


@PACKED
def test_columns_are_equal_with_and_without_compression(compression: Compression) -> None:
    messages = [Message(b"x" * 200, tag=f"t{n}", keys=(f"k{n}", "b")) for n in range(50)]
    plain, packed = (
        encode(RecordCompressor(), *messages),
        encode(RecordCompressor(compression), *messages),
    )
    heads = read_header(plain), read_header(packed)
    assert [head.compression for head in heads] == [Compression.NONE, compression]
    assert len(packed) < len(plain) / 2
    assert tag_hashes(packed, heads[1]) == tag_hashes(plain, heads[0])
    assert record_lengths(packed, heads[1]) == (214,) * 10 + (216,) * 40
    assert record_section(packed, heads[1]) == record_section(plain, heads[0])


@PACKED
def test_small_or_incompressible_batch_is_not_compressed(
    compression: Compression,
) -> None:
    short = Message(b"abc")
    assert encode(RecordCompressor(compression), short) == encode(RecordCompressor(), short)
    long = Message(b"x" * 1_000)
    assert encode(RecordCompressor(compression, 1_009), long) == encode(RecordCompressor(), long)
    assert len(encode(RecordCompressor(compression, 1_008), long)) < 300


@pytest.mark.parametrize("flags", [3, 15, 16, 17, 0x8000])
def test_flags_of_a_later_version_are_rejected(flags: int) -> None:
    batch = bytearray(encode(RecordCompressor(), Message(b"hello")))
    struct.pack_into(">H", batch, 94, flags)
    with pytest.raises(BadBatch, match="unknown flags") as refused:
        read_header(bytes(batch))
    assert refused.value.facts == {"field": "flags"}


@PACKED
@FEW_AND_MANY
def test_records_that_do_not_match_their_lengths_are_rejected(
    compression: Compression, count: int
) -> None:
    message = Message(b"x" * 100)
    batch = encode(RecordCompressor(compression), *[message] * count)
    records = encode_record(message) * count
    packed = pack(compression, records)
    wrong = [
        pack(compression, records[:-1]),
        pack(compression, records + b"x"),
        pack(compression, records * 50),
        packed[:-1],
        packed + b"x",
        packed + packed,
        b"\0",
        b"garbage",
        struct.pack("<II", 0x184D2A50, len(records)) + records,  # a skippable frame
    ]
    for one in wrong:
        bad = repacked(batch, one)
        header = read_header(bad)
        for read in (
            lambda bad=bad: check_batch(bad, stamped=False),
            lambda bad=bad, header=header: record_section(bad, header),
            lambda bad=bad, header=header: list(decode_records(bad, header, [0])),
        ):
            with pytest.raises(BadBatch) as refused:
                read()
            assert refused.value.facts == {"field": "records"}


@PACKED
@FEW_AND_MANY
@pytest.mark.parametrize(
    ("head", "body", "error", "field"),
    [
        ((2_000, 0, 0), 5_000, LimitExceeded, "keys"),
        ((0, 128, 0), 5_000, LimitExceeded, "tag"),
        ((0, 0, 48 * 1024 + 1), 50_000, LimitExceeded, "properties"),
        ((0, 0, 0), BODY_BYTES_MAX + 1, LimitExceeded, "body"),
        ((1, 1, 4), 5, BadBatch, "record"),
    ],
)
def test_limits_hold_for_decompressed_records(
    compression: Compression,
    count: int,
    head: tuple[int, int, int],
    body: int,
    error: type[BatonError],
    field: str,
) -> None:
    builder = BatchBuilder(RecordCompressor(compression))
    for record in (RECORD.pack(*head) + bytes(body), *[RECORD.pack(0, 0, 0)] * (count - 1)):
        builder.add(Message(b""), record)
    batch = builder.encode(topic="t", queue_id=0)
    with pytest.raises(error) as refused:
        check_batch(batch, stamped=False)
    assert refused.value.facts["field"] == field


@PACKED
@FEW_AND_MANY
def test_record_shorter_than_its_head_is_rejected(compression: Compression, count: int) -> None:
    batch = encode(RecordCompressor(compression), *[Message(b"x" * 100)] * count)
    records = encode_record(Message(b"x" * 100)) * (count - 1) + b"\0" * 7
    bad = repacked(batch, pack(compression, records), [108] * (count - 1) + [7])
    with pytest.raises(BadBatch) as refused:
        check_batch(bad, stamped=False)
    assert refused.value.facts["field"] == "lengths"


@PACKED
def test_batch_that_would_be_too_long_decompressed_is_rejected_by_its_lengths(
    compression: Compression,
) -> None:
    batch = encode(RecordCompressor(compression), *[Message(bytes(1_000))] * 2)
    columns_bytes = HEADER_BYTES + len("TopicTest") + 24
    fits = BATCH_BYTES_MAX - columns_bytes - BODY_BYTES_MAX
    bad = repacked(batch, b"garbage", [BODY_BYTES_MAX, fits + 1])
    with pytest.raises(LimitExceeded) as refused:
        check_batch(bad, stamped=False)
    assert refused.value.facts["field"] == "batch"
    with pytest.raises(BadBatch, match="decompressed"):
        check_batch(repacked(batch, b"garbage", [BODY_BYTES_MAX, fits]), stamped=False)


@PACKED
def test_records_that_decompress_to_more_than_their_lengths_take_no_memory(
    compression: Compression,
) -> None:
    batch = encode(RecordCompressor(compression), Message(bytes(10_000)))
    bomb = repacked(batch, pack(compression, bytes(200_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(BadBatch):
            record_section(bomb, read_header(bomb))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@PACKED
def test_encoder_enforces_the_limit_before_compression(compression: Compression) -> None:
    message = Message(bytes(BODY_BYTES_MAX))
    builder = BatchBuilder(RecordCompressor(compression))
    for _ in range(2):
        builder.add(message, encode_record(message))
    with pytest.raises(LimitExceeded):
        builder.encode(topic="t", queue_id=0)


@PACKED
def test_flipped_bytes_and_truncations_are_rejected(compression: Compression) -> None:
    golden = GOLDEN[compression]
    for at in range(HEADER_BYTES, len(golden)):
        flipped = bytearray(golden)
        flipped[at] ^= 0x10
        for bad in (bytes(flipped), golden[:at]):
            with pytest.raises(BatonError):
                check_batch(bad, stamped=False)


@PACKED
def test_arbitrary_compressed_bytes_are_rejected_as_a_bad_batch(compression: Compression) -> None:
    batch = encode(RecordCompressor(compression), Message(b"x" * 100))

    @given(st.binary(min_size=1, max_size=200))
    def judged(junk: bytes) -> None:
        with pytest.raises(BadBatch):
            check_batch(repacked(batch, junk), stamped=False)

    judged()
