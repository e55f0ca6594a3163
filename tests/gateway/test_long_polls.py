"""Long polls end at shared moments, never late, and at most one step early."""

from __future__ import annotations

from random import Random

from batonmq_server.gateway.core.long_polls import LONG_WAIT_MS, STEP_MS, shared_wait_ms


def test_long_waits_that_begin_at_any_time_end_at_steps_of_the_clock() -> None:
    random = Random(1)
    for _ in range(1_000):
        now_ms, wait_ms = random.randrange(10**9), random.randrange(LONG_WAIT_MS, 60_000)
        end_ms = now_ms + shared_wait_ms(now_ms, wait_ms)
        assert end_ms % STEP_MS == 0
        assert 0 <= now_ms + wait_ms - end_ms < STEP_MS


def test_short_wait_is_kept() -> None:
    for wait_ms in (0, 1, 2_000, LONG_WAIT_MS - 1):
        assert shared_wait_ms(123_456_789, wait_ms) == wait_ms


def test_polls_of_one_thousand_clients_end_at_few_moments() -> None:
    ends = {now_ms + shared_wait_ms(now_ms, 20_000) for now_ms in range(0, 20_000, 20)}
    assert len(ends) == 20_000 // STEP_MS
