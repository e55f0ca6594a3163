"""The cost of authorization: two secure clusters do the same work by turns, one with access on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from baton.common.v1 import queue_pb2
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability, ProducerSettings
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.bench_cluster import TIMEOUT_S
from bench.cluster_comparison import append_rates, send_times
from bench.figures import Figure, Goal, figure, interleaved, seconds
from bench.setup import TOPIC, Setup
from bench.wire import QUEUES

_ON = {"off": False, "on": True}
_GROUPS_GRANTED = 100
"""Grants of the program on other groups, which must not cost anything."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the clusters: the clients of a program with a token."""

    storage: storage_grpc.StorageServiceAsyncStub
    producer: Producer

    async def call_time(self) -> float:
        """Return the duration of a small call in seconds."""
        queue = queue_pb2.QueueRef(topic=TOPIC, broker="broker-0", queue_id=0)
        request = pb.QueryOffsetsRequest(queues=[queue])
        return await seconds(self.storage.QueryOffsets(request, timeout=TIMEOUT_S))


async def access(setup: Setup) -> list[Figure]:
    """Measure appends of 512 KiB, single awaited sends and small calls of a program with a token.

    The clusters write into memory, because a disk would hide the cost.
    """
    async with AsyncExitStack() as stack:
        sides = {
            name: await _side(stack, setup.folder / f"access-{name}", on=on)
            for name, on in _ON.items()
        }
        rates = await append_rates({name: side.storage for name, side in sides.items()}, setup)
        sends = await send_times({name: side.producer for name, side in sides.items()}, setup)
        setup.say("small calls")
        calls = await interleaved(
            {name: side.call_time for name, side in sides.items()}, setup.sized(4_000, 50)
        )
    return [
        figure(
            "access on: appends of 512 KiB into memory",
            rates["on"],
            "MiB/s",
            Goal(ratio_min=0.9),
            reference=rates["off"],
        ),
        figure(
            "access on: single awaited send into memory, p50",
            sends["on"],
            "µs",
            Goal(ratio_max=1.1),
            reference=sends["off"],
        ),
        figure(
            "access on: call that looks up one offset, p50",
            calls["on"] * 1e6,
            "µs",
            Goal(ratio_max=1.15),
            reference=calls["off"] * 1e6,
        ),
    ]


async def _side(stack: AsyncExitStack, folder: Path, *, on: bool) -> _Side:
    options = ClusterOptions(secure=True, access=on, auto_restart=False, log_level="WARNING")
    cluster = await stack.enter_async_context(LocalCluster(folder, options, start=start_program))
    security = cluster.security
    assert security is not None
    admin = await stack.enter_async_context(Admin(cluster.nameserver, security=security))
    await admin.create_topic(TOPIC, QUEUES)
    control = AccessControl(admin)
    for number in range(_GROUPS_GRANTED):
        await control.grant("bench", RoleGrant(Role.CONSUME, f"group:bench-{number}"))
    await control.grant("bench", RoleGrant(Role.PRODUCE, f"topic:{TOPIC}"))
    made = await control.create_token("bench")
    settings = ProducerSettings(
        durability=Durability.MEMORY, security=replace(security, token=made.token)
    )
    producer = await stack.enter_async_context(Producer(cluster.nameserver, settings))
    await _sent(producer)
    as_program = Admin(cluster.nameserver, security=settings.security)
    await stack.enter_async_context(as_program)
    channel = as_program.directory.connect(cluster.addresses["storage"])
    await stack.enter_async_context(channel)
    return _Side(storage_grpc.StorageServiceStub(channel), producer)


async def _sent(producer: Producer) -> None:
    """Send one message; wait until the services have the grants."""
    for _ in range(100):
        try:
            await producer.send(TOPIC, b"")
            return
        except BatonError:
            await asyncio.sleep(0.05)
    await producer.send(TOPIC, b"")
