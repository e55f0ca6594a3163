"""Client process of NATS JetStream with nats-py: `python -m bench.peers.clients.nats TASK`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from types import TracebackType
from typing import Self

import nats
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NothingReceived
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from bench.peers.clients.steps import Client, Sender, run
from bench.peers.clients.task import PARTITIONS, TOPICS, Task

_ANSWER_S = 30
_FETCH = 1_000


@asynccontextmanager
async def _jetstream(address: str) -> AsyncIterator[JetStreamContext]:
    connection = await nats.connect(f"nats://{address}", pending_size=64 * 1024 * 1024)
    try:
        yield connection.jetstream(timeout=_ANSWER_S)
    finally:
        await connection.close()


class NatsSender(Sender):
    """The publisher of nats-py."""

    bulk_messages = 2_000

    def __init__(self, task: Task) -> None:
        self._context = _jetstream(task.address)
        self._stream = task.topic
        self._subjects = cycle([f"{task.topic}.{number}" for number in range(PARTITIONS)])
        self._posted = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        self._jetstream = await self._context.__aenter__()
        await self._posted.__aenter__()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._posted.__aexit__(error_type, error, traceback)
        await self._context.__aexit__(error_type, error, traceback)

    async def send_bulk(self, bodies: Sequence[bytes]) -> None:  # noqa: D102
        publish = self._jetstream.publish_async
        receipts = [await publish(next(self._subjects), body) for body in bodies]
        for receipt in receipts:
            await receipt

    async def send(self, body: bytes) -> None:  # noqa: D102
        await self._jetstream.publish(next(self._subjects), body)

    def post(self, body: bytes) -> None:  # noqa: D102
        self._posted.create_task(self.send(body))

    async def flush(self) -> None:
        """Return: leaving the context waits for the posted messages."""


class NatsClient(Client):
    """The library nats-py."""

    async def create_topics(self, task: Task) -> None:  # noqa: D102
        async with _jetstream(task.address) as jetstream:
            for topic in TOPICS:
                await jetstream.add_stream(
                    StreamConfig(
                        name=topic,
                        subjects=[f"{topic}.*"],
                        storage=StorageType.FILE,
                        retention=RetentionPolicy.LIMITS,
                    )
                )

    def sender(self, task: Task) -> Sender:  # noqa: D102
        return NatsSender(task)

    async def receive(  # noqa: D102
        self, task: Task, handle: Callable[[Sequence[bytes]], bool]
    ) -> None:
        async with _jetstream(task.address) as jetstream:
            consumer = await jetstream.pull_subscribe(
                f"{task.topic}.*",
                durable=task.group,
                config=ConsumerConfig(ack_policy=AckPolicy.ALL, max_ack_pending=10 * _FETCH),
            )
            while True:
                try:
                    messages = await consumer.fetch(_FETCH, timeout=1)
                except NothingReceived:
                    continue
                await messages[-1].ack()
                if handle([message.data for message in messages]):
                    return

    async def receive_each(  # noqa: D102
        self, task: Task, handle: Callable[[bytes], bool]
    ) -> None:
        finished = asyncio.Event()

        async def handle_one(message: Msg) -> None:
            if not finished.is_set():
                await message.ack()
                if handle(message.data):
                    finished.set()

        async with _jetstream(task.address) as jetstream:
            await jetstream.subscribe(
                f"{task.topic}.*", durable=task.group, cb=handle_one, manual_ack=True
            )
            await finished.wait()


if __name__ == "__main__":
    run(NatsClient())
