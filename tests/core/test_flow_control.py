"""Flow control of a consumer's queues.

Goal: the first limit that is reached is returned; the bytes of all queues share one budget, and a
queue without waiting messages may always fetch.
Method: the pure core with plain values.
"""

from __future__ import annotations

import pytest

from batonmq._core.flow_control import (
    ByteBudget,
    FlowLimits,
    FlowReason,
    QueueBytes,
    blocking_limit,
)

LIMITS = FlowLimits(messages_max=5, span_max=9)


class TwoQueues:
    """Two queues of a client; the bytes of `a` fill its budget."""

    def __init__(self) -> None:
        self.budget = ByteBudget(100)
        self.a, self.b = QueueBytes(self.budget), QueueBytes(self.budget)
        for each in (self.a, self.b):
            each.join()
        self.a.add(100)


@pytest.fixture
def full() -> TwoQueues:
    return TwoQueues()


def reason(
    part: QueueBytes, *, waiting_count: int = 0, span: int = 0, handled_ahead: bool = False
) -> FlowReason | None:
    return blocking_limit(
        LIMITS, part, waiting_count=waiting_count, span=span, handled_ahead=handled_ahead
    )


def test_first_reached_limit_is_returned(full: TwoQueues) -> None:
    free = QueueBytes(ByteBudget(100))
    assert reason(free, waiting_count=4, span=8) is None
    assert reason(free, waiting_count=5, span=8) == "count"
    assert reason(free, waiting_count=5, span=9, handled_ahead=True) == "span"
    assert reason(full.a) == "bytes"


def test_span_of_messages_that_only_wait_is_their_count() -> None:
    free = QueueBytes(ByteBudget(100))
    assert reason(free, waiting_count=4, span=9) == "count"
    assert reason(free, waiting_count=4, span=9, handled_ahead=True) == "span"


def test_queue_without_waiting_messages_is_not_starved_by_others(full: TwoQueues) -> None:
    assert reason(full.b) is None
    full.b.add(1)
    assert reason(full.b) == "bytes"


def test_queues_fetch_equal_shares_of_the_budget(full: TwoQueues) -> None:
    assert full.budget.share() == 50
    full.b.leave()
    assert full.budget.share() == 100
    assert ByteBudget(0).share() == 1


def test_waiting_queues_are_woken_once_half_of_the_budget_is_free(full: TwoQueues) -> None:
    assert [full.a.remove(10) for _ in range(10)] == [False] * 4 + [True] + [False] * 5
    assert full.budget.total == 0


def test_queue_that_leaves_frees_its_bytes(full: TwoQueues) -> None:
    full.b.add(7)
    for _ in range(2):
        full.a.leave()
        assert (full.budget.total, full.budget.queue_count) == (7, 1)


def test_queues_with_waiting_messages_are_counted(full: TwoQueues) -> None:
    counts = [full.budget.waiting_count]
    for change in (
        lambda: full.b.add(0),  # all messages of a fetch were filtered
        lambda: full.b.add(3),
        lambda: full.b.add(2),
        lambda: full.b.remove(4),
        lambda: full.b.remove(0),
        lambda: full.b.remove(1),
        lambda: full.b.remove(0),
        full.a.leave,
        full.a.leave,
    ):
        change()
        counts.append(full.budget.waiting_count)
    assert counts == [1, 1, 2, 2, 2, 2, 1, 1, 0, 0]
