"""Who has what, and what follows from it, as the leader of a replica set sees it.

Goal: nothing counts as confirmed that a member of the in-sync set lacks; who falls behind is let
out, who has caught up is let in, and neither happens without a reason.
Method: claims on the books alone, times as arguments; a state machine that plays leaders, followers
and etcd at random against a plain model.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batonmq_server.runtime.replication.in_sync_tracker import InSyncTracker

LAG_MS = 3_000


def books(*followers: str, position: int = 0) -> InSyncTracker:
    return InSyncTracker("a", frozenset({"a", *followers}), position, now_ms=0)


def level(of: InSyncTracker, now_ms: int) -> frozenset[str]:
    of.wait_for(frozenset("bcd"), now_ms, LAG_MS)
    return of.level()


def test_alone_everything_durable_is_confirmed() -> None:
    alone = books(position=7)
    assert alone.confirmed == 7
    alone.wrote(9)
    assert alone.confirmed == 9


def test_what_one_member_lacks_is_not_confirmed() -> None:
    three = books("b", "c")
    three.wrote(5)
    three.heard("b", 5, 10)
    assert three.confirmed == 0
    three.heard("c", 3, 20)
    assert three.confirmed == 3


def test_what_the_leader_lacks_is_not_confirmed() -> None:
    two = books("b", position=2)
    two.heard("b", 4, 10)
    assert two.confirmed == 2


def test_a_new_leader_confirms_nothing_until_its_followers_have_spoken() -> None:
    two = books("b", position=9)
    assert two.confirmed == 0
    two.heard("b", 9, 10)
    assert two.confirmed == 9


def test_a_follower_outside_holds_nothing_up() -> None:
    alone = books(position=5)
    alone.heard("b", 1, 10)
    alone.wrote(8)
    assert alone.confirmed == 8


def test_who_joins_is_waited_for_before_etcd_says_so() -> None:
    alone = books(position=5)
    alone.heard("b", 5, 10)
    alone.join(level(alone, 20))
    alone.wrote(6)
    assert alone.confirmed == 5
    alone.heard("b", 6, 30)
    assert alone.confirmed == 6


def test_who_fell_out_is_not_waited_for() -> None:
    two = books("b")
    two.wrote(4)
    assert two.late(LAG_MS + 1, LAG_MS) == {"b"}
    two.settled(frozenset({"a"}))
    assert two.confirmed == 4


def test_a_member_that_was_never_heard_of_is_late_although_nothing_is_written() -> None:
    assert books("b").late(LAG_MS, LAG_MS) == frozenset()
    assert books("b").late(LAG_MS + 1, LAG_MS) == {"b"}


def test_a_follower_that_keeps_up_with_a_busy_leader_is_not_late() -> None:
    two = books("b")
    for step in range(1, 100):
        two.wrote(10 * step)
        two.heard("b", 10 * (step - 1), 100 * step)
        assert two.late(100 * step, LAG_MS) == frozenset()


def test_a_follower_that_crawls_is_late_although_it_is_heard_of() -> None:
    two = books("b")
    now_ms = 0
    while not two.late(now_ms, LAG_MS):
        now_ms += 100
        two.wrote(now_ms)
        two.heard("b", now_ms // 10, now_ms)
        assert now_ms < 10 * LAG_MS
    assert now_ms > LAG_MS


def test_a_follower_without_everything_that_is_confirmed_can_not_come_in() -> None:
    alone = books(position=5)
    alone.heard("b", 4, 10)
    assert level(alone, 20) == frozenset()
    alone.heard("b", 5, 30)
    assert level(alone, 40) == {"b"}


def test_who_lacks_what_the_leader_began_with_can_not_come_in_to_a_new_leadership() -> None:
    two = books("b", position=11)
    two.heard("c", 9, 10)
    assert two.confirmed == 0, "the new leader does not know yet what was"
    assert level(two, 20) == frozenset(), "10 and 11 may have been answered for"
    two.heard("c", 11, 30)
    assert level(two, 40) == {"c"}


def test_a_follower_that_keeps_up_comes_in_although_the_leader_never_rests() -> None:
    alone = books(position=10)
    given = 0
    for now_ms in range(0, 60_000, 5):
        alone.heard("b", given, now_ms)
        given = alone.position
        if alone.confirmed == alone.position:  # those who write wait for what they have written
            alone.wrote(alone.position + 10)
        if now_ms % 100 == 50 and level(alone, now_ms):
            break
    assert alone.level() == {"b"}
    assert now_ms < 1_000


def test_who_keeps_up_from_outside_is_waited_for_until_it_does_not() -> None:
    alone = books(position=5)
    alone.heard("b", 5, 10)
    alone.wrote(6)
    assert level(alone, 20) == frozenset(), "6 is confirmed already"
    alone.wrote(7)
    assert alone.confirmed == 6
    alone.heard("b", 6, 30)
    assert level(alone, 40) == {"b"}
    assert level(alone, 30 + LAG_MS + 1) == frozenset()
    assert alone.confirmed == 7


def test_who_has_not_caught_up_once_is_not_waited_for() -> None:
    alone = books(position=5)
    alone.heard("b", 5, 10)
    alone.forget("b")
    alone.heard("b", 1, 20)
    alone.heard("c", 1, 20)
    level(alone, 30)
    assert alone.awaited == frozenset()
    alone.wrote(9)
    assert alone.confirmed == 9


def test_a_follower_that_has_gone_silent_can_not_come_in() -> None:
    alone = books(position=5)
    alone.heard("b", 5, 10)
    assert level(alone, 10 + LAG_MS + 1) == frozenset()


def test_a_follower_that_begins_anew_counts_as_empty_and_confirmed_never_falls() -> None:
    two = books("b")
    two.wrote(5)
    two.heard("b", 5, 10)
    two.forget("b")
    assert two.confirmed == 5
    assert two.lag("b") == 5
    two.wrote(6)
    assert two.confirmed == 5


def test_a_follower_may_say_less_than_before() -> None:
    two = books("b")
    two.wrote(5)
    two.heard("b", 5, 10)
    two.heard("b", 2, 20)
    two.wrote(6)
    assert two.confirmed == 5
    assert two.lag("b") == 4


class Set(RuleBasedStateMachine):
    """A leader and three possible followers, told of at random; the model knows all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.books = InSyncTracker("a", frozenset({"a", "b"}), 0, 0)
        self.told = {"b": 0, "c": 0, "d": 0}

    @rule(by=st.integers(1, 5))
    def write(self, by: int) -> None:
        self.books.wrote(self.books.position + by)

    @rule(name=st.sampled_from("bcd"), back=st.integers(0, 8), after=st.integers(0, 4_000))
    def hear(self, name: str, back: int, after: int) -> None:
        self.now_ms += after
        self.told[name] = max(0, self.books.position - back)
        self.books.heard(name, self.told[name], self.now_ms)

    @rule()
    def let_out(self) -> None:
        late = self.books.late(self.now_ms, LAG_MS)
        self.books.settled((self.books.in_sync | self.books.joining) - late)

    @rule(etcd_knows=st.booleans())
    def let_in(self, etcd_knows: bool) -> None:
        enter = level(self.books, self.now_ms)
        assert all(self.told[name] >= self.books.confirmed for name in enter)
        self.books.join(enter)
        if etcd_knows:
            self.books.settled(self.books.in_sync | self.books.joining)

    @rule(name=st.sampled_from("bcd"))
    def begin_anew(self, name: str) -> None:
        self.books.forget(name)
        self.told[name] = 0

    def teardown(self) -> None:
        assert self.books.confirmed <= self.books.position

    @invariant()
    def nothing_new_is_confirmed_without_every_member(self) -> None:
        before = getattr(self, "confirmed", 0)
        self.confirmed = self.books.confirmed
        assert self.confirmed >= before
        if self.confirmed > before:
            needed = (self.books.in_sync | self.books.joining | self.books.awaited) - {"a"}
            assert all(self.told[name] >= self.confirmed for name in needed)


TestSet = Set.TestCase
