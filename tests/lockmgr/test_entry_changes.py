"""Goal: a change of an entry runs once, alone and to its end, or leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from batonmq._core.queues import GroupQueue
from batonmq.errors import Held, NotLeader
from batonmq_server.lockmgr.entry_changes import EntryChanges

KEY = GroupQueue("g", "news", "broker-a", 0)


@pytest.mark.filterwarnings("error")
async def test_change_that_the_end_of_the_term_prevents_is_not_called_and_not_in_progress() -> None:
    calls: list[str] = []

    async def change() -> None:
        calls.append("change")

    async with asyncio.TaskGroup() as tasks:
        changes = EntryChanges(tasks)
        started = changes.start(KEY, change)
        started.cancel()
    assert calls == []
    await changes.wait_for(KEY)
    await changes.wait_for_all()
    with pytest.raises(NotLeader):
        changes.start(KEY, change)
    with pytest.raises(NotLeader):
        await changes.run_to_end(change)
    assert calls == []


async def test_second_change_of_a_queue_is_rejected_while_the_first_runs() -> None:
    go_on = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        changes = EntryChanges(tasks)
        first = changes.start(KEY, go_on.wait)
        with pytest.raises(AssertionError, match="is being changed already"):
            changes.start(KEY, go_on.wait)
        go_on.set()
        await changes.wait_for(KEY)
        assert first.done()


async def test_error_of_a_change_that_runs_to_its_end_reaches_the_caller() -> None:
    async def refuse() -> None:
        raise Held("owned by c1")

    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(Held):
            await EntryChanges(tasks).run_to_end(refuse)
