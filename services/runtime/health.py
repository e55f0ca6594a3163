"""What a process answers to health checks (grpc.health.v1).

`live`: the event loop turns, nothing else; neither peers nor the disk can change that.
`started`: what has to be recovered is recovered.
`ready`: registered, and caught up with whoever it follows. The empty name and those of the services
say whether calls are taken: from the registration to the drain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from batonmq.common.errors import NoQuorum

log = logging.getLogger(__name__)

LIVE, STARTED, READY = "live", "started", "ready"
LOOK_INTERVAL_S = 0.5
_STATUS = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class Health:
    """The answers of one process; the same at every port that gives them."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names: frozenset[str] = frozenset({""})
        self._draining = False

    def add(self, server: grpc.aio.Server) -> None:
        """Answer at `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def starts(self) -> None:
        """The process lives, and does not serve yet."""
        await self._set((LIVE,), True)
        await self._set((STARTED, READY, *self._names), False)

    async def recovered(self) -> None:
        """The process has recovered what it keeps."""
        await self._set((STARTED,), True)

    async def serves(self, names: Iterable[str]) -> None:
        """Calls of the services of these names are taken."""
        self._names |= frozenset(names)
        await self._set(self._names, True)

    async def follow(
        self, registered: Callable[[], bool], caught_up: Callable[[], Awaitable[bool]]
    ) -> None:
        """Tell for ever whether the process is ready; to be run as one task.

        While etcd does not answer nobody knows, and what was said last stays.

        Args:
            registered: Whether its entry stands among the nodes.
            caught_up: Whether it has all that it is to follow; waits until that can be told.
        """
        before = False
        while not self._draining:
            try:
                now = registered() and await caught_up()
            except NoQuorum as error:
                log.debug("whether this node is ready is not known error=%s", error)
                now = before
            if now != before and not self._draining:
                log.info("ready" if now else "not ready")
                await self._set((READY,), now)
                before = now
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def drains(self) -> None:
        """From now on the process lives, and nothing else."""
        self._draining = True
        await self._set((READY, *self._names), False)

    async def _set(self, names: Iterable[str], good: bool) -> None:
        for name in names:
            await self._servicer.set(name, _STATUS[good])


@asynccontextmanager
async def health_of(host: str, port: int) -> AsyncIterator[Health]:
    """The answers of a process that starts, given from now on at a port that knows nothing else.

    Args:
        port: 0 for none.
    """
    answers = Health()
    await answers.starts()
    if not port:
        yield answers
        return
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    answers.add(server)
    server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield answers
    finally:
        await server.stop(None)
