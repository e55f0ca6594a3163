"""Goal: the polling thread of gRPC reads the sockets, unless the environment says something else.

Method: programs of their own, because gRPC reads its variables once in a process, when it is
imported. One counts how often the threads of the pool wake while messages go back and forth.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

from batonmq._connection import grpc_environment

ECHO = """
import asyncio, os
from pathlib import Path
from batonmq._connection.channels import connect
import grpc

EXCHANGES = 500

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        async def echo(requests, context):
            async for request in requests:
                yield request
        return grpc.stream_stream_rpc_method_handler(echo)

def wakeups():
    tasks = [task for task in Path("/proc/self/task").iterdir()
             if (task / "comm").read_text().strip() == "event_engine"]
    return sum(int(line.split()[1]) for task in tasks
               for line in (task / "status").read_text().splitlines()
               if line.startswith("voluntary_ctxt_switches"))

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}")
    call = channel.stream_stream("/echo")()
    for number in range(EXCHANGES + 1):
        if number == 1:
            before = wakeups()
        await call.write(b"x")
        await call.read()
    print((wakeups() - before) / EXCHANGES)
    await channel.close()
    await server.stop(None)

asyncio.run(main())
"""
IMPORT = """
import os, sys

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "grpc._cython":
            print(os.environ.get("GRPC_EXPERIMENTS"), os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))

sys.meta_path.insert(0, Watch())
import {module}
import grpc
"""


def run(program: str, **given: str) -> tuple[str, list[str]]:
    """Return what a program writes to its output, and the errors that gRPC logs."""
    inherited = os.environ.items()  # noqa: TID251  handed on, except for what is tested
    environment = {k: v for k, v in inherited if not k.startswith("GRPC_")} | given
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if line[:1] == "E"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_messages_do_not_wake_the_threads_of_the_pool() -> None:
    wakeups, errors = run(ECHO)
    assert float(wakeups) < 0.5
    assert errors == []


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_messages_wake_the_threads_of_the_pool_if_the_environment_says_so() -> None:
    wakeups, errors = run(ECHO, GRPC_EXPERIMENTS="")
    assert float(wakeups) > 1
    assert errors == []


@pytest.mark.parametrize(
    "module",
    [
        "batonmq",
        "batonmq.kombu",
        "batonmq.__main__",
        "batonmq._connection.channels",
        "batonmq_server.storage.app",
        "batonmq_server.console.app",
        "batonmq_server.local.fork_server",
    ],
)
def test_variables_are_set_before_grpc_is_imported(module: str) -> None:
    printed, _ = run(IMPORT.format(module=module))
    assert printed == f"{grpc_environment.POLLING_THREAD_READS} 0"


@pytest.mark.parametrize("value", ["", "event_engine_client"])
def test_value_of_the_environment_stays(value: str) -> None:
    given = {"GRPC_EXPERIMENTS": value, "GRPC_ENABLE_FORK_SUPPORT": "1"}
    assert run(IMPORT.format(module="batonmq"), **given)[0] == f"{value} 1".strip()


@pytest.mark.parametrize(
    ("version", "chosen"), [((1, 85), True), ((1, 86), False), ((2, 0), False)]
)
def test_version_that_may_not_know_the_setting_gets_none(
    version: tuple[int, ...], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(grpc_environment.EXPERIMENTS, raising=False)
    monkeypatch.setattr(grpc_environment, "grpc_version", lambda: version)
    grpc_environment.prepare()
    assert (os.getenv(grpc_environment.EXPERIMENTS) is not None) is chosen


def test_version_is_that_of_the_installed_package() -> None:
    assert grpc_environment.grpc_version() == tuple(
        map(int, metadata.version("grpcio").split(".")[:2])
    )


def test_version_of_a_package_that_does_not_tell_it_is_unmeasured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_environment, "find_spec", lambda name: None)
    assert grpc_environment.grpc_version() >= grpc_environment.FIRST_UNMEASURED
