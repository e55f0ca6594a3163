"""Bounds the connections of one address to the port of the service.

gRPC bounds the connections of all clients before their handshake, but not those of one address, and
does not show its sockets. So this module finds the sockets among the descriptors of the process,
and shuts down the newest ones of an address that has too many; gRPC then sees that they ended.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from batonmq_server.runtime.descriptor_shortage import is_shortage

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
_OPEN = "/proc/self/fd"


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
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return str(ip)


class ConnectionLimiter:
    """Ends the connections of an address beyond its bound; run it as one task.

    Args:
        port: Port of the service.
        per_address: Maximum number of connections of one address.
        open_descriptors: Returns the number of open descriptors; while there are no more than
            `per_address`, nothing else is looked at.
    """

    def __init__(
        self,
        port: int,
        per_address: int,
        registry: CollectorRegistry,
        open_descriptors: Callable[[], int],
    ) -> None:
        self._port, self._per_address = port, per_address
        self._ages, self._open_descriptors = ConnectionAges(per_address), open_descriptors
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
        return dict(_accepted(self._port))

    def check(self) -> None:
        """Check once; blocks for some microseconds per open descriptor."""
        if self._open_descriptors() <= self._per_address:
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


def _accepted(port: int) -> Iterator[tuple[Connection, int]]:
    """Yield the connections that were accepted on `port`, with their descriptors."""
    for name in os.listdir(_OPEN):  # noqa: PTH208  thousands of names, which need no paths
        descriptor = int(name)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            # It belongs to gRPC, which may close it meanwhile: it is only read, and not closed.
            borrowed = socket.socket(fileno=descriptor)
        except OSError:
            continue
        try:
            if borrowed.getsockname()[1] != port:
                continue
            network = network_of(borrowed.getpeername()[0])
        except (OSError, ValueError, IndexError):
            continue  # it listens, has ended, or is no socket of a network
        finally:
            borrowed.detach()
        yield Connection(status.st_ino, network), descriptor


def end_connection(descriptor: int, inode: int) -> None:
    """Shut down the socket with this inode, unless the descriptor is another file by now."""
    with suppress(OSError):
        copy = os.dup(descriptor)  # stays the same file even if gRPC closes its descriptor
        try:
            if os.fstat(copy).st_ino == inode:
                ended = socket.socket(fileno=copy)
                try:
                    ended.shutdown(socket.SHUT_RDWR)
                finally:
                    ended.detach()
        finally:
            os.close(copy)
