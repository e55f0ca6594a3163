"""A consumer that is cancelled while it closes.

Goal: cancellation ends the drain at once.
Method: a real cluster, and a handler that never ends by itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from batonmq._consumer.message import ReceivedMessage
from tests.client.group import QUICK, Scene, scene
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]
FOR_EVER = replace(QUICK, drain_timeout_ms=None)


class ClosingConsumer:
    """A consumer whose block has ended while its handler runs.

    Attributes:
        limit: The time that the whole block may take.
        handling: Whether the handler runs.
        ending: Whether the block ends.
    """

    def __init__(self, at: Scene) -> None:
        self._at = at
        self.limit = asyncio.timeout(None)
        self.handling = self.ending = False

    async def run(self) -> None:
        begun = asyncio.Event()

        async def hang(_: ReceivedMessage) -> None:
            self.handling = True
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.handling = False

        with suppress(TimeoutError):
            async with self.limit, self._at.consumer("a", settings=FOR_EVER) as consumer:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(consumer.run(hang))
                    await begun.wait()
                    consumer.stop()
                self.ending = True

    async def wait_until_draining(self) -> None:
        """Wait until the consumer drains and its block ends."""
        await until(
            lambda: self.ending and "draining" in [event.kind for _, event in self._at.events]
        )
        assert self.handling


async def test_consumer_cancelled_while_it_drains_ends_at_once(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at, asyncio.TaskGroup() as tasks:
        await at.send(["hangs"])
        closing = ClosingConsumer(at)
        task = tasks.create_task(closing.run())
        await closing.wait_until_draining()
        task.cancel()
        await asyncio.wait({task}, timeout=20)
        assert task.cancelled()
        assert not closing.handling


async def test_timeout_around_the_block_includes_its_close(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at, asyncio.TaskGroup() as tasks:
        await at.send(["hangs"])
        closing = ClosingConsumer(at)
        task = tasks.create_task(closing.run())
        await closing.wait_until_draining()
        closing.limit.reschedule(0)
        await asyncio.wait({task}, timeout=20)
        assert task.done()
        assert closing.limit.expired()
        assert not closing.handling
