"""Goal: a signal drains the consumer of a program that has no code for signals.

Method: each program is a process that gets the signal while it handles a message; the handler
continues when the test says so. The message must be committed, and the queue released.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

import pytest

from batonmq.admin.admin import Admin
from tests.client.group import scene
from tests.support.conditions import WAIT_S, until

ASYNCIO = """
import asyncio, sys
from batonmq import Consumer, ConsumerSettings

async def handle(message):
    print("handling", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("handled", flush=True)

async def handle_all(messages):
    for message in messages:
        await handle(message)

async def main():
    settings = ConsumerSettings(consume_from="first")
    nameserver, group, topic = sys.argv[1:]
    async with Consumer(nameserver, group, {topic: "*"}, settings) as consumer:
        %s
    print("closed", flush=True)

asyncio.run(main())
"""
BLOCKING = """
import sys
from batonmq import BlockingConsumer, ConsumerSettings

def handle(message):
    print("handling", flush=True)
    sys.stdin.readline()
    print("handled", flush=True)

settings = ConsumerSettings(consume_from="first")
nameserver, group, topic = sys.argv[1:]
with BlockingConsumer(nameserver, group, {topic: "*"}, settings) as consumer:
    %s
print("closed", flush=True)
"""
PROGRAMS = {
    "run": ASYNCIO % "await consumer.run(handle)",
    "run_batches": ASYNCIO % "await consumer.run_batches(handle_all)",
    "iteration": ASYNCIO % "async for message in consumer: await handle(message)",
    "blocking-run": BLOCKING % "consumer.run(handle)",
    "blocking-iteration": BLOCKING % "for message in consumer: handle(message)",
}


async def started(nameserver: str, program: str, group: str, topic: str) -> Process:
    """Start a program; return it when it handles a message."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, nameserver, group, topic, stdin=PIPE, stdout=PIPE
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
    assert line == b"handling\n"
    return process


async def ended(process: Process) -> tuple[int, bytes]:
    """Let the handler continue; return the exit status and the rest of the output."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return process.returncode, output


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_drains_the_consumer(
    nameserver: str, program: str, number: signal.Signals
) -> None:
    async with scene(nameserver, queue_count=1) as at, Admin(nameserver) as admin:
        await at.send(["0"])
        process = await started(nameserver, PROGRAMS[program], at.group, at.topic)
        process.send_signal(number)
        assert await ended(process) == (0, b"handled\nclosed\n")
        assert await at.lag() == 0
        locks = await admin.list_locks(at.group, at.topic)
        assert [lock.client_id for lock in locks] == [None], (
            "the next member would wait for the lease"
        )


async def test_second_signal_ends_the_program_at_once(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["0"])
        process = await started(nameserver, PROGRAMS["run"], at.group, at.topic)
        process.send_signal(signal.SIGTERM)

        async def killed() -> bool:
            # Not `send_signal`: it polls the process, and asyncio could no longer read its status.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            return process.returncode is not None

        await until(killed)
        assert process.returncode == -signal.SIGTERM
