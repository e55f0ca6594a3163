"""Goal: a commit that is asked for has all new acks, and costs nothing for the other queues.

Method: real gRPC to simulated services in this process; no commit is regular, as the interval of
these is long.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._core.queue_progress import Acks
from batonmq.errors import NotServing
from tests.client.group_twins import OffsetsTwin, Twins, twins
from tests.client.test_ownership import (
    RunningConsumer,
    owning,
    running_consumer,
    wait_for_held_pulls,
)
from tests.support.conditions import until

BY_CALLS: dict[str, Any] = {"commit_on_pull": False, "span_max": 16}
"""Four acks of a queue ask for a commit."""


async def commit_all(at: Twins) -> None:
    """Cause the first commit: it has all queues, because the epoch of offsets was not known yet."""
    at.storage.send(0, *"0123")
    await until(lambda: at.committed(0) == 4)


def queue_of(running: RunningConsumer, queue_id: int) -> AssignedQueue:
    (queue,) = [one for one in running.consumer._queues.values() if one.ref.queue_id == queue_id]
    return queue


class HeldCommits:
    """The queues of each commit; answers wait while `go` is cleared.

    Attributes:
        failures: Number of commits that fail next.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.failures = 0
        self.go = asyncio.Event()
        self.go.set()
        self.queues: list[set[int]] = []
        commit = OffsetsTwin.Commit

        async def held(twin: Any, request: offsets_pb.CommitRequest, context: Any) -> Any:
            self.queues.append({item.queue.queue.queue_id for item in request.items})
            if self.failures:
                self.failures -= 1
                raise NotServing("not now", retry_after_ms=1)
            answer = await commit(twin, request, context)
            await self.go.wait()
            return answer

        patch.setattr(OffsetsTwin, "Commit", held)


async def test_commit_has_the_new_acks_of_all_queues_and_looks_at_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: set[int] = set()
    acks_due = AssignedQueue.acks_due

    def noted(queue: AssignedQueue, now_ms: int) -> Acks | None:
        looked_at.add(queue.ref.queue_id)
        return acks_due(queue, now_ms)

    async with owning(8, **BY_CALLS) as (at, running):
        await commit_all(at)
        monkeypatch.setattr(AssignedQueue, "acks_due", noted)
        at.storage.send(5, "a")
        await until(lambda: running.ended[-1] == "a")
        assert at.committed(5) == 0, "one ack asks for no commit"
        at.storage.send(3, *"bcde")
        await until(lambda: at.committed(3) == 4)
        assert at.committed(5) == 1
        assert looked_at == {3, 5}


async def test_ack_during_a_commit_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = HeldCommits(monkeypatch)
    async with owning(2, **BY_CALLS) as (at, running):
        await commit_all(at)
        commits.go.clear()
        at.storage.send(1, *"abcd")
        await until(lambda: commits.queues[1:] == [{1}])
        at.storage.send(1, "e")
        progress = queue_of(running, 1).progress
        await until(lambda: progress is not None and progress.unconfirmed_count == 5)
        assert at.committed(1) == 4
        commits.go.set()
        await until(lambda: at.committed(1) == 5)


async def test_committed_queue_is_in_no_further_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = HeldCommits(monkeypatch)
    async with owning(3, **BY_CALLS) as (at, running):
        await commit_all(at)
        at.storage.send(1, *"abcd")
        await until(lambda: commits.queues[1:] == [{1}])
        await until(lambda: not queue_of(running, 1).acked)
        at.storage.send(2, *"efgh")
        await until(lambda: commits.queues[1:] == [{1}, {2}])


async def test_new_epoch_of_offsets_has_all_positions_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = HeldCommits(monkeypatch)
    async with owning(3, **BY_CALLS) as (at, _):
        await commit_all(at)
    assert commits.queues[0] == {0, 1, 2}


async def test_positions_are_stated_again_after_a_failed_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = HeldCommits(monkeypatch)
    commits.failures = 1
    async with owning(3, **BY_CALLS) as (at, _):
        at.storage.send(0, *"0123")
        await until(lambda: len(commits.queues) == 1)
        at.storage.send(0, "4")
        await until(lambda: at.committed(0) == 5)
    assert commits.queues[:2] == [{0, 1, 2}, {0, 1, 2}]


async def test_failed_commit_is_repeated_without_new_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is full until its acks are committed has no new ones."""
    commits = HeldCommits(monkeypatch)
    async with owning(2, **BY_CALLS) as (at, _):
        await commit_all(at)
        commits.failures = 2
        at.storage.send(1, *"abcd")
        await until(lambda: at.committed(1) == 4)
    assert commits.queues[1:4] == [{1}] * 3


async def test_filtered_messages_alone_do_not_keep_a_queue_full() -> None:
    settings = BY_CALLS | {"span_max": 4}
    async with twins(1) as at, running_consumer(at, expression="x", **settings) as running:
        at.nameserver.assign("a", [0])
        await wait_for_held_pulls(at, 0)
        at.storage.send(0, *(f"y:{number}" for number in range(9)), "x:1")
        await until(lambda: running.ended == ["x:1"])


async def test_filtered_messages_before_one_that_runs_do_not_keep_a_queue_full() -> None:
    settings = BY_CALLS | {"span_max": 4}
    async with twins(1) as at, running_consumer(at, expression="x", **settings) as running:
        at.nameserver.assign("a", [0])
        await wait_for_held_pulls(at, 0)
        at.storage.send(0, "x:0")
        await until(lambda: at.committed(0) == 1)  # as `commit_all`
        running.gate.clear()
        at.storage.send(0, "y:1", "y:2", "y:3", "x:4", "x:5")
        await until(lambda: at.committed(0) == 4)
        assert running.ended == ["x:0"]
