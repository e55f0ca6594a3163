"""Goal: no entry is due early, and no due entry is left out, whatever is added, removed or moved.

Method: Hypothesis drives the queue and a plain dictionary side by side, with a clock that jumps;
many times are near the borders of seconds and minutes.
"""

from __future__ import annotations

import time  # noqa: TID251  of the processor
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batonmq_server.storage.core import delay_queue
from batonmq_server.storage.core.delay_queue import (
    MINUTE_MS,
    ROW,
    DelayedBatch,
    DelayKey,
    DelayQueue,
    DelaySnapshot,
)

NOW = 1_700_000_000_000 // MINUTE_MS * MINUTE_MS
DAY_MS = 86_400_000

aheads = st.one_of(
    st.integers(-2_000, 3_000),
    st.sampled_from([0, 999, 1_000, 59_999, MINUTE_MS, MINUTE_MS + 1, DAY_MS, 40 * DAY_MS]),
    st.integers(-DAY_MS, 40 * DAY_MS),
)


@pytest.fixture(autouse=True)
def _few_are_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_queue, "LISTED_AT_ONCE", 7)


class DelayQueueMachine(RuleBasedStateMachine):
    """`levels` is tested; `waiting` and `taken` are the expected content."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = DelayQueue()
        self.waiting: dict[DelayKey, int] = {}
        self.taken: dict[DelayKey, int] = {}
        self.next_position = 0
        self.now = NOW

    @initialize(now=st.integers(NOW, NOW + 2 * MINUTE_MS))
    def start(self, now: int) -> None:
        self.now = now

    @rule(ahead=aheads, count=st.integers(1, 4))
    def add(self, ahead: int, count: int) -> None:
        for _ in range(count):
            self.next_position += 100
            entry = DelayedBatch(self.now + ahead, self.next_position, self.next_position)
            self.levels.add(entry)
            self.waiting[entry.key] = entry.position

    @rule(data=st.data())
    @precondition(lambda self: self.waiting or self.taken)
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting | self.taken)))
        assert self.levels.remove(key)
        (self.waiting if key in self.waiting else self.taken).pop(key)
        assert not self.levels.remove(key)

    @rule(data=st.data())
    @precondition(lambda self: self.waiting or self.taken)
    def move(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting | self.taken)))
        self.next_position += 100
        self.levels.add(DelayedBatch(*key, self.next_position))
        (self.waiting if key in self.waiting else self.taken)[key] = self.next_position

    @rule(step=st.one_of(aheads, st.integers(-5_000, 5_000)))
    def turn_clock(self, step: int) -> None:
        self.now = max(self.now + step, NOW // 2)

    @rule(count=st.integers(1, 6), deliver=st.booleans())
    def take(self, count: int, deliver: bool) -> None:
        due = sorted(key for key in self.waiting if key[0] <= self.now)[:count]
        given_ = self.levels.due(self.now, count)
        assert given_ == [DelayedBatch(*key, self.waiting[key]) for key in due]
        for key in due:
            self.taken[key] = self.waiting.pop(key)
            if deliver:
                assert self.levels.remove(key)
                del self.taken[key]

    @rule()
    def release(self) -> None:
        self.levels.release(self.levels.taken)
        self.waiting |= self.taken
        self.taken.clear()

    @rule()
    def restart(self) -> None:
        raw = self.levels.snapshot().encode()
        self.levels = DelayQueue()
        self.levels.restore(raw)
        self.waiting |= self.taken
        self.taken.clear()

    @rule(part=st.floats(0, 1), count=st.integers(1, 5))
    def look_before(self, part: float, count: int) -> None:
        limit = int(self.next_position * part)
        everything = self.waiting | self.taken
        entries = sorted((at, key) for key, at in everything.items() if at < limit)[:count]
        assert self.levels.before(limit, count) == [DelayedBatch(*key, at) for at, key in entries]

    @rule(part=st.floats(0, 1), count=st.integers(1, 5))
    def look_from(self, part: float, count: int) -> None:
        begin = int(self.next_position * part)
        everything = self.waiting | self.taken
        entries = sorted((at, key) for key, at in everything.items() if at >= begin)[:count]
        found = self.levels.by_position(begin, count)
        assert found == [DelayedBatch(*key, at) for at, key in entries]

    @invariant()
    def agrees(self) -> None:
        everything = self.waiting | self.taken
        assert len(self.levels) == len(everything)
        assert self.levels.oldest_position() == min(everything.values(), default=None)
        assert self.levels.positions().tolist() == sorted(everything.values())
        assert set(self.levels.taken) == set(self.taken)
        assert all(key in self.levels for key in everything)
        if self.waiting:
            next_unix_ms = self.levels.next_unix_ms()
            assert next_unix_ms is not None
            assert next_unix_ms <= min(key[0] for key in self.waiting)


DelayQueueMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestAgainst = DelayQueueMachine.TestCase


@given(st.lists(aheads, max_size=200), st.integers(1, 50))
@settings(deadline=None)
def test_entries_are_due_once_in_order_of_time(times: list[int], count: int) -> None:
    levels = DelayQueue()
    entries = [DelayedBatch(NOW + ahead, at, at) for at, ahead in enumerate(times)]
    for entry in entries:
        levels.add(entry)
    due_entries: list[DelayedBatch] = []
    while due := levels.due(NOW + 41 * DAY_MS, count):
        due_entries += due
        for entry in due:
            levels.remove(entry.key)
    assert due_entries == sorted(entries)
    assert len(levels) == 0
    assert levels.next_unix_ms() is None


def test_no_entry_is_due_early_when_the_clock_steps_back() -> None:
    levels = DelayQueue()
    levels.due(NOW, 1)
    levels.add(DelayedBatch(NOW + 500, 1, 1))
    assert levels.due(NOW + 400, 9) == []
    levels.add(DelayedBatch(NOW - 100, 2, 2))
    assert levels.due(NOW - 3_600_000, 9) == []
    assert levels.due(NOW - 101, 9) == []
    assert levels.due(NOW - 100, 9) == [DelayedBatch(NOW - 100, 2, 2)]
    assert levels.due(NOW + 499, 9) == []
    assert levels.due(NOW + 500, 9) == [DelayedBatch(NOW + 500, 1, 1)]


def test_pages_by_position_copy_all_entries_only_once_for_many_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delay_queue, "LISTED_AT_ONCE", 2_000)
    copies, snapshot = list[int](), DelayQueue.snapshot

    def counted(levels: DelayQueue) -> DelaySnapshot:
        copies.append(len(levels))
        return snapshot(levels)

    monkeypatch.setattr(DelayQueue, "snapshot", counted)
    levels, position, listed = DelayQueue(), 0, list[int]()
    for at in range(5_000):
        levels.add(DelayedBatch(NOW + at * 7_919 % DAY_MS, at, at))
    while page := levels.by_position(position, 100):
        listed += [one.position for one in page]
        position = listed[-1] + 1
    assert listed == list(range(5_000))
    assert len(copies) == 4, "three, and one that finds the end"


def test_removed_entries_free_their_memory() -> None:
    levels = DelayQueue()
    for at in range(100_000):
        levels.add(DelayedBatch(NOW + at % 50_000, at, at))
    for at in range(99_000):
        levels.remove((NOW + at % 50_000, at))
    bucket = levels._minutes[NOW // MINUTE_MS]
    assert len(bucket.ids) < 2_100
    assert levels.oldest_position() == 99_000


@pytest.mark.parametrize("spread_ms", [30_000, 40 * DAY_MS])
def test_entries_take_less_than_24_bytes_each_plus_their_buckets(spread_ms: int) -> None:
    count, levels = 50_000, DelayQueue()
    tracemalloc.start()
    try:
        for at in range(count):
            levels.add(DelayedBatch(NOW + at * 7_919 % spread_ms, at, at))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    buckets = len(levels._minutes)
    assert used / count < 24 + 1_000 * buckets / count, (used / count, buckets)


def test_snapshot_is_restored_as_it_was() -> None:
    levels = DelayQueue()
    for at in range(20_000):
        levels.add(DelayedBatch(NOW + at * 7_919 % DAY_MS, at, at))
    again = DelayQueue()
    again.restore(levels.snapshot().encode())
    assert len(again) == len(levels)
    assert sorted(again.before(1 << 60, 1 << 60)) == sorted(levels.before(1 << 60, 1 << 60))


def test_snapshot_of_many_entries_is_quick_and_immutable() -> None:
    """The snapshot is taken on the event loop, so it must be quick; it is encoded elsewhere."""
    rows = np.empty(300_000, ROW)
    numbers = np.arange(len(rows))
    rows["deliver_unix_ms"] = NOW + numbers * 40 * DAY_MS // len(rows)
    rows["schedule_id"] = rows["position"] = numbers * 100
    levels = DelayQueue()
    levels.restore(rows.tobytes())
    assert len(levels._minutes) == 40 * 24 * 60
    snapshot_s, reference_s = list[float](), list[float]()
    for _ in range(3):  # by turns; the shortest time of each is the one that nothing disturbed
        begin_s = time.process_time()
        snapshot = levels.snapshot()
        snapshot_s.append(time.process_time() - begin_s)
        begin_s = time.process_time()
        assert sum(number * number for number in range(1_000_000))  # about as long
        reference_s.append(time.process_time() - begin_s)
    assert min(snapshot_s) < 2 * min(reference_s)
    for number in range(0, 1_000, 2):
        levels.remove((NOW + number * 40 * DAY_MS // len(rows), number * 100))
        levels.add(DelayedBatch(NOW + number, 1_000_000_000 + number, 5))
    decoded = np.frombuffer(snapshot.encode(), ROW)
    assert decoded[np.argsort(decoded["schedule_id"])].tobytes() == rows.tobytes()
