"""Goal: lines of log that callers cause are bounded, and no event is left out of the counts."""

from __future__ import annotations

from batonmq_server.runtime.log_limiter import KEYS_MAX, LogLimiter


def test_first_event_of_a_key_gets_a_line_and_later_ones_are_counted() -> None:
    now_ms = 5
    limiter = LogLimiter(lambda: now_ms, 1_000)
    assert [limiter.count("a") for _ in range(4)] == [1, 0, 0, 0]
    assert limiter.count("b") == 1
    now_ms += 999
    assert limiter.count("a") == 0
    now_ms += 1
    assert limiter.count("a") == 5, "four without a line, and this one"
    assert limiter.count("a") == 0


def test_many_keys_share_one_line_and_take_bounded_memory() -> None:
    now_ms = 0
    limiter = LogLimiter(lambda: now_ms, 1_000)
    lines = [limiter.count(number) for number in range(10 * KEYS_MAX)]
    assert sum(map(bool, lines)) == KEYS_MAX + 1
    assert len(limiter._lines) <= KEYS_MAX + 1
    now_ms += 1_000
    assert limiter.count("new") == 1, "old keys are removed"


def test_keys_with_uncounted_events_are_removed_and_the_shared_line_counts_them() -> None:
    now_ms = 0
    limiter = LogLimiter(lambda: now_ms, 1_000)
    for number in range(KEYS_MAX):
        assert [limiter.count(number), limiter.count(number)] == [1, 0]
    now_ms += 1_000
    assert [limiter.count("new"), limiter.count("new")] == [1, 0], "the new key has its own line"
    lines = [limiter.count(KEYS_MAX + number) for number in range(KEYS_MAX)]
    assert max(lines) == KEYS_MAX + 1, "the shared line counts every event of the removed keys"
