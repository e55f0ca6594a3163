"""Health checks of a process (grpc.health.v1).

- `live`: the event loop runs; peers and disk have no influence.
- `started`: the recovery is done.
- `ready`: the process is registered, and has caught up with what it follows.
- The empty name and the names of services: calls are accepted, from registration to drain.
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
from batonmq_server.runtime.request_decoding import DecodingInterceptor
from batonmq_server.runtime.server_options import HEALTH_OPTIONS, with_connections_max

log = logging.getLogger(__name__)

LIVE, STARTED, READY = "live", "started", "ready"
CHECK_INTERVAL_S = 0.5
NAME_CHARACTERS_MAX = 255
"""Longest name that can be watched: it is kept in memory during the watch."""
WATCHES_MAX = 1_000
"""Limit of watches per process."""
_Answer = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Any, Any]


class _Servicer(health_pb2_grpc.HealthServicer):
    """The health service, with bounded memory for watches, unlike the servicer of gRPC."""

    def __init__(self) -> None:
        self._good: dict[str, bool] = {}
        self._changed = asyncio.Condition()
        self._watches = 0

    async def set(self, names: Iterable[str], good: bool) -> None:
        """Set the status of these names."""
        async with self._changed:
            self._good.update(dict.fromkeys(names, good))
            self._changed.notify_all()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Answer:
        if request.service not in self._good:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such health check")
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
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a name has at most {NAME_CHARACTERS_MAX} characters",
            )
        if self._watches >= WATCHES_MAX:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {WATCHES_MAX} watches"
            )
        self._watches += 1
        try:
            while True:
                sent = self._answer(name)
                yield sent
                async with self._changed:
                    while self._answer(name) == sent:
                        await self._changed.wait()
        finally:
            self._watches -= 1

    def _answer(self, name: str) -> _Answer:
        if name not in self._good:
            return _Answer(status=_Answer.SERVICE_UNKNOWN)
        return _Answer(status=_Answer.SERVING if self._good[name] else _Answer.NOT_SERVING)


class Health:
    """The health of one process, the same on each server that it is added to."""

    def __init__(self) -> None:
        self._servicer = _Servicer()
        self._names: frozenset[str] = frozenset({""})
        self._draining = False

    def add(self, server: grpc.aio.Server) -> None:
        """Add the health service to `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_live(self) -> None:
        """Set `live`; nothing else is true yet."""
        await self._servicer.set((LIVE,), True)
        await self._servicer.set((STARTED, READY, *self._names), False)

    async def set_started(self) -> None:
        """Set `started`: the recovery is done."""
        await self._servicer.set((STARTED,), True)

    async def set_serving(self, names: Iterable[str]) -> None:
        """Set the names of services, and the empty name: calls are accepted."""
        self._names |= frozenset(names)
        await self._servicer.set(self._names, True)

    async def follow_readiness(
        self, registered: Callable[[], bool], caught_up: Callable[[], Awaitable[bool]]
    ) -> None:
        """Keep `ready` up to date until the drain; run as one task.

        While etcd does not answer, the last status stays.

        Args:
            registered: Returns whether the node's entry is in etcd.
            caught_up: Returns whether the process has everything that it follows; may wait.
        """
        before = False
        while not self._draining:
            try:
                now = registered() and await caught_up()
            except NoQuorum as error:
                log.debug("readiness is not known error=%s", error)
                now = before
            if now != before and not self._draining:
                log.info("ready" if now else "not ready")
                await self._servicer.set((READY,), now)
                before = now
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def set_draining(self) -> None:
        """Reset everything but `live`, for good: the process is stopping."""
        self._draining = True
        await self._servicer.set((READY, *self._names), False)


@asynccontextmanager
async def serve_health(host: str, port: int, connections_max: int) -> AsyncIterator[Health]:
    """Yield the health of a starting process, served on a port of its own from now on.

    Args:
        port: Port for health checks only; 0 for none.
        connections_max: Maximum number of connections to that port.
    """
    status = Health()
    await status.set_live()
    if not port:
        yield status
        return
    server = grpc.aio.server(
        interceptors=[DecodingInterceptor()],
        options=with_connections_max(HEALTH_OPTIONS, connections_max),
    )
    status.add(server)
    server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield status
    finally:
        await server.stop(None)
