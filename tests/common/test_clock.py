"""Time as a dependency.

Goal: deadlines follow the event loop, and go on while the machine is suspended; stamps follow the
wall.
Method: an event loop whose time is the test's, and a machine that was suspended by what its clocks
say.
"""

from __future__ import annotations

import asyncio
import time  # noqa: TID251  what is under test

import pytest

from batonmq._common.clock import Clock


async def test_monotonic_time_is_that_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 12.3456)
    assert Clock().monotonic_ms() == 12_345


async def test_time_goes_on_while_the_machine_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 100.0)
    asleep_s = 7.0  # before the process began
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    monkeypatch.setattr(time, "clock_gettime", lambda _: 50.0 + asleep_s)
    clock = Clock()
    assert clock.monotonic_ms() == 100_000
    asleep_s += 30
    assert clock.monotonic_ms() == 130_000
    asleep_s -= 0.4  # the two are not read in the same moment
    assert clock.monotonic_ms() == 130_000
    asleep_s += 0.9
    assert clock.monotonic_ms() == 130_000
    asleep_s += 60
    assert clock.monotonic_ms() == 190_500


async def test_wall_clock_counts_from_the_unix_epoch() -> None:
    before_ms = time.time_ns() // 1_000_000
    now_ms = Clock().unix_ms()
    assert before_ms <= now_ms <= time.time_ns() // 1_000_000
