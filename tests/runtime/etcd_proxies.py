"""Proxies to one etcd that can get stuck, like a member that does not respond."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from batonmq_server.runtime.etcd.session import EtcdSession
from tests.support.conditions import until


class StickingProxy:
    """Forwards bytes until it is stuck; then it reads all bytes and sends none.

    Attributes:
        swallowed: Pieces that were not forwarded to etcd.
        answered: Pieces that were returned from it.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint.split(":")
        self.stuck = False
        self.swallowed = self.answered = self._serving = 0
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

        def closed() -> bool:
            self.free()  # also connections that arrive in this moment
            return not self._serving

        await until(closed)

    def free(self) -> None:
        """Stop being stuck; open connections are aborted."""
        self.stuck = False
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving += 1
        try:
            await self._serve_until_closed(reader, writer)
        finally:
            self._serving -= 1

    async def _serve_until_closed(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        etcd_reader, etcd_writer = await asyncio.open_connection(*self._endpoint)
        ends = {writer, etcd_writer}
        self._open |= ends
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_back(etcd_reader, writer))
            await self._pass_on(reader, etcd_writer)
        for end in ends:
            with contextlib.suppress(ConnectionError):
                await end.wait_closed()
        self._open -= ends

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for piece in pieces(reader, writer):
            if self.stuck:
                self.swallowed += 1
            else:
                writer.write(piece)

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for piece in pieces(reader, writer):
            if not self.stuck:
                self.answered += 1
                writer.write(piece)


class SlowProxy(StickingProxy):
    """Returns no bytes until `goes_on` is set; then all of them."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.goes_on = asyncio.Event()

    def free(self) -> None:
        """See the base."""
        self.goes_on.set()
        super().free()

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for piece in pieces(reader, writer):
            await self.goes_on.wait()
            writer.write(piece)


async def pieces(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[bytes]:
    """Yield all that arrives; then close `writer`."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65_536):
            yield piece
    writer.close()


class EtcdProxies:
    """Several proxies, of which a session uses one at a time."""

    def __init__(self, proxies: list[StickingProxy]) -> None:
        self._proxies = proxies
        self.endpoint = ",".join(proxy.address for proxy in proxies)
        self._answered = [0] * len(proxies)

    def stick_the_used(self, session: EtcdSession) -> StickingProxy:
        """Make the proxy stuck that the session calls next, and return it.

        The traffic does not show which one it is: on a loaded machine a session may switch by
        itself, and late bytes of the first still arrive.
        """
        address = session._members.first.address
        (used,) = [proxy for proxy in self._proxies if proxy.address == address]
        used.stuck = True
        self._answered = [proxy.answered for proxy in self._proxies]
        return used

    def another_answers(self, stuck: StickingProxy) -> bool:
        """Return whether an answer came through another proxy since `stick_the_used`.

        A request is no sign: a proxy that gets stuck during the handshake of gRPC gets none.
        """
        return any(
            proxy.answered > count_before
            for proxy, count_before in zip(self._proxies, self._answered, strict=True)
            if proxy is not stuck
        )


@asynccontextmanager
async def two_proxies(endpoint: str) -> AsyncIterator[EtcdProxies]:
    """Two proxies to the etcd at `endpoint`."""
    async with StickingProxy(endpoint) as one, StickingProxy(endpoint) as other:
        yield EtcdProxies([one, other])
