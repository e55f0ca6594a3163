"""Channels to the current leader of another service.

Goal: the stub calls the registered leader with the highest epoch, follows a change of leader, and
fails if there is none.
Method: node entries as processes write them, followed by a real mirror; two servers that return
their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._common.clock import Clock
from batonmq._connection.channels import connect
from batonmq._telemetry.event_hub import EventHub
from batonmq.errors import Unreachable
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.event_stream_server import MetricsServicer
from batonmq_server.runtime.leader_channels import LeaderChannel
from tests.support.grpc_server import serving_at


class Scene:
    """A channel to the leader of offsets, and the writer of the node entries."""

    def __init__(self, etcd: EtcdSession, nodes: EtcdMirror) -> None:
        self._etcd, self.nodes = etcd, nodes
        self.peer: LeaderChannel[metrics_grpc.MetricsServiceAsyncStub] = LeaderChannel(
            nodes, "offsets", metrics_grpc.MetricsServiceStub
        )

    async def register(
        self,
        node_id: str,
        address: str,
        *,
        epoch: int = 1,
        leader: bool = True,
        service: str = "offsets",
        replica_set: str = "",
    ) -> None:
        node = StoredNode(
            node_id=node_id, address=address, epoch=epoch, leader=leader, replica_set=replica_set
        )
        key = f"nodes/{service}/{node_id}"
        await self.nodes.reached(await self._etcd.put(key, node.SerializeToString()))

    async def unregister(self, node_id: str) -> None:
        await self._etcd.delete(f"nodes/offsets/{node_id}")
        marker = await self._etcd.put("nodes/z/z", StoredNode().SerializeToString())
        await self.nodes.reached(marker)


@asynccontextmanager
async def scene(etcd: EtcdSession) -> AsyncIterator[Scene]:
    nodes = EtcdMirror(etcd, "nodes/")
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(20):
        loop = tasks.create_task(nodes.run())
        await nodes.ready()
        new_scene = Scene(etcd, nodes)
        yield new_scene
        await new_scene.peer.close()
        loop.cancel()


@asynccontextmanager
async def server(name: str) -> AsyncIterator[str]:
    """A server whose events come from `name`."""
    hub = EventHub(name, 1, Clock())

    async def publish() -> None:
        while True:
            hub.publish(metrics_pb.MetricEvent())
            await asyncio.sleep(0.01)

    servicer = MetricsServicer(hub)
    add: Any = partial(metrics_grpc.add_MetricsServiceServicer_to_server, servicer)
    async with asyncio.TaskGroup() as tasks, serving_at(add) as address:
        publishing = tasks.create_task(publish())
        yield address
        publishing.cancel()


async def answering_server(stub: metrics_grpc.MetricsServiceAsyncStub) -> str:
    """Return the name of the server that answers."""
    call = stub.Watch(metrics_pb.WatchRequest())
    answer = await call.read()
    call.cancel()
    assert isinstance(answer, metrics_pb.WatchResponse)
    return answer.batch.source


async def test_service_without_a_leader_is_unreachable(etcd: EtcdSession) -> None:
    async with scene(etcd) as at:
        await at.register("b", "127.0.0.1:2", leader=False)
        await at.register("other", "127.0.0.1:3", service="lockmgr")
        await at.register("x", "127.0.0.1:4", service="offsets-old")
        with pytest.raises(Unreachable) as refused:
            at.peer.stub()
    assert refused.value.facts == {"service": "offsets"}
    assert refused.value.retry_after_ms > 0


async def test_leader_is_found_among_other_nodes(etcd: EtcdSession) -> None:
    async with scene(etcd) as at:
        await at.register("a", "127.0.0.1:1", leader=False, epoch=9)
        await at.register("b", "127.0.0.1:2")
        assert at.peer.address() == "127.0.0.1:2"


async def test_of_two_registered_leaders_the_newer_epoch_wins(etcd: EtcdSession) -> None:
    async with scene(etcd) as at:
        await at.register("a", "127.0.0.1:1", epoch=4)
        await at.register("b", "127.0.0.1:2", epoch=5)
        await at.register("c", "127.0.0.1:3", epoch=3)
        assert at.peer.address() == "127.0.0.1:2"


async def test_channel_follows_only_its_replica_set(etcd: EtcdSession) -> None:
    async with scene(etcd) as at:
        stub = metrics_grpc.MetricsServiceStub
        peer = LeaderChannel(at.nodes, "offsets", stub, replica_set="left")
        await at.register("a", "127.0.0.1:1", epoch=9, replica_set="right")
        with pytest.raises(Unreachable):
            peer.address()
        await at.register("b", "127.0.0.1:2", epoch=1, replica_set="left")
        assert peer.address() == "127.0.0.1:2"
        await at.register("left", "127.0.0.1:3", epoch=2)
        assert peer.address() == "127.0.0.1:3", "a node without replicas is a set of its own name"


async def test_stub_stays_while_the_leader_stays(etcd: EtcdSession) -> None:
    async with scene(etcd) as at:
        await at.register("a", "127.0.0.1:1")
        stub = at.peer.stub()
        assert at.peer.stub() is stub
        await at.register("b", "127.0.0.1:2", leader=False)
        assert at.peer.stub() is stub


async def test_calls_follow_a_leader_that_moves(etcd: EtcdSession) -> None:
    async with scene(etcd) as at, server("first") as first, server("second") as second:
        await at.register("a", first, epoch=1)
        assert await answering_server(at.peer.stub()) == "first"
        await at.register("b", second, epoch=2)
        assert await answering_server(at.peer.stub()) == "second"
        await at.unregister("b")
        assert await answering_server(at.peer.stub()) == "first"


async def test_call_in_progress_survives_a_change_of_leader(etcd: EtcdSession) -> None:
    async with scene(etcd) as at, server("first") as first, server("second") as second:
        await at.register("a", first, epoch=1)
        call = at.peer.stub().Watch(metrics_pb.WatchRequest())
        await call.read()
        await at.register("b", second, epoch=2)
        assert await answering_server(at.peer.stub()) == "second"
        answer = await call.read()
        assert isinstance(answer, metrics_pb.WatchResponse)
        assert answer.batch.source == "first"


async def test_unregistered_leader_is_unreachable(etcd: EtcdSession) -> None:
    async with scene(etcd) as at:
        await at.register("a", "127.0.0.1:1")
        at.peer.stub()
        await at.unregister("a")
        with pytest.raises(Unreachable):
            at.peer.stub()


async def test_close_ends_open_calls(etcd: EtcdSession) -> None:
    async with scene(etcd) as at, server("first") as first:
        await at.register("a", first)
        call = at.peer.stub().Watch(metrics_pb.WatchRequest())
        await call.read()
        await at.peer.close()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            while True:
                await call.read()


async def test_channel_reconnects_while_the_leader_is_away(etcd: EtcdSession) -> None:
    channels: list[grpc.aio.Channel] = []

    def note(address: str) -> grpc.aio.Channel:
        channels.append(connect(address))
        return channels[-1]

    async with scene(etcd) as at, server("a") as address:
        peer = LeaderChannel(at.nodes, "offsets", metrics_grpc.MetricsServiceStub, note)
        await at.register("a", address)
        peer.stub()
        (channel,) = channels
        assert channel.get_state() is grpc.ChannelConnectivity.IDLE
        await at.unregister("a")
        with pytest.raises(Unreachable):
            peer.stub()
        while (state := channel.get_state()) is not grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
        await peer.close()
