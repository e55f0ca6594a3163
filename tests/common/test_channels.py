"""Goal: a long poll is not cut short, and one to a peer that no longer responds ends soon.

Method: a server process that delays its responses and is then stopped by SIGSTOP, so that its
machine still accepts packets.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from batonmq._common.clock import Clock
from batonmq._connection.channels import connect

SERVER = """
import asyncio, grpc.aio
from batonmq._connection.channels import OPTIONS

async def hold(request, context):
    print("holds", flush=True)
    await asyncio.sleep(float(request))
    return b"held"

async def main():
    server = grpc.aio.server(options=OPTIONS)
    method = grpc.unary_unary_rpc_method_handler(hold)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("Test", {"Hold": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""


@asynccontextmanager
async def server() -> AsyncIterator[tuple[int, int, asyncio.StreamReader]]:
    """Yield the process id, the port, and a stream with a line for each call."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.pid, int(await process.stdout.readline()), process.stdout
    finally:
        process.kill()
        await process.wait()


async def held(channel: grpc.aio.Channel, hold_s: float) -> grpc.StatusCode:
    """Return the status of a call to which the server responds after `hold_s`."""
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/Test/Hold")
    return await method(b"%f" % hold_s, timeout=40).code()


@pytest.mark.long
@pytest.mark.e2e
async def test_long_poll_may_last_longer_than_the_keepalive_timeout() -> None:
    async with server() as (_, port, _), connect(f"127.0.0.1:{port}") as channel:
        assert await held(channel, 9) is grpc.StatusCode.OK


@pytest.mark.e2e
async def test_long_poll_ends_when_its_server_stops_responding() -> None:
    clock = Clock()
    async with (
        server() as (pid, port, lines),
        connect(f"127.0.0.1:{port}") as channel,
        asyncio.TaskGroup() as tasks,
    ):
        holding = tasks.create_task(held(channel, 40))
        await lines.readline()
        os.kill(pid, signal.SIGSTOP)
        begin_ms = clock.monotonic_ms()
        assert await holding is grpc.StatusCode.UNAVAILABLE
        assert clock.monotonic_ms() - begin_ms < 15_000
