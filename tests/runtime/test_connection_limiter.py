"""Goal: one address has at most its share of the connections, and keeps its oldest ones.

Method: the decision alone; then a real gRPC server with connections from three addresses.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from batonmq_server.runtime import connection_limiter
from batonmq_server.runtime.accepted_sockets import (
    AcceptedSocket,
    accepted_sockets,
    end_connection,
)
from batonmq_server.runtime.connection_limiter import (
    Connection,
    ConnectionAges,
    ConnectionLimiter,
    network_of,
)
from batonmq_server.runtime.descriptors import open_descriptors
from batonmq_server.runtime.server_options import SERVER_OPTIONS, with_connections_max
from tests.support.conditions import until


def connections(network: str, *inodes: int) -> list[Connection]:
    return [Connection(inode, network) for inode in inodes]


def test_newest_connections_of_an_address_beyond_its_bound_are_ended() -> None:
    ages = ConnectionAges(2)
    assert not ages.excess(connections("10.0.0.1", 9, 8) + connections("10.0.0.2", 7))
    again = connections("10.0.0.1", 3, 8, 9, 4) + connections("10.0.0.2", 7)
    assert ages.excess(again) == connections("10.0.0.1", 3, 4), "8 and 9 were there before"
    assert not ages.excess(connections("10.0.0.1", 3, 8))


def test_connection_from_before_the_rush_of_its_address_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers of sockets do not tell their ages: the kernel gives each processor its own."""
    inodes, closed = [9], list[int]()

    def accepted(_: object) -> list[AcceptedSocket]:
        return [AcceptedSocket(number, number, "10.0.0.1", 1) for number in inodes]

    monkeypatch.setattr(connection_limiter, "accepted_sockets", accepted)
    monkeypatch.setattr(connection_limiter, "end_connection", lambda _, inode: closed.append(inode))
    limiter = ConnectionLimiter([1], 3, CollectorRegistry(), lambda: len(inodes))
    limiter.check()
    inodes += [1, 2, 3, 4]
    limiter.check()
    assert closed == [3, 4], "9 was there before"


def test_address_of_ipv6_is_its_network_of_64_bits() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1")
    assert network_of("fe80::1%eth0") == "fe80::/64"


class Echo(grpc.GenericRpcHandler):
    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def echo(request: bytes, __: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


async def silent(exits: ExitStack, port: int, source: str, count: int) -> list[socket.socket]:
    loop, opened = asyncio.get_running_loop(), []
    for _ in range(count):
        one = exits.enter_context(socket.socket())
        one.setblocking(False)
        one.bind((source, 0))
        await loop.sock_connect(one, ("127.0.0.1", port))
        opened.append(one)
    return opened


def ended(one: socket.socket) -> bool:
    try:
        while one.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


async def test_connections_are_bounded_per_address_and_in_total_before_a_handshake() -> None:
    options = {**dict(SERVER_OPTIONS), "grpc.server_handshake_timeout_ms": 60_000}
    server = grpc.aio.server(options=with_connections_max(tuple(options.items()), 40))
    server.add_generic_rpc_handlers([Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    registry = CollectorRegistry()
    limiter = ConnectionLimiter([port], 10, registry, open_descriptors)
    with ExitStack() as exits:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as client:
            call: Any = client.unary_unary("/Test/Echo")
            assert await call(b"1", timeout=30) == b"1"
            strangers = await silent(exits, port, "127.0.0.2", 30)
            await until(lambda: len(limiter.connections()) == 31)
            more = await silent(exits, port, "127.0.0.3", 20)
            await until(lambda: sum(map(ended, more)) == 11)
            limiter.check()
            await until(lambda: sum(map(ended, strangers)) == 20)
            assert registry.get_sample_value("baton_connections_ended_total") == 20
            assert await call(b"2", timeout=30) == b"2", "another address keeps its connections"
            limiter.check()
            assert registry.get_sample_value("baton_connections_ended_total") == 20
    await server.stop(None)


def test_handshake_has_five_seconds() -> None:
    assert dict(SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] == 5_000


def test_connection_that_was_ended_is_not_listed_while_its_descriptor_is_open() -> None:
    with ExitStack() as exits:
        listener = exits.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        client = exits.enter_context(socket.create_connection(("127.0.0.1", port)))
        accepted, _ = listener.accept()
        exits.enter_context(accepted)
        (found,) = accepted_sockets([port])
        assert found.descriptor == accepted.fileno()
        end_connection(found.descriptor, found.inode)
        assert client.recv(1) == b""
        assert not list(accepted_sockets([port])), "it would be ended and counted again"


def test_descriptor_that_is_another_file_by_now_is_left_alone() -> None:
    left, right = socket.socketpair()
    with left, right:
        end_connection(left.fileno(), inode=0)
        left.sendall(b"x")
        assert right.recv(1) == b"x"


async def test_process_without_a_free_descriptor_goes_on_and_counts_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = 0

    def listdir(_: str) -> list[str]:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return []

    monkeypatch.setattr(connection_limiter, "INTERVAL_S", 0.01)
    monkeypatch.setattr(os, "listdir", listdir)
    limiter = ConnectionLimiter([1], 0, CollectorRegistry(), lambda: 1)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(limiter.run())
        await until(lambda: rounds >= 2)
        running.cancel()
