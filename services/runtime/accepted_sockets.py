"""The sockets of accepted connections, found among the descriptors of the process.

gRPC does not show its sockets. They are shut down, or their input is discarded; they are never
closed here, because they belong to gRPC.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_OPEN = "/proc/self/fd"
_SO_ATTACH_FILTER = 26
"""Socket option of Linux; the module `socket` does not have it."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter with one instruction: of each packet, keep nothing."""
_OPEN_STATES = (1, 8)
"""States of TCP in which this side has not ended the connection: ESTABLISHED and CLOSE_WAIT."""


@dataclass(frozen=True, slots=True)
class AcceptedSocket:
    """A connection of a client.

    Attributes:
        inode: Number of the socket, unique while it is open.
        address: IP address of the client.
        port: Port of the client.
    """

    descriptor: int
    inode: int
    address: str
    port: int


def accepted_sockets(ports: Collection[int]) -> Iterator[AcceptedSocket]:
    """Yield the connections that were accepted on `ports` and that this side has not ended.

    Takes some microseconds per descriptor.
    """
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
            if borrowed.getsockname()[1] not in ports:
                continue
            if borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _OPEN_STATES:
                continue  # it was shut down, and gRPC has not closed it yet
            address, client_port, *_ = borrowed.getpeername()
        except (OSError, ValueError, IndexError):
            continue  # it listens, has ended, or is no socket of a network
        finally:
            borrowed.detach()
        yield AcceptedSocket(descriptor, status.st_ino, plain_address(address), client_port)


def plain_address(address: str) -> str:
    """Return an IP address without its zone; an IPv4 address in IPv6 form as IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ip)


def end_connection(descriptor: int, inode: int) -> None:
    """Shut down the socket with this inode, unless the descriptor is another file by now."""
    with suppress(OSError), _copy(descriptor, inode) as ended:
        ended.shutdown(socket.SHUT_RDWR)


def reset_connection(descriptor: int, inode: int) -> None:
    """As `end_connection`, for a socket with discarded input.

    Its data are never acknowledged, so an ordinary end would wait behind them. Once gRPC closes the
    socket, the client gets a reset, at once.
    """
    with suppress(OSError), _copy(descriptor, inode) as ended:
        ended.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ended.shutdown(socket.SHUT_RDWR)


def discard_input(descriptor: int, inode: int) -> None:
    """Drop all packets that arrive at the socket with this inode, as if the network lost them.

    Nothing wakes the process for them, and the client stops sending. Does nothing if the descriptor
    is another file by now.

    Raises:
        OSError: the system has no such filters, or the socket has ended.
    """
    program = ctypes.create_string_buffer(_DROP_ALL)
    with _copy(descriptor, inode) as filtered:
        filtered.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
        )


@contextmanager
def _copy(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """Yield the socket under a descriptor of its own: gRPC may close the other one meanwhile."""
    copy = os.dup(descriptor)
    try:
        if os.fstat(copy).st_ino != inode:
            raise OSError(f"descriptor {descriptor} is another file now")
        borrowed = socket.socket(fileno=copy)
        try:
            yield borrowed
        finally:
            borrowed.detach()
    finally:
        os.close(copy)
