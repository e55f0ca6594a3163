"""A topic and a group of one test, and consumers that record the messages they handle."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin

QUICK = ConsumerSettings(
    consume_from="first",
    commit_interval_ms=100,
    retry_first_ms=10,
    retry_ms_max=50,
    drain_timeout_ms=5_000,
    send_back=False,
)
"""Short intervals; failed messages are handled again by the same member."""


@dataclass
class Handled:
    """One call of a handler with a message."""

    client_id: str
    queue: QueueRef
    offset: int
    body: str
    redelivered: bool
    attempts: int


@dataclass
class Scene:
    """A topic and a group, and what their consumers did."""

    nameserver: str
    topic: str
    group: str = field(default_factory=lambda: f"g-{secrets.token_hex(4)}")
    handled: list[Handled] = field(default_factory=list)
    events: list[tuple[str, OwnershipEvent]] = field(default_factory=list)

    def consumer(
        self,
        client_id: str = "",
        expression: str = "*",
        settings: ConsumerSettings = QUICK,
    ) -> Consumer:
        return Consumer(
            self.nameserver,
            self.group,
            {self.topic: expression},
            settings,
            client_id=client_id,
            on_ownership=lambda event: self.events.append((client_id, event)),
        )

    def note(self, consumer: Consumer, message: ReceivedMessage) -> None:
        self.handled.append(
            Handled(
                consumer.client_id,
                message.queue,
                message.offset,
                message.body.decode(),
                message.redelivered,
                message.attempts,
            )
        )

    @property
    def bodies(self) -> Counter[str]:
        """Return the number of handler calls by body."""
        return Counter(one.body for one in self.handled)

    def by(self, client_id: str) -> list[str]:
        return [one.body for one in self.handled if one.client_id == client_id]

    async def send(self, bodies: Sequence[str], *, queue_id: int | None = None) -> None:
        """Send in order, to one queue, or without a queue id to all queues in turn."""
        async with Producer(self.nameserver) as producer:
            for number, body in enumerate(bodies):
                message = Message(body.encode(), tag=body.partition(":")[0] if ":" in body else "")
                chosen = None if queue_id is None else QueueRef(self.topic, "broker-0", queue_id)
                await producer.submit(self.topic, message, ordering_key=f"{number}", queue=chosen)

    async def lag(self) -> int | None:
        """Return the number of messages that the group has not committed; None if not known yet."""
        async with Admin(self.nameserver) as admin:
            rows = (await admin.group_progress(self.group)).queues
        lags = [row.lag for row in rows]
        return None if None in lags else sum(lag for lag in lags if lag is not None)


@asynccontextmanager
async def scene(nameserver: str, queue_count: int = 4) -> AsyncIterator[Scene]:
    topic = f"t-{secrets.token_hex(4)}"
    async with Admin(nameserver) as admin:
        await admin.create_topic(topic, queue_count)
    yield Scene(nameserver, topic)


@asynccontextmanager
async def handle_all(
    at: Scene, client_id: str, expression: str = "*", settings: ConsumerSettings = QUICK
) -> AsyncIterator[Consumer]:
    """Run a member that handles every message until the block ends."""

    async with at.consumer(client_id, expression, settings) as consumer:

        async def handle(message: ReceivedMessage) -> None:
            at.note(consumer, message)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.run(handle))
            yield consumer
            consumer.stop()
