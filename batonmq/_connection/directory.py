"""Where everything is: one nameserver address in, stubs for every service out."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple, Self, TypeVar

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1 import access_service_pb2_grpc as access_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.offsets.v1 import replication_service_pb2_grpc as replication_grpc
from baton.storage.v1 import query_service_pb2_grpc as query_grpc
from baton.storage.v1 import replication_service_pb2_grpc as storage_replication_grpc
from baton.storage.v1 import schedule_service_pb2_grpc as schedule_grpc
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.backoff import Backoff
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import Connect, connect, connector
from batonmq._connection.security import Security
from batonmq.errors import (
    BatonError,
    GroupMoved,
    InvalidArgument,
    NoQuorum,
    Retry,
    Unreachable,
)

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
"""Bound of a call that is not held by the server."""
_CONNECTING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
_BACKOFF = Backoff(first_ms=50, delay_ms_max=1_000)
T = TypeVar("T")


def _fresh_random() -> Random:
    return Random(secrets.randbits(64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEnvironment:
    """What a client takes from outside: time, chance and the wire. A simulation brings its own."""

    clock: Clock = field(default_factory=Clock)
    random: Random = field(default_factory=_fresh_random)
    connect: Connect = connect

    def secured(self, security: Security | None) -> Self:
        """The same, over TLS if there is `security`.

        Raises:
            InvalidArgument: a file can't be used.
        """
        return self if security is None else replace(self, connect=connector(security))


class OffsetsLeader(NamedTuple):
    """Who keeps a group's progress: an offsets set, and its leader."""

    offsets_set: str
    stub: offsets_grpc.OffsetsServiceAsyncStub


def with_reachable_addresses(nodes: Iterable[pb.Node], asked: str) -> list[pb.Node]:
    """The nodes, each with the address at which it is reached by who has asked for them.

    Args:
        asked: Address of the nameserver that was asked. Who came to it from outside is outside.
    """
    found = list(nodes)
    if any(n.service == pb.SERVICE_KIND_NAMESERVER and n.outside_address == asked for n in found):
        for node in found:
            node.address = node.outside_address or node.address
    return found


class Directory:
    """Channels to the nodes of a cluster, found through its nameserver.

    Args:
        nameserver: host:port of a nameserver; several, separated by commas, are tried in turn.
        connect: Makes a channel to `host:port`.

    Raises:
        InvalidArgument: `nameserver` names no address.
    """

    def __init__(
        self,
        nameserver: str,
        random: Random,
        connect: Connect = connect,
    ) -> None:
        self.connect = connect
        self._addresses = [part.strip() for part in nameserver.split(",") if part.strip()]
        if not self._addresses:
            raise InvalidArgument(
                f"{nameserver!r} names no nameserver",
                remedy="Give host:port; several separated by commas.",
                facts={"field": "nameserver"},
            )
        self._random = random
        self._turn = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._nodes: list[pb.Node] = []
        self._places: dict[str, pb.Placement] = {}
        self._refreshing = asyncio.Lock()

    async def close(self) -> None:
        """Close every channel; calls under way end."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    @property
    def nameserver_address(self) -> str:
        """Of the nameserver whose turn it is."""
        return self._addresses[self._turn % len(self._addresses)]

    def nameserver(self) -> nameserver_grpc.NameserverServiceAsyncStub:
        """A stub for the nameserver whose turn it is."""
        return nameserver_grpc.NameserverServiceStub(self._channel(self.nameserver_address))

    def access(self) -> access_grpc.AccessServiceAsyncStub:
        """A stub for who may do what, at the nameserver whose turn it is."""
        return access_grpc.AccessServiceStub(self._channel(self.nameserver_address))

    def next_nameserver(self) -> None:
        """Try another nameserver from now on, if there is one."""
        self._turn += 1

    async def ask_nameserver(
        self, ask: Callable[[nameserver_grpc.NameserverServiceAsyncStub], Awaitable[T]]
    ) -> T:
        """The answer of the nameserver whose turn it is; of the next if that one does not answer.

        Raises:
            BatonError: it refused for good.
            Unreachable: no nameserver answers.
        """
        return (await self._ask(ask))[1]

    async def storage(self, broker: str) -> storage_grpc.StorageServiceAsyncStub:
        """A stub for the storage leader of `broker`.

        Raises:
            Unreachable: it is not registered, or no nameserver answers.
        """
        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        return storage_grpc.StorageServiceStub(self._channel(address))

    async def connected_storage(
        self, broker: str, timeout_s: float
    ) -> storage_grpc.StorageServiceAsyncStub:
        """As `storage`, once there is a connection: what fails before that was never sent.

        Raises:
            Unreachable: it is not registered, no nameserver answers, or it can't be connected to.
        """
        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        channel = self._channel(address)
        state = channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(timeout_s):
                while state in _CONNECTING:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            pass
        if state is not grpc.ChannelConnectivity.READY:
            raise Unreachable(
                f"no connection to storage node {broker} at {address}", facts={"service": "storage"}
            )
        return storage_grpc.StorageServiceStub(channel)

    async def reader(self, broker: str, node_id: str) -> storage_grpc.StorageServiceAsyncStub:
        """A stub for pulling from a node of `broker`; from the leader if there is no such node.

        Args:
            node_id: As the last answer, or `next_reader`, named it; empty for the leader.

        Raises:
            Unreachable: it is not registered, or no nameserver answers.
        """
        for node in self._of_broker(broker):
            if node.node_id == node_id:
                return storage_grpc.StorageServiceStub(self._channel(node.address))
        return await self.storage(broker)

    def next_reader(self, broker: str, node_id: str) -> str:
        """Whom to ask after `node_id` did not answer: each node in turn, and then the leader."""
        names = ["", *sorted(node.node_id for node in self._of_broker(broker))]
        at = names.index(node_id) if node_id in names else -1
        return names[(at + 1) % len(names)]

    async def schedule(self, broker: str) -> schedule_grpc.ScheduleServiceAsyncStub:
        """A stub for messages for later at the storage leader of `broker`.

        Raises:
            Unreachable: it is not registered, or no nameserver answers.
        """
        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        return schedule_grpc.ScheduleServiceStub(self._channel(address))

    async def query(self, broker: str, node_id: str = "") -> query_grpc.QueryServiceAsyncStub:
        """A stub for looking messages up at `broker`.

        Args:
            node_id: Which of its nodes, if that is registered; else, and if empty, the leader.

        While nobody leads, at another node: it has what all in sync have.

        Raises:
            Unreachable: none is registered, or no nameserver answers.
        """
        there = [node.address for node in self._of_broker(broker) if node.node_id == node_id]
        try:
            address = there[0] if there else await self._address(pb.SERVICE_KIND_STORAGE, broker)
        except Unreachable:
            followers = self._of_broker(broker)
            if not followers:
                raise
            address = self._random.choice(followers).address
        return query_grpc.QueryServiceStub(self._channel(address))

    async def followers(self, broker: str) -> list[str]:
        """Node ids of the followers of `broker`, ascending, as a nameserver knows them now.

        Raises:
            Unreachable: no nameserver answers.
        """
        await self.refresh()
        return sorted(node.node_id for node in self._of_broker(broker) if not node.leader)

    async def offsets(self, group: str) -> offsets_grpc.OffsetsServiceAsyncStub:
        """A stub for the leader of the offsets set that keeps `group`.

        Raises:
            Unreachable: none is registered, or no nameserver answers.
        """
        return (await self.keeper(group)).stub

    async def keeper(self, group: str) -> OffsetsLeader:
        """As `offsets`, with the name of the set."""
        name = await self.offsets_set(group)
        address = await self._address(pb.SERVICE_KIND_OFFSETS, name)
        return OffsetsLeader(name, offsets_grpc.OffsetsServiceStub(self._channel(address)))

    async def offsets_set(self, group: str) -> str:
        """Name of the offsets set that keeps `group`, as far as is known; empty if there is none.

        Raises:
            Unreachable: no nameserver answers.
        """
        place = self._places.get(group)
        if place is not None:
            return place.offsets_set
        nodes = self._nodes or await self.refresh()
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
        self._places[group] = answer.placement
        return answer.placement.offsets_set

    def moved(self, error: GroupMoved) -> None:
        """Note where an offsets set says that a group is."""
        moved = error.detail
        known = self._places.get(moved.group)
        if known is None or known.move < moved.move:
            place = pb.Placement(offsets_set=moved.offsets_set, move=moved.move)
            self._places[moved.group] = place

    async def storage_replication(
        self, broker: str
    ) -> storage_replication_grpc.ReplicationServiceAsyncStub:
        """A stub for the replication of `broker`, at its leader; a node without followers has none.

        Raises:
            Unreachable: it is not registered, or no nameserver answers.
        """
        address = await self._address(pb.SERVICE_KIND_STORAGE, broker)
        return storage_replication_grpc.ReplicationServiceStub(self._channel(address))

    async def offsets_replication(
        self, offsets_set: str
    ) -> replication_grpc.ReplicationServiceAsyncStub:
        """A stub for the replication of an offsets set, at its leader; a node alone has none.

        Raises:
            Unreachable: none is registered, or no nameserver answers.
        """
        address = await self._address(pb.SERVICE_KIND_OFFSETS, offsets_set)
        return replication_grpc.ReplicationServiceStub(self._channel(address))

    async def lockmgr(self) -> lockmgr_grpc.LockmgrServiceAsyncStub:
        """A stub for the lockmgr leader.

        Raises:
            Unreachable: none is registered, or no nameserver answers.
        """
        address = await self._address(pb.SERVICE_KIND_LOCKMGR)
        return lockmgr_grpc.LockmgrServiceStub(self._channel(address))

    async def refresh(self) -> list[pb.Node]:
        """Ask a nameserver for the nodes again.

        Raises:
            Unreachable: no nameserver answers.
        """
        before = self._nodes
        async with self._refreshing:
            if self._nodes is not before:
                return self._nodes
            asked, answer = await self._ask(
                lambda stub: stub.DescribeCluster(
                    pb.DescribeClusterRequest(), timeout=CALL_TIMEOUT_S
                )
            )
            self._nodes = with_reachable_addresses(answer.nodes, asked)
            return self._nodes

    def doubt(self, error: BatonError) -> None:
        """Look the nodes up again before the next call, if the error says that somebody moved."""
        if isinstance(error, Unreachable | NoQuorum) or error.retry is Retry.REFRESH_ROUTE:
            self._nodes = []

    async def pause(self, error: BatonError, failures: int) -> None:
        """Wait before the next try, as long as `error` and the failures so far suggest.

        Looks the nodes up again if the error says that somebody moved.
        """
        if isinstance(error, Unreachable):
            # Who is away may come back elsewhere: a channel that tries meanwhile knows by then.
            for channel in self._channels.values():
                channel.get_state(try_to_connect=True)
        if isinstance(error, GroupMoved):
            self.moved(error)
        await asyncio.sleep(_BACKOFF.delay_ms(failures, self._random, error.retry_after_ms) / 1000)
        if isinstance(error, Unreachable | NoQuorum) or error.retry is Retry.REFRESH_ROUTE:
            if not isinstance(error, GroupMoved):
                self._places.clear()  # who could tell that a group has moved may be away
            try:
                await self.refresh()
            except BatonError as failure:
                log.debug("nodes not refreshed error=%s", failure)

    async def _ask(
        self, ask: Callable[[nameserver_grpc.NameserverServiceAsyncStub], Awaitable[T]]
    ) -> tuple[str, T]:
        """As `ask_nameserver`, with the address that has answered."""
        untried = len(self._addresses)
        while True:
            asked = self.nameserver_address
            try:
                return asked, await ask(self.nameserver())
            except grpc.aio.AioRpcError as failure:
                untried -= 1
                error = from_rpc_error(failure)
                if error.retry is not Retry.NEVER and self.nameserver_address == asked:
                    self.next_nameserver()
                if error.retry is Retry.NEVER or not untried:
                    raise error from failure

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self.connect(address)
        return channel

    async def _address(self, service: pb.ServiceKind.ValueType, replica_set: str = "") -> str:
        found = self._find(service, replica_set)
        if found is None:
            await self.refresh()
            found = self._find(service, replica_set)
        if found is None:
            name = pb.ServiceKind.Name(service).removeprefix("SERVICE_KIND_").lower()
            raise Unreachable(
                f"no {name} node {replica_set} is registered".replace("  ", " "),
                retry_after_ms=200,
                facts={"service": name},
            )
        return found

    def _of_broker(self, broker: str) -> list[pb.Node]:
        """The nodes of a broker, unless it is one that leads alone."""
        nodes = [
            node
            for node in self._nodes
            if node.service == pb.SERVICE_KIND_STORAGE and node.replica_set == broker
        ]
        return nodes if len(nodes) > 1 or not all(node.leader for node in nodes) else []

    def _find(self, service: pb.ServiceKind.ValueType, replica_set: str) -> str | None:
        """Of all that claim to lead, the one with the highest epoch does."""
        nodes = [
            node
            for node in self._nodes
            if node.service == service
            and node.leader
            and replica_set in ("", node.replica_set or node.node_id)
        ]
        return max(nodes, key=lambda node: node.epoch).address if nodes else None
