"""Goal: the polling thread of gRPC reads the sockets, unless the environment says something else.

Method: programs of their own, because gRPC reads the setting once in a process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from batonmq._connection import event_engine

PROGRAM = """
import asyncio, os
from batonmq._connection.channels import connect

async def main():
    channel = connect("127.0.0.1:1")
    channel.get_state(try_to_connect=True)
    await channel.close()

asyncio.run(main())
print(os.environ.get("GRPC_EXPERIMENTS"))
"""


def run(**given: str) -> tuple[str, str]:
    """Return what a program with a channel writes to its output and to its standard error."""
    inherited = os.environ.items()  # noqa: TID251  handed on, except for what is tested
    environment = {k: v for k, v in inherited if not k.startswith("GRPC_")} | given
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def test_installed_grpc_knows_the_setting() -> None:
    assert run() == (event_engine.POLLING_THREAD_READS, "")


@pytest.mark.parametrize("value", ["", "event_engine_client"])
def test_value_of_the_environment_stays(value: str) -> None:
    assert run(GRPC_EXPERIMENTS=value) == (value, "")


@pytest.mark.parametrize(("version", "chosen"), [("1.85.9", True), ("1.86.0", False)])
def test_version_that_may_not_know_the_setting_gets_none(
    version: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(event_engine.VARIABLE, raising=False)
    monkeypatch.setattr("grpc.__version__", version)
    event_engine.choose()
    assert (os.getenv(event_engine.VARIABLE) is not None) is chosen
