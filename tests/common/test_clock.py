"""Goal: monotonic time follows the event loop and includes suspensions; timestamps are wall time.

Method: an event loop and system clocks whose time the test sets.
"""

from __future__ import annotations

import asyncio
import time  # noqa: TID251  the clocks under test

import pytest

from batonmq._common.clock import Clock


async def test_monotonic_time_is_that_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 12.3456)
    assert Clock().monotonic_ms() == 12_345


async def test_monotonic_time_includes_the_suspension_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 100.0)
    asleep_s = 7.0  # before the process started
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    monkeypatch.setattr(time, "clock_gettime", lambda _: 50.0 + asleep_s)
    clock = Clock()
    assert clock.monotonic_ms() == 100_000
    asleep_s += 30
    assert clock.monotonic_ms() == 130_000
    asleep_s -= 0.4  # the two clocks are not read at the same moment
    assert clock.monotonic_ms() == 130_000
    asleep_s += 0.9
    assert clock.monotonic_ms() == 130_000
    asleep_s += 60
    assert clock.monotonic_ms() == 190_500


async def test_wall_clock_counts_from_the_unix_epoch() -> None:
    before_ms = time.time_ns() // 1_000_000
    now_ms = Clock().unix_ms()
    assert before_ms <= now_ms <= time.time_ns() // 1_000_000
