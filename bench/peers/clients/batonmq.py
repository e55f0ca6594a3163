"""Client process of BatonMQ: `python -m bench.peers.clients.batonmq TASK`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from batonmq import Admin, Consumer, ConsumerSettings, Durability, Producer, ProducerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from bench.peers.clients.steps import Client, Sender, run
from bench.peers.clients.task import PARTITIONS, TOPICS, Task


class BatonSender(Sender):
    """The producer of batonmq."""

    bulk_messages = 20_000

    def __init__(self, task: Task) -> None:
        durability = Durability.FSYNCED if task.fsync else Durability.MEMORY
        self._producer = Producer(task.address, ProducerSettings(durability=durability))
        self._topic = task.topic
        self._posted = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._producer.__aenter__()
        await self._posted.__aenter__()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._posted.__aexit__(error_type, error, traceback)
        await self._producer.__aexit__(error_type, error, traceback)

    async def send_bulk(self, bodies: Sequence[bytes]) -> None:  # noqa: D102
        await self._producer.send_many(self._topic, bodies)

    async def send(self, body: bytes) -> None:  # noqa: D102
        await self._producer.send(self._topic, body)

    def post(self, body: bytes) -> None:  # noqa: D102
        self._posted.create_task(self._producer.send(self._topic, body))

    async def flush(self) -> None:  # noqa: D102
        await self._producer.flush()


class BatonClient(Client):
    """The library batonmq."""

    async def create_topics(self, task: Task) -> None:  # noqa: D102
        async with Admin(task.address) as admin:
            for topic in TOPICS:
                await admin.create_topic(topic, PARTITIONS)

    def sender(self, task: Task) -> Sender:  # noqa: D102
        return BatonSender(task)

    async def receive(  # noqa: D102
        self, task: Task, handle: Callable[[Sequence[bytes]], bool]
    ) -> None:
        async with _consumer(task) as consumer:

            async def handle_batch(batch: MessageBatch) -> None:
                if handle(batch.bodies()):
                    consumer.stop()

            await consumer.run_batches(handle_batch)

    async def receive_each(  # noqa: D102
        self, task: Task, handle: Callable[[bytes], bool]
    ) -> None:
        async with _consumer(task) as consumer:

            async def handle_one(message: ReceivedMessage) -> None:
                if handle(message.body):
                    consumer.stop()

            await consumer.run(handle_one)


def _consumer(task: Task) -> Consumer:
    settings = ConsumerSettings(consume_from="first")
    return Consumer(task.address, task.group, {task.topic: "*"}, settings)


if __name__ == "__main__":
    run(BatonClient())
