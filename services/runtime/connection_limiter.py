"""Bounds the connections of one address to the port of the service.

gRPC bounds the connections of all clients before their handshake, but not those of one address. So
this module shuts down the newest sockets of an address that has too many; gRPC then sees that they
ended.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from batonmq_server.runtime.accepted_sockets import (
    accepted_sockets,
    end_connection,
    plain_address,
)
from batonmq_server.runtime.descriptor_shortage import is_shortage

log = logging.getLogger(__name__)

INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of a client.

    Attributes:
        inode: Number of the socket, unique while it is open.
        network: Address of the client; of IPv6 the network of 64 bits, which one host may own.
    """

    inode: int
    network: str


class ConnectionAges:
    """Decides which connections exceed the bound of their address.

    Args:
        per_address: Maximum number of connections of one address.
    """

    def __init__(self, per_address: int) -> None:
        self._per_address = per_address
        self._seen: dict[int, int] = {}
        self._round = 0

    def excess(self, connections: Iterable[Connection]) -> list[Connection]:
        """Return the connections to end: the newest of each address that has too many.

        Args:
            connections: All connections that are open now.
        """
        self._round += 1
        by_network: dict[str, list[Connection]] = defaultdict(list)
        seen: dict[int, int] = {}
        for one in connections:
            seen[one.inode] = self._seen.get(one.inode, self._round)
            by_network[one.network].append(one)
        self._seen = seen
        ended: list[Connection] = []
        for group in by_network.values():
            if len(group) > self._per_address:
                group.sort(key=lambda one: (seen[one.inode], one.inode))
                ended += group[self._per_address :]
        return ended


def network_of(address: str) -> str:
    """Return the IPv4 address, or the network of 64 bits of an IPv6 address."""
    ip = ipaddress.ip_address(plain_address(address))
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return str(ip)


class ConnectionLimiter:
    """Ends the connections of an address beyond its bound; run it as one task.

    Args:
        ports: Ports of the service.
        per_address: Maximum number of connections of one address.
        open_descriptors: Returns the number of open descriptors. While it stays the same, and is
            not above `per_address`, nothing else is looked at.
    """

    def __init__(
        self,
        ports: Collection[int],
        per_address: int,
        registry: CollectorRegistry,
        open_descriptors: Callable[[], int],
    ) -> None:
        self._ports, self._per_address = ports, per_address
        self._ages, self._open_descriptors = ConnectionAges(per_address), open_descriptors
        self._descriptors = 0
        self._ended = Counter(
            "baton_connections_ended",
            "Connections closed because their remote address had too many connections.",
            registry=registry,
        )

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await asyncio.to_thread(self.check)
            except OSError as error:
                if not is_shortage(error):
                    raise
                log.warning("connections not counted, no free file descriptor error=%s", error)

    def connections(self) -> dict[Connection, int]:
        """Return the open connections of clients, with their descriptors."""
        return {
            Connection(one.inode, network_of(one.address)): one.descriptor
            for one in accepted_sockets(self._ports)
        }

    def check(self) -> None:
        """Check once; blocks for some microseconds per open descriptor."""
        before, self._descriptors = self._descriptors, self._open_descriptors()
        if self._descriptors == before <= self._per_address:
            return
        connections = self.connections()
        ended = self._ages.excess(connections)
        for one in ended:
            end_connection(connections[one], one.inode)
        if ended:
            self._ended.inc(len(ended))
            log.warning(
                "address has too many connections ended=%d address=%s limit=%d",
                len(ended),
                ended[-1].network,
                self._per_address,
            )
