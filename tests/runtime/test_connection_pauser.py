"""Goal: nothing of a paused connection is read, it is closed after the pause, others are served.

Method: a real gRPC server with two clients, over IPv4 and IPv6.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from batonmq_server.runtime import connection_pauser
from batonmq_server.runtime.accepted_sockets import accepted_sockets, discard_input
from batonmq_server.runtime.connection_pauser import ConnectionPauser, parse_peer
from tests.support.conditions import until


@pytest.mark.parametrize(
    ("peer", "parsed"),
    [
        ("ipv4:10.0.0.1:50000", ("10.0.0.1", 50_000)),
        ("ipv6:%5B::1%5D:50000", ("::1", 50_000)),
        ("ipv6:[2001:db8::1]:7", ("2001:db8::1", 7)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:7", ("10.0.0.1", 7)),
        ("ipv6:%5Bfe80::1%25eth0%5D:7", ("fe80::1", 7)),
        ("unix:/run/x", None),
        ("ipv4:nonsense:7", None),
        ("ipv4:10.0.0.1:", None),
        ("", None),
    ],
)
def test_peer_is_read_as_grpc_writes_it(peer: str, parsed: tuple[str, int] | None) -> None:
    assert parse_peer(peer) == parsed


class Recorder(grpc.GenericRpcHandler):
    """Returns the client of each call, and counts the calls of each."""

    def __init__(self) -> None:
        self.peers: list[str] = []

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def call(_: bytes, context: Any) -> bytes:
            self.peers.append(context.peer())
            return b""

        return grpc.unary_unary_rpc_method_handler(call)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("filters", [True, False])
async def test_paused_connection_is_not_read_and_closed_after_the_pause(
    host: str, monkeypatch: pytest.MonkeyPatch, filters: bool
) -> None:
    """Without filters of the system the connection is closed at once."""

    def refused(*_: object) -> None:
        raise OSError("Protocol not available")

    monkeypatch.setattr(connection_pauser, "PAUSE_S", 1.0 if filters else 3_600)
    if not filters:
        monkeypatch.setattr(connection_pauser, "discard_input", refused)
    server, recorder, registry = grpc.aio.server(), Recorder(), CollectorRegistry()
    server.add_generic_rpc_handlers([recorder])
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    pauser, loop = ConnectionPauser(registry), asyncio.get_running_loop()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(f"{host}:{port}", options) as rude,
        grpc.aio.insecure_channel(f"{host}:{port}", options) as polite,
        asyncio.TaskGroup() as tasks,
    ):
        pausing = tasks.create_task(pauser.run([port]))
        rude_call: Any = rude.unary_unary("/Test/Call")
        polite_call: Any = polite.unary_unary("/Test/Call")
        await rude_call(b"", timeout=30)
        await polite_call(b"", timeout=30)
        first, other = recorder.peers
        begin_s = loop.time()
        pauser.pause(first)
        if filters:
            paused = "baton_connections_paused_total"
            await until(lambda: registry.get_sample_value(paused) == 1)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await rude_call(b"", timeout=30)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert loop.time() - begin_s >= 0.9
            assert recorder.peers == [first, other], "nothing is read during the pause"
        else:
            await until(lambda: first not in clients(port))
        await polite_call(b"", timeout=30)
        await rude_call(b"", timeout=30, wait_for_ready=True)
        assert recorder.peers[2] == other, "another connection is not paused"
        assert recorder.peers[3] not in (first, other), "the client connects again"
        pausing.cancel()
    await server.stop(None)


def clients(port: int) -> set[str]:
    """Return the clients of the open connections, as gRPC names them."""
    return {
        f"ipv6:%5B{one.address}%5D:{one.port}" if ":" in one.address else
        f"ipv4:{one.address}:{one.port}"
        for one in accepted_sockets([port])
    }  # fmt: skip


def test_descriptor_that_is_another_file_by_now_is_not_filtered() -> None:
    with pytest.raises(OSError, match="another file"):
        discard_input(0, inode=0)
