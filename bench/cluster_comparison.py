"""Interleaved measurements of two clusters, in memory: a disk would hide the difference."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._producer.producer import Producer
from bench.figures import interleaved, seconds
from bench.setup import TOPIC, Setup, batch
from bench.wire import IN_FLIGHT, QUEUES, rate

_BODY = os.urandom(1_024)


async def append_rates(
    storages: Mapping[str, storage_grpc.StorageServiceAsyncStub], setup: Setup
) -> dict[str, float]:
    """Return the throughput of appends of 512 KiB, in MiB per second."""
    setup.say("appends")
    batches = [batch(1_024, queue_id=queue_id) for queue_id in range(QUEUES)]
    requests = [pb.AppendRequest(batches=[b], durability=pb.DURABILITY_MEMORY) for b in batches]
    for storage in storages.values():
        await rate(storage, requests, IN_FLIGHT)
    count = setup.sized(200, 64)
    return await interleaved(
        {name: partial(rate, storage, requests, count) for name, storage in storages.items()},
        rounds=setup.sized(15, 1),
    )


async def send_times(producers: Mapping[str, Producer], setup: Setup) -> dict[str, float]:
    """Return the time from a single send to its receipt, in microseconds."""
    setup.say("single awaited sends")

    def sends(producer: Producer) -> Callable[[], Awaitable[float]]:
        return lambda: seconds(producer.send(TOPIC, _BODY))

    found = await interleaved(
        {name: sends(producer) for name, producer in producers.items()}, setup.sized(2_000, 50)
    )
    return {name: value * 1e6 for name, value in found.items()}
