"""Whether connections to an address are refused."""

from __future__ import annotations

import asyncio
import socket

from batonmq._common import timeouts

TIMEOUT_S = 1.0


async def refuses(address: str) -> bool:
    """Return whether nothing listens at host:port: every address of the host refuses connections.

    Only a refusal says so. An accepted connection, a timeout, a missing route and an unknown name
    do not.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with timeouts.timeout(TIMEOUT_S):
            addresses = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            for family, kind, protocol, _, target in addresses:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)
                    try:
                        await loop.sock_connect(probe, target)
                    except ConnectionRefusedError:
                        continue
                    return False
    except (OSError, ValueError, TimeoutError):
        return False
    return bool(addresses)
