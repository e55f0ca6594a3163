"""Goal: a silent connection is closed, at each step; an idle client can still call.

Method: bytes of HTTP/2 made by hand over real connections to a server with the options of services,
with shortened timeouts; and a real client, for the other half.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from batonmq._common.clock import Clock
from batonmq._connection.channels import OPTIONS, connect
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.runtime.server_options import (
    HEALTH_OPTIONS,
    SERVER_OPTIONS,
    with_ping_interval,
)
from batonmq_server.runtime.tls import server_credentials

TIMES = {
    "grpc.server_handshake_timeout_ms": 500,
    "grpc.keepalive_time_ms": 200,
    "grpc.keepalive_timeout_ms": 200,
    "grpc.http2.ping_timeout_ms": 200,
}
AGE = {"grpc.max_connection_age_ms": 100}
"""The only shortened timeout in tests with a real client, which may be slow. Only the health port
closes connections that answer pings."""
SLOWER = {name: 10 * ms for name, ms in TIMES.items()}
"""Timeouts for a connection that must send something before it is closed."""
PATIENCE_S = 30
"""Far longer than the shortened timeouts, and shorter than the defaults of gRPC."""
PATH = "/Test/Hold"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def fields(**values: str) -> bytes:
    """Header fields, spelled out; a leading `_` is a colon, the others are dashes."""
    named = {name.replace("_", ":", 1) if name[0] == "_" else name: values[name] for name in values}
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
    return b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs
    )


SETTINGS, PING, ACK = 4, 6, 1
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
CALL = frame(
    1,
    4,
    1,
    fields(
        _method="POST",
        _scheme="http",
        _path=PATH,
        _authority="test",
        te="trailers",
        content_type="application/grpc",
    ),
) + frame(0, 1, 1, bytes(5))


def shortened(
    options: tuple[tuple[str, int], ...], times: Mapping[str, int]
) -> list[tuple[str, int]]:
    assert times.keys() <= dict(options).keys()
    return list({**dict(options), **times}.items())


class Holding:
    """Holds calls with an empty request, and answers the others at once."""

    def __init__(self) -> None:
        self.held, self.ended = asyncio.Event(), asyncio.Event()

    async def call(self, request: bytes, _: Any) -> bytes:
        if not request:
            self.held.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        return request


@asynccontextmanager
async def serving(
    options: tuple[tuple[str, int], ...],
    credentials: grpc.ServerCredentials | None = None,
    times: Mapping[str, int] = TIMES,
) -> AsyncIterator[tuple[int, Holding]]:
    holding = Holding()
    handler: Any = grpc.unary_unary_rpc_method_handler(holding.call)
    server = grpc.aio.server(options=shortened(options, times))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("Test", {"Hold": handler}),)
    )
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port, holding
    finally:
        await server.stop(None)


async def cut_off(port: int, sent: bytes) -> None:
    """Wait until the server closes a connection that sent only these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(4096):
                pass
    except ConnectionResetError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("options", [SERVER_OPTIONS, HEALTH_OPTIONS])
@pytest.mark.parametrize("sent", [b"", HELLO])
async def test_connection_without_a_call_is_closed(
    options: tuple[tuple[str, int], ...], sent: bytes
) -> None:
    async with serving(options) as (port, _):
        await cut_off(port, sent)


async def test_connection_with_an_unfinished_handshake_is_closed(tmp_path: Path) -> None:
    security = CertificateAuthority(tmp_path).issue(
        CertificateSubject(name="node", hosts=("127.0.0.1",))
    )
    async with serving(SERVER_OPTIONS, server_credentials(security)) as (port, _):
        await cut_off(port, b"")
        await cut_off(port, b"\x16\x03\x01\x02\x00\x01")


async def test_connection_that_answers_no_pings_is_closed() -> None:
    async with serving(SERVER_OPTIONS, times=SLOWER) as (port, holding):
        await cut_off(port, HELLO + CALL)
        assert holding.held.is_set()
        async with asyncio.timeout(PATIENCE_S):
            await holding.ended.wait()


async def time_of_pings(port: int, count: int) -> float:
    """Return how long `count` pings take to come to a client that answers them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin_ms = Clock().monotonic_ms()
    writer.write(HELLO + CALL)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while count:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                if kind in (SETTINGS, PING) and not flags & ACK:
                    writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
                    count -= kind == PING
    finally:
        writer.close()
    return (Clock().monotonic_ms() - begin_ms) / 1_000


async def test_server_with_a_longer_ping_interval_pings_at_that_interval() -> None:
    often = {**dict(SERVER_OPTIONS), "grpc.keepalive_time_ms": 100}
    rarely = with_ping_interval(tuple(often.items()), 700)
    async with serving(rarely, times={}) as (port, _):
        # The first one may be the ping that measures the connection.
        assert await time_of_pings(port, 3) > 1.3


async def test_client_whose_connection_is_closed_can_still_call() -> None:
    async with (
        serving(HEALTH_OPTIONS, times=AGE) as (port, _),
        connect(f"127.0.0.1:{port}") as channel,
    ):
        method: Any = channel.unary_unary(PATH)
        rest_s, closed = 0.08, 0
        async with asyncio.timeout(PATIENCE_S):
            while closed < 5:  # also while it is being closed
                assert await method(b"asked", timeout=PATIENCE_S) == b"asked"
                await asyncio.sleep(rest_s)
                closed += channel.get_state() is grpc.ChannelConnectivity.IDLE
                rest_s *= 1.03


async def test_client_that_calls_rarely_gets_no_line_of_grpc_on_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A client with two calls that far apart does not disconnect by itself any more."""
    faster = 25  # the shortest time that gRPC takes for a client is a second
    cuts = "grpc.max_connection_idle_ms", "grpc.max_connection_age_ms"
    let_go = "grpc.client_idle_timeout_ms"
    times = {name: ms // faster for name, ms in SERVER_OPTIONS if name in cuts}
    let_go_ms = dict(OPTIONS)[let_go] // faster
    async with (
        serving(SERVER_OPTIONS, times=times) as (port, _),
        connect(f"127.0.0.1:{port}", tuple(shortened(OPTIONS, {let_go: let_go_ms}))) as channel,
    ):
        method: Any = channel.unary_unary(PATH)
        capfd.readouterr()  # what connections of earlier tests in this process have caused
        for _ in range(2):
            assert await method(b"asked", timeout=PATIENCE_S) == b"asked"
            await asyncio.sleep(1.2 * let_go_ms / 1000)
        await asyncio.sleep(3 * let_go_ms / 1000)
        assert await method(b"asked", timeout=PATIENCE_S) == b"asked"
        # Read before the server stops: its end cancels all calls, which gRPC may log at the client.
        written = capfd.readouterr().err
    assert "goaway" not in written.lower()
