"""Goal: a directory without a nameserver is refused where it is made; who is away is looked for.

Method: directories made by hand, and a real server as one of the nodes; no call is sent to it.
"""

from __future__ import annotations

import asyncio
from random import Random

import grpc
import grpc.aio
import pytest
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc

from batonmq.admin import Admin
from batonmq.channels import connect
from batonmq.common.errors import InvalidArgument, Unreachable
from batonmq.directory import Directory
from tests.support.serving import serving_at


class Nameserver(nameserver_grpc.NameserverServiceServicer):
    """Knows one node of the offsets service."""

    def __init__(self, address: str) -> None:
        self._node = pb.Node(service=pb.SERVICE_KIND_OFFSETS, address=address, leader=True)

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: object
    ) -> pb.DescribeClusterResponse:
        return pb.DescribeClusterResponse(nodes=[self._node])


@pytest.mark.parametrize("nameserver", ["", " ", ",", " , ,"])
def test_list_without_an_address_is_refused(nameserver: str) -> None:
    with pytest.raises(InvalidArgument, match="names no nameserver") as refused:
        Directory(nameserver, Random(1))
    assert refused.value.facts == {"field": "nameserver"}
    with pytest.raises(InvalidArgument):
        Admin(nameserver)


async def test_while_somebody_is_away_the_ways_to_all_are_tried() -> None:
    made: dict[str, grpc.aio.Channel] = {}

    def note(address: str) -> grpc.aio.Channel:
        return made.setdefault(address, connect(address))

    async with serving_at() as offsets:
        servicer = Nameserver(offsets)  # type: ignore[abstract]
        async with serving_at(
            lambda server: nameserver_grpc.add_NameserverServiceServicer_to_server(servicer, server)
        ) as nameserver:
            directory = Directory(nameserver, Random(1), note)
            await directory.offsets("drivers")
            channel = made[offsets]
            assert channel.get_state() is grpc.ChannelConnectivity.IDLE
            await directory.pause(Unreachable("no offsets node is registered"), 0)
            async with asyncio.timeout(20):
                while (state := channel.get_state()) is not grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(state)
            await directory.close()
