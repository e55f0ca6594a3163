"""A gateway exports the metrics that are documented, and counts what its clients do."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc.aio
import pytest

from baton.metrics.v1.metrics_service_pb2 import WatchRequest
from baton.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from batonmq import Admin
from batonmq_server.local.prometheus import Prometheus, scrape_targets
from tests.deploy.live_prometheus import differing, documented, exported, read, unanswered
from tests.gateway.remote_stub import handle_of, remote_client
from tests.support.cluster import local_cluster
from tests.support.conditions import until
from tools.dashboards.gateway import GATEWAY


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_metrics_are_documented_and_count_what_clients_do(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, gateways=1) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic("orders", 1)
        async with remote_client(cluster.addresses["gateway"]) as stub:
            await stub.send("orders", b"a", b"b")
            messages = await stub.receive_until("billing", "orders", 2)
            await stub.ack("billing", "orders", [handle_of(messages[0])])
        (address,) = (e.metrics_address for e in cluster.endpoints() if e.name == "gateway")
        assert differing({"gateway": await exported([address])}, documented()) == []
        expected = {
            'baton_gateway_answers_total{call="SendMessage",code="OK",language="JAVA"} 1.0',
            "baton_gateway_sent_messages_total 2.0",
            "baton_gateway_delivered_messages_total 2.0",
            "baton_gateway_acknowledged_messages_total 1.0",
            "baton_gateway_in_flight_messages 1.0",
            "baton_gateway_groups 1.0",
            "baton_gateway_clients 1.0",
        }

        async def counted() -> bool:
            page = await asyncio.to_thread(read, f"http://{address}/metrics")
            return expected <= set(page.splitlines())

        await until(counted)
        await events_of_a_client_are_published(cluster.addresses["gateway"])
        if shutil.which("prometheus") is not None:
            targets = scrape_targets(cluster)
            async with Prometheus(tmp_path / "prometheus", targets, port=0) as prometheus:
                assert await unanswered(prometheus, [GATEWAY], 90) == []


async def events_of_a_client_are_published(address: str) -> None:
    async with remote_client(address) as stub, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(remote_events(address, 3))
        while not watching.done():  # events before the stream has begun are not in it
            await stub.send("orders", b"watched")
            messages = await stub.receive_until("billing", "orders", 1)
            await stub.ack("billing", "orders", [handle_of(one) for one in messages])
    assert watching.result() == {"sent", "remote_delivered", "handled"}


async def remote_events(address: str, count: int) -> set[str]:
    """Return the kinds of the events of one remote client, once there are so many."""
    kinds: set[str] = set()
    async with grpc.aio.insecure_channel(address) as channel:
        stream = MetricsServiceStub(channel).Watch(WatchRequest())
        async for answer in stream:
            for event in answer.batch.events:
                kind = str(event.WhichOneof("kind"))
                if getattr(getattr(event, kind), "client_id", "") == "stub@1@0@a":
                    kinds.add(kind)
            if len(kinds) >= count:
                break
    return kinds
