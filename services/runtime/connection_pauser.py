"""Pauses connections of callers that ignore their quotas.

A rejected call costs the event loop almost as much as a small call that is served, and gRPC reads
whatever a client sends. So the input of such a connection is discarded by the kernel: the client
waits for the network, and costs nothing. After the pause the connection is shut down. If it were
shut down at once, the client would connect again at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from urllib.parse import unquote

from prometheus_client import CollectorRegistry, Counter

from batonmq_server.runtime.accepted_sockets import (
    AcceptedSocket,
    accepted_sockets,
    discard_input,
    end_connection,
    plain_address,
    reset_connection,
)
from batonmq_server.runtime.descriptor_shortage import is_shortage

log = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Longest pause. A peer that sends keep-alive pings closes the connection before its end, and so
does this server, because it gets no answers to its own pings."""
_INTERVAL_S = 0.02
"""Time between two searches for sockets."""

Peer = tuple[str, int]
"""IP address and port of a client."""


class ConnectionPauser:
    """Pauses connections by the address of their client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._wanted: set[Peer] = set()
        self._inodes: set[int] = set()
        self._woken = asyncio.Event()
        self._paused = Counter(
            "baton_connections_paused",
            "Connections whose input was discarded for some seconds, and which were then closed, "
            "because their caller ignored the wait that a quota demands.",
            registry=registry,
        )

    def pause(self, peer: str) -> None:
        """Pause a connection soon; `peer` is its client as gRPC names it."""
        if (parsed := parse_peer(peer)) is not None:
            self._wanted.add(parsed)
            self._woken.set()

    async def run(self, ports: Collection[int]) -> None:
        """Pause connections that were accepted on `ports`, until cancelled."""
        async with asyncio.TaskGroup() as pauses:
            while True:
                await self._woken.wait()
                self._woken.clear()
                wanted, self._wanted = self._wanted, set()
                try:
                    paused = await asyncio.to_thread(_pause, ports, wanted, frozenset(self._inodes))
                except OSError as error:
                    if not is_shortage(error):
                        raise
                    log.warning("connections not paused, no free descriptor error=%s", error)
                    paused = []
                if paused:
                    self._paused.inc(len(paused))
                    pauses.create_task(self._end_after_pause(paused))
                await asyncio.sleep(_INTERVAL_S)

    async def _end_after_pause(self, paused: Sequence[AcceptedSocket]) -> None:
        inodes = {one.inode for one in paused}
        self._inodes |= inodes
        await asyncio.sleep(PAUSE_S)
        for one in paused:
            reset_connection(one.descriptor, one.inode)
        self._inodes -= inodes


def parse_peer(peer: str) -> Peer | None:
    """Return address and port of `ipv4:10.0.0.1:50000` or `ipv6:%5B::1%5D:50000`; None if other."""
    scheme, _, rest = peer.partition(":")
    address, _, port = unquote(rest).rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return plain_address(address.strip("[]")), int(port)
    except ValueError:
        return None


def _pause(
    ports: Collection[int], wanted: Collection[Peer], paused_inodes: Collection[int]
) -> list[AcceptedSocket]:
    """Discard the input of connections that are not paused yet; return those to end later."""
    paused = []
    for one in accepted_sockets(ports):
        if (one.address, one.port) in wanted and one.inode not in paused_inodes:
            try:
                discard_input(one.descriptor, one.inode)
            except OSError as error:
                if is_shortage(error):
                    raise
                end_connection(one.descriptor, one.inode)
            else:
                paused.append(one)
    return paused
