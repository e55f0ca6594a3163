"""Goal: the numpy columns of a batch are what the decoder without numpy reads, record by record.

Method: Hypothesis batches, with and without compression, and heads of records that do not fit.
"""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core import records
from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.records import (
    BODY_FROM,
    HEADER_BYTES,
    STAMP_TO,
    BatchBuilder,
    Message,
    decode_records,
    encode_record,
    key_hash,
    read_header,
    record_section,
)
from batonmq.errors import BadBatch, BatonError, LimitExceeded
from tests.core.batch_checks import check_batch

batch_columns = pytest.importorskip("batonmq._columns.batch_columns")

WORD = st.text("abcdé", min_size=1, max_size=8)
MESSAGES = st.lists(
    st.builds(
        Message,
        body=st.binary(max_size=50),
        tag=st.one_of(st.just(""), WORD),
        keys=st.lists(WORD, max_size=3).map(tuple),
        properties=st.dictionaries(WORD, WORD, max_size=3),
    ),
    min_size=1,
    max_size=60,
)


def encode(messages: list[Message], compression: Compression = Compression.NONE) -> bytes:
    builder = BatchBuilder(RecordCompressor(compression))
    for message in messages:
        builder.add(message, encode_record(message))
    return builder.encode(topic="t", queue_id=0)


@given(MESSAGES, st.sampled_from(Compression))
def test_columns_are_those_of_the_loop(messages: list[Message], compression: Compression) -> None:
    batch = encode(messages, compression)
    header = check_batch(batch, stamped=False)
    assert tuple(batch_columns.tag_hashes(batch, header)) == records.tag_hashes(batch, header)
    assert tuple(batch_columns.record_lengths(batch, header)) == records.record_lengths(
        batch, header
    )
    indexes, hashes = batch_columns.key_hashes(batch, header)
    assert sorted(zip(indexes.tolist(), hashes.tolist(), strict=True)) == sorted(
        (index, key_hash(key)) for index, message in enumerate(messages) for key in message.keys
    )
    columns = batch_columns.record_columns(batch, header)
    assert columns.section == record_section(batch, header)
    for record, (_, *bounds) in zip(
        decode_records(batch, header, range(header.count)), columns.bounds.tolist(), strict=True
    ):
        keys, tag, properties, body, end = bounds
        assert columns.section[keys:tag].decode() == " ".join(record.keys)
        assert columns.section[tag:properties].decode() == record.tag
        assert columns.section[body:end] == record.body


@given(MESSAGES, st.integers(0), st.integers(0, 8), st.binary(min_size=1, max_size=4))
def test_both_checks_accept_and_reject_the_same_batches(
    messages: list[Message], index: int, at: int, junk: bytes
) -> None:
    """A record's head, or the end of the columns before it, is overwritten and sealed again."""
    batch = bytearray(encode(messages))
    header = read_header(bytes(batch))
    lengths = records.record_lengths(bytes(batch), header)
    index %= header.count
    starts = records.column_starts(header)
    begin = starts.extra_keys + 8 * header.extra_key_count + sum(lengths[:index])
    begin += at - 4 if begin > HEADER_BYTES + 4 else at
    batch[begin : begin + len(junk)] = junk
    batch = batch[: header.length]
    struct.pack_into(">I", batch, STAMP_TO, crc32c(batch[BODY_FROM:]))
    try:
        check_batch(bytes(batch), stamped=False)
    except BatonError as error:
        assert isinstance(error, BadBatch | LimitExceeded)


def test_columns_of_a_record_that_does_not_fit_are_rejected() -> None:
    batch = bytearray(encode([Message(b"abc")] * 50))
    header = read_header(bytes(batch))
    records_at = records.column_starts(header).extra_keys
    struct.pack_into(">H", batch, records_at, 4)
    with pytest.raises(BadBatch, match="truncated"):
        batch_columns.record_columns(bytes(batch), header)
