"""Gateways that stop, die and come back under load: nothing lost, nothing acknowledged twice.

The ledger of a test: what was sent, what each delivery was, and which acknowledgements were
answered OK. An acknowledged message must never be delivered again, and every message must be
acknowledged at last.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq import Admin, Producer
from batonmq_server.local.cluster import LocalCluster
from tests.gateway.remote_stub import RemoteStub, handle_of, remote_client
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
SETTINGS = {"invisible_ms_min": 100, "group_idle_ms": 60_000}
INVISIBLE_MS = 3_000


@dataclass
class Ledger:
    """What happened to the messages, by body.

    Attributes:
        unsure: Messages whose acknowledgement was sent; its answer may have been lost.
    """

    sent: set[bytes] = field(default_factory=set)
    deliveries: Counter[bytes] = field(default_factory=Counter)
    attempts: dict[bytes, int] = field(default_factory=dict)
    acknowledged: set[bytes] = field(default_factory=set)
    delivered_after_ack: list[bytes] = field(default_factory=list)
    unsure: set[bytes] = field(default_factory=set)

    def has_acknowledged(self, count: int) -> bool:
        return len(self.acknowledged) > count

    def delivered(self, message: pb.Message) -> None:
        body = message.body
        if body in self.acknowledged:
            self.delivered_after_ack.append(body)
        self.deliveries[body] += 1
        attempt = message.system_properties.delivery_attempt
        assert attempt > self.attempts.get(body, 0), "the attempt of each delivery is higher"
        self.attempts[body] = attempt


async def consume(stub: RemoteStub, ledger: Ledger, *, ack: bool = True) -> None:
    """Receive and acknowledge until cancelled, as a client that retries after errors."""
    while True:
        try:
            _, messages = await stub.receive(
                "billing", "orders", invisible_ms=INVISIBLE_MS, wait_ms=1_000
            )
            for message in messages:
                ledger.delivered(message)
            if ack and messages:
                await acknowledge(stub, ledger, messages)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.05)


async def acknowledge(stub: RemoteStub, ledger: Ledger, messages: list[pb.Message]) -> None:
    bodies = [message.body for message in messages]
    ledger.unsure.update(bodies)
    codes = await stub.ack("billing", "orders", list(map(handle_of, messages)))
    for body, code in zip(bodies, codes, strict=True):
        if code == pb.OK:
            ledger.acknowledged.add(body)


async def produce(nameserver: str, ledger: Ledger, count: int) -> None:
    async with Producer(nameserver) as producer:
        for n in range(count):
            body = str(n).encode()
            await producer.send("orders", body)
            ledger.sent.add(body)


@asynccontextmanager
async def scene(folder: Path, gateways: int) -> AsyncIterator[LocalCluster]:
    async with local_cluster(folder, gateways=gateways, gateway=SETTINGS) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic("orders", 4)
        yield cluster


async def route(stub: RemoteStub) -> list[str]:
    """Return the addresses that a client is told."""
    request = service_pb2.QueryRouteRequest(topic=pb.Resource(name="orders"))
    answer = await stub.call("QueryRoute", request)
    return [
        f"{address.host}:{address.port}"
        for queue in answer.message_queues
        for address in queue.broker.endpoints.addresses
    ]


@pytest.mark.long
async def test_killed_gateway_loses_nothing_and_repeats_nothing_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, 1) as cluster, remote_client(cluster.addresses["gateway"]) as stub:
        ledger = Ledger()
        await produce(cluster.nameserver, ledger, 60)
        messages = await stub.receive_until("billing", "orders", 60, invisible_ms=60_000, batch=60)
        for message in messages:
            ledger.delivered(message)
        await acknowledge(stub, ledger, messages[:40])
        assert len(ledger.acknowledged) == 40
        held = {message.body for message in messages[40:]}
        await cluster.kill("gateway")
        await cluster.serving("gateway")
        async with asyncio.TaskGroup() as tasks:
            consuming = tasks.create_task(consume(stub, ledger))
            await until(lambda: ledger.acknowledged == ledger.sent, 90)
            consuming.cancel()
        assert ledger.delivered_after_ack == []
        again = {body for body, count in ledger.deliveries.items() if count > 1}
        assert again == held
        assert {ledger.attempts[body] for body in held} == {2}
        stale = await stub.ack("billing", "orders", [handle_of(messages[-1])])
        assert stale == [pb.INVALID_RECEIPT_HANDLE]


@pytest.mark.long
async def test_rolling_restart_of_three_gateways_under_load(tmp_path: Path) -> None:
    async with scene(tmp_path, 3) as cluster:
        names = ("gateway", "gateway-1", "gateway-2")
        ledger, loops = Ledger(), list[asyncio.Task[None]]()
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                loops.append(
                    tasks.create_task(consume_at(cluster.addresses[name], f"c@{name}", ledger))
                )
            producing = tasks.create_task(produce(cluster.nameserver, ledger, 3_000))
            async with remote_client(cluster.addresses["gateway"]) as stub:
                assert sorted(await route(stub)) == sorted(cluster.addresses[n] for n in names)
            for name in names:
                seen = len(ledger.acknowledged)
                await until(partial(ledger.has_acknowledged, seen + 100), 60)
                await cluster.restart(name)
            await producing
            await all_done(cluster, ledger, 90)
            for loop in loops:
                loop.cancel()
        assert len(ledger.sent) == 3_000
        assert ledger.delivered_after_ack == []
        assert set(ledger.deliveries) == ledger.sent
        # An answer may be lost with its gateway; offsets has the acknowledgement.
        assert ledger.sent - ledger.acknowledged <= ledger.unsure
        twice = {body for body, count in ledger.deliveries.items() if count > 1}
        assert twice <= ledger.unsure, "only what was in flight comes again"
        assert len(twice) == 0, "clients end what they hold while a gateway stops"


@pytest.mark.long
async def test_killed_gateway_of_three_under_load_loses_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, 3) as cluster:
        ledger, loops = Ledger(), list[asyncio.Task[None]]()
        async with asyncio.TaskGroup() as tasks:
            for name in ("gateway", "gateway-1", "gateway-2"):
                loops.append(
                    tasks.create_task(consume_at(cluster.addresses[name], f"c@{name}", ledger))
                )
            producing = tasks.create_task(produce(cluster.nameserver, ledger, 2_000))
            await until(lambda: len(ledger.acknowledged) > 300, 60)
            await cluster.kill("gateway-1")
            await producing
            await all_done(cluster, ledger, 120)
            for loop in loops:
                loop.cancel()
        assert ledger.delivered_after_ack == []
        assert set(ledger.deliveries) == ledger.sent
        # The answers that the killed gateway owed are lost; offsets has the acknowledgements.
        assert ledger.sent - ledger.acknowledged <= ledger.unsure


@pytest.mark.long
@pytest.mark.parametrize("name", ["storage", "offsets", "lockmgr", "nameserver"])
async def test_killed_service_behind_the_gateway_under_load_loses_nothing(
    tmp_path: Path, name: str
) -> None:
    async with scene(tmp_path, 1) as cluster:
        ledger = Ledger()
        async with asyncio.TaskGroup() as tasks:
            consuming = tasks.create_task(
                consume_at(cluster.addresses["gateway"], "c@gateway", ledger)
            )
            producing = tasks.create_task(produce(cluster.nameserver, ledger, 1_000))
            await until(partial(ledger.has_acknowledged, 200), 60)
            await cluster.kill(name)
            await cluster.serving(name)
            await producing
            await all_done(cluster, ledger, 90)
            consuming.cancel()
        assert ledger.delivered_after_ack == []
        assert set(ledger.deliveries) == ledger.sent
        assert ledger.sent - ledger.acknowledged <= ledger.unsure


async def all_done(cluster: LocalCluster, ledger: Ledger, timeout_s: float) -> None:
    """Wait until offsets has the acknowledgement of all messages that were sent."""

    async def is_done() -> bool:
        rows = (await admin.group_progress("billing")).queues
        done = sum(row.committed_offset or 0 for row in rows if row.topic == "orders")
        return done == len(ledger.sent)

    async with Admin(cluster.nameserver) as admin:
        try:
            await until(is_done, timeout_s)
        except TimeoutError:
            open_bodies = sorted(ledger.sent - ledger.acknowledged)[:20]
            deliveries = [(body, ledger.deliveries[body]) for body in open_bodies]
            rows = (await admin.group_progress("billing")).queues
            pytest.fail(f"without an acknowledgement, with deliveries: {deliveries}; {rows}")


async def consume_at(address: str, client_id: str, ledger: Ledger) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await consume(RemoteStub(channel, client_id), ledger)
