"""Goal: a commit that is asked for has all new acks, and costs nothing for the other queues.

Method: real gRPC to simulated services in this process; no commit is regular, as the interval of
these is long.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._core.queue_progress import Acks
from tests.client.group_twins import twins
from tests.client.test_ownership import owning, running_consumer, wait_for_held_pulls
from tests.support.conditions import until

BY_CALLS: dict[str, Any] = {"commit_on_pull": False, "span_max": 4}
"""Four acks of a queue ask for a commit."""


async def test_commit_that_is_asked_for_looks_only_at_queues_with_new_acks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: set[int] = set()
    acks_due = AssignedQueue.acks_due

    def noted(queue: AssignedQueue, now_ms: int) -> Acks | None:
        looked_at.add(queue.ref.queue_id)
        return acks_due(queue, now_ms)

    async with owning(8, **BY_CALLS) as (at, running):
        monkeypatch.setattr(AssignedQueue, "acks_due", noted)
        at.storage.send(5, "a")
        await until(lambda: running.ended == ["a"])
        at.storage.send(3, *"bcde")
        await until(lambda: 3 in at.offsets.queues and at.committed(3) == 4)
        assert at.committed(5) == 1, "its ack was new, too"
        assert looked_at == {3, 5}


async def test_queue_with_filtered_messages_only_does_not_stay_full() -> None:
    async with twins(1) as at, running_consumer(at, expression="x", **BY_CALLS) as running:
        at.nameserver.assign("a", [0])
        await wait_for_held_pulls(at, 0)
        at.storage.send(0, *(f"y:{number}" for number in range(9)), "x:1")
        await until(lambda: running.ended == ["x:1"])
