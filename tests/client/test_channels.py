"""Channels to slow services.

Goal: a client waits for a connection that takes more than a second to open.
Method: a real server behind a proxy that delays each connection.

The end of channels: gRPC has the end of their calls before the event loop may be closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from batonmq._common.health import SERVING, ask_health
from batonmq._connection.channels import connect

WAIT_S = 1.4
"""Longer than the longest pause between two tries to connect, with its jitter."""


@asynccontextmanager
async def delaying_proxy(port: int) -> AsyncIterator[str]:
    """Yield the address of a proxy to `port` that delays each connection before it forwards."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(WAIT_S)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_pass(reader, upstream[1]))
            tasks.create_task(_pass(upstream[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def health_server() -> AsyncIterator[int]:
    """Yield the port of a server that serves."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def test_connection_that_takes_longer_than_a_second_is_opened() -> None:
    async with (
        health_server() as port,
        delaying_proxy(port) as address,
        connect(address) as channel,
    ):
        assert await ask_health(channel, timeout_s=20) == SERVING


def calls_without_an_end() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if "_AioCall" in repr(task)]


async def test_last_channel_of_a_loop_is_closed_when_grpc_has_the_end_of_all_calls() -> None:
    """A call without an end makes gRPC log an error in the next loop of the process."""
    async with health_server() as port:
        first, last = (connect(f"127.0.0.1:{port}") for _ in range(2))
        for channel in (first, first, last):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        await first.close()
        assert calls_without_an_end(), "the last one waits for all"
        await last.close()
        assert not calls_without_an_end()
