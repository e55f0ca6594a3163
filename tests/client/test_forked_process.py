"""Processes that are forked from a program with an open client.

Goal: they run, as long as they use no client. If they do, its calls fail with an error that names
the remedy, where gRPC would hang, or end the process.
Method: programs that fork, in processes of their own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from tests.client.twins import twins


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = os.environ.items()  # noqa: TID251  handed on, except for what is tested
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={name: value for name, value in inherited if not name.startswith("GRPC_")},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


PROGRAM = """
import asyncio, os, signal, sys
from batonmq import BlockingProducer
from batonmq._connection.channels import connect

async def use():
    await connect("127.0.0.1:1").close()

inherited = BlockingProducer("127.0.0.1:1")
inherited.__enter__()
asyncio.run(use())
child = os.fork()
if child == 0:
    signal.alarm(20)
    refused = []
    try:
        inherited.send("orders", b"")
    except Exception as error:
        refused.append(type(error).__name__)
    try:
        with BlockingProducer("127.0.0.1:1") as producer:
            producer.send("orders", b"")
    except Exception as error:
        refused.append(type(error).__name__)
    sys.stdout.write(" ".join(refused))
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
inherited.__exit__(None, None, None)
"""


POOL = """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from batonmq import BlockingProducer

with BlockingProducer(sys.argv[1]) as producer:
    producer.send("orders", b"")
    for _ in range(20):
        with ProcessPoolExecutor(4, get_context("fork")) as pool:
            assert list(pool.map(abs, range(8))) == list(range(8))
"""


async def test_workers_that_are_forked_beside_an_open_client_do_not_crash() -> None:
    async with twins(orders=1) as at:
        run = await asyncio.to_thread(run_program, POOL, at.address)
    assert run.returncode == 0, run.stderr


def test_client_of_a_forked_process_is_refused() -> None:
    run = run_program(PROGRAM)
    assert (run.stdout, run.returncode) == ("ForkedProcess ForkedProcess", 0), run.stderr
