"""Ways to one etcd that get stuck when told so, as a member of it that stands still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from batonmq_server.runtime.etcd.session import EtcdSession
from tests.support.waiting import until


class StuckDoor:
    """Passes on what comes until it is stuck; then it takes everything, and answers nothing.

    Attributes:
        swallowed: Pieces that did not go through to etcd.
        answered: Pieces that came back from it.
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
            self.free()  # also who came in this moment
            return not self._serving

        await until(closed)

    def free(self) -> None:
        """Be stuck no more; who went through has to come again."""
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
        async for piece in _pieces(reader, writer):
            if self.stuck:
                self.swallowed += 1
            else:
                writer.write(piece)

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for piece in _pieces(reader, writer):
            if not self.stuck:
                self.answered += 1
                writer.write(piece)


class SlowDoor(StuckDoor):
    """Passes nothing back until `goes_on` is set; then all there is."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.goes_on = asyncio.Event()

    def free(self) -> None:
        """See the base."""
        self.goes_on.set()
        super().free()

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for piece in _pieces(reader, writer):
            await self.goes_on.wait()
            writer.write(piece)


async def _pieces(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[bytes]:
    """All that comes; then `writer` is closed."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65_536):
            yield piece
    writer.close()


class Doors:
    """Several, of which a session uses one at a time."""

    def __init__(self, doors: list[StuckDoor]) -> None:
        self._doors = doors
        self.endpoint = ",".join(door.address for door in doors)
        self._answered = [0] * len(doors)

    def stick_the_used(self, session: EtcdSession) -> StuckDoor:
        """Let the one get stuck that the session asks next; that one.

        What goes through does not tell which it is: on a loaded machine a session may turn to
        another one by itself, and what is late of the first still comes.
        """
        address = session._members.first.address
        (used,) = [door for door in self._doors if door.address == address]
        used.stuck = True
        self._answered = [door.answered for door in self._doors]
        return used

    def another_answers(self, stuck: StuckDoor) -> bool:
        """Whether an answer came through another one since `stick_the_used`.

        A question alone does not tell: a door that gets stuck while gRPC still shakes hands behind
        it is asked nothing.
        """
        return any(
            door.answered > was
            for door, was in zip(self._doors, self._answered, strict=True)
            if door is not stuck
        )


@asynccontextmanager
async def two_doors(endpoint: str) -> AsyncIterator[Doors]:
    """Two to the etcd at `endpoint`."""
    async with StuckDoor(endpoint) as one, StuckDoor(endpoint) as other:
        yield Doors([one, other])
