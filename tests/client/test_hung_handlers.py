"""Goal: an operator resets a queue past a handler that hangs, and sees which message hangs.

Method: the in-memory broker, most tests in virtual time. The handler of offset 1 hangs, and the
group is reset to offset 2. Plain functions hang in real threads, so their tests take real time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from batonmq import Consumer, ConsumerSettings, ReceivedMessage
from batonmq._core.reset_targets import ToOffset
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq.admin.operation import Operation
from batonmq.admin.resets import Resets, ResetScope
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.support.conditions import until

GROUP, TOPIC = "billing", "orders"
HANDLE_TIMEOUT_S = 15 * 60


@dataclass
class HungConsumer:
    """A consumer with three messages, of which the handler of offset 1 hangs.

    Attributes:
        started: Offsets in the order of their starts, with the time of the loop.
        ended: Offset and result of each handler that ended.
    """

    broker: MemoryBroker
    admin: Admin
    consumer: Consumer
    started: list[tuple[int, float]] = field(default_factory=list)
    ended: list[tuple[int, str]] = field(default_factory=list)

    @property
    def offsets(self) -> list[int]:
        return [offset for offset, _ in self.started]

    def start(self, message: ReceivedMessage) -> None:
        self.started.append((message.offset, asyncio.get_running_loop().time()))

    async def handle(self, message: ReceivedMessage) -> None:
        """Hang at offset 1."""
        self.start(message)
        try:
            if message.offset == 1:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.append((message.offset, "cancelled"))
            raise
        self.ended.append((message.offset, "returned"))

    async def reset(self, to: int) -> float:
        """Reset the group; return the time of the loop after it."""
        resets = Resets(self.admin)
        plan = await resets.plan(GROUP, ToOffset(to), ResetScope())
        await resets.reset(plan, Operation("operator", "offset 1 hangs"))
        return asyncio.get_running_loop().time()

    async def diagnosis(self) -> QueueDiagnosis:
        (diagnosis,) = await self.admin.why_stuck(GROUP, TOPIC)
        return diagnosis


@asynccontextmanager
async def hung_consumer(*, owned: bool = True, **settings: Any) -> AsyncIterator[HungConsumer]:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        async with broker.producer() as producer:
            for number in range(3):
                await producer.send(TOPIC, b"%d" % number)
        chosen = ConsumerSettings(consume_from="first", **settings)
        if not owned:
            async with broker.consumer(GROUP, {TOPIC: "*"}, chosen):
                pass
            await admin.update_group(GROUP, ownership="off")
        async with broker.consumer(GROUP, {TOPIC: "*"}, chosen, client_id="worker-1") as consumer:
            yield HungConsumer(broker, admin, consumer)
            await consumer.close(drain_ms=0)


@asynccontextmanager
async def running(at: HungConsumer, work: Any) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work)
        yield
        at.consumer.stop()


@pytest.mark.parametrize("batches", [False, True], ids=["run", "run_batches"])
@pytest.mark.parametrize("order", ["none", "queue"])
def test_reset_past_a_hung_handler_cancels_it_and_frees_the_queue_within_a_second(
    batches: bool, order: str
) -> None:
    async def check() -> None:
        async with hung_consumer(order=order) as at:

            async def handle_all(messages: Sequence[ReceivedMessage]) -> None:
                for message in messages:
                    await at.handle(message)

            work = (
                at.consumer.run_batches(handle_all, messages_max=1)
                if batches
                else at.consumer.run(at.handle)
            )
            async with running(at, work):
                await asyncio.sleep(60)
                assert at.offsets == [0, 1]
                reset_s = await at.reset(2)
                await asyncio.sleep(HANDLE_TIMEOUT_S)
                assert at.offsets == [0, 1, 2]
                assert at.started[-1][1] - reset_s < 1.0
                assert at.ended == [(0, "returned"), (1, "cancelled"), (2, "returned")]

    run_virtual(check())


def test_reset_without_ownership_cancels_a_hung_handler() -> None:
    async def check() -> None:
        async with hung_consumer(owned=False) as at, running(at, at.consumer.run(at.handle)):
            await asyncio.sleep(60)
            assert at.offsets == [0, 1]
            reset_s = await at.reset(2)
            await asyncio.sleep(10)
            assert at.offsets == [0, 1, 2]
            assert at.started[-1][1] - reset_s < 1.0

    run_virtual(check())


def test_handler_that_ignores_its_cancellation_keeps_its_slot() -> None:
    async def check() -> None:
        async with hung_consumer(concurrency=2) as at:
            proceed = asyncio.Event()
            running_count = 0
            running_max = 0

            async def handle(message: ReceivedMessage) -> None:
                nonlocal running_count, running_max
                running_count += 1
                running_max = max(running_max, running_count)
                at.start(message)
                while message.offset == 1 and not proceed.is_set():
                    try:
                        await proceed.wait()
                    except asyncio.CancelledError:
                        continue
                await asyncio.sleep(1)
                running_count -= 1

            async with running(at, at.consumer.run(handle)):
                await asyncio.sleep(60)
                await at.reset(2)
                await asyncio.sleep(10)
                assert at.offsets == [0, 1, 2]
                proceed.set()
                await asyncio.sleep(10)
                async with at.broker.producer() as producer:
                    for _ in range(4):
                        await producer.send(TOPIC, b"later")
                running_max = 0
                await asyncio.sleep(20)
                assert at.offsets == [0, 1, 2, 3, 4, 5, 6]
                assert running_max == 1, "two messages of a queue were handled at once"

    run_virtual(check())


def test_why_stuck_names_the_handled_message_its_member_and_its_time() -> None:
    async def check() -> None:
        async with hung_consumer() as at, running(at, at.consumer.run(at.handle)):
            await asyncio.sleep(60)
            diagnosis = await at.diagnosis()
            assert diagnosis.reason == "HEAD_OF_LINE"
            assert "worker-1 has been handling offset 1 (message broker-0-" in diagnosis.message
            assert diagnosis.evidence["running_offset"] == "1"
            assert 55_000 <= int(diagnosis.evidence["running_ms"]) <= 61_000

    run_virtual(check())


def test_why_stuck_names_the_message_of_another_queue_during_an_iteration() -> None:
    async def check() -> None:
        async with MemoryBroker() as broker, broker.admin() as admin:
            await broker.create_topic(TOPIC, 2)
            settings = ConsumerSettings(consume_from="first")
            async with broker.producer() as producer:
                for number in range(4):
                    await producer.send(TOPIC, b"%d" % number)
            async with broker.consumer(
                GROUP, {TOPIC: "*"}, settings, client_id="worker-1"
            ) as consumer:
                message = await anext(consumer)
                await asyncio.sleep(60)
                diagnoses = await admin.why_stuck(GROUP, TOPIC)
            other = next(one for one in diagnoses if one.queue_id != message.queue.queue_id)
            assert f"handling offset {message.offset} of {message.queue} for " in other.message
            assert 55_000 <= int(other.evidence["running_ms"]) <= 61_000

    run_virtual(check())


class HangingFunction:
    """A plain function as handler that hangs at offset 1 until it is released.

    Attributes:
        offsets: Offsets in the order of their starts.
    """

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self._released = threading.Event()

    def handle(self, message: ReceivedMessage) -> None:
        self.offsets.append(message.offset)
        if message.offset == 1:
            self._released.wait()

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def function() -> Iterator[HangingFunction]:
    """Return a handler that is released at the end, so that no thread outlives the test."""
    hanging = HangingFunction()
    yield hanging
    hanging.release()


@asynccontextmanager
async def reset_past(function: HangingFunction, concurrency: int) -> AsyncIterator[HungConsumer]:
    """Run the function as handler; when it hangs at offset 1, reset the group to offset 2."""
    async with (
        hung_consumer(concurrency=concurrency, keep_alive_ms=100) as at,
        running(at, at.consumer.run(function.handle)),
    ):
        await until(lambda: function.offsets == [0, 1])
        await at.reset(2)
        yield at


async def test_plain_function_that_hangs_is_abandoned_by_a_reset_and_its_slot_counted(
    function: HangingFunction,
) -> None:
    async with reset_past(function, concurrency=2) as at:
        await until(lambda: function.offsets == [0, 1, 2])
        function.release()
        async with at.broker.producer() as producer:
            await producer.send(TOPIC, b"3")
        await until(lambda: function.offsets == [0, 1, 2, 3])
        await at.broker.settled(GROUP, timeout_s=30)


async def test_why_stuck_names_an_abandoned_function_that_takes_the_last_slot(
    function: HangingFunction,
) -> None:
    async with reset_past(function, concurrency=1) as at:

        async def is_named() -> bool:
            message = (await at.diagnosis()).message
            return "offset 1 of" in message and "abandoned" in message

        await until(is_named, timeout_s=30)
        assert function.offsets == [0, 1], "offset 2 did not wait for a slot"
        function.release()
        await until(lambda: function.offsets == [0, 1, 2])
