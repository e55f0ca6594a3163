"""Goal: the decision table of protocol section 7, row by row, and the edges between the rows.

Method: `decide` with plain values. A is the owner, B the newcomer; the owner was granted
the queue by generation 5 with request 3, its token is 7, and its lease began at 1,000 ms.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import (
    BatonError,
    Draining,
    Fenced,
    Held,
    NotAssigned,
    OldRequest,
    Unacked,
)
from batonmq_server.lockmgr.core.decision import (
    Decision,
    DenyDecision,
    FenceCondition,
    FreeDecision,
    GrantDecision,
    RenewDecision,
    decide,
    decide_clear,
)
from batonmq_server.lockmgr.core.lock_entry import (
    LockEntry,
    LockPolicy,
    LockRecord,
    Observation,
    Requester,
)

KEY = GroupQueue("g", "t", "broker-a", 0)
A, A_RESTARTED, B = Incarnation("a", 1), Incarnation("a", 2), Incarnation("b", 1)
POLICY = LockPolicy()
LEASE_START_MS = 1_000
LEASE_END_MS = LEASE_START_MS + POLICY.lease_ms

CLOSED_OR_DRAINED, SAME_HOLDER, IDLE = (
    FenceCondition.CLOSED_OR_DRAINED,
    FenceCondition.SAME_HOLDER,
    FenceCondition.IDLE,
)
DRAINED = Observation(token=7, committed=10, delivered=10)
IN_FLIGHT = Observation(token=7, committed=10, delivered=14, unacked_count=3)
CLOSED = Observation(token=7, closed=True, committed=10, delivered=10)
PHANTOM = Observation(token=8, committed=10, delivered=10)
ANEW = Observation(token=9, closed=True, begins_anew=True)


def owned(*, slots: int = 0, generation: int = 5) -> LockEntry:
    lock = LockRecord(owner=A, token=7, acquire_seq=3, attempt="x", generation=generation)
    return LockEntry(KEY, lock, revision=1, lease_start_ms=LEASE_START_MS, slots=slots)


def free(*, generation: int = 5) -> LockEntry:
    return LockEntry(KEY, LockRecord(token=7, generation=generation), revision=1)


def newcomer(generation: int = 6) -> Requester:
    return Requester(B, 1, generation)


def owner_again(acquire_seq: int, generation: int = 5) -> Requester:
    return Requester(A, acquire_seq, generation)


def decision_for(
    entry: LockEntry | None, asker: Requester, seen: Observation, now_ms: int = LEASE_START_MS + 1
) -> Decision:
    return decide(entry, asker, seen, now_ms, POLICY)


def refused(decision: Decision) -> BatonError:
    assert isinstance(decision, DenyDecision)
    return decision.error


# Row: none or free


def test_unknown_queue_is_granted_on_the_token_offsets_shows() -> None:
    for token in (0, 4):
        seen = Observation(token=token)
        assert decision_for(None, newcomer(), seen) == GrantDecision(
            (CLOSED_OR_DRAINED, IDLE), token
        )


def test_free_queue_is_granted_if_offsets_agrees_that_it_is_drained_or_idle() -> None:
    for seen in (DRAINED, IN_FLIGHT, CLOSED):
        assert decision_for(free(), newcomer(), seen) == GrantDecision((CLOSED_OR_DRAINED, IDLE), 7)


def test_free_queue_with_a_phantom_token_is_granted_on_that_token() -> None:
    assert decision_for(free(), newcomer(), PHANTOM) == GrantDecision((CLOSED_OR_DRAINED, IDLE), 8)


@pytest.mark.parametrize("generation", [5, 6])
def test_free_queue_goes_to_any_member_of_the_same_or_a_newer_generation(generation: int) -> None:
    assert isinstance(decision_for(free(), newcomer(generation), DRAINED), GrantDecision)


def test_free_queue_is_not_for_a_member_with_an_older_view() -> None:
    assert isinstance(refused(decision_for(free(), newcomer(4), DRAINED)), NotAssigned)


# Rows: same incarnation


def test_story_05_owner_that_asks_anew_is_fenced_and_never_given_the_stored_token() -> None:
    """A renewal that returns the stored token would hide what its earlier request left over."""
    for seen in (DRAINED, IN_FLIGHT, CLOSED):
        decision = decision_for(owned(), owner_again(4), seen)
        assert decision == GrantDecision(
            (SAME_HOLDER, CLOSED_OR_DRAINED, IDLE), 7, newly_acquired=False
        )


def test_story_05_restarted_client_is_somebody_else() -> None:
    decision = decision_for(owned(), Requester(A_RESTARTED, 1, 6), IN_FLIGHT)
    assert isinstance(refused(decision), Unacked)


def test_owner_of_a_phantom_token_is_fenced_on_what_offsets_shows() -> None:
    decision = decision_for(owned(), owner_again(4), PHANTOM)
    assert isinstance(decision, GrantDecision)
    assert decision.expected_token == 8


def test_repeated_request_of_the_owner_is_replayed() -> None:
    for seen in (DRAINED, IN_FLIGHT):
        assert decision_for(owned(), owner_again(3), seen) == RenewDecision()


@pytest.mark.parametrize(("seen", "why"), [(PHANTOM, "TAKEN"), (CLOSED, "CLOSED")])
def test_repeated_request_is_refused_once_its_token_is_finished(
    seen: Observation, why: str
) -> None:
    error = refused(decision_for(owned(), owner_again(3), seen))
    assert isinstance(error, Fenced)
    assert error.facts["why"] == why


def test_story_08_older_request_of_the_owner_is_refused_without_a_fence() -> None:
    for seen in (DRAINED, IN_FLIGHT, CLOSED, PHANTOM):
        for now_ms in (LEASE_START_MS, LEASE_END_MS + 1):
            decision = decision_for(owned(), owner_again(2), seen, now_ms)
            error = refused(decision)
            assert isinstance(error, OldRequest)
            assert error.facts == {"acquire_seq": "2", "current": "3"}
            assert isinstance(decision, DenyDecision)
            assert not decision.clears


def test_newer_request_of_the_owner_with_an_older_view_is_refused() -> None:
    assert isinstance(refused(decision_for(owned(), owner_again(4, 4), DRAINED)), NotAssigned)


# Rows: another owner, lease not over


def test_closed_queue_of_another_is_granted_on_the_entrys_token() -> None:
    for generation in (5, 6):
        decision = decision_for(owned(), newcomer(generation), CLOSED)
        assert decision == GrantDecision((CLOSED_OR_DRAINED,), 7)


def test_drained_queue_of_another_is_granted_after_three_slots() -> None:
    assert decision_for(owned(slots=3), newcomer(), DRAINED) == GrantDecision(
        (CLOSED_OR_DRAINED,), 7
    )


def test_drained_queue_of_another_is_held_for_two_slots_more() -> None:
    for slots in (0, 1, 2):
        decision = decision_for(owned(slots=slots), newcomer(), DRAINED)
        error = refused(decision)
        assert isinstance(error, Held)
        assert error.facts["owner"] == "a"
        assert error.retry_after_ms > 0
        assert isinstance(decision, DenyDecision)
        assert decision.clears


def test_queue_of_another_with_messages_in_flight_is_refused_however_quiet() -> None:
    decision = decision_for(owned(slots=100), newcomer(), IN_FLIGHT)
    error = refused(decision)
    assert isinstance(error, Unacked)
    assert (error.facts["unacked"], error.facts["lowest_offset"]) == ("3", "10")
    assert isinstance(decision, DenyDecision)
    assert decision.clears


@pytest.mark.parametrize("seen", [PHANTOM, replace(PHANTOM, closed=True), Observation()])
def test_phantom_token_is_left_to_the_holder_while_its_lease_runs(seen: Observation) -> None:
    decision = decision_for(owned(slots=100), newcomer(), seen)
    assert isinstance(refused(decision), Held)
    assert isinstance(decision, DenyDecision)
    assert decision.clears


@pytest.mark.parametrize("seen", [DRAINED, IN_FLIGHT, PHANTOM])
@pytest.mark.parametrize("generation", [4, 5])
def test_two_views_do_not_take_a_queue_from_each_other(seen: Observation, generation: int) -> None:
    decision = decision_for(owned(slots=100), newcomer(generation), seen)
    error = refused(decision)
    assert isinstance(error, NotAssigned)
    assert error.facts == {"generation": str(generation), "current": "5"}
    assert isinstance(decision, DenyDecision)
    assert not decision.clears


def told(entry: LockEntry) -> LockEntry:
    entry.told = True
    return entry


@pytest.mark.parametrize("slots", [0, 2])
def test_owner_that_was_told_and_has_drained_is_letting_go(slots: int) -> None:
    decision = decision_for(told(owned(slots=slots)), newcomer(), DRAINED)
    error = refused(decision)
    assert isinstance(error, Draining)
    assert (error.facts["owner"], error.facts["age_ms"]) == ("a", "1")
    assert isinstance(decision, DenyDecision)
    assert decision.clears


def test_owner_that_was_told_and_has_messages_in_hand_is_told_of_by_their_number() -> None:
    assert isinstance(refused(decision_for(told(owned()), newcomer(), IN_FLIGHT)), Unacked)


def test_phantom_is_held_though_its_owner_was_told() -> None:
    """It can't let go of a token that is dead."""
    entry = told(owned())
    entry.phantom = True
    assert isinstance(refused(decision_for(entry, newcomer(), PHANTOM)), Held)


@pytest.mark.parametrize("generation", [4, 5])
def test_closed_queue_is_not_for_an_older_view_but_for_one_of_the_same(generation: int) -> None:
    decision = decision_for(owned(), newcomer(generation), CLOSED)
    if generation == 5:
        assert decision == GrantDecision((CLOSED_OR_DRAINED,), 7)
    else:
        assert isinstance(refused(decision), NotAssigned)


def test_drained_for_three_slots_is_not_enough_for_the_same_generation() -> None:
    assert isinstance(refused(decision_for(owned(slots=3), newcomer(5), DRAINED)), NotAssigned)


# Rows: another owner, lease over


@pytest.mark.parametrize("seen", [DRAINED, IN_FLIGHT])
def test_lease_of_exactly_its_length_is_not_over(seen: Observation) -> None:
    assert isinstance(decision_for(owned(), newcomer(), seen, LEASE_END_MS), DenyDecision)
    assert decision_for(owned(), newcomer(), seen, LEASE_END_MS + 1) == GrantDecision((IDLE,), 7)


def test_lease_end_takes_a_phantom_token_as_offsets_shows_it() -> None:
    assert decision_for(owned(), newcomer(), PHANTOM, LEASE_END_MS + 1) == GrantDecision((IDLE,), 8)


def test_lease_end_gives_the_queue_to_a_member_of_the_same_generation() -> None:
    assert decision_for(owned(), newcomer(5), IN_FLIGHT, LEASE_END_MS + 1) == GrantDecision(
        (IDLE,), 7
    )


def test_lease_end_gives_nothing_to_an_older_view() -> None:
    decision = decision_for(owned(), newcomer(4), IN_FLIGHT, LEASE_END_MS + 1)
    assert isinstance(refused(decision), NotAssigned)


def test_owner_that_has_let_go_need_not_be_idle_after_its_lease() -> None:
    """It may still be heard of at offsets, by parked pulls, though not here."""
    conditions = (CLOSED_OR_DRAINED, IDLE)
    for entry, seen in ((owned(), CLOSED), (owned(slots=3), DRAINED)):
        assert decision_for(entry, newcomer(), seen, LEASE_END_MS + 1) == GrantDecision(
            conditions, 7
        )


def test_no_decision_passes_without_a_condition() -> None:
    """Story 18: there is no way to an unconditional fence, whatever the table has forgotten."""
    entries = [None, free(), owned(), owned(slots=9), owned(generation=0)]
    askers = [newcomer(), newcomer(5), owner_again(3), owner_again(4), Requester(A_RESTARTED, 9, 9)]
    granted = [
        decision
        for entry in entries
        for asker in askers
        for seen in (Observation(), DRAINED, IN_FLIGHT, CLOSED, PHANTOM)
        for now_ms in (LEASE_START_MS, LEASE_END_MS + 1)
        if isinstance(decision := decision_for(entry, asker, seen, now_ms), GrantDecision)
    ]
    assert len(granted) > 50
    assert all(decision.conditions for decision in granted)


# A group whose subscription changes: queues go to nobody


@pytest.mark.parametrize("seen", [CLOSED, replace(CLOSED, token=8), ANEW])
@pytest.mark.parametrize("now_ms", [LEASE_START_MS, LEASE_END_MS + 1])
def test_token_that_is_finished_at_offsets_is_freed_without_a_fence(
    seen: Observation, now_ms: int
) -> None:
    assert decide_clear(owned(), seen, now_ms, POLICY) == FreeDecision()


@pytest.mark.parametrize("seen", [DRAINED, IN_FLIGHT])
def test_owner_that_lives_clears_its_queue_itself_until_its_lease_is_over(
    seen: Observation,
) -> None:
    for entry in (owned(), owned(slots=9)):
        assert decide_clear(entry, seen, LEASE_END_MS, POLICY) is None
    assert decide_clear(owned(), seen, LEASE_END_MS + 1, POLICY) == GrantDecision((IDLE,), 7)


@pytest.mark.parametrize("now_ms", [LEASE_START_MS, LEASE_END_MS + 1])
def test_phantom_is_cleared_by_what_offsets_knows_of_it(now_ms: int) -> None:
    decision = decide_clear(owned(), PHANTOM, now_ms, POLICY)
    assert decision == GrantDecision((CLOSED_OR_DRAINED, IDLE), 8)


@pytest.mark.parametrize("token", [0, 6])
def test_token_newer_than_what_offsets_knows_is_left_to_its_owner_for_its_lease(token: int) -> None:
    """Then it is freed without a fence: a queue without progress can't be fenced to nobody."""
    old_backup = Observation(token=token, closed=True)
    assert decide_clear(owned(), old_backup, LEASE_END_MS, POLICY) is None
    assert decide_clear(owned(), old_backup, LEASE_END_MS + 1, POLICY) == FreeDecision()
    held = replace(old_backup, closed=False)
    assert decide_clear(owned(), held, LEASE_END_MS + 1, POLICY) == GrantDecision((IDLE,), token)


# A topic that was deleted and created again


@pytest.mark.parametrize("now_ms", [0, LEASE_END_MS + 1])
def test_owner_in_an_earlier_topic_of_the_name_does_not_keep_the_queue(now_ms: int) -> None:
    decision = decision_for(owned(), newcomer(), ANEW, now_ms)
    assert decision == GrantDecision((CLOSED_OR_DRAINED, IDLE), 9)


def test_owner_asks_again_in_the_new_topic_as_ever() -> None:
    assert isinstance(refused(decision_for(owned(), owner_again(2), ANEW)), OldRequest)
    assert isinstance(refused(decision_for(owned(), owner_again(3), ANEW)), Fenced)
    decision = decision_for(owned(), owner_again(4), ANEW)
    assert decision == GrantDecision(
        (SAME_HOLDER, CLOSED_OR_DRAINED, IDLE), 9, newly_acquired=False
    )


def test_queue_that_begins_anew_is_still_refused_to_an_older_generation() -> None:
    older = Requester(B, 1, owned().lock.generation - 1)
    assert isinstance(refused(decision_for(owned(), older, ANEW)), NotAssigned)


@pytest.mark.parametrize("seen", [Observation(closed=True), replace(ANEW, token=6)])
def test_owner_newer_than_what_offsets_knows_keeps_the_queue_for_its_lease(
    seen: Observation,
) -> None:
    """So it looks after a restore of an old backup: the owner may have messages of this topic."""
    assert isinstance(refused(decision_for(owned(), newcomer(), seen)), Held)
