"""The remote clients of a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq._common.clock import Clock
from batonmq_server.gateway.callers import VERSION_CHARACTERS_MAX, Caller
from batonmq_server.gateway.config import PING_INTERVAL_MS
from batonmq_server.gateway.core.client_connections import ClientConnections
from batonmq_server.gateway.core.message_leases import LeaseTerms

CLIENTS_MAX = 100_000
"""Clients that are remembered; calls of further ones are served, and leave nothing in memory."""
GROUPS_MAX = 1_000
"""Groups of one client that are remembered."""
HOST_CHARACTERS_MAX = 255
DOUBT_MS = PING_INTERVAL_MS + 10_000
"""Time within which a broken connection is noticed: that between two pings, and for the answer."""
_FORGET_AFTER = 4
"""A client is forgotten after so many of its timeouts."""


@dataclass(slots=True)
class RemoteClient:
    """A client that has called.

    Attributes:
        seen_ms: When it last called, by the monotonic clock.
        identity: Its identity; empty while access control is off.
        connections: Those that it calls by.
        groups: The groups that it consumes for.
        kind: What it is, as its settings say.
        version: Version of its library; empty if it has named none.
        host: Host name that it has named, else the address that it calls from.
        namespace: Namespace of its names; empty for none.
    """

    language: str
    seen_ms: int
    connections: ClientConnections = field(default_factory=ClientConnections)
    groups: set[str] = field(default_factory=set)
    identity: str = ""
    kind: pb.ClientType.ValueType = pb.CLIENT_TYPE_UNSPECIFIED
    version: str = ""
    host: str = ""
    namespace: str = ""

    @property
    def reads_queues(self) -> bool:
        """Whether it reads stored queues by itself."""
        return self.kind == pb.PULL_CONSUMER

    @contextmanager
    def calling(self, caller: Caller) -> Iterator[None]:
        """Count a receive call or a telemetry stream as open, from the last noted call on."""
        begin_ms = self.seen_ms
        self.connections.open(caller.peer, begin_ms)
        try:
            yield
        finally:
            self.connections.close(caller.peer, begin_ms)

    def describe(self, sent: pb.Settings) -> None:
        """Note what the settings of the client say about it."""
        self.kind = sent.client_type
        self.version = sent.user_agent.version[:VERSION_CHARACTERS_MAX] or self.version
        self.host = sent.user_agent.hostname[:HOST_CHARACTERS_MAX] or self.host


class RemoteClients:
    """The clients that called lately, by client id.

    Calls of a client that is not known are served. Only a client that reads queues by itself must
    have sent its settings, to get stored queues as its route.
    """

    def __init__(self, clock: Clock, timeout_ms: int) -> None:
        self._clock, self._timeout_ms = clock, timeout_ms
        self._clients: dict[str, RemoteClient] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def find(self, client_id: str) -> RemoteClient | None:
        """Return a client that called lately."""
        return self._clients.get(client_id)

    def silent_ms(self, client: RemoteClient) -> int:
        """Return the time since the last call of a client began."""
        return self._clock.monotonic_ms() - client.seen_ms

    def note(self, caller: Caller, group: str = "") -> RemoteClient:
        """Note a call.

        While too many clients are known, a further one is returned and not remembered.
        """
        now_ms = self._clock.monotonic_ms()
        client = self._clients.get(caller.client_id)
        if client is None:
            client = RemoteClient(
                caller.language,
                now_ms,
                identity=caller.identity,
                version=caller.version,
                host=_host_of(caller.peer),
                namespace=caller.namespace,
            )
            if len(self._clients) < CLIENTS_MAX:
                self._clients[caller.client_id] = client
        client.seen_ms = now_ms
        client.connections.note(caller.peer, now_ms)
        if group and len(client.groups) < GROUPS_MAX:
            client.groups.add(group)
        return client

    def identity_of(self, client_id: str) -> str | None:
        """Return the identity of a client; None if it is not known."""
        client = self._clients.get(client_id)
        return client.identity if client is not None else None

    def reads_queues(self, client_id: str) -> bool:
        """Whether a client reads stored queues by itself."""
        client = self._clients.get(client_id)
        return client is not None and client.reads_queues

    def is_alive(self, client_id: str) -> bool:
        """Whether a client called within the timeout, or has a call open."""
        client = self._clients.get(client_id)
        if client is None:
            return False
        open_calls = client.connections.open_calls
        return open_calls > 0 or self.silent_ms(client) < self._timeout_ms

    def broke(self, caller: Caller) -> None:
        """Note that the connection of a caller may be broken."""
        client = self._clients.get(caller.client_id)
        if client is not None:
            client.connections.broke(caller.peer, self._clock.monotonic_ms())

    def may_renew(self, terms: LeaseTerms) -> bool:
        """Whether a client is alive, and has what it was sent on these terms, as far as known."""
        client = self._clients.get(terms.client_id)
        if client is None or not self.is_alive(terms.client_id):
            return False
        reception = terms.reception
        return reception is None or not client.connections.may_lack(reception, DOUBT_MS)

    def consumes(self, group: str) -> bool:
        """Whether a client that is alive consumes for a group; it looks at all clients."""
        return any(
            group in client.groups and self.is_alive(client_id)
            for client_id, client in self._clients.items()
        )

    def remove(self, client_id: str) -> frozenset[str]:
        """Forget a client that has ended; return the groups that it consumed for."""
        client = self._clients.pop(client_id, None)
        return frozenset(client.groups) if client is not None else frozenset()

    def forget_silent(self) -> None:
        """Forget clients that were silent for long; called at intervals, as it looks at all."""
        limit_ms = _FORGET_AFTER * self._timeout_ms
        for client_id, client in list(self._clients.items()):
            if not client.connections.open_calls and self.silent_ms(client) > limit_ms:
                del self._clients[client_id]


def _host_of(peer: str) -> str:
    """Return the host of an address as gRPC writes it, such as `ipv4:10.0.0.7:4711`."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind
