"""Goal: silent connections to the metrics port hold neither threads nor the port.

Method: a real server with a shortened timeout, and connections that send nothing.
"""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

from batonmq_server.runtime.metrics_server import SILENCE_S, MetricsServer
from tests.support.conditions import until_now

CONNECTIONS = 8


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    return registry


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, registry, CONNECTIONS, silence_s=60)
    server.start()
    yield server
    server.stop()


def scrape(server: MetricsServer) -> str:
    address = f"http://127.0.0.1:{server.server_port}/metrics"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read(), "utf-8")


def connect(exits: ExitStack, server: MetricsServer, count: int) -> list[socket.socket]:
    address = ("127.0.0.1", server.server_port)
    return [exits.enter_context(socket.create_connection(address, 30)) for _ in range(count)]


def test_scrape_gets_through_while_all_connections_are_silent(server: MetricsServer) -> None:
    before = set(threading.enumerate())  # one of an earlier test may end meanwhile

    def added() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    with ExitStack() as exits:
        silent = connect(exits, server, 50)
        assert "answer 42.0" in scrape(server)
        assert silent[0].recv(1) == b"", "the oldest connection is closed for a newer one"
        until_now(lambda: len(added()) <= CONNECTIONS)
    until_now(lambda: not added())


def test_silent_connection_is_closed(registry: CollectorRegistry) -> None:
    server = MetricsServer("127.0.0.1", 0, registry, CONNECTIONS, silence_s=0.05)
    server.start()
    with ExitStack() as exits:
        (silent,) = connect(exits, server, 1)
        assert silent.recv(1) == b""
        until_now(lambda: server.connection_count == 0)
        assert "answer 42.0" in scrape(server)
    server.stop()
    assert SILENCE_S <= 5


def test_port_in_use_is_named_in_the_error(registry: CollectorRegistry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"in use: metrics_port 127.0.0.1:{port}$"):
            MetricsServer("127.0.0.1", port, registry, CONNECTIONS)
