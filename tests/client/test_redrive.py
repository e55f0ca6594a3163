"""Goal: a redrive that ended early is continued, and no dead letter is sent twice.

Method: the in-memory broker; runs that end before they record what they have sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from batonmq import ConsumerSettings, ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq.admin.dead_letters import DeadLetter, DeadLetters
from batonmq.admin.operation import Operation
from batonmq.admin.redriver import RedriveOptions, Redriver, RedriveResult
from batonmq.errors import Unreachable
from batonmq_server.testing import MemoryBroker

TOPIC, GROUP = "orders", "billing"
ORDER = RedriveOptions(operation=Operation("ann", "the bank is back", "r1"), to_topic=True)
SETTINGS = ConsumerSettings(
    consume_from="first", send_back=True, retries_max=1, commit_interval_ms=50
)


async def die(broker: MemoryBroker, *queues: QueueRef) -> None:
    """Send a message to each queue, which becomes a dead letter."""

    async def fail(message: ReceivedMessage) -> None:
        raise ValueError("no such account")

    async with (
        broker.producer() as producer,
        broker.consumer(GROUP, {TOPIC: "*"}, replace(SETTINGS, retries_max=0)) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(fail))
        for queue in queues:
            await producer.send(TOPIC, b"order", queue=queue)
        await broker.settled(GROUP)
        consumer.stop()


async def copies(broker: MemoryBroker) -> list[str]:
    """Return of which dead letter each copy is."""
    found = (one.properties.get("baton.redriven_from") for one in await broker.messages(TOPIC))
    return [name for name in found if name is not None]


async def test_redrive_that_is_repeated_after_a_queue_retired_sends_nothing_twice() -> None:
    class Killed(Redriver):
        async def _record(self, letters: Sequence[DeadLetter]) -> None:
            raise Unreachable("killed")

    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 2)
        await die(broker, QueueRef(TOPIC, "broker-0", 1))
        letters = DeadLetters(admin)
        with pytest.raises(Unreachable, match="killed"):
            _ = [one async for one in Killed(admin, GROUP, ORDER).run(letters.read(GROUP))]
        (sent,) = await copies(broker)
        await admin.update_topic(TOPIC, queue_count=1)
        resumed = replace(ORDER, resumed=True)
        (one,) = [one async for one in letters.redrive(GROUP, resumed)]
        assert (one.outcome, one.letter.message_id) == ("repeated", sent)
        assert one.queue == QueueRef(TOPIC, "broker-0", 1)
        (again,) = [one async for one in letters.redrive(GROUP, resumed)]
        assert again.outcome == "passed_over"
        assert await copies(broker) == [sent]


@pytest.mark.parametrize("again", [False, True])
async def test_redrives_at_the_same_time_send_a_dead_letter_once(again: bool) -> None:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        await die(broker, QueueRef(TOPIC, "broker-0", 0))
        letters = DeadLetters(admin)
        orders = [
            replace(ORDER, operation=Operation("ann", "the bank is back", op_id), again=again)
            for op_id in ("r1", "r2")
        ]
        # Each has read the dead letter before the other one has recorded it.
        read = [[one async for one in letters.read(GROUP)] for _ in orders]
        outcomes = list[str]()
        for order, found in zip(orders, read, strict=True):
            results = Redriver(admin, GROUP, order).run(_each(found))
            outcomes += [one.outcome async for one in results]
        assert outcomes == ["redriven", "redriven" if again else "repeated"]
        assert len(await copies(broker)) == 1 + again


async def _each(letters: Sequence[DeadLetter]) -> AsyncIterator[DeadLetter]:
    for one in letters:
        yield one


async def test_what_one_broker_has_stored_is_recorded_if_another_one_does_not_answer() -> None:
    class HalfReached(Redriver):
        async def _append(self, broker: str, copies: Sequence[object]) -> list[RedriveResult]:
            if broker == "broker-1":
                raise Unreachable("broker-1 does not answer")
            return await super()._append(broker, copies)  # type: ignore[arg-type]

    async with MemoryBroker(broker_count=2) as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 2)
        await die(broker, QueueRef(TOPIC, "broker-0", 0), QueueRef(TOPIC, "broker-1", 0))
        letters = DeadLetters(admin)
        outcomes = list[str]()
        with pytest.raises(Unreachable, match="broker-1 does not answer"):
            async for one in HalfReached(admin, GROUP, ORDER).run(letters.read(GROUP)):
                outcomes.append(f"{one.queue} {one.outcome}")
        assert outcomes == [f"{TOPIC}/broker-0/0 redriven"]
        other = replace(ORDER, operation=Operation("ann", "again", "r2"))
        found = sorted([one.outcome async for one in letters.redrive(GROUP, other)])
        assert found == ["passed_over", "redriven"]
        assert len(await copies(broker)) == 2
