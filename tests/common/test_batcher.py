"""Goal: items are sent in order, in batches, and every caller gets the outcome of its item.

Method: a `send` that records its batches and returns when the test allows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from batonmq._common.batcher import Batcher
from batonmq.errors import NoQuorum, Overloaded
from tests.support.conditions import until


class Server:
    """Returns the double of each number, when `release` allows it."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.fail: Exception | None = None
        self.gate = asyncio.Semaphore(0)

    async def send(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        await self.gate.acquire()
        if self.fail is not None:
            raise self.fail
        return [2 * item for item in items]

    def release(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()


async def test_items_with_one_key_go_into_different_batches_in_order() -> None:
    server = Server()
    batcher = Batcher(server.send, items_max=4, key=lambda number: number % 10)
    async with running(batcher) as callers:
        (first,) = await callers.call(0)
        await until(lambda: server.batches == [[0]])
        others = await callers.call(11, 2, 21, 31, 3, 1)
        server.release(5)
        assert [await each for each in (first, *others)] == [0, 22, 4, 42, 62, 6, 2]
    assert server.batches == [[0], [11, 2], [21, 3], [31], [1]]


class Callers:
    """Starts tasks that each call with one item."""

    def __init__(self, batcher: Batcher[int, int], tasks: asyncio.TaskGroup) -> None:
        self._batcher, self._tasks = batcher, tasks
        self._called = 0

    async def call(self, *numbers: int) -> list[asyncio.Task[int]]:
        """Return once every task has called the batcher."""
        wanted = self._called + len(numbers)
        made = [self._tasks.create_task(self._call(number)) for number in numbers]
        await until(lambda: self._called == wanted)
        return made

    async def _call(self, number: int) -> int:
        self._called += 1
        return await self._batcher.call(number)


@asynccontextmanager
async def running(batcher: Batcher[int, int]) -> AsyncIterator[Callers]:
    """Run the batcher during the block, and until the tasks of the block have ended."""
    async with asyncio.TaskGroup() as outer:
        loop = outer.create_task(batcher.run())
        async with asyncio.TaskGroup() as tasks:
            yield Callers(batcher, tasks)
        loop.cancel()


async def test_caller_gets_the_outcome_of_its_item() -> None:
    server = Server()
    server.release(100)
    batcher = Batcher(server.send)
    async with running(batcher) as callers:
        tasks = await callers.call(*range(100))
    assert [task.result() for task in tasks] == [2 * number for number in range(100)]
    assert [item for batch in server.batches for item in batch] == list(range(100)), "in order"


async def test_items_that_arrive_during_a_call_go_into_the_next_one() -> None:
    server = Server()
    batcher = Batcher(server.send)
    async with running(batcher) as callers:
        await callers.call(0)
        await until(lambda: server.batches)
        await callers.call(1, 2, 3, 4, 5)
        assert len(server.batches) == 1, "one call in flight"
        server.release(2)
    assert server.batches == [[0], [1, 2, 3, 4, 5]]


async def test_batch_holds_no_more_items_than_allowed() -> None:
    server = Server()
    batcher = Batcher(server.send, items_max=3)
    async with running(batcher) as callers:
        await callers.call(0)
        await until(lambda: server.batches)
        await callers.call(*range(1, 8))
        server.release(10)
    assert [len(batch) for batch in server.batches] == [1, 3, 3, 1]


async def test_failed_send_fails_the_callers_of_its_batch_only() -> None:
    server = Server()
    batcher = Batcher(server.send)
    outcomes: dict[int, int | str] = {}

    async def call(number: int) -> None:
        try:
            outcomes[number] = await batcher.call(number)
        except NoQuorum as error:
            outcomes[number] = error.message

    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(batcher.run())
        for number in (0, 1):
            tasks.create_task(call(number))
        await until(lambda: server.batches == [[0, 1]])
        tasks.create_task(call(2))
        server.fail = NoQuorum("gone")
        server.release(1)
        await until(lambda: server.batches == [[0, 1], [2]])
        server.fail = None
        server.release(1)
        await until(lambda: len(outcomes) == 3)
        loop.cancel()
    assert outcomes == {0: "gone", 1: "gone", 2: 4}


async def test_cancelled_caller_leaves_the_others_their_outcomes() -> None:
    server = Server()
    batcher = Batcher(server.send)
    async with running(batcher) as callers:
        tasks = await callers.call(0, 1, 2)
        await until(lambda: server.batches)
        tasks[1].cancel()
        await until(tasks[1].done)
        server.release(1)
    assert server.batches == [[0, 1, 2]], "its item was sent already"
    assert [tasks[0].result(), tasks[2].result()] == [0, 4]


async def test_end_of_run_cancels_waiting_callers_and_callers_in_flight() -> None:
    server = Server()
    batcher = Batcher(server.send)
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(batcher.run())
        callers = Callers(batcher, tasks)
        in_flight = await callers.call(0)
        await until(lambda: server.batches)
        waiting = await callers.call(1)
        loop.cancel()
    assert all(task.cancelled() for task in in_flight + waiting)


async def test_items_beyond_the_limit_are_rejected() -> None:
    server = Server()
    batcher = Batcher(server.send, waiting_max=2)
    async with running(batcher) as callers:
        await callers.call(0)
        await until(lambda: server.batches)
        await callers.call(1, 2)
        with pytest.raises(Overloaded) as refused:
            await batcher.call(3)
        server.release(10)
    assert refused.value.facts == {"limit": "2"}
    assert refused.value.retry_after_ms > 0
    assert [item for batch in server.batches for item in batch] == [0, 1, 2]


async def test_call_after_the_end_of_run_is_cancelled() -> None:
    server = Server()
    batcher = Batcher(server.send)
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(batcher.run())
        await Callers(batcher, tasks).call(0)
        await until(lambda: server.batches)
        loop.cancel()
    async with asyncio.TaskGroup() as tasks:
        (late,) = await Callers(batcher, tasks).call(1)
        await asyncio.wait({late}, timeout=20)
        assert late.cancelled()
        late.cancel()
    assert server.batches == [[0]]
