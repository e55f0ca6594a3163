"""Channels to the current leader of another service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import grpc.aio

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._connection.channels import connect
from batonmq.errors import Unreachable
from batonmq_server.runtime.etcd.mirror import EtcdMirror

Stub = TypeVar("Stub")


class LeaderChannel(Generic[Stub]):
    """Channels to the leader of one service, which is followed through the `nodes/` mirror.

    The channel to an old leader stays open, for calls in progress and because it may lead again.

    Args:
        service: Folder name of the service, such as "offsets".
        stub: Makes the stub from a channel.
        connect: Makes a channel to a host:port.
        replica_set: Only nodes of this replica set; empty for all nodes.
    """

    def __init__(
        self,
        nodes: EtcdMirror,
        service: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        connect: Callable[[str], grpc.aio.Channel] = connect,
        *,
        replica_set: str = "",
    ) -> None:
        self._nodes, self._service, self._make_stub = nodes, service, stub
        self._replica_set = replica_set
        self._connect = connect
        self._made: dict[str, tuple[grpc.aio.Channel, Stub]] = {}
        self._current: Stub | None = None
        self._seen = -1

    def address(self) -> str:
        """Return host:port of the leader.

        Raises:
            Unreachable: no leader is registered.
        """
        leaders = [
            node
            for key, stored in self._nodes.values.items()
            if key.startswith(f"{self._service}/")
            and (node := StoredNode.FromString(stored.value)).leader
            and self._replica_set in ("", node.replica_set or node.node_id)
        ]
        if not leaders:
            raise Unreachable(
                f"no leader of {self._service} {self._replica_set} is registered".replace(
                    "  ", " "
                ),
                retry_after_ms=200,
                facts={"service": self._service},
            )
        return max(leaders, key=lambda node: node.epoch).address

    def stub(self) -> Stub:
        """Return a stub for the leader.

        Raises:
            Unreachable: no leader is registered.
        """
        if self._current is not None and self._seen == self._nodes.revision:
            return self._current
        try:
            address = self.address()
        except Unreachable:
            for channel, _ in self._made.values():  # resolve names again: the leader may have moved
                channel.get_state(try_to_connect=True)
            raise
        made = self._made.get(address)
        if made is None:
            channel = self._connect(address)
            made = self._made[address] = channel, self._make_stub(channel)
        self._current, self._seen = made[1], self._nodes.revision
        return self._current

    async def close(self) -> None:
        """Close the channels; calls in progress are cancelled."""
        for channel, _ in self._made.values():
            await channel.close()
        self._made.clear()
        self._current = None


class LeaderChannels(Generic[Stub]):
    """A `LeaderChannel` for each replica set of one service."""

    def __init__(
        self,
        nodes: EtcdMirror,
        service: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        connect: Callable[[str], grpc.aio.Channel] = connect,
    ) -> None:
        self._nodes, self._service, self._make_stub = nodes, service, stub
        self._connect = connect
        self._peers: dict[str, LeaderChannel[Stub]] = {}

    def stub(self, replica_set: str) -> Stub:
        """Return a stub for the leader of a set; of any set if the name is empty.

        Raises:
            Unreachable: no leader is registered.
        """
        peer = self._peers.get(replica_set)
        if peer is None:
            peer = self._peers[replica_set] = LeaderChannel(
                self._nodes,
                self._service,
                self._make_stub,
                self._connect,
                replica_set=replica_set,
            )
        return peer.stub()

    async def close(self) -> None:
        """Close the channels; calls in progress are cancelled."""
        for peer in self._peers.values():
            await peer.close()
        self._peers.clear()
