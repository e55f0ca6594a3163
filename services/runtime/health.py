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
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batonmq.errors import NoQuorum
from batonmq_server.runtime.server_options import HEALTH_OPTIONS

log = logging.getLogger(__name__)

LIVE, STARTED, READY = "live", "started", "ready"
LOOK_INTERVAL_S = 0.5
NAME_CHARACTERS_MAX = 255
"""Of a name that is watched: it is kept for as long."""
WATCHES_MAX = 1_000
"""In one process."""
_Answer = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Any, Any]


class _Servicer(health_pb2_grpc.HealthServicer):
    """Unlike the one that gRPC brings it bounds what those who watch can make it keep."""

    def __init__(self) -> None:
        self._good: dict[str, bool] = {}
        self._changed = asyncio.Condition()
        self._watches = 0

    async def set(self, names: Iterable[str], good: bool) -> None:
        """From now on that is the answer for these names."""
        async with self._changed:
            self._good.update(dict.fromkeys(names, good))
            self._changed.notify_all()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Answer:
        if request.service not in self._good:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such name")
        return self._answer(request.service)

    async def List(self, request: object, context: Context) -> Any:
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined]
            statuses={name: self._answer(name) for name in self._good}
        )

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[_Answer]:
        name = request.service
        if len(name) > NAME_CHARACTERS_MAX:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no name is as long")
        if self._watches >= WATCHES_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watches")
        self._watches += 1
        try:
            while True:
                told = self._answer(name)
                yield told
                async with self._changed:
                    while self._answer(name) == told:
                        await self._changed.wait()
        finally:
            self._watches -= 1

    def _answer(self, name: str) -> _Answer:
        if name not in self._good:
            return _Answer(status=_Answer.SERVICE_UNKNOWN)
        return _Answer(status=_Answer.SERVING if self._good[name] else _Answer.NOT_SERVING)


class Health:
    """The answers of one process; the same at every port that gives them."""

    def __init__(self) -> None:
        self._servicer = _Servicer()
        self._names: frozenset[str] = frozenset({""})
        self._draining = False

    def add(self, server: grpc.aio.Server) -> None:
        """Answer at `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def starts(self) -> None:
        """The process lives, and does not serve yet."""
        await self._servicer.set((LIVE,), True)
        await self._servicer.set((STARTED, READY, *self._names), False)

    async def recovered(self) -> None:
        """The process has recovered what it keeps."""
        await self._servicer.set((STARTED,), True)

    async def serves(self, names: Iterable[str]) -> None:
        """Calls of the services of these names are taken."""
        self._names |= frozenset(names)
        await self._servicer.set(self._names, True)

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
                await self._servicer.set((READY,), now)
                before = now
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def drains(self) -> None:
        """From now on the process lives, and nothing else."""
        self._draining = True
        await self._servicer.set((READY, *self._names), False)


@asynccontextmanager
async def serve_health(host: str, port: int) -> AsyncIterator[Health]:
    """The answers of a process that starts, given from now on at a port that knows nothing else.

    Args:
        port: 0 for none.
    """
    answers = Health()
    await answers.starts()
    if not port:
        yield answers
        return
    server = grpc.aio.server(options=HEALTH_OPTIONS)
    answers.add(server)
    server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield answers
    finally:
        await server.stop(None)
