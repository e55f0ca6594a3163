"""Goal: what a broken connection has lost comes again soon, and what has arrived is not sent twice.

Method: a proxy between a stub and a gateway. While it is stuck it takes the answers of the gateway,
as a network does that loses all packets; then it breaks the connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq import Admin
from batonmq.admin.remote_clients import RemoteClients
from tests.gateway.remote_stub import RemoteStub, handle_of
from tests.runtime.etcd_proxies import StickingProxy, pieces
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
FIXED_WINDOW = [("grpc.http2.bdp_probe", 0)]
"""Options of a client to which the gateway can send 64 KiB that it has not received."""
SETTINGS = {"invisible_ms_min": 100, "delivery_attempts_max": 17}


class HaltingProxy(StickingProxy):
    """Loses all that the gateway sends while it is halted.

    Attributes:
        lost: The lost bytes.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._halted, self.lost = False, b""

    def halt(self) -> None:
        self._halted = True

    def free(self) -> None:
        """Override."""
        super().free()
        self._halted = False

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for piece in pieces(reader, writer):
            if self._halted:
                self.lost += piece
            else:
                writer.write(piece)


class Scene:
    """A gateway behind a proxy; a client that calls through it, and one that calls directly."""

    def __init__(
        self, proxy: HaltingProxy, near: RemoteStub, far: RemoteStub, admin: Admin
    ) -> None:
        self.proxy, self.near, self.far, self._clients = proxy, near, far, RemoteClients(admin)

    def has_open(self, count: int) -> Callable[[], Awaitable[bool]]:
        """Return whether the far client has this many calls open."""

        async def condition() -> bool:
            clients = (await self._clients.clients(client_id=self.far.client_id)).clients
            return [one.open_call_count for one in clients] == [count]

        return condition


@asynccontextmanager
async def scene(folder: Path, renew_ms: int = 60_000) -> AsyncIterator[Scene]:
    settings = SETTINGS | {"renew_ms": renew_ms}
    async with (
        local_cluster(folder, gateways=1, gateway=settings) as cluster,
        Admin(cluster.nameserver) as admin,
        HaltingProxy(cluster.addresses["gateway"]) as proxy,
        grpc.aio.insecure_channel(cluster.addresses["gateway"]) as near,
        grpc.aio.insecure_channel(proxy.address, options=FIXED_WINDOW) as far,
    ):
        for topic in ("orders", "refunds"):
            await admin.create_topic(topic, 1)
        yield Scene(proxy, RemoteStub(near, "near@1@0@a"), RemoteStub(far, "far@1@0@a"), admin)


@asynccontextmanager
async def telemetry(stub: RemoteStub, timeout_s: float | None = None) -> AsyncIterator[None]:
    """Hold the telemetry stream of a push consumer open, until its deadline at the latest."""
    stream = stub.stub.Telemetry(metadata=stub.metadata, timeout=timeout_s)
    every = pb.FilterExpression(type=pb.TAG, expression="*")
    entry = pb.SubscriptionEntry(topic=pb.Resource(name="orders"), expression=every)
    subscription = pb.Subscription(group=pb.Resource(name="billing"), subscriptions=[entry])
    settings = pb.Settings(client_type=pb.PUSH_CONSUMER, subscription=subscription)
    await stream.write(service_pb2.TelemetryCommand(settings=settings))
    answer: Any = await stream.read()
    assert answer.status.code == pb.OK
    try:
        yield
    finally:
        stream.cancel()


@asynccontextmanager
async def receiving_elsewhere(stub: RemoteStub) -> AsyncIterator[None]:
    """Wait for messages of another topic."""
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(broken(stub, "refunds"))
        try:
            yield
        finally:
            waiting.cancel()


async def broken(stub: RemoteStub, topic: str, **options: Any) -> None:
    """Receive by a call whose connection breaks."""
    options = {"wait_ms": 20_000, "renewed": "invisible_ms" not in options} | options
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.receive("billing", topic, **options)


@pytest.mark.parametrize("meanwhile", [telemetry, receiving_elsewhere])
async def test_renewed_messages_of_an_answer_that_was_lost_come_again(
    tmp_path: Path, meanwhile: Callable[[RemoteStub], AbstractAsyncContextManager[None]]
) -> None:
    """The client gives its next call another attempt id, as those of Go and Java do."""
    async with scene(tmp_path, renew_ms=1_500) as at:
        async with meanwhile(at.far), asyncio.TaskGroup() as tasks:
            await until(at.has_open(1))
            tasks.create_task(broken(at.far, "orders"))
            await until(at.has_open(2))
            at.proxy.halt()
            await at.near.send("orders", b"lost")
            await until(lambda: b"lost" in at.proxy.lost)
            at.proxy.free()
        (message,) = await at.far.receive_until(
            "billing", "orders", 1, renewed=True, wait_ms=15_000
        )
        assert (message.body, message.system_properties.delivery_attempt) == (b"lost", 2)
        assert await at.far.ack("billing", "orders", [handle_of(message)]) == [pb.OK]


@pytest.mark.parametrize("before", [True, False])
async def test_answer_of_which_a_part_is_acknowledged_is_still_renewed(
    tmp_path: Path, before: bool
) -> None:
    renew_ms = 6_000
    async with scene(tmp_path, renew_ms) as at:
        async with telemetry(at.far):
            await at.near.send("orders", b"a", b"b")
            first, second = await at.far.receive_until("billing", "orders", 2, renewed=True)
            if before:
                assert await at.far.ack("billing", "orders", [handle_of(first)]) == [pb.OK]
            at.proxy.free()
            await until(at.has_open(0))
        if not before:
            assert await at.far.ack("billing", "orders", [handle_of(first)]) == [pb.OK]
        _, others = await at.near.receive("billing", "orders", wait_ms=2 * renew_ms)
        assert others == []
        assert await at.far.ack("billing", "orders", [handle_of(second)]) == [pb.OK]


async def test_answers_are_still_renewed_if_their_client_ends_another_call(tmp_path: Path) -> None:
    renew_ms = 1_500
    async with scene(tmp_path, renew_ms) as at, telemetry(at.far):
        await at.near.send("orders", b"a")
        (held,) = await at.far.receive_until("billing", "orders", 1, renewed=True)
        async with receiving_elsewhere(at.far):
            await until(at.has_open(2))
        await until(at.has_open(1))
        _, others = await at.near.receive("billing", "orders", wait_ms=3 * renew_ms)
        assert others == []
        assert await at.far.ack("billing", "orders", [handle_of(held)]) == [pb.OK]


async def test_answers_are_still_renewed_if_a_telemetry_stream_reaches_its_deadline(
    tmp_path: Path,
) -> None:
    """The Python client gives its stream 50 minutes."""
    renew_ms = 1_500
    async with scene(tmp_path, renew_ms) as at, telemetry(at.far, timeout_s=5):
        await at.near.send("orders", b"a")
        (held,) = await at.far.receive_until("billing", "orders", 1, renewed=True)
        await until(at.has_open(0))
        _, others = await at.near.receive("billing", "orders", wait_ms=3 * renew_ms)
        assert others == []
        assert await at.far.ack("billing", "orders", [handle_of(held)]) == [pb.OK]


async def test_messages_of_an_answer_that_broke_off_come_again_at_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.far.receive("billing", "orders", wait_ms=100)  # it connects
        bodies = [b"%02d" % number + b"x" * 10_000 for number in range(60)]
        for body in bodies:
            assert (await at.near.send("orders", body)).code == pb.OK
        at.proxy.halt()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broken(at.far, "orders", batch=60, invisible_ms=600_000))
            await until(lambda: bodies[3] in at.proxy.lost)
            at.proxy.free()
        again = await at.near.receive_until("billing", "orders", 60, batch=60)
        assert sorted(one.body for one in again) == bodies
