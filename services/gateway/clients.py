"""The remote clients of a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from batonmq._common.clock import Clock
from batonmq_server.gateway.callers import Caller

CLIENTS_MAX = 100_000
_FORGET_AFTER = 4
"""A client is forgotten after so many of its timeouts."""


@dataclass(slots=True)
class RemoteClient:
    """A client that has called.

    Attributes:
        seen_ms: When it last called, by the monotonic clock.
        identity: Its identity; empty while access control is off.
        open_calls: Receive calls and telemetry streams that are open.
        groups: The groups that it consumes for.
        reads_queues: Whether it reads stored queues by itself, as its settings say.
    """

    language: str
    seen_ms: int
    open_calls: int = 0
    groups: set[str] = field(default_factory=set)
    identity: str = ""
    reads_queues: bool = False


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

    def note(self, caller: Caller, group: str = "") -> RemoteClient:
        """Note a call."""
        now_ms = self._clock.monotonic_ms()
        client = self._clients.get(caller.client_id)
        if client is None:
            if len(self._clients) >= CLIENTS_MAX:
                self.forget_silent()
            client = self._clients[caller.client_id] = RemoteClient(
                caller.language, now_ms, identity=caller.identity
            )
        client.seen_ms = now_ms
        if group:
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
        return client.open_calls > 0 or self._silent_ms(client) < self._timeout_ms

    def remove(self, client_id: str) -> frozenset[str]:
        """Forget a client that has ended; return the groups that it consumed for."""
        client = self._clients.pop(client_id, None)
        return frozenset(client.groups) if client is not None else frozenset()

    def forget_silent(self) -> None:
        """Forget clients that were silent for long."""
        limit_ms = _FORGET_AFTER * self._timeout_ms
        for client_id, client in list(self._clients.items()):
            if not client.open_calls and self._silent_ms(client) > limit_ms:
                del self._clients[client_id]

    def _silent_ms(self, client: RemoteClient) -> int:
        return self._clock.monotonic_ms() - client.seen_ms
