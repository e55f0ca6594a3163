"""Goal: operators see remote clients as what they are, and which client a stuck queue waits for.

Method: stubs of two clients hold messages of a real cluster; the commands and the library are used
as an operator uses them. One cluster serves all steps, as its start takes seconds.
"""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from baton.gateway.v1 import gateway_service_pb2 as gateway_pb
from baton.gateway.v1 import gateway_service_pb2_grpc as gateway_grpc
from batonmq import Admin
from batonmq._common.rpc import from_rpc_error
from batonmq._core.queues import QueueRef
from batonmq.admin import RemoteClients
from batonmq.errors import InvalidArgument, InvalidName
from tests.cli.baton import BATON
from tests.gateway.remote_stub import RemoteStub, handle_of, remote_client
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SHOP, KIOSK = "shop-7@1@0@a", "kiosk@2@0@b"
HOUR_MS = 3_600_000


async def introduce(client: RemoteStub) -> Any:
    """Send settings as an official client does; the stream stays open."""
    stream: Any = client.stub.Telemetry(metadata=client.metadata)
    settings = pb.Settings(
        client_type=pb.PUSH_CONSUMER,
        user_agent=pb.UA(language=pb.JAVA, version="5.2.0", hostname="shop-7"),
        subscription=pb.Subscription(
            group=pb.Resource(name="billing"),
            subscriptions=[pb.SubscriptionEntry(topic=pb.Resource(name="orders"))],
        ),
    )
    await stream.write(service_pb2.TelemetryCommand(settings=settings))
    assert (await stream.read()).status.code == pb.OK
    return stream


class Operator:
    """Runs commands, and asks by the library."""

    def __init__(self, nameserver: str, admin: Admin) -> None:
        self.nameserver, self.admin = nameserver, admin
        self.remote = RemoteClients(admin)

    async def run(self, *arguments: str) -> str:
        """Return what a command prints."""
        process = await asyncio.create_subprocess_exec(
            *(*BATON, "--nameserver", self.nameserver, *arguments), stdout=PIPE, stderr=PIPE
        )
        out, error = await process.communicate()
        assert process.returncode == 0, error.decode()
        return out.decode()

    async def json(self, *arguments: str) -> Any:
        """Return what a command prints as JSON."""
        return json.loads(await self.run("--format", "json", *arguments))


@pytest.mark.long
async def test_operators_see_the_clients_behind_a_gateway_and_what_they_hold(
    tmp_path: Path,
) -> None:
    async with (
        local_cluster(tmp_path, gateways=1) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"], SHOP) as shop,
        remote_client(cluster.addresses["gateway"], KIOSK) as kiosk,
    ):
        operator = Operator(cluster.nameserver, admin)
        await admin.create_topic("orders", 1)
        stream = await introduce(shop)
        await shop.send("orders", b"a", b"b", b"c")
        held = await shop.receive_until("billing", "orders", 2, batch=2, invisible_ms=HOUR_MS)
        assert len(held) == 2
        (last,) = await kiosk.receive_until("billing", "orders", 1, invisible_ms=HOUR_MS)
        await clients_are_listed_with_what_they_hold(operator)
        await clients_are_part_of_their_group(operator)
        await held_messages_are_listed_one_by_one(operator)
        await pages_have_every_entry_once(cluster.addresses["gateway"])
        assert await kiosk.ack("billing", "orders", [handle_of(last)]) == [pb.OK]
        await stuck_queue_names_the_client_that_it_waits_for(operator)
        stream.cancel()
        assert (await operator.remote.clients("strangers")).clients == ()
        assert (await operator.remote.held_messages("strangers")).messages == ()


async def clients_are_listed_with_what_they_hold(operator: Operator) -> None:
    seen = {one["client_id"]: one for one in await operator.json("gateway", "clients")}
    assert seen.keys() == {SHOP, KIOSK}
    assert (seen[SHOP]["language"], seen[SHOP]["version"]) == ("JAVA", "5.2.0")
    assert (seen[SHOP]["host"], seen[SHOP]["kind"]) == ("shop-7", "push_consumer")
    assert (seen[KIOSK]["host"], seen[KIOSK]["kind"]) == ("127.0.0.1", "")
    assert [seen[name]["in_flight_count"] for name in (SHOP, KIOSK)] == [2, 1]
    assert seen[SHOP]["open_call_count"] == 1, "its telemetry stream"
    assert seen[SHOP]["group_names"] == ["billing"]
    assert 0 <= seen[SHOP]["oldest_lease_ms"] < HOUR_MS


async def clients_are_part_of_their_group(operator: Operator) -> None:
    members = await operator.run("--format", "wide", "group", "members", "billing")
    member, clients = members.split("\n\n")
    assert "gateway-" in member
    assert SHOP in clients
    assert KIOSK in clients
    assert "JAVA 5.2.0" in clients
    described = await operator.json("group", "describe", "billing")
    assert {one["client_id"] for one in described["remote_clients"]} == {SHOP, KIOSK}
    (gateway,) = {one["gateway"] for one in described["remote_clients"]}
    assert described["members"][0]["client_id"].rpartition("-")[0] == gateway


async def held_messages_are_listed_one_by_one(operator: Operator) -> None:
    rows = await operator.json("gateway", "messages", "billing")
    assert [(one["offset"], one["state"], one["client_id"]) for one in rows] == [
        (0, "leased", SHOP),
        (1, "leased", SHOP),
        (2, "leased", KIOSK),
    ]
    assert all(0 < one["lease_left_ms"] <= HOUR_MS and one["attempt"] == 1 for one in rows)
    mine = await operator.remote.held_messages("billing", client_id=KIOSK)
    assert [one.offset for one in mine.messages] == [2]
    other = QueueRef("orders", "storage", 7)
    assert (await operator.remote.held_messages("billing", queue=other)).messages == ()


async def stuck_queue_names_the_client_that_it_waits_for(operator: Operator) -> None:
    async def names_the_client() -> bool:
        (stuck,) = await operator.admin.why_stuck("billing", "orders")
        if stuck.reason != "HEAD_OF_LINE":
            return False
        assert f"at client {SHOP} (JAVA 5.2.0 on shop-7)" in stuck.message
        assert "attempt 1; its lease expires in" in stuck.message
        assert stuck.evidence["remote_client_id"] == SHOP
        return True

    await until(names_the_client, timeout_s=30)


async def pages_have_every_entry_once(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = gateway_grpc.GatewayServiceStub(channel)
        clients, token = list[str](), ""
        while token or not clients:
            request = gateway_pb.ListClientsRequest(page_size=1, page_token=token)
            page = await stub.ListClients(request, timeout=5)
            clients += [one.client_id for one in page.clients]
            token = page.next_page_token
        assert clients == sorted([SHOP, KIOSK])
        offsets, token = list[int](), ""
        while token or not offsets:
            ask = gateway_pb.ListHeldMessagesRequest(group="billing", page_size=2, page_token=token)
            answer = await stub.ListHeldMessages(ask, timeout=5)
            offsets += [one.offset for one in answer.messages]
            token = answer.next_page_token
        assert offsets == [0, 1, 2]
        for bad, kind in (
            (gateway_pb.ListHeldMessagesRequest(), InvalidName),
            (gateway_pb.ListHeldMessagesRequest(group="g", page_token="x"), InvalidArgument),
            (
                gateway_pb.ListHeldMessagesRequest(group="g", page_token="MWEvYi8xLw=="),
                InvalidArgument,
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListHeldMessages(bad, timeout=5)
            assert isinstance(from_rpc_error(refused.value), kind)
