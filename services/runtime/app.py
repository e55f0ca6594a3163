"""What a service hands to the runtime: its servicers, background loops and shutdown hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from batonmq_server.runtime.access.rules import AccessRules

Loop = Callable[[], Coroutine[Any, Any, None]]


async def _nothing() -> None:
    return


async def _true() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherPorts:
    """Ports that a process serves on beside its main one.

    Attributes:
        ports: Their numbers.
        tls_address: host:port of one with TLS and without client certificates; empty for none.
        plain_address: host:port of one without TLS; empty for none.
    """

    ports: Sequence[int] = ()
    tls_address: str = ""
    plain_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A service, ready to be served by a process.

    Attributes:
        servicers: Full proto service name to the function that adds the servicer to a server.
        rules: Access rules of all methods of these servicers.
        own_admission: Names of services whose servicers check callers by these rules themselves,
            because their contract has its own form of credentials and refusals.
        listen: Binds further ports of the server.
        loops: Background loops, each run as one task until the process stops. If one raises, the
            process ends with status 1: no service continues with a dead flusher.
        ping_interval_ms: How often each connection is pinged; 0 for the default. A dead peer is
            noticed at the next ping.
        long_polls: Names of methods with calls that may wait with nothing to do; SIGTERM ends these
            calls with NOT_SERVING.
        epoch: Registered with the node; of two nodes of one name, the one with the higher epoch
            is the current one.
        leader: Registered with the node; False if the service registers its leadership itself.
        room: Registered with the node: its machine room; empty for none.
        replica_set: Registered with the node: the replica set it belongs to; empty for none.
        data_dir: Data directory of the process, which no other process uses; None for none.
        caught_up: Whether the service has all data that it follows; waits until this is known.
        finish: Called first when the process stops, while it still takes calls: the service ends
            what its clients have to end.
        resign: Called next: the node gives up its leadership.
        drain: Called after the server has stopped taking calls: finish, flush, release.
    """

    servicers: Mapping[str, Callable[[grpc.aio.Server], None]]
    rules: AccessRules = field(default_factory=dict)
    own_admission: frozenset[str] = frozenset()
    listen: Callable[[grpc.aio.Server], FurtherPorts] = lambda _: FurtherPorts()
    loops: Sequence[Loop] = ()
    ping_interval_ms: int = 0
    long_polls: frozenset[str] = frozenset()
    epoch: int = 0
    leader: bool = True
    room: str = ""
    replica_set: str = ""
    data_dir: Path | None = None
    caught_up: Callable[[], Awaitable[bool]] = _true
    finish: Callable[[], Awaitable[None]] = _nothing
    resign: Callable[[], None] = lambda: None
    drain: Callable[[], Awaitable[None]] = _nothing
