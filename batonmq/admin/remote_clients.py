"""Remote clients behind the gateways, and the messages that they hold."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

from baton.gateway.v1 import gateway_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonmq.admin._pagination import iter_pages
from batonmq.admin.admin import Admin
from batonmq.admin.reports import queue_from_pb, queue_to_pb
from batonmq.errors import BatonError, Unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteClient:
    """A client that calls a gateway. It may call several, and then each of them knows it.

    Attributes:
        gateway: Node id of the gateway.
        language: Language that it names, such as `JAVA`; empty if the gateway has forgotten the
            client and only knows what it holds.
        version: Version of its library; empty if it names none.
        host: Host name that it has named, else the address that it calls from.
        kind: producer, push_consumer, simple_consumer or pull_consumer; empty without settings.
        namespace: Namespace of its names; empty for none.
        identity: Its identity; empty while access control is off.
        group_names: Groups that it consumes for; at most 64.
        in_flight_count: Messages that it holds by this gateway; of one group, if one was asked for.
        oldest_lease_ms: Time since the oldest delivery that it holds; None if it holds none.
        silent_ms: Time since its last call began; None if the gateway has forgotten the client.
        open_call_count: Receive calls and telemetry streams that it has open.
    """

    gateway: str
    client_id: str
    language: str
    version: str
    host: str
    kind: str
    namespace: str
    identity: str
    group_names: tuple[str, ...]
    in_flight_count: int
    oldest_lease_ms: int | None
    silent_ms: int | None
    open_call_count: int


@dataclass(frozen=True, slots=True)
class RemoteClientReport:
    """The clients of all gateways, by gateway and client id.

    Attributes:
        members: Of a group: client id under which a gateway is a member, by gateway.
        problems: Errors of gateways that did not answer.
    """

    clients: tuple[RemoteClient, ...]
    members: Mapping[str, str]
    problems: tuple[str, ...]

    def behind(self, member_client_id: str) -> tuple[RemoteClient, ...]:
        """Return the clients that the member of this client id works for; none for a native one."""
        gateways = {name for name, member in self.members.items() if member == member_client_id}
        return tuple(client for client in self.clients if client.gateway in gateways)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMessage:
    """A message of a group that a gateway has started, and that is not acknowledged.

    Attributes:
        gateway: Node id of the gateway.
        state: waiting (for an earlier message of its message group), ready (for a receive call),
            leased (a client holds it) or ending (its outcome is being stored).
        attempt: Deliveries so far.
        message_group: Empty if its order does not matter.
        client_id: The client that holds it; empty if none does.
        language: Of the client, as are `version` and `host`.
        held_ms: Time since it was delivered; None unless a client holds it.
        lease_left_ms: Time until its lease expires; None unless a client holds it.
        renewed: Whether the gateway renews the lease as long as the client is alive.
    """

    gateway: str
    queue: QueueRef
    offset: int
    state: str
    attempt: int
    message_group: str
    client_id: str
    language: str
    version: str
    host: str
    held_ms: int | None
    lease_left_ms: int | None
    renewed: bool


@dataclass(frozen=True, slots=True)
class HeldMessageReport:
    """Held messages by gateway, queue and offset, and errors of gateways that did not answer."""

    messages: tuple[HeldMessage, ...]
    problems: tuple[str, ...]


class RemoteClients:
    """Reads what the gateways know of their clients. It changes nothing.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def clients(self, group: str = "", *, client_id: str = "") -> RemoteClientReport:
        """Return the clients that have called a gateway lately.

        Args:
            group: Only clients that consume for this group; empty for all, which needs the role
                admin of the cluster.
            client_id: Only the client of this id; empty for all.
        """
        clients: list[RemoteClient] = []
        members: dict[str, str] = {}
        problems: list[str] = []
        for gateway in await self._gateways():

            def page(page_token: str, gateway: str = gateway) -> Awaitable[pb.ListClientsResponse]:
                request = pb.ListClientsRequest(
                    group=group, client_id=client_id, page_token=page_token
                )

                async def ask(limit_s: float) -> pb.ListClientsResponse:
                    stub = self._admin.directory.gateway(gateway)
                    return await stub.ListClients(request, timeout=limit_s)

                return self._admin.ask(ask)

            try:
                async for answer in iter_pages(page):
                    clients += [_client(gateway, client) for client in answer.clients]
                    if answer.member_client_id:
                        members[gateway] = answer.member_client_id
            except Unreachable as error:
                problems.append(_problem(gateway, error))
        return RemoteClientReport(tuple(clients), members, tuple(problems))

    async def held_messages(
        self, group: str, *, queue: QueueRef | None = None, client_id: str = ""
    ) -> HeldMessageReport:
        """Return the messages of a group that gateways hold.

        Args:
            queue: Only of this queue; None for all.
            client_id: Only those that this client holds; empty for all.
        """
        messages: list[HeldMessage] = []
        problems: list[str] = []
        for gateway in await self._gateways():

            def page(
                page_token: str, gateway: str = gateway
            ) -> Awaitable[pb.ListHeldMessagesResponse]:
                request = pb.ListHeldMessagesRequest(
                    group=group,
                    queue=queue_to_pb(queue) if queue else None,
                    client_id=client_id,
                    page_token=page_token,
                )

                async def ask(limit_s: float) -> pb.ListHeldMessagesResponse:
                    stub = self._admin.directory.gateway(gateway)
                    return await stub.ListHeldMessages(request, timeout=limit_s)

                return self._admin.ask(ask)

            try:
                async for answer in iter_pages(page):
                    messages += [_message(gateway, message) for message in answer.messages]
            except Unreachable as error:
                problems.append(_problem(gateway, error))
        return HeldMessageReport(tuple(messages), tuple(problems))

    async def _gateways(self) -> list[str]:
        return await self._admin.ask(lambda _: self._admin.directory.gateways())


def _problem(gateway: str, error: BatonError) -> str:
    return f"gateway {gateway}: {error.reason}: {error.message}"


def _client(gateway: str, client: pb.RemoteClient) -> RemoteClient:
    kind = pb.ClientKind.Name(client.kind).removeprefix("CLIENT_KIND_").lower()
    return RemoteClient(
        gateway=gateway,
        client_id=client.client_id,
        language=client.language,
        version=client.version,
        host=client.host,
        kind="" if kind == "unspecified" else kind,
        namespace=client.namespace,
        identity=client.identity,
        group_names=tuple(client.groups),
        in_flight_count=client.in_flight_count,
        oldest_lease_ms=client.oldest_lease_ms if client.in_flight_count else None,
        silent_ms=client.silent_ms if client.silent_ms >= 0 else None,
        open_call_count=client.open_call_count,
    )


def _message(gateway: str, message: pb.HeldMessage) -> HeldMessage:
    held = message.state == pb.HELD_STATE_LEASED
    return HeldMessage(
        gateway=gateway,
        queue=queue_from_pb(message.queue),
        offset=message.offset,
        state=pb.HeldState.Name(message.state).removeprefix("HELD_STATE_").lower(),
        attempt=message.attempt,
        message_group=message.message_group,
        client_id=message.client.client_id,
        language=message.client.language,
        version=message.client.version,
        host=message.client.host,
        held_ms=message.held_ms if held else None,
        lease_left_ms=message.lease_left_ms if held else None,
        renewed=message.renewed,
    )
