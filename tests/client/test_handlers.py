"""Handlers with faults.

Goal: the message of a faulty handler is redelivered or becomes a dead letter, its queue continues,
and the process can end.
Method: the in-memory broker; retry delays in virtual time; another process for the last test.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from batonmq import ConsumerSettings, ReceivedMessage, RetryLater, Suspend
from batonmq._consumer.handler_adapters import Handler
from batonmq._core.records import PROPERTIES_BYTES_MAX, encode_properties
from batonmq.errors import InvalidArgument, TopicNotFound
from batonmq_server.testing import MemoryBroker, run_virtual

SETTINGS: dict[str, Any] = {"consume_from": "first", "retries_max": 2}
DAY_MS = 24 * 3_600_000


def dead_letter_after(
    handler: Handler, *, properties: Mapping[str, str] | None = None, **settings: Any
) -> list[ReceivedMessage]:
    """Send one message, run until nothing is left to do, and return the dead letter."""

    async def run() -> list[ReceivedMessage]:
        async with MemoryBroker() as broker:
            await broker.create_topic("orders")
            async with (
                broker.producer() as producer,
                broker.consumer(
                    "billing", {"orders": "*"}, ConsumerSettings(**SETTINGS | settings)
                ) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(consumer.run(handler))
                await producer.send("orders", b"order", properties=properties)
                await broker.settled("billing")
                consumer.stop()
            try:
                return await broker.messages("%DLQ%billing")
            except TopicNotFound:
                return []

    return run_virtual(run())


@pytest.mark.parametrize("order", ["none", "queue"])
def test_cancellation_of_a_task_that_a_handler_awaits_is_a_failure(
    order: str,
) -> None:
    attempts = []

    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempts)
        if message.attempts < 3:
            work = asyncio.get_running_loop().create_future()
            work.cancel()
            await work

    assert dead_letter_after(handle, order=order) == []
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize("order", ["none", "queue", "key"])
@pytest.mark.parametrize("fault", ["cancellation", "timeout"])
def test_message_whose_handler_caught_the_failure_of_a_task_group_is_handled_again(
    order: str, fault: str
) -> None:
    """Before Python 3.13 such a task counts as cancelled from then on."""
    attempts = []

    async def fail() -> None:
        raise ValueError("on purpose")

    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempts)
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        if message.attempts < 3:
            work = asyncio.get_running_loop().create_future()
            if fault == "cancellation":
                work.cancel()
            await work

    assert dead_letter_after(handle, order=order, handle_timeout_ms=1_000) == []
    assert attempts == [1, 2, 3]


def test_message_with_properties_at_the_limit_becomes_a_dead_letter_with_its_history() -> None:
    properties = {"a": "x" * (PROPERTIES_BYTES_MAX - 3)}
    assert len(encode_properties(properties)) == PROPERTIES_BYTES_MAX

    async def handle(_: ReceivedMessage) -> None:
        raise ValueError("\N{PILE OF POO}" * 1_000)

    (dead,) = dead_letter_after(handle, properties=properties)
    assert dead.properties["a"] == properties["a"]
    assert dead.properties["baton.attempts"] == "3"
    assert dead.properties["baton.error"].endswith("\N{PILE OF POO}")


@pytest.mark.parametrize("delay_ms", [-1, 39 * DAY_MS + 1, 1.5])
def test_delay_beyond_the_limit_of_storage_is_refused_in_the_handler(delay_ms: Any) -> None:
    for result in (RetryLater, Suspend):
        with pytest.raises(InvalidArgument, match="39 days"):
            result(delay_ms)

    async def handle(_: ReceivedMessage) -> RetryLater:
        return RetryLater(delay_ms)

    (dead,) = dead_letter_after(handle)
    assert dead.properties["baton.reason"] == "failed"


PROGRAM = """
import asyncio, threading
from batonmq import ConsumerSettings
from batonmq_server.testing import MemoryBroker

async def main():
    async with MemoryBroker() as broker:
        await broker.create_topic("orders")
        settings = ConsumerSettings(consume_from="first")
        async with broker.consumer("billing", {"orders": "*"}, settings) as consumer:
            loop = asyncio.get_running_loop()

            def hang(message):
                loop.call_soon_threadsafe(consumer.stop)
                threading.Event().wait()

            async with broker.producer() as producer:
                await producer.send("orders", b"order")
            await consumer.run(hang)
            await consumer.close(drain_ms=0)
    print("closed", flush=True)

asyncio.run(main())
"""


def test_process_ends_though_a_handler_hangs_in_a_thread() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=True
    )
    assert ended.stdout == "closed\n"
