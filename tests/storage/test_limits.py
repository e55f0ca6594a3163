"""Goal: requests beyond a limit are rejected with limit and size; requests at the limit succeed.

Method: the whole node over gRPC. Batches beyond a limit are built directly, because this client
library rejects them before it sends them.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from batonmq._common.rpc import error_from_pb
from batonmq._core.names import check_broker, check_client_id, check_group, check_topic
from batonmq._core.records import (
    BODY_FROM,
    HEADER_BYTES,
    RECORDS_MAX,
    BatchBuilder,
    Message,
    encode_record,
)
from batonmq.errors import InvalidName, LimitExceeded
from tests.storage.batches import TOPIC, batch
from tests.storage.running_node import running_node

MIB = 1024 * 1024


def raw_batch(record: bytes, count: int = 1) -> bytes:
    """Return a batch of raw records, without the checks of a client."""
    builder = BatchBuilder()
    for _ in range(count):
        builder.add(Message(b""), record)
    return builder.encode(topic=TOPIC, queue_id=0)


def record(keys: int = 0, tag: int = 0, properties: int = 0, body: int = 0) -> bytes:
    """Return a record with parts of these sizes."""
    return struct.pack(">HHI", keys, tag, properties) + b"x" * (keys + tag + properties + body)


@pytest.mark.parametrize(
    ("sizes", "field", "limit"),
    [
        ({"body": 4 * MIB + 1}, "body", 4 * MIB),
        ({"properties": 48 * 1024 + 1}, "properties", 48 * 1024),
        ({"keys": 1_025}, "keys", 1_024),
        ({"tag": 128}, "tag", 127),
    ],
)
async def test_record_beyond_a_limit_is_rejected_with_limit_and_size(
    etcd_endpoint: str, tmp_path: Path, sizes: dict[str, int], field: str, limit: int
) -> None:
    fits = record(**{field: limit})
    async with running_node(etcd_endpoint, tmp_path) as node:
        good, bad = await node.outcomes(raw_batch(fits), raw_batch(record(**sizes)))
        error = error_from_pb(bad.error)
        assert isinstance(error, LimitExceeded)
        assert error.facts == {"field": field, "limit": str(limit), "actual": str(limit + 1)}
        assert good.receipt.first_offset == 0
        assert (await node.pull()).queue_next_offset == 1


async def test_batch_beyond_its_limit_is_rejected_with_limit_and_size(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    head = len(raw_batch(record(), 2)) - len(record()) * 2
    rest = 8 * MIB - head - 2 * len(record())
    fits = BatchBuilder()
    for size in (rest // 2, rest - rest // 2):
        fits.add(Message(b""), encode_record(Message(bytes(size))))
    whole = fits.encode(topic=TOPIC, queue_id=0)
    assert len(whole) == 8 * MIB
    async with running_node(etcd_endpoint, tmp_path) as node:
        good, bad = await node.outcomes(whole, whole + b"x")
        assert good.HasField("receipt")
        assert error_from_pb(bad.error).facts == {
            "field": "batch",
            "limit": str(8 * MIB),
            "actual": str(8 * MIB + 1),
        }


async def test_batch_with_the_maximum_of_records_is_accepted(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    raw = raw_batch(record(), RECORDS_MAX)
    more = bytearray(raw)
    struct.pack_into(">I", more, 84, RECORDS_MAX + 1)
    assert BODY_FROM < 84 < HEADER_BYTES
    async with running_node(etcd_endpoint, tmp_path) as node:
        good, bad = await node.outcomes(raw, bytes(more))
        assert good.receipt.first_offset == 0
        assert error_from_pb(bad.error).reason == "BAD_BATCH"
        assert (await node.pull()).queue_next_offset == RECORDS_MAX


async def test_batch_longer_than_a_segment_is_rejected_with_limit_and_size(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    raw = batch(bytes(5_000))
    async with running_node(etcd_endpoint, tmp_path, segment_bytes=4_096) as node:
        (outcome,) = await node.outcomes(raw)
        assert error_from_pb(outcome.error).facts == {
            "field": "batch",
            "limit": "4096",
            "actual": str(len(raw)),
        }


async def test_batch_that_fits_only_a_larger_old_segment_is_rejected(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """The old segment has room for one of the two batches, but both are rejected alike."""
    raw = batch(bytes(5_000))
    async with running_node(etcd_endpoint, tmp_path, segment_bytes=16_384) as node:
        await node.append(batch(bytes(8_000)))
    async with running_node(etcd_endpoint, tmp_path, segment_bytes=4_096) as node:
        for outcome in await node.outcomes(raw, raw):
            assert error_from_pb(outcome.error).facts == {
                "field": "batch",
                "limit": "4096",
                "actual": str(len(raw)),
            }
        assert [one.first_offset for one in await node.append(batch(b"a"))] == [1]


@pytest.mark.parametrize(
    ("check", "field", "limit"),
    [
        (check_topic, "topic", 127),
        (check_group, "group", 127),
        (check_broker, "broker", 63),
        (check_client_id, "client_id", 255),
    ],
)
def test_invalid_names_are_rejected(check, field: str, limit: int) -> None:  # type: ignore[no-untyped-def]
    assert check("a" * limit) == "a" * limit
    with pytest.raises(InvalidName) as refused:
        check("a" * (limit + 1))
    assert refused.value.facts == {
        "field": field,
        "limit": str(limit),
        "actual": str(limit + 1),
    }
    for name in ("", "a/b", "a b", "ä", "a\n", "a\x00"):
        with pytest.raises(InvalidName) as refused:
            check(name)
        assert refused.value.facts == {"field": field}
