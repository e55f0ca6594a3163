"""Appends over gRPC, the storage node in another process: bytes, latency, awaited sends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability, ProducerSettings
from bench.bench_cluster import TIMEOUT_S, BenchCluster, bench_cluster
from bench.figures import MIB, Figure, Goal, figure, interleaved, seconds
from bench.setup import TOPIC, Setup, batch

QUEUES = 8
IN_FLIGHT = 64
SENDS_IN_FLIGHT = 2_000


async def appends(setup: Setup) -> list[Figure]:
    """Measure the throughput of batches of 512 KiB with 64 requests in flight."""
    async with bench_cluster(setup.folder, queue_count=QUEUES) as cluster:
        return await _appends(setup, cluster, 1_024) + await _appends(setup, cluster, 100)


async def _appends(setup: Setup, cluster: BenchCluster, record_bytes: int) -> list[Figure]:
    setup.say(f"end to end, {record_bytes} B")
    batches = [batch(record_bytes, queue_id=queue_id) for queue_id in range(QUEUES)]
    memory = _requests(batches, pb.DURABILITY_MEMORY)
    synced = _requests(batches, pb.DURABILITY_FSYNCED)
    count = setup.sized(200, 100)

    async def stored(requests: Sequence[pb.AppendRequest]) -> float:
        await asyncio.to_thread(os.sync)  # else the disk is busy with the previous round
        return await rate(cluster.storage, requests, count)

    for stub in (cluster.echo, cluster.storage):
        await rate(stub, memory, IN_FLIGHT)
    rates = await interleaved(
        {
            "echo": lambda: rate(cluster.echo, memory, count),
            "async": lambda: stored(memory),
            "fsync": lambda: stored(synced),
        },
        rounds=setup.sized(15, 1),
    )
    name = f"end to end, {record_bytes} B records"
    return [
        figure(
            f"{name}, async flush",
            rates["async"],
            "MiB/s",
            Goal(ratio_min=0.6),
            reference=rates["echo"],
        ),
        figure(
            f"{name}, fsync against async",
            rates["fsync"],
            "MiB/s",
            Goal(ratio_min=0.7),
            reference=rates["async"],
        ),
    ]


async def latency(setup: Setup) -> list[Figure]:
    """Measure an awaited send of 1 KiB against an empty call and a sync of the same bytes.

    They alternate call by call, because a sync right after another sync takes half the time of one
    after a send.
    """
    setup.say("single awaited send")
    body = os.urandom(1_024)
    request = pb.AppendRequest(batches=[batch(1_024, count=1)])
    async with (
        bench_cluster(setup.folder, queue_count=QUEUES) as cluster,
        Producer(cluster.local.nameserver) as producer,
    ):
        with _preallocated(setup.folder / "plain") as fd:

            async def sync() -> float:
                os.write(fd, body)
                begin = perf_counter()
                os.fdatasync(fd)
                return perf_counter() - begin

            await producer.send(TOPIC, body)
            times = await interleaved(
                {
                    "empty": lambda: seconds(cluster.echo.Append(request, timeout=TIMEOUT_S)),
                    "send": lambda: seconds(producer.send(TOPIC, body)),
                    "sync": sync,
                },
                rounds=setup.sized(2_000, 50),
            )
    return [
        figure(
            "single awaited send, fsync, p50",
            times["send"] * 1e6,
            "µs",
            Goal(ratio_max=1.6),
            reference=(times["empty"] + times["sync"]) * 1e6,
        )
    ]


async def sends(setup: Setup) -> list[Figure]:
    """Measure `await producer.send()` for every message, with 2,000 in flight.

    The producer starts cold: no message opens the topic before the 2,000 tasks send.
    """
    setup.say("awaited sends")
    body = os.urandom(100)
    settings = ProducerSettings(durability=Durability.MEMORY)
    count = setup.sized(100, 10)
    async with (
        bench_cluster(setup.folder, queue_count=QUEUES) as cluster,
        Producer(cluster.local.nameserver, settings) as producer,
    ):

        async def sender() -> None:
            for _ in range(count):
                await producer.send(TOPIC, body)

        async def rate() -> float:
            begin = perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(SENDS_IN_FLIGHT):
                    tasks.create_task(sender())
            return SENDS_IN_FLIGHT * count / (perf_counter() - begin)

        rates = await interleaved({"sends": rate}, rounds=5)
        many = [body] * setup.sized(200_000, 10_000)

        async def rate_of_many() -> float:
            return len(many) / await seconds(producer.send_many(TOPIC, many))

        rates |= await interleaved({"many": rate_of_many}, rounds=5)
    return [
        figure(
            "awaited send() with 2,000 in flight, 100 B",
            rates["sends"],
            "messages/s",
            Goal(value_min=150_000),
        ),
        figure("send_many(), 100 B", rates["many"], "messages/s", Goal(value_min=900_000)),
    ]


def _requests(
    batches: Sequence[bytes], durability: pb.Durability.ValueType
) -> list[pb.AppendRequest]:
    return [pb.AppendRequest(batches=[raw], durability=durability) for raw in batches]


async def rate(
    stub: storage_grpc.StorageServiceAsyncStub, requests: Sequence[pb.AppendRequest], count: int
) -> float:
    """Return the MiB per second of `count` requests, `IN_FLIGHT` at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for index in left:
            answer = await stub.Append(requests[index % len(requests)], timeout=TIMEOUT_S)
            assert answer.outcomes[0].HasField("receipt"), answer

    begin = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(worker())
    return count * len(requests[0].batches[0]) / MIB / (perf_counter() - begin)


@contextmanager
def _preallocated(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, 64 * MIB)
        os.fsync(fd)
        yield fd
    finally:
        os.close(fd)
