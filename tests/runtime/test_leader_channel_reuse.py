"""Goal: a leader that moves often does not leave a channel for each move.

Method: a mirror of the nodes filled by the test, and channels that are counted as they are made; no
calls.
"""

from __future__ import annotations

import grpc.aio

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._common.clock import Clock
from batonmq._connection.channels import connect
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.runtime.leader_channels import LeaderChannel

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2")


async def test_each_address_has_one_channel_however_often_the_leader_moves() -> None:
    addresses: list[str] = []

    def counted(address: str) -> grpc.aio.Channel:
        addresses.append(address)
        return connect(address)

    nodes = EtcdMirror(EtcdSession("127.0.0.1:1", "unused", Clock()), "nodes/")
    peer: LeaderChannel[offsets_grpc.OffsetsServiceAsyncStub] = LeaderChannel(
        nodes, "offsets", offsets_grpc.OffsetsServiceStub, counted
    )
    stubs = []
    for move in range(1, 21):
        node = StoredNode(node_id="a", leader=True, epoch=move, address=ADDRESSES[move % 2])
        nodes.values["offsets/a"] = KeyValue("offsets/a", node.SerializeToString(), 1, move)
        nodes.revision = move
        stubs.append(peer.stub())
    assert sorted(addresses) == sorted(ADDRESSES)
    assert stubs[0] is stubs[2] is stubs[-2]
    assert stubs[0] is not stubs[1]
    await peer.close()
