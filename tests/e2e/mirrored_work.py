"""Numbered messages that are sent and handled in one cluster after the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from tests.support.conditions import until

TOPIC, GROUP, QUEUES = "orders", "workers", 4
FAILS_ONCE = 7
"""Of each hundred messages the one with this number fails once."""
BATCH = 10
PACE_S = 0.05


class MirroredWork:
    """What was sent, and what the handlers have handled, over both clusters.

    Attributes:
        held: Numbers whose handlers do not end, in the first cluster.
    """

    def __init__(
        self, held: frozenset[int] = frozenset(), topic: str = TOPIC, group: str = GROUP
    ) -> None:
        self.held, self.topic, self.group = held, topic, group
        self.sent: set[int] = set()
        self.handled: Counter[int] = Counter()
        self.failed: set[int] = set()
        self.paused = False

    async def handle(self, message: ReceivedMessage) -> None:
        """Handle a message; a few fail once, and some hang."""
        number = int(message.body)
        if self.paused or number in self.held:
            await asyncio.Event().wait()
        if number % 100 == FAILS_ONCE and number not in self.failed:
            self.failed.add(number)
            raise RuntimeError(f"message {number} fails once")
        self.handled[number] += 1

    async def send(self, nameserver: str, stop: asyncio.Event) -> None:
        """Send numbers until `stop`."""
        number = max(self.sent, default=-1) + 1
        async with Producer(nameserver) as producer:
            while not stop.is_set():
                pending = {
                    n: await producer.submit(
                        self.topic,
                        Message(b"%d" % n, "tag", (f"key-{n}",), {"number": str(n)}),
                        ordering_key=str(n % 50),
                    )
                    for n in range(number, number + BATCH)
                }
                for n, receipt in pending.items():
                    await receipt
                    self.sent.add(n)
                number += BATCH
                await asyncio.sleep(PACE_S)

    @asynccontextmanager
    async def members(self, nameserver: str, *names: str) -> AsyncIterator[None]:
        """Run members of the group during the block."""
        settings = ConsumerSettings(
            consume_from="first",
            commit_interval_ms=200,
            queue_concurrency=8,
            handle_timeout_ms=None,
            drain_timeout_ms=500,
            handle_signals=False,
        )

        async def run(name: str) -> None:
            async with Consumer(
                nameserver, self.group, {self.topic: "*"}, settings, client_id=name
            ) as consumer:
                await consumer.run(self.handle)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(name)) for name in names]
            yield
            for task in running:
                task.cancel()

    async def proceed(self, count: int) -> None:
        """Wait until `count` more messages are sent and handled."""
        sent, handled = len(self.sent) + count, len(self.handled) + count
        await until(lambda: len(self.sent) >= sent and len(self.handled) >= handled, timeout_s=60)
