"""Clients outside the network of the services.

Goal: a client that calls a nameserver at its outside address gets the outside addresses of all
nodes that have one; a client that calls another address gets the inside addresses.
Method: a nameserver with two names; it lists itself, a node with an outside address, and one
without.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from batonmq._connection.directory import ClientEnvironment as Around
from batonmq._connection.directory import Directory
from batonmq.admin.admin import Admin

INSIDE = ["offsets-0.offsets.baton.svc:10912", "storage-a-0.storage.baton.svc:10911"]


class NameserverTwin(pb_grpc.NameserverServiceServicer):
    """A nameserver.

    Attributes:
        outside: Outside address of the nameserver.
    """

    outside = ""

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeClusterResponse:
        offsets, storage = INSIDE
        nodes = [
            pb.Node(
                service=pb.SERVICE_KIND_NAMESERVER,
                node_id="nameserver-0",
                address="nameserver-0.nameserver-nodes.baton.svc:9876",
                outside_address=self.outside,
            ),
            pb.Node(
                service=pb.SERVICE_KIND_OFFSETS,
                node_id="offsets-0",
                address=offsets,
                outside_address="mq.example.com:30930",
            ),
            pb.Node(service=pb.SERVICE_KIND_STORAGE, node_id="storage-a-0", address=storage),
        ]
        return pb.DescribeClusterResponse(cluster="c", nodes=nodes)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Return the port of a nameserver whose outside address is on 127.0.0.1."""
    server, twin = grpc.aio.server(), NameserverTwin()  # type: ignore[abstract]
    pb_grpc.add_NameserverServiceServicer_to_server(twin, server)
    bound = server.add_insecure_port("127.0.0.1:0")
    twin.outside = f"127.0.0.1:{bound}"
    await server.start()
    yield bound
    await server.stop(None)


async def addresses(nameserver: str) -> list[str]:
    environment = Around()
    directory = Directory(nameserver, environment.random, environment.connect)
    try:
        return [node.address for node in (await directory.refresh())[1:]]
    finally:
        await directory.close()


async def test_client_outside_gets_outside_addresses(port: int) -> None:
    assert await addresses(f"127.0.0.1:{port}") == ["mq.example.com:30930", INSIDE[1]]


async def test_client_inside_gets_inside_addresses(port: int) -> None:
    assert await addresses(f"localhost:{port}") == INSIDE


async def test_cluster_report_for_a_client_outside_has_outside_addresses(port: int) -> None:
    async with Admin(f"127.0.0.1:{port}") as admin:
        cluster = await admin.cluster()
    assert [node.address for node in cluster.nodes] == [
        f"127.0.0.1:{port}",
        "mq.example.com:30930",
        INSIDE[1],
    ]
