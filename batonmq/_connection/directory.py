"""Nodes of a cluster, found through its nameserver, and stubs of their services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random, SystemRandom
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from baton.nameserver.v1 import quota_service_pb2_grpc as quota_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import schedule_service_pb2_grpc as schedule_grpc
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common import timeouts
from batonmq._common.backoff import Backoff
from batonmq._common.clock import Clock
from batonmq._common.large_messages import storage_stub
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import Connect, connect, connector
from batonmq._connection.security import Security
from batonmq.errors import (
    BatonError,
    GroupMoved,
    InvalidArgument,
    NoQuorum,
    Retry,
    Throttled,
    Unreachable,
)

if TYPE_CHECKING:  # for administration only: these methods import them when they are called
    from baton.gateway.v1 import gateway_service_pb2_grpc as gateway_grpc
    from baton.nameserver.v1 import access_service_pb2_grpc as access_grpc
    from baton.offsets.v1 import replication_service_pb2_grpc as replication_grpc
    from baton.storage.v1 import output_service_pb2_grpc as output_grpc
    from baton.storage.v1 import query_service_pb2_grpc as query_grpc
    from baton.storage.v1 import replication_service_pb2_grpc as storage_replication_grpc
    from baton.storage.v1 import reply_service_pb2_grpc as reply_grpc
    from baton.storage.v1 import transaction_service_pb2_grpc as transaction_grpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
"""Timeout of a call that is not a long poll."""
_CONNECTING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
_ROUTE_AGE_S = 1.0
"""Callers of `has_leader` share an answer of the nameserver for this time."""
_WITHOUT_CALLS = (
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)
"""States in which a channel has no call in flight."""
UNLISTED_S = 60.0
"""A channel is closed when no node was listed at its address for so long. A node that has lost its
lease for a moment may still serve."""
_BACKOFF = Backoff(first_ms=50, delay_ms_max=1_000)
_THROTTLED_INTERVAL_S = 0.05
"""Minimum time between two retries of throttled calls of a client. A consumer of many queues would
otherwise try all of them at the end of each wait, and have all but one rejected again."""
T = TypeVar("T")


def _fresh_random() -> Random:
    return Random(SystemRandom().getrandbits(64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEnvironment:
    """Clock, random source and network of a client; a simulation replaces them."""

    clock: Clock = field(default_factory=Clock)
    random: Random = field(default_factory=_fresh_random)
    connect: Connect = connect

    def secured(self, security: Security | None) -> Self:
        """Return this environment with TLS; unchanged if `security` is None.

        Raises:
            InvalidArgument: A file can't be read or used.
        """
        return self if security is None else replace(self, connect=connector(security))


class OffsetsLeader(NamedTuple):
    """The offsets set that keeps a group, and a stub for its leader."""

    offsets_set: str
    stub: offsets_grpc.OffsetsServiceAsyncStub


def _has_port(address: str) -> bool:
    """Return whether an address ends with a port, from 1 to 65535."""
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16


def with_reachable_addresses(nodes: Iterable[pb.Node], nameserver: str) -> list[pb.Node]:
    """Return the nodes, each with the address at which this client reaches it.

    Args:
        nameserver: Address of the nameserver that returned the nodes. A client that used its
            outside address is outside of the cluster's network.
    """
    reachable = list(nodes)
    if any(
        n.service == pb.SERVICE_KIND_NAMESERVER and n.outside_address == nameserver
        for n in reachable
    ):
        for node in reachable:
            node.address = node.outside_address or node.address
    return reachable


class Directory:
    """Channels to the nodes of a cluster, found through its nameserver.

    Args:
        nameserver: host:port of a nameserver; several, separated by commas, are tried in turn.
        connect: Returns a channel to `host:port`.

    Attributes:
        random: Draws the delays before retries, also those of its clients.

    Raises:
        InvalidArgument: `nameserver` has no address, or one without a port: gRPC would use 443.
    """

    def __init__(
        self,
        nameserver: str,
        random: Random,
        connect: Connect = connect,
    ) -> None:
        self.connect = connect
        self._addresses = [part.strip() for part in nameserver.split(",") if part.strip()]
        wrong = [address for address in self._addresses if not _has_port(address)]
        if wrong or not self._addresses:
            raise InvalidArgument(
                f"{(wrong or [nameserver])[0]!r} is not an address of a nameserver",
                remedy="Give host:port, or several separated by commas.",
                facts={"field": "nameserver"},
            )
        self.random = random
        self._current_address = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._storage_stubs: dict[str, storage_grpc.StorageServiceAsyncStub] = {}
        self._unlisted_s: dict[str, float] = {}
        self._nodes: list[pb.Node] = []
        self._refreshed_s, self._outdated = 0.0, True
        self._throttled_s = 0.0
        self._placements: dict[str, pb.Placement] = {}
        self._refreshing = asyncio.Lock()

    async def close(self) -> None:
        """Close every channel; calls in flight end."""
        self._storage_stubs.clear()
        while self._channels:  # a call may still add one
            _, channel = self._channels.popitem()
            await channel.close()

    @property
    def nameserver_address(self) -> str:
        """Address of the current nameserver."""
        return self._addresses[self._current_address % len(self._addresses)]

    def nameserver(self) -> nameserver_grpc.NameserverServiceAsyncStub:
        """Return a stub for the current nameserver."""
        return nameserver_grpc.NameserverServiceStub(self._channel(self.nameserver_address))

    def access(self) -> access_grpc.AccessServiceAsyncStub:
        """Return a stub for authorization at the current nameserver."""
        from baton.nameserver.v1 import access_service_pb2_grpc as access_grpc  # noqa: PLC0415

        return access_grpc.AccessServiceStub(self._channel(self.nameserver_address))

    def quotas(self) -> quota_grpc.QuotaServiceAsyncStub:
        """Return a stub for quotas at the current nameserver."""
        return quota_grpc.QuotaServiceStub(self._channel(self.nameserver_address))

    def next_nameserver(self) -> None:
        """Make the next nameserver the current one."""
        self._current_address += 1

    async def ask_nameserver(
        self, ask: Callable[[nameserver_grpc.NameserverServiceAsyncStub], Awaitable[T]]
    ) -> T:
        """Return the response of the current nameserver; of the next one if it does not respond.

        Raises:
            BatonError: The nameserver rejected the request, and a retry is useless.
            Unreachable: No nameserver responds.
        """
        return (await self._ask(ask))[1]

    async def storage(self, broker: str) -> storage_grpc.StorageServiceAsyncStub:
        """Return a stub for the storage leader of `broker`.

        Raises:
            Unreachable: The broker is not registered, or no nameserver responds.
        """
        return self.storage_at(await self._address(pb.SERVICE_KIND_STORAGE, broker))

    async def connected_storage(
        self, broker: str, timeout_s: float
    ) -> storage_grpc.StorageServiceAsyncStub:
        """As `storage`, after connecting: a failure to connect means that nothing was sent.

        Raises:
            Unreachable: The broker is not registered, no nameserver responds, or the connection
                fails.
        """
        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        channel = self._channel(address)
        state = channel.get_state(try_to_connect=True)
        if state is not grpc.ChannelConnectivity.READY:
            with suppress(TimeoutError):
                async with timeouts.timeout(timeout_s):
                    while state in _CONNECTING:
                        await channel.wait_for_state_change(state)
                        state = channel.get_state(try_to_connect=True)
        if state is not grpc.ChannelConnectivity.READY:
            raise Unreachable(
                f"can't connect to storage node {broker} at {address}", facts={"service": "storage"}
            )
        return self.storage_at(address)

    async def reader(self, broker: str, node_id: str) -> storage_grpc.StorageServiceAsyncStub:
        """Return a stub for pulls from a node of `broker`; for the leader if the node is unknown.

        Args:
            node_id: The node that the last response, or `next_reader`, named; empty for the leader.

        Raises:
            Unreachable: The broker is not registered, or no nameserver responds.
        """
        return self.storage_at(await self.reader_address(broker, node_id))

    async def reader_address(self, broker: str, node_id: str) -> str:
        """As `reader`, but return the address of the node."""
        for node in self._of_broker(broker):
            if node.node_id == node_id:
                return node.address
        return await self._address(pb.SERVICE_KIND_STORAGE, broker)

    def storage_at(self, address: str) -> storage_grpc.StorageServiceAsyncStub:
        """Return a stub for the storage node at an address: always the same one."""
        stub = self._storage_stubs.get(address)
        if stub is None:
            stub = self._storage_stubs[address] = storage_stub(self._channel(address))
        return stub

    def next_reader(self, broker: str, node_id: str) -> str:
        """Return the node to use after `node_id` failed: each node in turn, then the leader."""
        names = ["", *sorted(node.node_id for node in self._of_broker(broker))]
        at = names.index(node_id) if node_id in names else -1
        return names[(at + 1) % len(names)]

    async def has_leader(self, broker: str) -> bool:
        """Return whether a leader of `broker` is registered, from an answer of at most 1 s ago.

        Raises:
            Unreachable: No nameserver responds.
        """
        age_s = asyncio.get_running_loop().time() - self._refreshed_s
        if age_s > _ROUTE_AGE_S or self._outdated:
            await self.refresh()
        return self._find(pb.SERVICE_KIND_STORAGE, broker) is not None

    async def schedule(self, broker: str) -> schedule_grpc.ScheduleServiceAsyncStub:
        """Return a stub for scheduled messages at the storage leader of `broker`.

        Raises:
            Unreachable: The broker is not registered, or no nameserver responds.
        """
        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        return schedule_grpc.ScheduleServiceStub(self._channel(address))

    async def transactions(self, broker: str) -> transaction_grpc.TransactionServiceAsyncStub:
        """Return a stub for transactions at the storage leader of `broker`.

        Raises:
            Unreachable: The broker is not registered, or no nameserver responds.
        """
        from baton.storage.v1 import (  # noqa: PLC0415
            transaction_service_pb2_grpc as transaction_grpc,
        )

        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        return transaction_grpc.TransactionServiceStub(self._channel(address))

    async def outputs(self, broker: str) -> output_grpc.OutputServiceAsyncStub:
        """Return a stub for the memory of outputs at the storage leader of `broker`.

        Raises:
            Unreachable: The broker is not registered, or no nameserver responds.
        """
        from baton.storage.v1 import output_service_pb2_grpc as output_grpc  # noqa: PLC0415

        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        return output_grpc.OutputServiceStub(self._channel(address))

    async def brokers(self) -> set[str]:
        """Ask a nameserver for the names of all brokers.

        Raises:
            Unreachable: No nameserver responds.
        """
        return {
            node.replica_set or node.node_id
            for node in await self.refresh()
            if node.service == pb.SERVICE_KIND_STORAGE
        }

    async def query(self, broker: str, node_id: str = "") -> query_grpc.QueryServiceAsyncStub:
        """Return a stub for queries of messages at `broker`.

        While the broker has no leader, this is a stub for a follower.

        Args:
            node_id: The node; the leader if the node is not registered, or if empty.

        Raises:
            Unreachable: No node of the broker is registered, or no nameserver responds.
        """
        from baton.storage.v1 import query_service_pb2_grpc as query_grpc  # noqa: PLC0415

        addresses = [node.address for node in self._of_broker(broker) if node.node_id == node_id]
        try:
            address = (
                addresses[0] if addresses else await self._address(pb.SERVICE_KIND_STORAGE, broker)
            )
        except Unreachable:
            followers = self._of_broker(broker)
            if not followers:
                raise
            address = self.random.choice(followers).address
        return query_grpc.QueryServiceStub(self._channel(address))

    async def reply_nodes(self) -> list[str]:
        """Return the ids of all storage nodes, leaders and followers; any of them keeps inboxes.

        Raises:
            Unreachable: No nameserver responds.
        """
        nodes = await self.refresh() if self._outdated else self._nodes
        return sorted(node.node_id for node in nodes if node.service == pb.SERVICE_KIND_STORAGE)

    async def replies(self, node_id: str) -> reply_grpc.ReplyServiceAsyncStub:
        """Return a stub for the reply inboxes of a storage node.

        Raises:
            Unreachable: The node is not registered, or no nameserver responds.
        """
        from baton.storage.v1 import reply_service_pb2_grpc as reply_grpc  # noqa: PLC0415

        address = None if self._outdated else self._storage_address(node_id)
        if address is None:
            await self.refresh()
            address = self._storage_address(node_id)
        if address is None:
            raise Unreachable(
                f"no storage node {node_id} is registered", facts={"service": "storage"}
            )
        return reply_grpc.ReplyServiceStub(self._channel(address))

    async def gateways(self) -> list[str]:
        """Ask a nameserver for the node ids of all gateways; ascending.

        Raises:
            Unreachable: No nameserver responds.
        """
        nodes = await self.refresh()
        return sorted(node.node_id for node in nodes if node.service == pb.SERVICE_KIND_GATEWAY)

    def gateway(self, node_id: str) -> gateway_grpc.GatewayServiceAsyncStub:
        """Return a stub for a gateway that `gateways` has returned.

        Raises:
            Unreachable: The gateway is not registered any more.
        """
        from baton.gateway.v1 import gateway_service_pb2_grpc as gateway_grpc  # noqa: PLC0415

        for node in self._nodes:
            if node.service == pb.SERVICE_KIND_GATEWAY and node.node_id == node_id:
                return gateway_grpc.GatewayServiceStub(self._channel(node.address))
        raise Unreachable(f"no gateway {node_id} is registered", facts={"service": "gateway"})

    async def followers(self, broker: str) -> list[str]:
        """Ask a nameserver for the node ids of the followers of `broker`; ascending.

        Raises:
            Unreachable: No nameserver responds.
        """
        await self.refresh()
        return sorted(node.node_id for node in self._of_broker(broker) if not node.leader)

    async def offsets(self, group: str) -> offsets_grpc.OffsetsServiceAsyncStub:
        """Return a stub for the leader of the offsets set that keeps `group`.

        Raises:
            Unreachable: No leader is registered, or no nameserver responds.
        """
        return (await self.offsets_leader(group)).stub

    async def offsets_leader(self, group: str) -> OffsetsLeader:
        """As `offsets`, with the name of the offsets set."""
        name = await self.offsets_set(group)
        address = await self._address(pb.SERVICE_KIND_OFFSETS, name)
        return OffsetsLeader(name, offsets_grpc.OffsetsServiceStub(self._channel(address)))

    async def offsets_set(self, group: str) -> str:
        """Return the name of the offsets set that keeps `group`; empty if no set is registered.

        A cached name may be out of date: the set then raises GroupMoved, see `pause`.

        Raises:
            Unreachable: No nameserver responds.
        """
        placement = self._placements.get(group)
        if placement is not None:
            return placement.offsets_set
        nodes = await self.refresh() if self._outdated else self._nodes
        names = {
            node.replica_set or node.node_id
            for node in nodes
            if node.service == pb.SERVICE_KIND_OFFSETS
        }
        if len(names) <= 1:
            return next(iter(names), "")
        request = pb.LocateGroupRequest(group=group)
        answer = await self.ask_nameserver(
            lambda stub: stub.LocateGroup(request, timeout=CALL_TIMEOUT_S)
        )
        self._placements[group] = answer.placement
        return answer.placement.offsets_set

    def note_moved(self, error: GroupMoved) -> None:
        """Cache the placement of a group that an offsets set has reported."""
        moved = error.detail
        known = self._placements.get(moved.group)
        if known is None or known.move < moved.move:
            placement = pb.Placement(offsets_set=moved.offsets_set, move=moved.move)
            self._placements[moved.group] = placement

    async def storage_replication(
        self, broker: str
    ) -> storage_replication_grpc.ReplicationServiceAsyncStub:
        """Return a stub for the replication service of the leader of `broker`.

        A node that is not replicated does not have that service.

        Raises:
            Unreachable: The broker is not registered, or no nameserver responds.
        """
        from baton.storage.v1 import (  # noqa: PLC0415
            replication_service_pb2_grpc as storage_replication_grpc,
        )

        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        return storage_replication_grpc.ReplicationServiceStub(self._channel(address))

    async def offsets_replication(
        self, offsets_set: str
    ) -> replication_grpc.ReplicationServiceAsyncStub:
        """Return a stub for the replication service of the leader of an offsets set.

        A node that is not replicated does not have that service.

        Raises:
            Unreachable: No leader is registered, or no nameserver responds.
        """
        from baton.offsets.v1 import (  # noqa: PLC0415
            replication_service_pb2_grpc as replication_grpc,
        )

        address = await self._address(pb.SERVICE_KIND_OFFSETS, offsets_set)
        return replication_grpc.ReplicationServiceStub(self._channel(address))

    async def lockmgr(self) -> lockmgr_grpc.LockmgrServiceAsyncStub:
        """Return a stub for the leader of lockmgr.

        Raises:
            Unreachable: No leader is registered, or no nameserver responds.
        """
        address = await self._address(pb.SERVICE_KIND_LOCKMGR)
        return lockmgr_grpc.LockmgrServiceStub(self._channel(address))

    async def refresh(self) -> list[pb.Node]:
        """Ask a nameserver for all nodes, and return them.

        Raises:
            Unreachable: No nameserver responds.
        """
        before = self._nodes
        async with self._refreshing:
            if self._nodes is not before:
                return self._nodes
            nameserver, answer = await self._ask(
                lambda stub: stub.DescribeCluster(
                    pb.DescribeClusterRequest(), timeout=CALL_TIMEOUT_S
                )
            )
            self._nodes = with_reachable_addresses(answer.nodes, nameserver)
            self._refreshed_s, self._outdated = asyncio.get_running_loop().time(), False
            await self._close_unlisted(self._refreshed_s)
            return self._nodes

    async def _close_unlisted(self, now_s: float) -> None:
        """Close the channels to addresses at which nodes were, such as those of replaced pods.

        A channel that is connected, or connects, may have calls in flight, which a close would
        cancel. So it stays until it is neither.
        """
        listed = {*self._addresses, *(node.address for node in self._nodes)}
        self._unlisted_s = {
            address: self._unlisted_s.get(address, now_s)
            for address in self._channels
            if address not in listed
        }
        gone = [
            self._channels.pop(address)
            for address, since_s in self._unlisted_s.items()
            if now_s - since_s >= UNLISTED_S
            and self._channels[address].get_state() in _WITHOUT_CALLS
        ]
        for address in self._storage_stubs.keys() - self._channels.keys():
            del self._storage_stubs[address]
        for channel in gone:
            await channel.close()

    def invalidate(self, error: BatonError) -> None:
        """Look leaders up again if the error means that a service may have another address."""
        if isinstance(error, Unreachable | NoQuorum) or error.retry is Retry.REFRESH_ROUTE:
            self._outdated = True

    async def pause(self, error: BatonError, failures: int) -> None:
        """Wait before a retry, for a time that depends on `error` and on the failures so far.

        Refreshes the nodes if the error means that a service may have another address.
        """
        if isinstance(error, Unreachable):
            # Reconnecting during the pause finds a service that restarted at another address.
            for channel in self._channels.values():
                channel.get_state(try_to_connect=True)
        if isinstance(error, GroupMoved):
            self.note_moved(error)
        delay_s = _BACKOFF.delay_ms(failures, self.random, error.retry_after_ms) / 1000
        if isinstance(error, Throttled):
            delay_s = self._throttled_delay_s(delay_s)
        await asyncio.sleep(delay_s)
        if isinstance(error, Unreachable | NoQuorum) or error.retry is Retry.REFRESH_ROUTE:
            if not isinstance(error, GroupMoved):
                self._placements.clear()  # the set that could report a move may be down
            try:
                await self.refresh()
            except BatonError as failure:
                log.debug("could not refresh nodes error=%s", failure)

    def _throttled_delay_s(self, delay_s: float) -> float:
        """Return the delay of a retry that keeps the interval to the retry before it."""
        now_s = asyncio.get_running_loop().time()
        self._throttled_s = max(now_s + delay_s, self._throttled_s + _THROTTLED_INTERVAL_S)
        return self._throttled_s - now_s

    async def _ask(
        self, ask: Callable[[nameserver_grpc.NameserverServiceAsyncStub], Awaitable[T]]
    ) -> tuple[str, T]:
        """As `ask_nameserver`, with the address of the nameserver that responded."""
        untried = len(self._addresses)
        while True:
            address = self.nameserver_address
            try:
                return address, await ask(self.nameserver())
            except grpc.aio.AioRpcError as failure:
                untried -= 1
                error = from_rpc_error(failure)
                if error.retry is not Retry.NEVER and self.nameserver_address == address:
                    self.next_nameserver()
                if error.retry is Retry.NEVER or not untried:
                    raise error from failure

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self.connect(address)
        return channel

    async def _address(self, service: pb.ServiceKind.ValueType, replica_set: str = "") -> str:
        address = None if self._outdated else self._find(service, replica_set)
        if address is None:
            await self.refresh()
            address = self._find(service, replica_set)
        if address is None:
            name = pb.ServiceKind.Name(service).removeprefix("SERVICE_KIND_").lower()
            raise Unreachable(
                f"no {name} node {replica_set} is registered".replace("  ", " "),
                retry_after_ms=200,
                facts={"service": name},
            )
        return address

    def _storage_address(self, node_id: str) -> str | None:
        for node in self._nodes:
            if node.service == pb.SERVICE_KIND_STORAGE and node.node_id == node_id:
                return node.address
        return None

    def _of_broker(self, broker: str) -> list[pb.Node]:
        """Return the nodes of a replicated broker; none for a node that is not replicated."""
        nodes = [
            node
            for node in self._nodes
            if node.service == pb.SERVICE_KIND_STORAGE and node.replica_set == broker
        ]
        return nodes if len(nodes) > 1 or not all(node.leader for node in nodes) else []

    def _find(self, service: pb.ServiceKind.ValueType, replica_set: str) -> str | None:
        """Return the address of the leader: of all nodes that claim to lead, the highest epoch."""
        nodes = [
            node
            for node in self._nodes
            if node.service == service
            and node.leader
            and replica_set in ("", node.replica_set or node.node_id)
        ]
        return max(nodes, key=lambda node: node.epoch).address if nodes else None
