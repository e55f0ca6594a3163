"""The cost of TLS: two clusters do the same work by turns, one of them over TLS."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.health import SERVING, ask_health
from batonmq._connection.channels import Connect
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability, ProducerSettings
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.cluster_comparison import append_rates, send_times
from bench.figures import Figure, Goal, figure, interleaved, seconds
from bench.setup import TOPIC, Setup
from bench.wire import QUEUES

_SECURE = {"plain": False, "tls": True}


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the clusters: its broker and the clients of it."""

    storage: storage_grpc.StorageServiceAsyncStub
    producer: Producer
    connect: Connect
    address: str

    async def connection_time(self) -> float:
        """Return the seconds for a new connection and a small call on it."""
        return await seconds(self._connect())

    async def _connect(self) -> None:
        async with self.connect(self.address) as channel:
            assert await ask_health(channel, timeout_s=5) == SERVING


async def tls(setup: Setup) -> list[Figure]:
    """Measure appends of 512 KiB, single awaited sends, and new connections.

    The clusters write into memory, because a disk would hide the cost.
    """
    async with AsyncExitStack() as stack:
        sides = {
            name: await _side(stack, setup.folder / name, secure=secure)
            for name, secure in _SECURE.items()
        }
        rates = await append_rates({name: side.storage for name, side in sides.items()}, setup)
        sends = await send_times({name: side.producer for name, side in sides.items()}, setup)
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
            sends["tls"],
            "µs",
            Goal(ratio_max=1.25),
            reference=sends["plain"],
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
    cluster = await stack.enter_async_context(LocalCluster(folder, options, start=start_program))
    security = cluster.security
    admin = await stack.enter_async_context(Admin(cluster.nameserver, security=security))
    await admin.create_topic(TOPIC, QUEUES)
    settings = ProducerSettings(durability=Durability.MEMORY, security=security)
    producer = await stack.enter_async_context(Producer(cluster.nameserver, settings))
    await producer.send(TOPIC, b"")
    address, connect = cluster.addresses["storage"], admin.directory.connect
    channel = await stack.enter_async_context(connect(address))
    return _Side(storage_grpc.StorageServiceStub(channel), producer, connect, address)
