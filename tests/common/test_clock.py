"""Time as a dependency.

Goal: deadlines follow the event loop, stamps the wall.
Method: an event loop whose time is the test's.
"""

from __future__ import annotations

import asyncio
import time  # noqa: TID251  what is under test

import pytest

from batonmq.common.clock import Clock


async def test_monotonic_time_is_that_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 12.3456)
    assert Clock().monotonic_ms() == 12_345


async def test_wall_clock_counts_from_the_unix_epoch() -> None:
    before_ms = time.time_ns() // 1_000_000
    now_ms = Clock().unix_ms()
    assert before_ms <= now_ms <= time.time_ns() // 1_000_000
