"""Numbered messages that are sent and handled during a fault, and the check that none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

from batonmq._connection.security import Security
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import Receipt

TOPIC = "numbers"
QUEUES = 8
PACE_S = 0.005
"""Pause after ten messages: the tests need steady traffic, not throughput."""


class NumberedTraffic:
    """The receipts and the handled messages so far."""

    def __init__(self, nameserver: str, security: Security | None = None) -> None:
        self.nameserver, self.security = nameserver, security
        self.receipts: dict[int, Receipt] = {}
        self.handled: list[tuple[str, QueueRef, int, int, bool]] = []
        self.stop_sending = asyncio.Event()

    def check(self) -> None:
        """Assert that every number with a receipt was handled once, in the order of its queue."""
        times = Counter(number for _, _, _, number, _ in self.handled)
        assert set(times) == set(self.receipts), "an acknowledged message was lost"
        assert [n for n, count in times.items() if count > 1] == [], "a message was handled twice"
        by_queue: dict[QueueRef, list[int]] = defaultdict(list)
        for _, queue, offset, number, _ in self.handled:
            assert self.receipts[number].queue == queue
            assert self.receipts[number].offset == offset
            by_queue[queue].append(offset)
        assert all(offsets == sorted(offsets) for offsets in by_queue.values()), "out of order"
        assert len(by_queue) == QUEUES

    async def send(self, total: int) -> None:
        """Send at least `total` numbers, until `stop_sending` is set, and await all receipts."""
        settings = ProducerSettings(security=self.security)
        async with Producer(self.nameserver, settings) as producer:
            number = 0
            while number < total or not self.stop_sending.is_set():
                pending = []
                for n in range(number, number + 50):
                    pending.append(
                        await producer.submit(TOPIC, Message(str(n).encode()), ordering_key=str(n))
                    )
                    if n % 10 == 9:
                        await asyncio.sleep(PACE_S)
                for n, receipt in enumerate(pending, start=number):
                    self.receipts[n] = await receipt
                number += 50

    async def consume(self, name: str, stop: asyncio.Event) -> None:
        """Handle messages until `stop` is set, then leave gracefully."""
        settings = ConsumerSettings(
            consume_from="first", commit_interval_ms=200, security=self.security
        )
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
