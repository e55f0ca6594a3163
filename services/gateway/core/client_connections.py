"""The connections of one client, and whether an answer that it was sent has arrived. Pure.

A server does not learn whether an answer has arrived. It learns, later, that a connection has
broken: when a call that is open there ends, or when the client continues by another connection. An
answer that was sent long before has arrived, as the connection answered pings since. Any later one
may be lost.

Calls of one client may come by several connections at once, as from a proxy that has a connection
for each call. So a connection counts as left only if all open calls came by the last one used.

A client may also end a call by itself. So a connection counts as broken only if all calls that were
open then have ended. One that goes on later proves nothing: a proxy may use its connection again.
"""

from __future__ import annotations

from dataclasses import dataclass

CONNECTIONS_MAX = 8
"""Connections of one client that are remembered, beyond those with open calls."""


@dataclass(slots=True, eq=False)
class Reception:
    """The answer to one receive call.

    Attributes:
        connection: The connection that it was sent by.
        sent_ms: When all of it was sent; 0 before.
        arrived: Whether the client has it for sure, as it has used one of its handles.
    """

    connection: str
    sent_ms: int = 0
    arrived: bool = False


class ClientConnections:
    """The connections of one client. Times are milliseconds of the monotonic clock."""

    __slots__ = ("_broken_ms", "_last", "_open", "_seen_ms")

    def __init__(self) -> None:
        self._last = ""
        self._open: dict[str, list[int]] = {}
        """When the open calls of each connection began."""
        self._seen_ms: dict[str, int] = {}
        self._broken_ms: dict[str, int] = {}

    @property
    def open_calls(self) -> int:
        """Number of open calls."""
        return sum(map(len, self._open.values()))

    def note(self, connection: str, now_ms: int) -> None:
        """Note that a call has begun."""
        self._last = connection
        self._seen_ms.pop(connection, None)
        self._seen_ms[connection] = now_ms
        _drop_oldest(self._seen_ms)

    def open(self, connection: str, begin_ms: int) -> None:
        """Note a call that stays open, until `close` with the same time."""
        self._open.setdefault(connection, []).append(begin_ms)

    def close(self, connection: str, begin_ms: int) -> None:
        """Note the end of an open call."""
        begins = self._open[connection]
        begins.remove(begin_ms)
        if not begins:
            del self._open[connection]

    def broke(self, connection: str, now_ms: int) -> None:
        """Note that a call ended before its answer, or a stream before its end."""
        self._broken_ms[connection] = now_ms
        _drop_oldest(self._broken_ms)

    def may_lack(self, reception: Reception, doubt_ms: int) -> bool:
        """Return whether an answer may not have arrived.

        Args:
            doubt_ms: Time within which a broken connection is noticed.
        """
        if reception.arrived:
            return False
        connection, sent_ms = reception.connection, reception.sent_ms
        broken_ms = self._broken_ms.get(connection)
        if (
            broken_ms is not None
            and broken_ms - doubt_ms <= sent_ms <= broken_ms
            and min(self._open.get(connection, ()), default=broken_ms) >= broken_ms
        ):
            return True
        if connection == self._last or self._open.keys() - {self._last}:
            return False
        seen_ms = self._seen_ms.get(connection)
        return seen_ms is not None and sent_ms >= seen_ms - doubt_ms


def _drop_oldest(times: dict[str, int]) -> None:
    if len(times) > CONNECTIONS_MAX:
        del times[next(iter(times))]
