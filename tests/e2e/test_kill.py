"""Goal: kill -9 of any one service in the middle of the work loses and doubles nothing.

Method: a real cluster; one producer that keeps sending numbered messages, two consumers of one
group, and a victim that is killed and started again while both go on. Afterwards every message
with a receipt was handled exactly once, in the order of its queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from batonmq.admin import Admin
from batonmq.consumer import Consumer
from batonmq.consuming.session import ConsumerSettings
from batonmq.core.records import Message
from batonmq.core.route import QueueId
from batonmq.producer import Producer
from batonmq.producing.receipts import Receipt
from tests.support.cluster import local_cluster
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TOPIC = "numbers"
BEFORE, DURING, AFTER = 2_000, 3_000, 2_000


class Run:
    """What was sent and what was handled, as it happens."""

    def __init__(self, nameserver: str) -> None:
        self.nameserver = nameserver
        self.receipts: dict[int, Receipt] = {}
        self.handled: list[tuple[str, QueueId, int, int, bool]] = []
        self.stop_sending = asyncio.Event()

    async def send(self, total: int) -> None:
        """Send numbers until `total` and until told to stop, each confirmed."""
        async with Producer(self.nameserver) as producer:
            number = 0
            while number < total or not self.stop_sending.is_set():
                pending = [
                    await producer.submit(TOPIC, Message(str(n).encode()), ordering_key=str(n))
                    for n in range(number, number + 50)
                ]
                for n, receipt in enumerate(pending, start=number):
                    self.receipts[n] = await receipt
                number += 50

    async def consume(self, name: str, stop: asyncio.Event) -> None:
        """Handle until told to stop, then leave gracefully."""
        settings = ConsumerSettings(consume_from="first", commit_interval_ms=200)
        async with (
            Consumer(
                self.nameserver, "counters", {TOPIC: "*"}, settings, client_id=name
            ) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            stopping = tasks.create_task(_stop(stop, consumer))
            async for message in consumer:
                self.handled.append(
                    (
                        name,
                        message.queue,
                        message.offset,
                        int(message.body),
                        message.redelivered,
                    )
                )
            stopping.cancel()


async def _stop(stop: asyncio.Event, consumer: Consumer) -> None:
    await stop.wait()
    consumer.stop()


@pytest.mark.parametrize("victim", ["storage", "offsets", "lockmgr", "nameserver", "etcd"])
async def test_kill_9_of_a_service_loses_and_doubles_nothing(tmp_path: Path, victim: str) -> None:
    async with local_cluster(tmp_path) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, 8)
        run, stop = Run(cluster.nameserver), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(run.send(BEFORE + DURING + AFTER))
            tasks.create_task(run.consume("first", stop))
            await until(lambda: len(run.handled) >= BEFORE, timeout_s=60)
            await cluster.kill(victim)
            tasks.create_task(run.consume("second", stop))
            await cluster.serving(victim)
            sent = len(run.receipts)
            await until(lambda: len(run.receipts) >= sent + AFTER, timeout_s=60)
            await until(lambda: any(name == "second" for name, *_ in run.handled), timeout_s=60)
            run.stop_sending.set()
            await sending
            await until(
                lambda: len({n for *_, n, _ in run.handled}) >= len(run.receipts), timeout_s=60
            )
            stop.set()

    times = Counter(number for _, _, _, number, _ in run.handled)
    assert set(times) == set(run.receipts), "something acknowledged was lost"
    assert [n for n, count in times.items() if count > 1] == [], "something came twice"
    by_queue: dict[QueueId, list[int]] = defaultdict(list)
    for _, queue, offset, number, _ in run.handled:
        assert run.receipts[number].queue == queue
        assert run.receipts[number].offset == offset
        by_queue[queue].append(offset)
    assert all(offsets == sorted(offsets) for offsets in by_queue.values()), "out of order"
    assert len(by_queue) == 8
