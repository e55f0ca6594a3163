"""The progress of a queue at its owner.

Goal: only offsets that were finished, filtered or acked before are acked; finished offsets are
neither lost nor started again after a new grant; a Close names exactly the offsets that were
started and not finished.
Method: hand-written cases of known mistakes, then a Hypothesis state machine that compares one
queue with plain sets, together with an offsets service that is a set. Commits may be lost in both
directions and answered late and out of order; between two grants another owner may handle messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from batonmq._core.queue_progress import Acks, GrantedProgress, QueueProgress
from batonmq._core.ranges import Range, normalize, of_sorted

OFFSETS = st.integers(0, 9)
SETS = st.sets(OFFSETS, max_size=4)
PICKS = st.integers(0, 9)


def members(ranges: Iterable[Range]) -> set[int]:
    return {offset for first, end in ranges for offset in range(first, end)}


def runs(offsets: Iterable[int]) -> tuple[Range, ...]:
    return tuple(of_sorted(sorted(offsets)))


def handled_offsets(acks: Acks) -> set[int]:
    """Return every offset that is handled by `acks`."""
    return set(range(acks.committed)) | members(acks.ranges)


def handle(progress: QueueProgress, *offsets: int) -> None:
    for offset in offsets:
        assert start(progress, offset)
        assert finish(progress, offset)


def start(progress: QueueProgress, offset: int) -> bool:
    return progress.start(offset, offset + 1)


def finish(progress: QueueProgress, offset: int) -> bool:
    return progress.finish(offset, offset + 1) == 1


def is_done(progress: QueueProgress, offset: int) -> bool:
    return not progress.not_done(offset, offset + 1)


def receive(progress: QueueProgress, next_offset: int, offsets: Iterable[int]) -> None:
    progress.receive(next_offset, runs(offsets))


# ---- known mistakes


def test_first_offset_of_a_later_acked_range_is_done() -> None:
    progress = QueueProgress(GrantedProgress(1, 0, 2, acked=((4, 6), (8, 10))))
    assert [offset for offset in range(2, 12) if is_done(progress, offset)] == [4, 5, 8, 9]


def test_work_finished_before_a_new_grant_and_committed_after_it_is_not_started_again() -> None:
    before = QueueProgress(GrantedProgress(1, 0, 5))
    receive(before, 8, [5, 6, 7])
    handle(before, 5, 6, 7)
    progress = before.renewed(GrantedProgress(2, 0, 5))
    progress.confirm(progress.acks())
    assert progress.committed == 8
    assert progress.next_offset == 5, "the next pull returns 5, 6 and 7 again"
    assert all(is_done(progress, offset) for offset in (5, 6, 7))


def test_message_whose_handler_runs_through_a_new_grant_is_not_started_again() -> None:
    before = QueueProgress(GrantedProgress(1, 0, 0))
    receive(before, 2, [0, 1])
    assert start(before, 0)
    progress = before.renewed(GrantedProgress(2, 0, 0))
    assert is_done(progress, 0)
    assert not is_done(progress, 1), "the message was never started"
    assert finish(progress, 0)
    assert handled_offsets(progress.acks()) == {0}


def test_story_09_message_given_up_after_its_claim_is_flagged_as_redelivered() -> None:
    """offsets does not flag a claimed message, so the client does."""
    before = QueueProgress(GrantedProgress(1, 0, 0))
    receive(before, 2, [0, 1])
    assert start(before, 0)
    assert before.claim(10) == [(0, 1)]
    before.give_up(0)
    progress = before.renewed(GrantedProgress(2, 0, 0))
    assert not is_done(progress, 0), "the message is delivered again"
    assert progress.is_redelivered(0)
    assert not progress.is_redelivered(1)
    assert progress.close_content().unfinished == ((0, 1),), "the next owner flags it too"
    receive(progress, 1, [0])
    handle(progress, 0)
    assert progress.close_content().unfinished == ()


def test_message_given_up_under_a_new_grant_is_delivered_again_and_then_acknowledged() -> None:
    before = QueueProgress(GrantedProgress(1, 0, 0))
    receive(before, 6, [0, 1, 2, 3, 4, 5])
    assert start(before, 3)
    before.claim(10)
    progress = before.renewed(GrantedProgress(2, 0, 0))
    assert progress.give_up(3), "it was not received under the new grant yet"
    assert progress.is_redelivered(3)
    assert progress.close_content().unfinished == ((3, 4),)
    receive(progress, 5, [0, 1, 2, 3, 4])
    for offset in range(5):
        handle(progress, offset)
    assert progress.acks().committed == 5
    assert progress.close_content().unfinished == ()


def test_message_given_up_under_its_own_grant_is_acknowledged_only_under_the_next_one() -> None:
    progress = QueueProgress(GrantedProgress(1, 0, 0))
    receive(progress, 2, [0, 1])
    assert start(progress, 0)
    assert not progress.give_up(0)
    handle(progress, 1)
    assert handled_offsets(progress.acks()) == {1}


def test_message_given_up_before_the_claim_is_flagged_by_offsets() -> None:
    """A message that is not claimed is flagged by the fence."""
    before = QueueProgress(GrantedProgress(1, 0, 0))
    receive(before, 1, [0])
    assert start(before, 0)
    before.give_up(0)
    assert before.claim(10) == []
    progress = before.renewed(GrantedProgress(2, 0, 0, maybe_seen=((0, 1),)))
    assert progress.is_redelivered(0)
    assert progress.close_content().unfinished == ()


def test_result_of_a_message_that_another_owner_has_acked_does_not_count() -> None:
    before = QueueProgress(GrantedProgress(1, 0, 0))
    receive(before, 2, [0, 1])
    assert start(before, 0)
    progress = before.renewed(GrantedProgress(3, 0, 2))
    assert not progress.running
    assert not finish(progress, 0)
    assert progress.acks().committed == 2


def test_nothing_survives_a_reset() -> None:
    before = QueueProgress(GrantedProgress(1, 0, 0))
    receive(before, 3, [0, 1, 2])
    handle(before, 0)
    assert start(before, 1)
    progress = before.renewed(GrantedProgress(2, 1, 0))
    assert not any(is_done(progress, offset) for offset in range(3))
    assert not finish(progress, 1)
    assert handled_offsets(progress.acks()) == set()


def test_unfinished_message_stops_the_committed_offset() -> None:
    progress = QueueProgress(GrantedProgress(1, 0, 0))
    receive(progress, 4, [0, 1, 2, 3])
    handle(progress, 1, 3)
    acks = progress.acks()
    assert (acks.committed, acks.ranges) == (0, ((1, 2), (3, 4)))
    handle(progress, 0)
    acks = progress.acks()
    assert (acks.committed, acks.ranges) == (2, ((3, 4),))


def test_filtered_messages_are_acked_without_a_handler() -> None:
    progress = QueueProgress(GrantedProgress(1, 0, 0))
    receive(progress, 5, [])
    assert progress.dirty
    assert progress.acks().committed == 5


def test_close_names_cancelled_and_given_up_messages_and_no_unstarted_ones() -> None:
    progress = QueueProgress(GrantedProgress(7, 3, 0))
    receive(progress, 5, [0, 1, 2, 3, 4])
    handle(progress, 0)
    assert start(progress, 1)
    assert start(progress, 2)
    progress.give_up(2)
    closing = progress.close_content()
    assert (closing.token, closing.reset_epoch) == (7, 3)
    assert closing.acks.committed == 1
    assert closing.unfinished == ((1, 3),)


def test_late_answer_to_an_older_commit_does_not_undo_a_newer_one() -> None:
    progress = QueueProgress(GrantedProgress(1, 0, 0))
    receive(progress, 2, [0, 1])
    handle(progress, 0)
    older = progress.acks()
    handle(progress, 1)
    progress.confirm(progress.acks())
    progress.confirm(older)
    assert progress.committed == 2
    assert not progress.dirty
    assert progress.span == 0


# ---- model


class NaiveProgress:
    """The progress of one grant, as plain sets."""

    def __init__(self, acked: set[int], running: set[int], finished: set[int]) -> None:
        self.next_offset = first_missing(acked)
        self.handled = acked | finished
        self.running = running - acked
        self.given_up: set[int] = set()
        self.dropped: set[int] = set()
        self.claimed: set[int] = set()
        self.waiting: set[int] = set()
        self.known_acked = set(acked)

    @property
    def unconfirmed(self) -> set[int]:
        return (self.handled - self.known_acked) | self.running

    @property
    def started(self) -> set[int]:
        return self.running | self.given_up

    @property
    def startable(self) -> set[int]:
        return self.waiting - self.started

    def is_done(self, offset: int) -> bool:
        return offset in self.handled or offset in self.running


def picked(offsets: set[int], pick: int) -> int:
    return sorted(offsets)[pick % len(offsets)]


def first_missing(offsets: set[int]) -> int:
    offset = 0
    while offset in offsets:
        offset += 1
    return offset


class OneQueue(RuleBasedStateMachine):
    """Grants, pulls, handlers and commits of one queue, in any order."""

    commits = Bundle("commits")

    @initialize(acked=SETS, maybe_seen=SETS)
    def grant(self, acked: set[int], maybe_seen: set[int]) -> None:
        self.server = acked
        """What offsets has durably."""
        self.token = self.epoch = 1
        self.maybe_seen = maybe_seen
        self.naive = NaiveProgress(set(acked), set(), set())
        self.real = QueueProgress(self._start())
        self.committed = self.real.committed

    def _start(self) -> GrantedProgress:
        self.token += 1
        committed = first_missing(self.server)
        above = {offset for offset in self.server if offset > committed}
        return GrantedProgress(
            self.token, self.epoch, committed, runs(above), runs(self.maybe_seen)
        )

    @rule(count=st.integers(1, 5), filtered=SETS, redelivered=SETS)
    def pull(self, count: int, filtered: set[int], redelivered: set[int]) -> None:
        first = self.naive.next_offset
        end = first + count
        arrived = range(first, end)
        startable = [o for o in arrived if not self.naive.is_done(o) and o not in filtered]
        self.real.note_maybe_seen(runs(redelivered))
        self.maybe_seen |= redelivered
        receive(self.real, end, startable)
        self.naive.next_offset = end
        self.naive.waiting |= set(startable)
        handled = set(arrived) - set(startable) - self.naive.running - self.naive.given_up
        self.naive.handled |= handled
        for offset in arrived:
            flagged = offset in self.maybe_seen or offset in self.naive.dropped
            assert self.real.is_redelivered(offset) == flagged

    @precondition(lambda self: self.naive.startable)
    @rule(pick=PICKS)
    def start(self, pick: int) -> None:
        offset = picked(self.naive.startable, pick)
        assert start(self.real, offset)
        self.naive.running.add(offset)

    @precondition(lambda self: self.naive.startable)
    @rule(pick=PICKS, count=st.integers(2, 5))
    def start_together(self, pick: int, count: int) -> None:
        first = picked(self.naive.startable, pick)
        offsets = set(range(first, first + count))
        assert self.real.start(first, first + count) == (offsets <= self.naive.startable)
        if offsets <= self.naive.startable:
            self.naive.running |= offsets

    @rule(first=OFFSETS, count=st.integers(2, 6))
    def finish_together(self, first: int, count: int) -> None:
        finished = set(range(first, first + count)) & self.naive.running
        assert self.real.finish(first, first + count) == len(finished)
        self._finished(finished)

    def _finished(self, offsets: set[int]) -> None:
        self.naive.running -= offsets
        self.naive.dropped -= offsets
        self.naive.handled |= offsets
        self.naive.waiting -= offsets

    @rule(offset=OFFSETS)
    def start_only_waiting_messages(self, offset: int) -> None:
        if offset not in self.naive.startable:
            assert not start(self.real, offset)

    @precondition(lambda self: self.naive.running)
    @rule(pick=PICKS)
    def finish(self, pick: int) -> None:
        offset = picked(self.naive.running, pick)
        assert finish(self.real, offset)
        self._finished({offset})

    @precondition(lambda self: self.naive.running)
    @rule(pick=PICKS)
    def give_up(self, pick: int) -> None:
        offset = picked(self.naive.running, pick)
        self.real.give_up(offset)
        self.naive.running.discard(offset)
        comes_again = offset >= self.naive.next_offset
        (self.naive.dropped if comes_again else self.naive.given_up).add(offset)

    @rule(offset=OFFSETS)
    def late_result_does_not_count(self, offset: int) -> None:
        if offset not in self.naive.running:
            assert not finish(self.real, offset)
            self.real.give_up(offset)

    @rule(target=commits, arrives=st.booleans())
    def send_commit(self, arrives: bool) -> object:
        acks = self.real.acks()
        if not arrives:
            return multiple()
        self.server |= handled_offsets(acks)
        return (self.token, acks)

    @rule(commit=consumes(commits))
    def confirm_commit(self, commit: tuple[int, Acks]) -> None:
        token, acks = commit
        if token != self.token:
            return  # as the puller does
        self.real.confirm(acks)
        self.naive.known_acked |= handled_offsets(acks)

    @rule()
    def claim(self) -> None:
        self.naive.claimed = members(self.real.claim(100))
        assert self.naive.claimed == self.naive.unconfirmed

    @rule(handled_elsewhere=st.just(set()) | SETS, flagged=SETS)
    def granted_again(self, handled_elsewhere: set[int], flagged: set[int]) -> None:
        self.server |= handled_elsewhere
        before = self.naive
        finished = before.unconfirmed - before.running
        self.maybe_seen = flagged
        self.real = self.real.renewed(self._start())
        self.naive = NaiveProgress(set(self.server), set(before.running), finished)
        given_up = before.given_up | before.dropped
        self.naive.dropped = (given_up & before.claimed) - self.server
        self.committed = self.real.committed

    @rule(to=OFFSETS)
    def reset(self, to: int) -> None:
        self.epoch += 1
        self.server = set(range(to))
        self.maybe_seen = set()
        self.real = self.real.renewed(self._start())
        self.naive = NaiveProgress(set(self.server), set(), set())
        self.committed = self.real.committed

    @invariant()
    def acks_are_the_handled_offsets(self) -> None:
        acks = self.real.acks()
        assert handled_offsets(acks) == set(range(acks.committed)) | self.naive.handled
        assert self.naive.handled >= handled_offsets(acks), "acked without being handled"
        assert_ascending([(0, acks.committed), *acks.ranges])
        assert acks.committed >= self.committed, "committed progress never goes back"
        self.committed = acks.committed
        if not self.real.dirty:
            assert handled_offsets(acks) <= self.naive.known_acked, (
                "finished work is claimed or committed"
            )

    @invariant()
    def unconfirmed_work_is_claimable(self) -> None:
        claimed = self.real.claimable()
        assert members(claimed) == self.naive.unconfirmed
        assert claimed == normalize(claimed)

    @invariant()
    def handled_messages_are_not_started_again(self) -> None:
        for offset in range(self.naive.next_offset, self.naive.next_offset + 5):
            assert is_done(self.real, offset) == self.naive.is_done(offset)

    @invariant()
    def close_content_is_complete(self) -> None:
        closing = self.real.close_content()
        assert closing.acks == self.real.acks()
        started = self.naive.started | self.naive.dropped
        assert members(closing.unfinished) == started - handled_offsets(closing.acks)
        assert not members(closing.unfinished) & handled_offsets(closing.acks)
        assert members(self.real.running) == self.naive.running
        assert self.real.running_count == len(self.naive.running)

    @invariant()
    def position_is_above_every_received_or_kept_offset(self) -> None:
        held = members(self.real.running) | self.real._given_up | self.real._dropped
        finished = handled_offsets(self.real.acks())
        assert self.real.received_offset >= max({self.real.next_offset - 1, *held, *finished}) + 1

    @invariant()
    def span_counts_from_the_committed_offset(self) -> None:
        committed = first_missing(self.naive.known_acked)
        assert self.real.committed == committed
        assert self.real.span == self.naive.next_offset - committed
        assert self.real.unconfirmed_count >= 0


def assert_ascending(ranges: Sequence[Range]) -> None:
    assert all(first < end for first, end in ranges[1:])
    assert all(a[1] < b[0] for a, b in pairwise(ranges)), ranges


OneQueue.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestOneQueue = OneQueue.TestCase
