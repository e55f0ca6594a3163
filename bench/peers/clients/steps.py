"""The work of a client process, for every client library."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Self

from bench.peers.clients.task import SENDS_IN_FLIGHT, STAMP, Task, Work

_SETTLE_S = 1.0
"""Messages of this long are not counted after producer and consumer of `post` have met."""


class Sender(ABC):
    """A producer of one library, for use with `async with`."""

    bulk_messages = 10_000
    """Messages of one bulk call."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    @abstractmethod
    async def send_bulk(self, bodies: Sequence[bytes]) -> None:
        """Send messages; return when all are stored."""

    @abstractmethod
    async def send(self, body: bytes) -> None:
        """Send a message; return when it is stored."""

    @abstractmethod
    def post(self, body: bytes) -> None:
        """Start to send a message."""

    @abstractmethod
    async def flush(self) -> None:
        """Wait until all posted messages are stored; raise if one is not."""

    async def keep_in_flight(self, body: bytes, work: Work) -> None:
        """Send with one call per message and 2,000 in flight until the time is over."""

        async def repeat() -> None:
            await self.send(body)
            work.add(1)
            while not work.is_over():
                await self.send(body)
                work.add(1)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(SENDS_IN_FLIGHT):
                tasks.create_task(repeat())


class Client(ABC):
    """A client library."""

    @abstractmethod
    async def create_topics(self, task: Task) -> None:
        """Create the topics of the bench, unless the servers have done so."""

    @abstractmethod
    def sender(self, task: Task) -> Sender:
        """Return a producer for the topic of the task."""

    @abstractmethod
    async def receive(self, task: Task, handle: Callable[[Sequence[bytes]], bool]) -> None:
        """Pass batches to `handle` until it returns True."""

    @abstractmethod
    async def receive_each(self, task: Task, handle: Callable[[bytes], bool]) -> None:
        """Pass single messages to `handle` until it returns True."""


def run(client: Client) -> None:
    """Do the task in the arguments of this process."""
    task = Task.decode(sys.argv[1])
    work = Work(task)
    asyncio.run(_run(client, task, work))
    work.finish()


async def _run(client: Client, task: Task, work: Work) -> None:
    match task.kind:
        case "create":
            await client.create_topics(task)
            work.begin()
        case "consume":
            await client.receive(task, work.received)
        case "consume-each":
            await client.receive_each(task, lambda body: work.received((body,)))
        case "handle":
            await client.receive_each(task, work.handled)
        case _:
            async with client.sender(task) as sender:
                await _send(sender, task, work)


async def _send(sender: Sender, task: Task, work: Work) -> None:
    body = bytes(range(1, 101)) * (task.size // 100 + 1)
    body = body[: task.size]
    if task.kind == "post":
        await _post(sender, task, work)
        return
    work.begin()
    match task.kind:
        case "produce":
            await _produce(sender, body, work)
        case "send-each":
            await sender.keep_in_flight(body, work)
        case _:
            await sender.send(body)  # the first message opens the topic and is not counted
            while not work.delays_ms or not work.is_over():
                begin_s = monotonic()
                await sender.send(body)
                work.delays_ms.append(1_000 * (monotonic() - begin_s))
                work.add(1)
    await sender.flush()
    work.add(0)  # the work ends with the last receipt


async def _produce(sender: Sender, body: bytes, work: Work) -> None:
    bodies = [body] * sender.bulk_messages

    async def repeat() -> None:
        await sender.send_bulk(bodies)
        work.add(len(bodies))
        while not work.is_over():
            await sender.send_bulk(bodies)
            work.add(len(bodies))

    async with asyncio.TaskGroup() as tasks:  # one call is encoded while the other is stored
        tasks.create_task(repeat())
        tasks.create_task(repeat())


async def _post(sender: Sender, task: Task, work: Work) -> None:
    padding = bytes(task.size - STAMP.size)
    met = work.begin_later()
    next_s, interval_s = monotonic(), 1 / task.rate
    settling, sent = int(_SETTLE_S * task.rate), 0
    while sent < task.count:
        next_s += interval_s
        if (wait_s := next_s - monotonic()) > 0:
            await asyncio.sleep(wait_s)
        is_counted = met.is_set() and settling <= 0
        sender.post(STAMP.pack(monotonic() if is_counted else 0.0) + padding)
        sent += is_counted
        settling -= met.is_set()
    await sender.flush()
    work.add(sent)
