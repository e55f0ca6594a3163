"""Catch-up from the object store against catch-up from the local disk, in one run.

`python -m bench.tiers [--store URL] [--mib N]`. Two clusters get the same messages; the segments of
one leave the local disk. Both are read from the first message on, over all queues at once. The page
cache of the local log is left alone: it is the faster of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

from baton.common.v1 import queue_pb2
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import query_service_pb2_grpc as query_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._connection.channels import connect
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.records import read_header
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.bench_cluster import BROKER
from bench.setup import TOPIC, batch

QUEUES, RECORD_BYTES, SEGMENT_BYTES = 8, 1_000, 32 * 1024 * 1024
MIB = 1024 * 1024
TIMEOUT_S = 60


async def catch_up(
    folder: Path, mib: int, storage: Mapping[str, object]
) -> tuple[float, float, float]:
    """Store messages; return the rates of reads and of a group, in MiB/s, and what is remote.

    The last value is the share of the log that is only in the object store.
    """
    settings = {"storage": {"flush": "async", "segment_bytes": SEGMENT_BYTES, **storage}}
    options = ClusterOptions(settings=settings, auto_restart=False, log_level="WARNING")
    async with LocalCluster(folder, options, start=start_program) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        async with connect(cluster.addresses["storage"]) as channel:
            stub, count = pb_grpc.StorageServiceStub(channel), 0
            raw = [batch(RECORD_BYTES, queue_id=number) for number in range(QUEUES)]
            for _ in range(max(1, mib * MIB // sum(map(len, raw)))):
                answer = await stub.Append(pb.AppendRequest(batches=raw), timeout=TIMEOUT_S)
                assert not any(one.HasField("error") for one in answer.outcomes)
                count += 1
            log = cluster.data_dir / "storage" / "log"
            if storage:
                await _moved(log)
            segments = list(log.iterdir())
            remote = sum(map(_is_remote, segments)) / len(segments)
            bytes_count = count * sum(map(len, raw)) / MIB
            begin = monotonic()
            queries = query_grpc.QueryServiceStub(channel)
            await asyncio.gather(*(_read(queries, number) for number in range(QUEUES)))
            reads = bytes_count / (monotonic() - begin)
        messages = count * sum(read_header(one).count for one in raw)
        seconds = await _consume(cluster.nameserver, messages)
        return reads, messages * RECORD_BYTES / MIB / seconds, remote


async def _read(queries: query_grpc.QueryServiceAsyncStub, number: int) -> None:
    queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=number)
    offset = 0
    while True:
        request = query_pb.ReadRequest(queue=queue, offset=offset, bytes_max=4 * MIB)
        answer = await queries.Read(request, timeout=TIMEOUT_S)
        if answer.next_offset == offset:
            return
        offset = answer.next_offset


async def _consume(nameserver: str, count: int) -> float:
    """Return how long a new group needs for all messages, in seconds."""
    seen, done = 0, asyncio.Event()

    async def handle(_: ReceivedMessage) -> None:
        nonlocal seen
        seen += 1
        if seen >= count:
            done.set()

    settings = ConsumerSettings(consume_from="first")
    async with Consumer(nameserver, "late", {TOPIC: "*"}, settings) as consumer:
        begin = monotonic()
        running = asyncio.create_task(consumer.run(handle))
        await done.wait()
        seconds = monotonic() - begin
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return seconds


def _is_remote(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"BTNT"


async def _moved(log: Path) -> None:
    """Wait until all closed segments have left the local disk."""
    async with asyncio.timeout(TIMEOUT_S):
        while await asyncio.to_thread(_local_count, log) > 1:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.5)


def _local_count(log: Path) -> int:
    return sum(not _is_remote(path) for path in log.iterdir())


async def _main() -> None:
    parser = argparse.ArgumentParser(description="Catch-up from store and disk.")
    parser.add_argument("--store", default="", help="URL or path; by default a folder")
    parser.add_argument("--mib", type=int, default=512, help="size of all messages")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as folder:
        root = Path(folder)
        tier = {
            "tier_url": chosen.store or str(root / "store"),
            "tier_local_age_ms": 0,
            "tier_interval_ms": 200,
        }
        local = await catch_up(root / "local", chosen.mib, {})
        remote = await catch_up(root / "remote", chosen.mib, tier)
    print(f"{remote[2]:.0%} of the segments are only in the store")
    for name, at in (("reads of 4 MiB", 0), ("a consumer group", 1)):
        share = remote[at] / local[at]
        print(f"{name}: disk {local[at]:.0f} MiB/s, store {remote[at]:.0f} MiB/s, {share:.2f} x")


if __name__ == "__main__":
    asyncio.run(_main())
