"""Processes that are forked from a program with an open client.

Goal: they run, as long as they use no client.
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
