"""Goal: each message is handled once by several processes, and again if its process is killed.

Method: real processes on one SQLite file, one Redis and one PostgreSQL; `kill -9` during a handler.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

import pytest

from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq.idempotence import idempotent
from tests.idempotence.messages import message
from tests.idempotence.racer import CLAIM_MS, DONE_MS
from tests.idempotence.stores import aging_store
from tools.docs.pages import ROOT

pytestmark = pytest.mark.e2e

Names = Callable[[], str]


async def racer(*arguments: str) -> Process:
    """Start a process of `tests.idempotence.racer`; return it when it is ready."""
    command = (sys.executable, "-m", "tests.idempotence.racer", *arguments)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_each_message_is_handled_by_exactly_one_of_two_processes(
    shared_url: str, namespaces: Names
) -> None:
    name, count = namespaces(), 100
    racers = [await racer(shared_url, name, str(count)) for _ in range(2)]
    async with asyncio.TaskGroup() as tasks:
        ends = [tasks.create_task(each.communicate(b"go\n")) for each in racers]
    handled = [int(line) for end in ends for line in end.result()[0].split()]
    assert sorted(handled) == list(range(count))
    assert [each.returncode for each in racers] == [0, 0]


async def test_message_of_a_killed_process_is_handled_after_its_claim_expires(
    shared_url: str, namespaces: Names
) -> None:
    name = namespaces()
    victim = await racer(shared_url, name, "1", "hang")
    assert victim.stdin is not None
    assert victim.stdout is not None
    victim.stdin.write(b"go\n")
    assert await victim.stdout.readline() == b"0\n"
    victim.kill()
    await victim.communicate()
    booked = []

    async def book(message: ReceivedMessage) -> None:
        booked.append(message.offset)

    async with aging_store(shared_url, name) as store_access:
        handle = idempotent(book, store_access.store, claim_ms=CLAIM_MS, done_ms=DONE_MS)
        await store_access.pass_ms(CLAIM_MS // 2)
        assert isinstance(await handle(message()), RetryLater)
        assert booked == []
        await store_access.pass_ms(CLAIM_MS // 2)
        assert await handle(message()) is None
        assert await handle(message()) is None
        assert booked == [0]


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("RedisStore", "redis", "redis"), ("SqlStore", "sqlalchemy", "sql")],
)
def test_store_without_its_package_names_the_extra_to_install(
    name: str, package: str, extra: str
) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import batonmq.idempotence as i\n"
    program += f"i.idempotent, i.MemoryStore\nfrom batonmq.idempotence import {name}"
    command = (sys.executable, "-c", program)
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert process.returncode == 1
    last = process.stderr.splitlines()[-1]
    assert last == (
        f"ImportError: {name} needs the package {package}: pip install 'batonmq[{extra}]'"
    )
