"""Goal: the decision table of protocol section 7 decides every situation, row by row.

Method: `decide` with plain values. A is the owner, B another client. A was granted the queue by
generation 5 with request 3, its token is 7, and its lease began at 1,000 ms. The table itself is
checked over all situations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
    ROWS,
    TABLE,
    Decision,
    DenyDecision,
    FenceCondition,
    FreeDecision,
    GrantDecision,
    RenewDecision,
    WaitDecision,
    decide,
    decide_clear,
    is_removable,
    markdown,
)
from batonmq_server.lockmgr.core.lock_entry import (
    ChangeStep,
    LockEntry,
    LockPolicy,
    LockRecord,
    Observation,
    PendingChange,
    Requester,
    Waiter,
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
PHANTOM_IN_FLIGHT = replace(PHANTOM, delivered=12, unacked_count=2)
RECREATED = Observation(token=9, closed=True, floor_token=9, deleted=True)


def owned(*, quiet_slots: int = 0, generation: int = 5) -> LockEntry:
    lock = LockRecord(owner=A, token=7, acquire_seq=3, attempt="x", generation=generation)
    return LockEntry(KEY, lock, revision=1, lease_start_ms=LEASE_START_MS, quiet_slots=quiet_slots)


def free(*, generation: int = 5) -> LockEntry:
    return LockEntry(KEY, LockRecord(token=7, generation=generation), revision=1)


def other(generation: int = 6) -> Requester:
    return Requester(B, 1, generation)


def owner_again(acquire_seq: int, generation: int = 5) -> Requester:
    return Requester(A, acquire_seq, generation)


def decision_for(
    entry: LockEntry | None,
    requester: Requester,
    observation: Observation,
    now_ms: int = LEASE_START_MS + 1,
) -> Decision:
    return decide(entry, requester, observation, now_ms, POLICY)


def denied(decision: Decision) -> BatonError:
    assert isinstance(decision, DenyDecision)
    return decision.error


def waiting(decision: Decision) -> BatonError:
    assert isinstance(decision, WaitDecision)
    return decision.error


# The table


def test_every_row_decides_some_situation() -> None:
    assert set(ROWS.values()) == set(TABLE)


def test_first_row_that_fits_decides() -> None:
    for situation, row in ROWS.items():
        assert row.fits(situation)
        assert not any(earlier.fits(situation) for earlier in TABLE[: TABLE.index(row)])


def test_documentation_has_the_table() -> None:
    assert markdown() in Path("docs/explanation/ownership.md").read_text(encoding="utf-8")


# A queue without an owner


def test_queue_without_an_entry_is_granted_from_the_token_at_offsets() -> None:
    for token in (0, 4):
        observation = Observation(token=token)
        assert decision_for(None, other(), observation) == GrantDecision(
            (CLOSED_OR_DRAINED, SAME_HOLDER, IDLE), observation
        )


def test_free_queue_is_granted_if_it_is_drained_or_idle_or_the_requester_holds_its_token() -> None:
    for observation in (DRAINED, IN_FLIGHT, CLOSED):
        assert decision_for(free(), other(), observation) == GrantDecision(
            (CLOSED_OR_DRAINED, SAME_HOLDER, IDLE), observation
        )


def test_free_queue_with_a_phantom_token_is_granted_from_that_token() -> None:
    conditions = (CLOSED_OR_DRAINED, SAME_HOLDER, IDLE)
    assert decision_for(free(), other(), PHANTOM) == GrantDecision(conditions, PHANTOM)


@pytest.mark.parametrize("generation", [5, 6])
def test_free_queue_is_granted_to_the_same_and_to_a_newer_generation(generation: int) -> None:
    assert isinstance(decision_for(free(), other(generation), DRAINED), GrantDecision)


def test_free_queue_is_denied_to_an_older_generation() -> None:
    assert isinstance(denied(decision_for(free(), other(4), DRAINED)), NotAssigned)


# Requests of the owner


def test_story_05_new_request_of_the_owner_is_fenced_and_never_gets_the_stored_token() -> None:
    """The stored token would hide the messages that the earlier request left in flight."""
    for observation in (DRAINED, IN_FLIGHT, CLOSED):
        decision = decision_for(owned(), owner_again(4), observation)
        assert decision == GrantDecision(
            (SAME_HOLDER, CLOSED_OR_DRAINED, IDLE), observation, newly_acquired=False
        )


def test_story_05_restarted_client_is_another_owner() -> None:
    decision = decision_for(owned(), Requester(A_RESTARTED, 1, 6), IN_FLIGHT)
    assert isinstance(waiting(decision), Unacked)


def test_owner_of_a_phantom_is_fenced_from_the_token_at_offsets() -> None:
    decision = decision_for(owned(), owner_again(4), PHANTOM)
    assert isinstance(decision, GrantDecision)
    assert decision.observation == PHANTOM


def test_repeated_request_of_the_owner_renews_its_grant() -> None:
    for observation in (DRAINED, IN_FLIGHT):
        assert decision_for(owned(), owner_again(3), observation) == RenewDecision()


@pytest.mark.parametrize(("observation", "why"), [(PHANTOM, "TAKEN"), (CLOSED, "CLOSED")])
def test_repeated_request_is_denied_once_its_token_is_invalid(
    observation: Observation, why: str
) -> None:
    error = denied(decision_for(owned(), owner_again(3), observation))
    assert isinstance(error, Fenced)
    assert error.facts["why"] == why


def test_story_08_older_request_of_the_owner_is_denied_without_a_fence() -> None:
    for observation in (DRAINED, IN_FLIGHT, CLOSED, PHANTOM):
        for now_ms in (LEASE_START_MS, LEASE_END_MS + 1):
            decision = decision_for(owned(), owner_again(2), observation, now_ms)
            error = denied(decision)
            assert isinstance(error, OldRequest)
            assert error.facts == {"acquire_seq": "2", "current": "3"}


def test_new_request_of_the_owner_is_denied_to_an_older_generation() -> None:
    assert isinstance(denied(decision_for(owned(), owner_again(4, 4), DRAINED)), NotAssigned)


# Another owner, valid lease


def test_closed_queue_of_another_owner_is_granted_from_its_token() -> None:
    for generation in (5, 6):
        decision = decision_for(owned(), other(generation), CLOSED)
        assert decision == GrantDecision((CLOSED_OR_DRAINED,), CLOSED)


def test_drained_queue_of_another_owner_is_granted_after_three_slots() -> None:
    assert decision_for(owned(quiet_slots=3), other(), DRAINED) == GrantDecision(
        (CLOSED_OR_DRAINED,), DRAINED
    )


def test_drained_queue_of_another_owner_waits_before_three_slots() -> None:
    for slots in (0, 1, 2):
        decision = decision_for(owned(quiet_slots=slots), other(), DRAINED)
        error = waiting(decision)
        assert isinstance(error, Held)
        assert error.facts["owner"] == "a"
        assert error.retry_after_ms > 0


def test_queue_with_messages_in_flight_waits_after_any_number_of_slots() -> None:
    decision = decision_for(owned(quiet_slots=100), other(), IN_FLIGHT)
    error = waiting(decision)
    assert isinstance(error, Unacked)
    assert (error.facts["unacked"], error.facts["lowest_offset"]) == ("3", "10")


@pytest.mark.parametrize("observation", [PHANTOM, replace(PHANTOM, closed=True, delivered=12)])
def test_closed_or_drained_phantom_is_granted_at_once(observation: Observation) -> None:
    decision = decision_for(owned(), other(), observation)
    assert decision == GrantDecision((CLOSED_OR_DRAINED,), observation)


@pytest.mark.parametrize("observation", [PHANTOM_IN_FLIGHT, Observation()])
def test_phantom_in_flight_or_with_an_older_token_waits_for_the_lease_of_its_owner(
    observation: Observation,
) -> None:
    """An offsets that was restored from an old backup does not know what the owner handles."""
    decision = decision_for(owned(quiet_slots=100), other(), observation)
    assert isinstance(waiting(decision), Held)


@pytest.mark.parametrize("observation", [DRAINED, IN_FLIGHT, PHANTOM])
@pytest.mark.parametrize("generation", [4, 5])
def test_queue_of_another_owner_is_denied_to_the_same_and_to_an_older_generation(
    observation: Observation, generation: int
) -> None:
    decision = decision_for(owned(quiet_slots=100), other(generation), observation)
    error = denied(decision)
    assert isinstance(error, NotAssigned)
    assert error.facts == {"generation": str(generation), "current": "5"}


def notified(entry: LockEntry) -> LockEntry:
    entry.owner_notified = True
    return entry


@pytest.mark.parametrize("slots", [0, 2])
def test_drained_queue_of_a_notified_owner_is_reported_as_draining(slots: int) -> None:
    decision = decision_for(notified(owned(quiet_slots=slots)), other(), DRAINED)
    error = waiting(decision)
    assert isinstance(error, Draining)
    assert (error.facts["owner"], error.facts["age_ms"]) == ("a", "1")


def test_queue_of_a_notified_owner_with_messages_in_flight_is_reported_as_unacked() -> None:
    assert isinstance(waiting(decision_for(notified(owned()), other(), IN_FLIGHT)), Unacked)


def test_phantom_of_a_notified_owner_is_reported_as_held() -> None:
    """The owner can't close a token that is invalid."""
    entry = notified(owned())
    entry.phantom = True
    assert isinstance(waiting(decision_for(entry, other(), PHANTOM_IN_FLIGHT)), Held)


@pytest.mark.parametrize("generation", [4, 5])
def test_closed_queue_is_granted_to_the_same_generation_and_denied_to_an_older_one(
    generation: int,
) -> None:
    decision = decision_for(owned(), other(generation), CLOSED)
    if generation == 5:
        assert decision == GrantDecision((CLOSED_OR_DRAINED,), CLOSED)
    else:
        assert isinstance(denied(decision), NotAssigned)


def test_drained_queue_is_denied_to_the_same_generation_after_three_slots() -> None:
    assert isinstance(denied(decision_for(owned(quiet_slots=3), other(5), DRAINED)), NotAssigned)


# Another owner, expired lease


@pytest.mark.parametrize("observation", [DRAINED, IN_FLIGHT])
def test_lease_is_valid_at_exactly_its_length(observation: Observation) -> None:
    assert isinstance(decision_for(owned(), other(), observation, LEASE_END_MS), WaitDecision)
    assert decision_for(owned(), other(), observation, LEASE_END_MS + 1) == GrantDecision(
        (IDLE,), observation
    )


def test_phantom_with_an_expired_lease_is_granted_from_the_token_at_offsets() -> None:
    for observation, conditions in (
        (PHANTOM, (CLOSED_OR_DRAINED, IDLE)),
        (PHANTOM_IN_FLIGHT, (IDLE,)),
    ):
        decision = decision_for(owned(), other(), observation, LEASE_END_MS + 1)
        assert decision == GrantDecision(conditions, observation)


def test_queue_with_an_expired_lease_is_granted_to_the_same_generation() -> None:
    assert decision_for(owned(), other(5), IN_FLIGHT, LEASE_END_MS + 1) == GrantDecision(
        (IDLE,), IN_FLIGHT
    )


def test_queue_with_an_expired_lease_is_denied_to_an_older_generation() -> None:
    decision = decision_for(owned(), other(4), IN_FLIGHT, LEASE_END_MS + 1)
    assert isinstance(denied(decision), NotAssigned)


def test_owner_that_has_closed_or_drained_need_not_be_idle_after_its_lease() -> None:
    """Its long polls may still keep it active at offsets."""
    conditions = (CLOSED_OR_DRAINED, IDLE)
    for entry, observation in ((owned(), CLOSED), (owned(quiet_slots=3), DRAINED)):
        assert decision_for(entry, other(), observation, LEASE_END_MS + 1) == GrantDecision(
            conditions, observation
        )


def test_every_grant_has_a_condition() -> None:
    """Story 18: no fence is unconditional, even if the lock table has lost its entries."""
    entries = [None, free(), owned(), owned(quiet_slots=9), owned(generation=0)]
    requesters = [other(), other(5), owner_again(3), owner_again(4), Requester(A_RESTARTED, 9, 9)]
    granted = [
        decision
        for entry in entries
        for requester in requesters
        for observation in (Observation(), DRAINED, IN_FLIGHT, CLOSED, PHANTOM)
        for now_ms in (LEASE_START_MS, LEASE_END_MS + 1)
        if isinstance(
            decision := decision_for(entry, requester, observation, now_ms), GrantDecision
        )
    ]
    assert len(granted) > 50
    assert all(decision.conditions for decision in granted)


# Clearing a group whose subscription changes


@pytest.mark.parametrize("observation", [CLOSED, replace(CLOSED, token=8), RECREATED])
@pytest.mark.parametrize("now_ms", [LEASE_START_MS, LEASE_END_MS + 1])
def test_queue_closed_at_offsets_is_cleared_without_a_fence(
    observation: Observation, now_ms: int
) -> None:
    assert decide_clear(owned(), observation, now_ms, POLICY) == FreeDecision()


@pytest.mark.parametrize("observation", [DRAINED, IN_FLIGHT])
def test_queue_of_a_live_owner_is_cleared_only_after_its_lease(
    observation: Observation,
) -> None:
    for entry in (owned(), owned(quiet_slots=9)):
        assert decide_clear(entry, observation, LEASE_END_MS, POLICY) is None
    assert decide_clear(owned(), observation, LEASE_END_MS + 1, POLICY) == GrantDecision(
        (IDLE,), observation
    )


@pytest.mark.parametrize("now_ms", [LEASE_START_MS, LEASE_END_MS + 1])
def test_phantom_is_cleared_by_a_fence_from_the_token_at_offsets(now_ms: int) -> None:
    decision = decide_clear(owned(), PHANTOM, now_ms, POLICY)
    assert decision == GrantDecision((CLOSED_OR_DRAINED, IDLE), PHANTOM)


@pytest.mark.parametrize("token", [0, 6])
def test_token_that_offsets_does_not_have_is_cleared_only_after_its_lease(token: int) -> None:
    """Then it is freed without a fence: a queue without progress can't be fenced."""
    old_backup = Observation(token=token, closed=True)
    assert decide_clear(owned(), old_backup, LEASE_END_MS, POLICY) is None
    assert decide_clear(owned(), old_backup, LEASE_END_MS + 1, POLICY) == FreeDecision()
    open_token = replace(old_backup, closed=False)
    assert decide_clear(owned(), open_token, LEASE_END_MS + 1, POLICY) == GrantDecision(
        (IDLE,), open_token
    )


# A recreated topic


@pytest.mark.parametrize("now_ms", [0, LEASE_END_MS + 1])
def test_owner_from_a_deleted_topic_of_the_same_name_does_not_keep_the_queue(now_ms: int) -> None:
    decision = decision_for(owned(), other(), RECREATED, now_ms)
    assert decision == GrantDecision((CLOSED_OR_DRAINED, SAME_HOLDER, IDLE), RECREATED)


def test_requests_of_the_owner_are_decided_alike_in_a_recreated_topic() -> None:
    assert isinstance(denied(decision_for(owned(), owner_again(2), RECREATED)), OldRequest)
    assert isinstance(denied(decision_for(owned(), owner_again(3), RECREATED)), Fenced)
    decision = decision_for(owned(), owner_again(4), RECREATED)
    assert decision == GrantDecision(
        (SAME_HOLDER, CLOSED_OR_DRAINED, IDLE), RECREATED, newly_acquired=False
    )


def test_queue_of_a_recreated_topic_is_denied_to_an_older_generation() -> None:
    older = Requester(B, 1, owned().lock.generation - 1)
    assert isinstance(denied(decision_for(owned(), older, RECREATED)), NotAssigned)


@pytest.mark.parametrize("observation", [Observation(closed=True), replace(RECREATED, token=6)])
def test_owner_with_a_token_that_offsets_does_not_have_keeps_the_queue_for_its_lease(
    observation: Observation,
) -> None:
    """As after a restore of an old backup: the owner may have messages of this topic."""
    assert isinstance(waiting(decision_for(owned(), other(), observation)), Held)


# ---- locks of deleted progress


@pytest.mark.parametrize(
    ("entry", "observation", "now_ms", "removable"),
    [
        (free(), RECREATED, LEASE_START_MS, True),
        (free(), Observation(closed=True, floor_token=7), LEASE_START_MS, True),
        (free(), Observation(closed=True, floor_token=6), LEASE_START_MS, False),
        (free(), Observation(closed=True), LEASE_START_MS, False),
        (owned(), RECREATED, LEASE_END_MS, False),
        (owned(), RECREATED, LEASE_END_MS + 1, True),
        (LockEntry(KEY), RECREATED, LEASE_START_MS, False),
        (LockEntry(KEY, revision=1), DRAINED, LEASE_START_MS, False),
    ],
)
def test_lock_is_removable_if_its_progress_was_deleted_and_nobody_uses_it(
    entry: LockEntry, observation: Observation, now_ms: int, removable: bool
) -> None:
    assert is_removable(entry, observation, now_ms, POLICY) is removable


def test_lock_that_somebody_waits_for_or_changes_is_not_removable() -> None:
    waited, changed = free(), free()
    waited.waiters[A] = Waiter(0, 0)
    changed.pending = PendingChange(ChangeStep.FENCE)
    for entry in (waited, changed):
        assert not is_removable(entry, RECREATED, LEASE_START_MS, POLICY)
