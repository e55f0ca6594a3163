"""Goal: a benchmark reports measured values, and a stall counts for every message that was due.

Method: the schedule and the percentiles with hand-made numbers; the topic in a real cluster.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batonmq.admin.admin import Admin
from batonmq.admin.reports import CreatedTopic
from batonmq.cli.benchmark import BenchLoad, BenchResult, due_times, percentiles_ms, temporary_topic
from batonmq.errors import TopicNotFound


class _Watch:
    """A clock that advances by a step with each call."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 10.0, step_s

    def __call__(self) -> float:
        self._now_s += self._step_s
        return self._now_s


def test_percentiles_are_measured_values() -> None:
    percentiles = percentiles_ms([number / 1000 for number in range(1, 1001)])
    assert percentiles == {"p50": 501, "p95": 951, "p99": 991, "p99.9": 1000, "max": 1000}
    assert percentiles_ms([0.002]) == dict.fromkeys(("p50", "p95", "p99", "p99.9", "max"), 2)
    assert percentiles_ms([]) is None


def test_with_a_rate_due_times_do_not_depend_on_the_clock() -> None:
    for step_s in (0.0, 100.0):  # without any delay, and with delays beyond every due time
        times = list(due_times(BenchLoad(per_s=4, count=5), _Watch(step_s)))
        assert [time - times[0] for time in times if time and times[0]] == [0, 0.25, 0.5, 0.75, 1]
    assert len(list(due_times(BenchLoad(per_s=4, seconds=3), _Watch(0)))) == 12


def test_without_a_rate_messages_are_due_at_once_until_the_count_or_the_time() -> None:
    assert list(due_times(BenchLoad(count=3), _Watch(100))) == [None] * 3
    assert list(due_times(BenchLoad(seconds=2), _Watch(0.5))) == [None] * 3


def test_rates_follow_from_count_and_time() -> None:
    result = BenchResult(count=10, seconds=4, size_bytes=100)
    assert (result.per_s, result.bytes_per_s) == (2.5, 250)
    assert BenchResult(0, 0, 100).per_s == 0


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_rate_of_no_messages_is_zero(seconds: float) -> None:
    assert BenchResult(0, seconds, 1).bytes_per_s == 0


class _Interrupted(Admin):
    """An admin client that is cancelled after the creation of a topic, before its response."""

    async def create_topic(self, name: str, queue_count: int = 0, **more: Any) -> CreatedTopic:
        await super().create_topic(name, queue_count, **more)
        raise asyncio.CancelledError


async def test_interrupted_topic_creation_leaves_no_topic(nameserver: str) -> None:
    async with _Interrupted(nameserver) as admin:
        with pytest.raises(asyncio.CancelledError):
            async with temporary_topic(admin, "interrupted", 1, keep=False):
                raise AssertionError("the cancellation was ignored")
        with pytest.raises(TopicNotFound):
            await admin.delete_topic("interrupted")
