"""Goal: a client with several nameservers works as long as one of them runs, and reconnects to
services while it waits.

Method: directories with addresses without a server and with addresses of real servers.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random

import grpc
import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from batonmq._connection.channels import connect
from batonmq._connection.directory import CALL_TIMEOUT_S, Directory
from batonmq._connection.routes import query_route
from batonmq.admin.admin import Admin
from batonmq.errors import InvalidArgument, Throttled, TopicNotFound, Unreachable
from batonmq_server.testing import run_virtual
from tests.support.grpc_server import serving_at

NO_SERVER = "127.0.0.1:1,127.0.0.1:2"


@asynccontextmanager
async def directory(nameserver: str) -> AsyncIterator[Directory]:
    opened = Directory(nameserver, Random(1))
    try:
        yield opened
    finally:
        await opened.close()


class Nameserver(nameserver_grpc.NameserverServiceServicer):
    """A nameserver with one node of the offsets service."""

    def __init__(self, address: str) -> None:
        self.list(address)

    def list(self, address: str) -> None:
        self._node = pb.Node(service=pb.SERVICE_KIND_OFFSETS, address=address, leader=True)

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: object
    ) -> pb.DescribeClusterResponse:
        return pb.DescribeClusterResponse(nodes=[self._node])


@pytest.mark.parametrize(
    "nameserver",
    ["", " ", ",", " , ,", "ns", "ns:", ":9876", "ns:0", "ns:65536", "ns:http", "a:1,b"],
)
def test_list_without_an_address_or_a_port_is_refused(nameserver: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an address of a nameserver") as refused:
        Directory(nameserver, Random(1))
    assert refused.value.facts == {"field": "nameserver"}
    with pytest.raises(InvalidArgument):
        Admin(nameserver)


@pytest.mark.e2e
async def test_call_is_retried_at_the_next_nameserver_until_one_answers(nameserver: str) -> None:
    topic = f"t-{secrets.token_hex(4)}"
    async with Admin(nameserver) as admin, directory(f"{NO_SERVER},{nameserver}") as opened:
        await admin.create_topic(topic, 1)
        assert (await query_route(opened, topic)).topic.name == topic
        assert opened.nameserver_address == nameserver, (
            "the next call does not go to the nameserver that answered"
        )
        with pytest.raises(TopicNotFound):
            await query_route(opened, "nothing")
        assert opened.nameserver_address == nameserver, "a rejected call was retried elsewhere"
    async with directory(f"{NO_SERVER},{nameserver}") as opened:
        assert await opened.refresh()


async def test_call_tries_every_nameserver_once_if_none_answers() -> None:
    addresses: list[str] = []
    async with directory(NO_SERVER) as opened:

        async def call(stub: object) -> pb.QueryRouteResponse:
            addresses.append(opened.nameserver_address)
            return await opened.nameserver().QueryRoute(
                pb.QueryRouteRequest(topic="flights"), timeout=CALL_TIMEOUT_S
            )

        with pytest.raises(Unreachable):
            await opened.ask_nameserver(call)
    assert addresses == NO_SERVER.split(",")


def test_retries_of_throttled_calls_are_spread_over_time() -> None:
    """As many as a consumer of 100 queues makes when its quota is used up."""

    async def retried_s() -> list[float]:
        loop, directory = asyncio.get_running_loop(), Directory(NO_SERVER, Random(1))
        begin_s, times_s = loop.time(), list[float]()

        async def one() -> None:
            await directory.pause(Throttled("quota", retry_after_ms=500), 0)
            times_s.append(loop.time() - begin_s)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(100):
                tasks.create_task(one())
        return times_s

    times_s = run_virtual(retried_s())
    assert 0.5 <= times_s[0] < 1
    gaps_s = [after - before for before, after in pairwise(times_s)]
    assert min(gaps_s) >= 0.049, "20 calls in a second"
    assert max(gaps_s) < 0.2, "no slot is left out"


async def test_pause_after_a_failed_call_connects_idle_channels() -> None:
    channels: dict[str, grpc.aio.Channel] = {}

    def connect_once(address: str) -> grpc.aio.Channel:
        return channels.setdefault(address, connect(address))

    async with serving_at() as offsets:
        servicer = Nameserver(offsets)  # type: ignore[abstract]
        async with serving_at(
            lambda server: nameserver_grpc.add_NameserverServiceServicer_to_server(servicer, server)
        ) as nameserver:
            directory = Directory(nameserver, Random(1), connect_once)
            await directory.offsets("drivers")
            channel = channels[offsets]
            assert channel.get_state() is grpc.ChannelConnectivity.IDLE
            await directory.pause(Unreachable("no offsets node is registered"), 0)
            async with asyncio.timeout(20):
                while (state := channel.get_state()) is not grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(state)
            await directory.close()


async def test_channel_is_closed_when_its_address_is_not_listed_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channels: dict[str, grpc.aio.Channel] = {}

    def connect_once(address: str) -> grpc.aio.Channel:
        return channels.setdefault(address, connect(address))

    monkeypatch.setattr("batonmq._connection.directory.UNLISTED_S", 0.0)
    async with serving_at() as connected:
        servicer = Nameserver(connected)  # type: ignore[abstract]
        async with serving_at(
            lambda server: nameserver_grpc.add_NameserverServiceServicer_to_server(servicer, server)
        ) as nameserver:
            directory = Directory(nameserver, Random(1), connect_once)
            await directory.offsets("drivers")
            await channels[connected].channel_ready()
            for number in range(3):
                servicer.list(f"127.0.0.1:{number + 1}")
                await directory.refresh()
                await directory.offsets("drivers")
            assert directory._channels.keys() == {nameserver, connected, "127.0.0.1:3"}
            closed = channels["127.0.0.1:1"]
            assert closed.get_state() is grpc.ChannelConnectivity.SHUTDOWN
            await directory.close()


async def test_channel_that_connects_stays_because_calls_may_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batonmq._connection.directory.UNLISTED_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        servicer = Nameserver(address)  # type: ignore[abstract]
        async with serving_at(
            lambda server: nameserver_grpc.add_NameserverServiceServicer_to_server(servicer, server)
        ) as nameserver:
            directory = Directory(nameserver, Random(1), connect)
            await directory.offsets("drivers")
            channel = directory._channels[address]
            channel.get_state(try_to_connect=True)
            await channel.wait_for_state_change(grpc.ChannelConnectivity.IDLE)
            servicer.list("127.0.0.1:1")
            await directory.refresh()
            await directory.refresh()
            assert directory._channels[address].get_state() is grpc.ChannelConnectivity.CONNECTING
            await directory.close()
