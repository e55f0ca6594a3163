"""Goal: one identity, or one group, can change groups at a bounded rate; others are not affected.

Method: the pure rules with the time as an argument; then the calls of a nameserver on a real etcd.
"""

from __future__ import annotations

from batonmq_server.nameserver.core.change_budget import KEYS_MAX, ChangeBudget, WritePace


def test_identity_gets_its_burst_and_then_its_rate() -> None:
    budget = ChangeBudget(rate=10, burst=3)
    assert [budget.wait_ms(1, 0) for _ in range(3)] == [0, 0, 0]
    assert budget.wait_ms(1, 0) == 100
    assert budget.wait_ms(1, 99) > 0
    assert budget.wait_ms(1, 101) == 0
    assert budget.wait_ms(1, 101) > 0


def test_identity_that_has_used_its_budget_takes_none_of_another() -> None:
    budget = ChangeBudget(rate=10, burst=3)
    while not budget.wait_ms(1, 0):
        pass
    assert budget.wait_ms(2, 0) == 0


def test_number_of_budgets_is_bounded() -> None:
    budget = ChangeBudget(rate=10, burst=3)
    for key in range(KEYS_MAX + 10):
        budget.wait_ms(key, 0)
    assert len(budget._buckets) == KEYS_MAX


def test_group_waits_as_long_as_its_write_takes_at_its_rate() -> None:
    pace = WritePace(bytes_per_s=1_000)
    assert pace.wait_ms("g", 0) == 0
    pace.written("g", 500, 0)
    assert [pace.wait_ms("g", at) for at in (0, 400, 500)] == [500, 100, 0]
    assert pace.wait_ms("other", 0) == 0


def test_group_that_may_be_written_is_dropped() -> None:
    pace = WritePace(bytes_per_s=1_000)
    pace.written("g", 500, 0)
    pace.written("other", 500, 600)
    assert list(pace._ready_ms) == ["other"]
