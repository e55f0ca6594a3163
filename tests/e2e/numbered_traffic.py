"""Numbered messages that are sent and handled during a fault, and the check that none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batonmq._connection.security import Security
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import Receipt
from tests.support.conditions import until

TOPIC = "numbers"
QUEUES = 8
PACE_S = 0.005
"""Pause after ten messages: the tests need steady traffic, not throughput."""


class NumberedTraffic:
    """A producer that keeps sending numbers, and members of one group that handle them.

    Attributes:
        queues_move: Whether the topic gets other queues meanwhile.
        receipts: The receipt of each number.
        handled: Member, queue, offset, number and redelivered flag of each handled message.
    """

    def __init__(
        self, nameserver: str, security: Security | None = None, *, queues_move: bool = False
    ) -> None:
        self.nameserver, self.security = nameserver, security
        self.queues_move = queues_move
        self.receipts: dict[int, Receipt] = {}
        self.handled: list[tuple[str, QueueRef, int, int, bool]] = []
        self._stop_sending, self._stop_consuming = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def running(self, *members: str, count_min: int = 0) -> AsyncIterator[None]:
        """Send and handle messages during the block, and at least `count_min` of them.

        At the end of the block sending stops, and each number with a receipt must have been handled
        once, in the order of its queue.
        """
        async with asyncio.TaskGroup() as self._tasks:
            sending = self._tasks.create_task(self._send(count_min))
            for name in members:
                self.join(name)
            yield
            self._stop_sending.set()
            await sending
            await until(lambda: len(self.handled_numbers()) >= len(self.receipts), timeout_s=60)
            self._stop_consuming.set()
        self.check()

    def join(self, name: str) -> None:
        """Start another member."""
        self._tasks.create_task(self._consume(name))

    async def proceed(self, count: int) -> None:
        """Wait until `count` more messages are sent and handled."""
        sent_count, handled_count = len(self.receipts) + count, len(self.handled) + count
        await until(
            lambda: len(self.receipts) >= sent_count and len(self.handled) >= handled_count,
            timeout_s=60,
        )

    def handled_numbers(self) -> set[int]:
        return {number for _, _, _, number, _ in self.handled}

    def handled_by(self, name: str) -> bool:
        """Return whether the member has handled a message."""
        return any(member == name for member, *_ in self.handled)

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
        assert len(by_queue) == QUEUES or (self.queues_move and len(by_queue) > QUEUES)

    async def _send(self, count_min: int) -> None:
        settings = ProducerSettings(security=self.security)
        async with Producer(self.nameserver, settings) as producer:
            number = 0
            while number < count_min or not self._stop_sending.is_set():
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

    async def _consume(self, name: str) -> None:
        settings = ConsumerSettings(
            consume_from="first", commit_interval_ms=200, security=self.security
        )
        async with (
            Consumer(
                self.nameserver, "counters", {TOPIC: "*"}, settings, client_id=name
            ) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            stopping = tasks.create_task(_stop(self._stop_consuming, consumer))
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
