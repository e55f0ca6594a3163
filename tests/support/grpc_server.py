"""A real gRPC server on a free port, behind the same edge as in production."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._connection.channels import OPTIONS, connect
from batonmq_server.runtime.call_streams import ServerWithCalls
from batonmq_server.runtime.interceptor import EdgeInterceptor


@asynccontextmanager
async def serving(*adders: Callable[[grpc.aio.Server], None]) -> AsyncIterator[grpc.aio.Channel]:
    """Yield a channel to a server with the servicers that `adders` add."""
    async with serving_at(*adders) as address, connect(address) as channel:
        yield channel


@asynccontextmanager
async def serving_at(
    *adders: Callable[[grpc.aio.Server], None], registry: CollectorRegistry | None = None
) -> AsyncIterator[str]:
    """Yield the address of a server with the servicers that `adders` add.

    Args:
        registry: Gets the metrics of the calls.
    """
    edge = EdgeInterceptor(Clock(), registry or CollectorRegistry())
    server = grpc.aio.server(interceptors=[edge], options=OPTIONS)
    with_calls = ServerWithCalls(server, edge)
    for add in adders:
        add(with_calls)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
