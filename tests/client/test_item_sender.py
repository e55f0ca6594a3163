"""Goal: a message that its queue refuses goes to another one, under a producer id of that queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from random import Random

import pytest

from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message, encode_record, read_header
from batonmq._producer.item_sender import ItemSender, OutgoingMessage
from batonmq.errors import BatonError, NotWritable, QueueNotFound

FIRST, SECOND = QueueRef("orders", "broker-0", 0), QueueRef("orders", "broker-1", 4)


@dataclass(frozen=True)
class Item:
    batch: bytes


@pytest.mark.parametrize("refusal", [NotWritable, QueueNotFound])
async def test_refused_message_goes_to_another_queue(refusal: type[BatonError]) -> None:
    seen: list[tuple[str, int, int, int, int]] = []

    async def request(broker: str, items: Sequence[Item]) -> list[int | BatonError]:
        headers = [read_header(item.batch) for item in items]
        seen.extend(
            (broker, one.queue_id, one.producer_id, one.producer_epoch, one.sequence)
            for one in headers
        )
        return [refusal("closed") if broker == FIRST.broker else 1 for _ in items]

    async with asyncio.TaskGroup() as tasks:
        running: list[asyncio.Task[None]] = []
        sender = ItemSender[Item, int](
            Directory("unused:1", Random(1)),
            Clock(),
            Random(1),
            lambda work: running.append(tasks.create_task(work)),
            request,
        )
        for _ in range(3):
            builder, message = BatchBuilder(), Message(b"body")
            builder.add(message, record := encode_record(message))
            sending = OutgoingMessage(builder, len(record), lambda: SECOND, 1 << 62, Item)
            assert await sender.send(sending, FIRST) == (SECOND, 1)
        assert sender._lanes.keys() == {FIRST, SECOND}
        sender.forget_topic("orders")
        assert not sender._lanes
        for task in running:
            task.cancel()
    of_first = [one for one in seen if one[0] == FIRST.broker]
    of_second = [one for one in seen if one[0] == SECOND.broker]
    assert len({one[2] for one in of_first}) == len({one[2] for one in of_second}) == 1
    assert of_first[0][2] != of_second[0][2]
    assert {one[3:] for one in of_first} == {(0, 0)}, "nothing was stored there"
    assert all(after[4] == before[4] + 1 for before, after in pairwise(of_second))


def test_message_that_every_queue_refuses_fails_at_its_time() -> None:
    """The route is as old as the refusals: the sender goes to and fro, with pauses."""
    calls: list[str] = []

    async def request(broker: str, items: Sequence[Item]) -> list[int | BatonError]:
        calls.append(broker)
        return [NotWritable("closed", retry_after_ms=500) for _ in items]

    async def main() -> None:
        clock, others = Clock(), cycle((SECOND, FIRST))
        now_s = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            running: list[asyncio.Task[None]] = []
            sender = ItemSender[Item, int](
                Directory("unused:1", Random(1)),
                clock,
                Random(1),
                lambda work: running.append(tasks.create_task(work)),
                request,
            )
            builder, message = BatchBuilder(), Message(b"body")
            builder.add(message, record := encode_record(message))
            late_ms = clock.monotonic_ms() + 1_000
            sending = OutgoingMessage(builder, len(record), lambda: next(others), late_ms, Item)
            begin_s = now_s()
            with pytest.raises(NotWritable):
                await sender.send(sending, FIRST)
            assert 1 <= now_s() - begin_s <= 4
            for task in running:
                task.cancel()

    asyncio.run(main())
    assert 3 <= len(calls) <= 6
