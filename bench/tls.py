"""What TLS costs: two clusters side by side, one of them secure, do the same work by turns."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc

from batonmq.admin import Admin
from batonmq.channels import Connect
from batonmq.common.health import SERVING, ask_health
from batonmq.local.cluster import LocalCluster
from batonmq.local.layout import ClusterOptions
from batonmq.producer import Producer
from batonmq.producing.settings import Durability, ProducerSettings
from bench.figures import Figure, Goal, figure, interleaved, seconds
from bench.setup import TOPIC, Setup, batch
from bench.wire import IN_FLIGHT, QUEUES, rate

_SECURE = {"plain": False, "tls": True}
_BODY = os.urandom(1_024)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the clusters: its broker, and what reaches it."""

    storage: storage_grpc.StorageServiceAsyncStub
    producer: Producer
    connect: Connect
    address: str

    async def send_time(self) -> float:
        """Seconds until the receipt of a message."""
        return await seconds(self.producer.send(TOPIC, _BODY))

    async def connection_time(self) -> float:
        """Seconds until a new connection has answered something small."""
        return await seconds(self._connect())

    async def _connect(self) -> None:
        async with self.connect(self.address) as channel:
            assert await ask_health(channel, timeout_s=5) == SERVING


async def tls(setup: Setup) -> list[Figure]:
    """Appends of 512 KiB and single awaited sends, into memory, since a disk would hide the cost;
    and a new connection.
    """
    async with AsyncExitStack() as stack:
        sides = {
            name: await _side(stack, setup.folder / name, secure=secure)
            for name, secure in _SECURE.items()
        }
        setup.say("appends")
        batches = [batch(1_024, queue_id=queue_id) for queue_id in range(QUEUES)]
        requests = [pb.AppendRequest(batches=[b], durability=pb.DURABILITY_MEMORY) for b in batches]
        for side in sides.values():
            await rate(side.storage, requests, IN_FLIGHT)
        count = setup.sized(100, 64)
        rates = await interleaved(
            {name: partial(rate, side.storage, requests, count) for name, side in sides.items()},
            rounds=setup.sized(9, 1),
        )
        setup.say("single awaited sends")
        sends = await interleaved(
            {name: side.send_time for name, side in sides.items()}, setup.sized(2_000, 50)
        )
        setup.say("new connections")
        connections = await interleaved(
            {name: side.connection_time for name, side in sides.items()}, setup.sized(300, 20)
        )
    return [
        figure(
            "over TLS: appends of 512 KiB into memory",
            rates["tls"],
            "MiB/s",
            Goal(ratio_min=0.6),
            reference=rates["plain"],
        ),
        figure(
            "over TLS: single awaited send into memory, p50",
            sends["tls"] * 1e6,
            "µs",
            Goal(ratio_max=1.25),
            reference=sends["plain"] * 1e6,
        ),
        figure(
            "over TLS: new connection and first call, p50",
            connections["tls"] * 1e6,
            "µs",
            Goal(value_max=20_000),
            reference=connections["plain"] * 1e6,
        ),
    ]


async def _side(stack: AsyncExitStack, folder: Path, *, secure: bool) -> _Side:
    options = ClusterOptions(secure=secure, auto_restart=False, log_level="WARNING")
    cluster = await stack.enter_async_context(LocalCluster(folder, options))
    security = cluster.security
    admin = await stack.enter_async_context(Admin(cluster.nameserver, security=security))
    await admin.create_topic(TOPIC, QUEUES)
    settings = ProducerSettings(durability=Durability.MEMORY, security=security)
    producer = await stack.enter_async_context(Producer(cluster.nameserver, settings))
    await producer.send(TOPIC, b"")
    address, connect = cluster.addresses["storage"], admin.directory.connect
    channel = await stack.enter_async_context(connect(address))
    return _Side(storage_grpc.StorageServiceStub(channel), producer, connect, address)
