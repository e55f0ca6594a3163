"""Goal: messages of a key are taken one after the other, in order; no key waits for another.

Method: the pure core. Single rules with a few messages; then Hypothesis does any sequence of
operations on a schedule and on a naive model, which searches a list of all messages each time.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonmq._consumer.key_schedule import KeySchedule


def schedule_of(keys: Sequence[str | None]) -> KeySchedule[str]:
    schedule = KeySchedule[str]()
    for offset, key in enumerate(keys):
        schedule.add(offset, key, f"{key}@{offset}")
    return schedule


def take_all(schedule: KeySchedule[str]) -> list[int]:
    offsets = []
    while (taken := schedule.take()) is not None:
        offsets.append(taken.offset)
    return offsets


def test_one_message_of_each_key_is_ready_and_all_without_a_key() -> None:
    schedule = schedule_of(["a", "a", "b", None, None, "b"])
    assert take_all(schedule) == [0, 2, 3, 4]
    assert schedule.waiting_count == 2
    assert not schedule.ready


def test_next_message_of_a_key_is_ready_when_the_one_before_is_finished() -> None:
    schedule = schedule_of(["a", "a", "b", "b"])
    take_all(schedule)
    assert schedule.finish(2)
    assert take_all(schedule) == [3]
    assert not schedule.finish(3), "no message of b waits"
    assert schedule.finish(0)
    assert take_all(schedule) == [1]


def test_lowest_offset_is_taken_first() -> None:
    schedule = schedule_of(["a", "a", None])
    first = schedule.take()
    assert first is not None
    schedule.finish(first.offset)
    assert take_all(schedule) == [1, 2]


def test_peek_shows_what_take_returns_and_changes_nothing() -> None:
    schedule = schedule_of(["a", "a", "b", None, "c"])
    assert [offset for offset, _ in schedule.peek(2)] == [0, 2]
    assert [offset for offset, _ in schedule.peek(9)] == take_all(schedule) == [0, 2, 3, 4]


def test_peek_ends_before_a_failed_message() -> None:
    schedule = schedule_of([None, "b", "c"])
    take_all(schedule)
    schedule.fail(1, "failed", 7)
    schedule.add(3, None, "3")
    assert [offset for offset, _ in schedule.peek(9)] == [3], "the failed one is not due"
    schedule.due(1)
    schedule.add(0, None, "0")
    assert [offset for offset, _ in schedule.peek(9)] == [0]


def test_failed_message_keeps_its_key_until_it_is_due_and_finished() -> None:
    schedule = schedule_of(["a", "a", "b"])
    take_all(schedule)
    schedule.fail(0, "failed", 7)
    schedule.finish(2)
    assert not schedule.ready
    assert (schedule.failed_count, schedule.taken_count) == (1, 1)
    lowest = schedule.lowest_failed
    assert lowest is not None
    assert (lowest[0], lowest[1].key, lowest[1].failed_ms) == (0, "a", 7)
    assert schedule.due(0)
    assert not schedule.due(0), "it is ready already"
    taken = schedule.take()
    assert taken == (0, "failed", True)
    assert not schedule.ready
    assert schedule.finish(0)
    assert take_all(schedule) == [1]


def test_message_given_up_keeps_its_key_until_the_next_grant() -> None:
    schedule = schedule_of(["a", "a", "b"])
    take_all(schedule)
    schedule.fail(0, "failed", 0)
    schedule.due(0)
    assert schedule.give_up_failed() == ["failed"]
    assert not schedule.ready
    schedule.drop_waiting()
    schedule.add(1, "a", "again")
    assert not schedule.ready, "offset 0 has to come first"
    schedule.drop_waiting()
    schedule.begin_grant()
    for offset in (0, 1):
        schedule.add(offset, "a", "again")
    assert take_all(schedule) == [0]


def test_message_in_a_handler_keeps_its_key_over_a_new_grant() -> None:
    schedule = schedule_of(["a", "b", "a", "b"])
    take_all(schedule)
    schedule.finish(1)
    schedule.drop_waiting()
    schedule.begin_grant()
    for offset, key in ((2, "a"), (3, "b")):
        schedule.add(offset, key, "again")
    assert take_all(schedule) == [3]
    assert schedule.finish(0)
    assert take_all(schedule) == [2]


def test_nothing_is_left_after_forget() -> None:
    schedule = schedule_of(["a", "a", "b", None])
    take_all(schedule)
    schedule.fail(2, "failed", 0)
    schedule.forget()
    assert (schedule.waiting_count, schedule.taken_count, schedule.failed_count) == (0, 0, 0)
    assert not schedule.finish(0), "a result from before does not count"
    schedule.add(0, "a", "again")
    assert take_all(schedule) == [0]


class ScheduleMachine(RuleBasedStateMachine):
    """A schedule beside a model: a list of messages that are not finished, by offset."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = KeySchedule[int]()
        self.next_offset = 0
        self.waiting: dict[int, str | None] = {}
        self.taken: dict[int, str | None] = {}
        self.failed: dict[int, bool] = {}
        self.given_up: set[str] = set()

    def model_ready(self) -> list[int]:
        occupied = {key for key in self.taken.values() if key is not None} | self.given_up
        ready = [offset for offset, due in self.failed.items() if due]
        for offset, key in sorted(self.waiting.items()):
            if key is None or key not in occupied:
                ready.append(offset)
            if key is not None:
                occupied.add(key)
        return sorted(ready)

    @rule(key=st.sampled_from(["a", "b", "c", None]))
    def add(self, key: str | None) -> None:
        self.schedule.add(self.next_offset, key, self.next_offset)
        self.waiting[self.next_offset] = key
        self.next_offset += 1

    @rule()
    def peek(self) -> None:
        fresh = []
        for offset in self.model_ready():
            if offset in self.failed:
                break
            fresh.append(offset)
        for count in (1, 2, 9):
            assert list(self.schedule.peek(count)) == [(one, one) for one in fresh[:count]]

    @rule()
    def take(self) -> None:
        ready = self.model_ready()
        taken = self.schedule.take()
        if not ready:
            assert taken is None
            return
        assert taken is not None
        assert (taken.offset, taken.item) == (ready[0], ready[0])
        assert taken.again == (taken.offset in self.failed)
        if taken.again:
            del self.failed[taken.offset]
        else:
            self.taken[taken.offset] = self.waiting.pop(taken.offset)

    def handled(self) -> list[int]:
        return [offset for offset in self.taken if offset not in self.failed]

    @precondition(lambda self: self.handled())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(self.handled()))
        before = self.model_ready()
        del self.taken[offset]
        assert self.schedule.finish(offset) == (self.model_ready() != before)

    @precondition(lambda self: self.handled())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(self.handled()))
        self.schedule.fail(offset, offset, 0)
        self.failed[offset] = False

    @precondition(lambda self: self.failed)
    @rule(data=st.data())
    def due(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.failed)))
        assert self.schedule.due(offset) == (not self.failed[offset])
        self.failed[offset] = True

    @precondition(lambda self: self.handled())
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(self.handled()))
        self.schedule.give_up(offset)
        key = self.taken.pop(offset)
        self.given_up |= {key} if key is not None else set()

    @rule()
    def lose_and_acquire(self) -> None:
        """Fence and grant: those in handlers stay, all others are delivered again, in order."""
        assert self.schedule.give_up_failed() == sorted(self.failed)
        for offset in self.failed:
            del self.taken[offset]
        self.schedule.drop_waiting()
        self.schedule.begin_grant()
        self.failed, self.given_up, self.waiting = {}, set(), {}

    @rule()
    def reset(self) -> None:
        self.schedule.forget()
        self.waiting, self.taken, self.failed, self.given_up = {}, {}, {}, set()

    @invariant()
    def same_counts(self) -> None:
        schedule = self.schedule
        assert schedule.ready == bool(self.model_ready())
        assert schedule.waiting_count == len(self.waiting)
        assert schedule.taken_count == len(self.taken)
        assert schedule.failed_count == len(self.failed)
        lowest = schedule.lowest_failed
        assert (None if lowest is None else lowest[0]) == min(self.failed, default=None)

    @invariant()
    def keys_without_messages_are_forgotten(self) -> None:
        held = {*self.waiting.values(), *self.taken.values(), *self.given_up} - {None}
        assert set(self.schedule._occupied) == held


TestScheduleAgainstItsModel = ScheduleMachine.TestCase
TestScheduleAgainstItsModel.settings = settings(max_examples=100, stateful_step_count=40)
