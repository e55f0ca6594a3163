"""Goal: storage handles compressed batches like others, and checks their content.

Method: the whole node over gRPC with a real etcd; scheduled messages and fsck in memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.records import (
    BatchBuilder,
    Message,
    check_batch,
    decode_records,
    encode_record,
)
from batonmq.errors import BadBatch, LimitExceeded
from batonmq_server.storage.core.checkpoint_writer import CheckpointWriter
from batonmq_server.storage.core.fsck import Fsck
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.core.test_compressed_batches import repacked
from tests.storage.batches import NOW, TOPIC, bodies, open_store, stored
from tests.storage.running_node import running_node
from tests.storage.schedule_scene import new_scene
from tests.storage.test_query_server import body, query_node

PACKED = pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
FILL = "x" * 500
MESSAGES = [
    Message(f"{FILL}{n}".encode(), tag="even" if n % 2 == 0 else "odd", keys=(f"key-{n}",))
    for n in range(50)
]
BODIES = [message.body for message in MESSAGES]


def packed(compression: Compression, producer: tuple[int, int] = (0, 0)) -> bytes:
    builder = BatchBuilder(RecordCompressor(compression))
    for message in MESSAGES:
        builder.add(message, encode_record(message))
    return builder.encode(topic=TOPIC, queue_id=0, producer=producer)


@PACKED
async def test_filter_key_index_and_recovery_read_inside_compressed_batches(
    compression: Compression, etcd_endpoint: str, tmp_path: Path
) -> None:
    raw = packed(compression, (5, 1))
    assert len(raw) < sum(map(len, BODIES)) / 5
    async with query_node(etcd_endpoint, tmp_path) as queries:
        (receipt,) = await queries.node.append(raw)
        (match,) = (await queries.find(key="key-17")).messages
        assert body(match) == BODIES[17]
    async with running_node(etcd_endpoint, tmp_path) as node:
        (again,) = await node.append(raw)
        assert (again.duplicate, again.position) == (True, receipt.position)
        answer = await node.pull(expression="odd")
        (batch,) = answer.batches
        header = check_batch(batch, stamped=True)
        assert (header.compression, header.count, header.length) == (compression, 50, len(raw))
        assert [r.body for r in decode_records(batch, header, range(50))] == BODIES
        assert (answer.next_offset, answer.filtered_count) == (50, 25)


@PACKED
async def test_content_of_a_compressed_batch_is_checked_before_it_is_stored(
    compression: Compression, etcd_endpoint: str, tmp_path: Path
) -> None:
    raw = packed(compression)
    columns_end = 96 + len(TOPIC) + 12 * 50
    records = raw[columns_end:]
    async with running_node(etcd_endpoint, tmp_path) as node:
        with pytest.raises(BadBatch):
            await node.append(repacked(raw, records[:-1]))
        with pytest.raises(BadBatch):
            await node.append(repacked(raw, b"garbage"))
        with pytest.raises(LimitExceeded):
            await node.append(repacked(raw, records, [1 << 20] * 50))
        assert (await node.pull()).queue_next_offset == 0


@PACKED
async def test_compressed_scheduled_message_is_delivered_unchanged(
    compression: Compression,
) -> None:
    async with new_scene() as scene:
        await scene.schedule(packed(compression), NOW + 5_000)
        scene.clock.pass_ms(5_000)
        await scene.deliver()
        assert scene.bodies() == BODIES


@PACKED
def test_fsck_calls_compressed_batches_clean(compression: Compression) -> None:
    opened = open_store(MemoryDisk(), segment_bytes=100_000, run_entries=1 << 19)
    stored(opened.store, *[packed(compression)] * 3)
    CheckpointWriter(opened.disk, opened.store, 0).run()
    assert bodies(opened.store) == 3 * BODIES
    report = Fsck(opened.disk.killed(), opened.store.log.synced_position).run()
    assert (report.problems, report.batches, report.messages) == ([], 3, 150)
