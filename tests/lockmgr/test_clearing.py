"""The clearing of draining groups at the end of a term."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.core.lock_entry import LockPolicy, LockRecord, Observation
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.entry_changes import EntryChanges
from batonmq_server.lockmgr.queue_releaser import QueueReleaser

KEY = GroupQueue("group", "topic", "broker", 0)


async def test_observation_that_arrives_as_the_term_ends_raises_no_error() -> None:
    """The tasks of the term are cancelled one turn before those of the clearing.

    An error of them would end the process, not only the term.
    """
    table, observed = LockTable(LockPolicy()), asyncio.get_running_loop().create_future()
    table.load(KEY, LockRecord(owner=Incarnation("client", 1), token=1), 1, 0)
    table.confirm(KEY, 1, 0)
    asked = asyncio.Event()

    async def observe_all(_: object) -> list[Observation]:
        asked.set()
        await observed
        return [Observation(token=1, closed=True)]

    parts: Any = SimpleNamespace(
        table=table,
        policy=LockPolicy(),
        now_ms=lambda: 0,
        observe_all=observe_all,
        is_draining=lambda _: True,
    )

    async def lead() -> None:
        async with asyncio.TaskGroup() as tasks:
            releaser = QueueReleaser(parts, parts, parts, parts, EntryChanges(tasks), parts)
            tasks.create_task(releaser.clear_draining_groups())

    async with asyncio.TaskGroup() as tasks:
        leading = tasks.create_task(lead())
        await asked.wait()
        leading.cancel()
        observed.set_result(None)
        await asyncio.wait({leading})
    with pytest.raises(asyncio.CancelledError):
        leading.result()
