"""The leader's tracker of positions, confirmed position and in-sync set.

Goal: a position that a replica of the in-sync set lacks is not confirmed; a follower that falls
behind leaves the set, one that has caught up joins, and neither happens without a reason.
Method: claims on the tracker alone, times as arguments; a state machine with random leaders,
followers and etcd against a plain model.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batonmq_server.runtime.replication.in_sync_tracker import InSyncTracker

LAG_MS = 3_000


def tracker(*followers: str, position: int = 0) -> InSyncTracker:
    return InSyncTracker("a", frozenset({"a", *followers}), position, now_ms=0)


def ready(of: InSyncTracker, now_ms: int) -> frozenset[str]:
    of.await_joiners(frozenset("bcd"), now_ms, LAG_MS)
    return of.ready_to_join()


def test_leader_alone_confirms_everything_durable() -> None:
    alone = tracker(position=7)
    assert alone.confirmed == 7
    alone.advance_leader(9)
    assert alone.confirmed == 9


def test_position_that_one_replica_lacks_is_not_confirmed() -> None:
    three = tracker("b", "c")
    three.advance_leader(5)
    three.acknowledge("b", 5, 10)
    assert three.confirmed == 0
    three.acknowledge("c", 3, 20)
    assert three.confirmed == 3


def test_position_that_the_leader_lacks_is_not_confirmed() -> None:
    two = tracker("b", position=2)
    two.acknowledge("b", 4, 10)
    assert two.confirmed == 2


def test_new_leader_confirms_nothing_before_its_followers_report() -> None:
    two = tracker("b", position=9)
    assert two.confirmed == 0
    two.acknowledge("b", 9, 10)
    assert two.confirmed == 9


def test_follower_outside_the_set_delays_nothing() -> None:
    alone = tracker(position=5)
    alone.acknowledge("b", 1, 10)
    alone.advance_leader(8)
    assert alone.confirmed == 8


def test_joining_follower_is_waited_for_before_etcd_has_the_change() -> None:
    alone = tracker(position=5)
    alone.acknowledge("b", 5, 10)
    alone.start_joining(ready(alone, 20))
    alone.advance_leader(6)
    assert alone.confirmed == 5
    alone.acknowledge("b", 6, 30)
    assert alone.confirmed == 6


def test_follower_that_left_the_set_is_not_waited_for() -> None:
    two = tracker("b")
    two.advance_leader(4)
    assert two.late(LAG_MS + 1, LAG_MS) == {"b"}
    two.set_in_sync(frozenset({"a"}))
    assert two.confirmed == 4


def test_follower_that_never_reported_is_late_although_nothing_is_written() -> None:
    assert tracker("b").late(LAG_MS, LAG_MS) == frozenset()
    assert tracker("b").late(LAG_MS + 1, LAG_MS) == {"b"}


def test_follower_that_keeps_up_with_a_busy_leader_is_not_late() -> None:
    two = tracker("b")
    for step in range(1, 100):
        two.advance_leader(10 * step)
        two.acknowledge("b", 10 * (step - 1), 100 * step)
        assert two.late(100 * step, LAG_MS) == frozenset()


def test_follower_that_falls_behind_is_late_although_it_reports() -> None:
    two = tracker("b")
    now_ms = 0
    while not two.late(now_ms, LAG_MS):
        now_ms += 100
        two.advance_leader(now_ms)
        two.acknowledge("b", now_ms // 10, now_ms)
        assert now_ms < 10 * LAG_MS
    assert now_ms > LAG_MS


def test_follower_that_lacks_something_confirmed_can_not_join() -> None:
    alone = tracker(position=5)
    alone.acknowledge("b", 4, 10)
    assert ready(alone, 20) == frozenset()
    alone.acknowledge("b", 5, 30)
    assert ready(alone, 40) == {"b"}


def test_follower_that_lacks_the_start_of_the_epoch_can_not_join() -> None:
    two = tracker("b", position=11)
    two.acknowledge("c", 9, 10)
    assert two.confirmed == 0, "the new leader has no confirmed position yet"
    assert ready(two, 20) == frozenset(), "10 and 11 may have been confirmed"
    two.acknowledge("c", 11, 30)
    assert ready(two, 40) == {"c"}


def test_follower_that_keeps_up_joins_although_the_leader_always_writes() -> None:
    alone = tracker(position=10)
    reported = 0
    for now_ms in range(0, 60_000, 5):
        alone.acknowledge("b", reported, now_ms)
        reported = alone.position
        if alone.confirmed == alone.position:  # writers wait for their last write
            alone.advance_leader(alone.position + 10)
        if now_ms % 100 == 50 and ready(alone, now_ms):
            break
    assert alone.ready_to_join() == {"b"}
    assert now_ms < 1_000


def test_follower_that_keeps_up_outside_the_set_is_waited_for_until_it_stops() -> None:
    alone = tracker(position=5)
    alone.acknowledge("b", 5, 10)
    alone.advance_leader(6)
    assert ready(alone, 20) == frozenset(), "6 is confirmed already"
    alone.advance_leader(7)
    assert alone.confirmed == 6
    alone.acknowledge("b", 6, 30)
    assert ready(alone, 40) == {"b"}
    assert ready(alone, 30 + LAG_MS + 1) == frozenset()
    assert alone.confirmed == 7


def test_follower_that_never_caught_up_is_not_waited_for() -> None:
    alone = tracker(position=5)
    alone.acknowledge("b", 5, 10)
    alone.reset_follower("b")
    alone.acknowledge("b", 1, 20)
    alone.acknowledge("c", 1, 20)
    ready(alone, 30)
    assert alone.awaited == frozenset()
    alone.advance_leader(9)
    assert alone.confirmed == 9


def test_silent_follower_can_not_join() -> None:
    alone = tracker(position=5)
    alone.acknowledge("b", 5, 10)
    assert ready(alone, 10 + LAG_MS + 1) == frozenset()


def test_follower_that_starts_anew_counts_as_empty_and_confirmed_never_goes_back() -> None:
    two = tracker("b")
    two.advance_leader(5)
    two.acknowledge("b", 5, 10)
    two.reset_follower("b")
    assert two.confirmed == 5
    assert two.lag("b") == 5
    two.advance_leader(6)
    assert two.confirmed == 5


def test_follower_may_report_a_lower_position() -> None:
    two = tracker("b")
    two.advance_leader(5)
    two.acknowledge("b", 5, 10)
    two.acknowledge("b", 2, 20)
    two.advance_leader(6)
    assert two.confirmed == 5
    assert two.lag("b") == 4


class Model(RuleBasedStateMachine):
    """A leader and three possible followers, with random reports; the model has all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.tracker = InSyncTracker("a", frozenset({"a", "b"}), 0, 0)
        self.reported = {"b": 0, "c": 0, "d": 0}

    @rule(by=st.integers(1, 5))
    def write(self, by: int) -> None:
        self.tracker.advance_leader(self.tracker.position + by)

    @rule(name=st.sampled_from("bcd"), back=st.integers(0, 8), after=st.integers(0, 4_000))
    def report(self, name: str, back: int, after: int) -> None:
        self.now_ms += after
        self.reported[name] = max(0, self.tracker.position - back)
        self.tracker.acknowledge(name, self.reported[name], self.now_ms)

    @rule()
    def leave(self) -> None:
        late = self.tracker.late(self.now_ms, LAG_MS)
        self.tracker.set_in_sync((self.tracker.in_sync | self.tracker.joining) - late)

    @rule(etcd_has_it=st.booleans())
    def join(self, etcd_has_it: bool) -> None:
        joining = ready(self.tracker, self.now_ms)
        assert all(self.reported[name] >= self.tracker.confirmed for name in joining)
        self.tracker.start_joining(joining)
        if etcd_has_it:
            self.tracker.set_in_sync(self.tracker.in_sync | self.tracker.joining)

    @rule(name=st.sampled_from("bcd"))
    def start_anew(self, name: str) -> None:
        self.tracker.reset_follower(name)
        self.reported[name] = 0

    def teardown(self) -> None:
        assert self.tracker.confirmed <= self.tracker.position

    @invariant()
    def nothing_new_is_confirmed_without_every_replica(self) -> None:
        before = getattr(self, "confirmed", 0)
        self.confirmed = self.tracker.confirmed
        assert self.confirmed >= before
        if self.confirmed > before:
            needed = (self.tracker.in_sync | self.tracker.joining | self.tracker.awaited) - {"a"}
            assert all(self.reported[name] >= self.confirmed for name in needed)


TestModel = Model.TestCase
