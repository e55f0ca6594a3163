"""A gateway exports the metrics that are documented, and counts what its clients do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from batonmq import Admin
from tests.deploy.live_prometheus import differing, documented, exported, read
from tests.gateway.remote_stub import handle_of, remote_client
from tests.support.cluster import local_cluster
from tests.support.conditions import until


@pytest.mark.e2e
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
