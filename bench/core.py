"""The storage core alone: append against a plain write, and the filter's scan."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, perf_counter

from batonmq._core.records import tag_hash
from batonmq._core.subscription import SqlFilter
from batonmq.errors import BatonError
from batonmq_server.storage.core.checks import LocalTopic, check
from batonmq_server.storage.core.queue_reader import ReadSpec
from batonmq_server.storage.core.tag_filter import HashFilter
from batonmq_server.storage.node import StorageNode, open_directory
from batonmq_server.storage.validation import filter_of
from bench.figures import MIB, Figure, Goal, figure, interleaved
from bench.setup import BATCH_BYTES, TOPIC, Setup, batch

SEGMENT_BYTES = 1 << 30
BYTES_WRITTEN = 3 * SEGMENT_BYTES // 2
ROUNDS = 15
TOPIC_ID = 1
KEPT_TAG, TAGS = "wanted", 100


@contextmanager
def open_node(folder: Path) -> Iterator[StorageNode]:
    """A data directory with segments of the default size."""
    with open_directory(
        folder, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: int(monotonic() * 1000)
    ) as node:
        yield node


def topics(queue_count: int) -> dict[str, LocalTopic | BatonError]:
    """The only topic of the benchmarks."""
    return {TOPIC: LocalTopic(TOPIC_ID, queue_count)}


async def append(setup: Setup) -> list[Figure]:
    """Measure checked, indexed appends of 512 KiB against `os.writev` of the same bytes."""
    large, _ = await _append_rates(setup, 1_024)
    small, records_per_mib = await _append_rates(setup, 100)
    small = {name: rate * records_per_mib for name, rate in small.items()}
    goal = Goal(ratio_min=0.6, value_min=3_000_000)
    return [
        figure(
            "core append, 1024 B records",
            large["append"],
            "MiB/s",
            Goal(ratio_min=0.8),
            reference=large["writev"],
        ),
        figure(
            "core append, 100 B records",
            small["append"],
            "records/s",
            goal,
            reference=small["writev"],
        ),
    ]


async def _append_rates(setup: Setup, record_bytes: int) -> tuple[dict[str, float], float]:
    """Return the MiB per second of both, and the records per MiB."""
    setup.say(f"core append, {record_bytes} B")
    folder = setup.folder / f"core-{record_bytes}"
    batches = [batch(record_bytes) for _ in range(16)]
    count = setup.sized(BYTES_WRITTEN, BYTES_WRITTEN // 16) // ROUNDS // BATCH_BYTES
    with open_node(folder) as node, _plain_file(folder / "plain") as fd:
        rates = await interleaved(
            {
                "append": lambda: _append(node, batches, count),
                "writev": lambda: _writev(fd, batches, count),
            },
            ROUNDS,
        )
    return rates, check(batches[0]).header.count / len(batches[0]) * MIB


async def scan(setup: Setup) -> list[Figure]:
    """Measure how many messages per second a filter scans that keeps and reads 1 in 100."""
    setup.say("filter scan")
    tags = (KEPT_TAG, *(f"tag{number}" for number in range(1, TAGS)))
    raw = batch(100, count=1_000, tags=tags)
    by_tag = await _scan(setup, "tags", raw, HashFilter(frozenset({tag_hash(KEPT_TAG)})))
    properties = [{"price": str(number), "region": "eu"} for number in range(100)]
    raw = batch(100, count=1_000, properties=properties)
    by_sql = await _scan(setup, "sql", raw, filter_of("sql: price > 98 AND region = 'eu'"))
    return [
        figure("filter that keeps 1 in 100", by_tag, "entries/s", Goal(value_min=5_000_000)),
        figure("condition that keeps 1 in 100", by_sql, "messages/s", Goal(value_min=300_000)),
    ]


async def _scan(setup: Setup, name: str, raw: bytes, wanted: HashFilter | SqlFilter) -> float:
    """Return the scanned messages per second."""
    with open_node(setup.folder / f"scan-{name}") as node:
        for _ in range(setup.sized(2_000 if name == "tags" else 200, 100)):
            node.store.append([check(raw)], topics(1), 1)
        sync(node)
        end = node.store.offsets((TOPIC_ID, 0)).next_offset

        async def scanned() -> float:
            begin, offset = perf_counter(), 0
            while offset < end:
                reading = node.store.read((TOPIC_ID, 0), ReadSpec(offset, 4 * MIB, 1_000, wanted))
                assert reading is not None
                offset = reading.next_offset
            return offset / (perf_counter() - begin)

        return (await interleaved({"scan": scanned}, rounds=5))["scan"]


async def _append(node: StorageNode, batches: Sequence[bytes], count: int) -> float:
    queues = topics(1)
    begin, size = perf_counter(), 0
    for index in range(count):
        checked = check(batches[index % len(batches)])
        node.store.append([checked], queues, 1)
        size += checked.header.length
    spent = perf_counter() - begin
    await asyncio.to_thread(sync, node)
    return size / MIB / spent


async def _writev(fd: int, batches: Sequence[bytes], count: int) -> float:
    begin, size = perf_counter(), 0
    for index in range(count):
        size += os.writev(fd, [batches[index % len(batches)]])
    spent = perf_counter() - begin
    await asyncio.to_thread(os.fdatasync, fd)
    return size / MIB / spent


def sync(node: StorageNode) -> None:
    """Sync and complete the appends as the flusher does."""
    unsynced = node.store.log.unsynced()
    node.sync(unsynced)
    node.store.synced(unsynced.position)


@contextmanager
def _plain_file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, 2 * SEGMENT_BYTES)
        os.fsync(fd)
        yield fd
    finally:
        os.close(fd)
