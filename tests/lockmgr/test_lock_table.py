"""Goal: the lock table keeps leases, slots, changes in progress and waiters correctly.

Method: a `LockTable` driven with plain values and given times.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonmq._core.queues import GroupQueue, Incarnation, QueueRef
from batonmq.errors import HandoverPending, Held, Unacked
from batonmq_server.lockmgr.core.decision import (
    FREE,
    Decision,
    FenceCondition,
    GrantDecision,
    WaitDecision,
)
from batonmq_server.lockmgr.core.lock_entry import (
    ChangeStep,
    DecisionProfile,
    LockPolicy,
    LockRecord,
    LockState,
    Observation,
    Requester,
    RunningHandler,
    WantedNotice,
    WantedReason,
)
from batonmq_server.lockmgr.core.lock_table import HoldState, KeepAliveCall, LockTable
from batonmq_server.lockmgr.lock_proto import entry_to_pb

KEY, OTHER = GroupQueue("g", "t", "broker-a", 0), GroupQueue("g", "t", "broker-a", 1)
A, B = Incarnation("a", 1), Incarnation("b", 1)
POLICY = LockPolicy()
SLOT_MS, LEASE_MS = POLICY.slot_ms, POLICY.lease_ms
DRAINED = Observation(token=7, committed=10, delivered=10)
OTHER_REQUESTER = Requester(B, 1, 6)


def lock_of(owner: Incarnation | None, token: int = 7, acquire_seq: int = 3) -> LockRecord:
    return LockRecord(owner=owner, token=token, acquire_seq=acquire_seq, attempt="x", generation=5)


def owned_by_a(*, now_ms: int = 0, offsets_token: int = 7) -> LockTable:
    table = LockTable(POLICY)
    table.load(KEY, lock_of(A), 1, now_ms)
    table.confirm(KEY, offsets_token, now_ms)
    return table


def observe(table: LockTable, seen: Observation, now_ms: int, key: GroupQueue = KEY) -> None:
    table.end_observation(key, seen, table.begin_observation(key), now_ms)


def decide(table: LockTable, now_ms: int, requester: Requester = OTHER_REQUESTER) -> Decision:
    decision = table.decide(KEY, requester, now_ms)
    assert decision is not None
    return decision


def keep_alive(
    table: LockTable, now_ms: int, token: int = 7, *, evicted: bool = False, seq: int = 3
) -> HoldState:
    call = KeepAliveCall(
        incarnation=A,
        acquire_seq=seq,
        holds=[(KEY, token)],
        evicted_groups=frozenset({"g"} if evicted else ()),
    )
    (report,) = table.keep_alive(call, now_ms)
    return report.state


def lease_age_ms(table: LockTable, now_ms: int) -> int:
    entry = table.get(KEY)
    assert entry is not None
    return now_ms - entry.lease_start_ms


# Slots


def test_drained_queue_is_granted_after_three_slots_without_a_change() -> None:
    table = owned_by_a()
    for slot in range(4):
        observe(table, DRAINED, slot * SLOT_MS)
        assert isinstance(
            decide(table, slot * SLOT_MS), GrantDecision if slot == 3 else WaitDecision
        )


def test_fifty_requesters_get_the_queue_no_sooner_than_one() -> None:
    """A slot counts once, however often the queue is observed in it."""
    table = owned_by_a()
    granted_ms = None
    for now_ms in range(0, 4 * SLOT_MS, 10):
        for number in range(50):
            observe(table, DRAINED, now_ms)
            requester = Requester(Incarnation(f"c{number}", 1), 1, 6)
            if isinstance(decide(table, now_ms, requester), GrantDecision):
                granted_ms = now_ms
                break
        if granted_ms is not None:
            break
    assert granted_ms == 3 * SLOT_MS


@pytest.mark.parametrize(
    "change",
    [
        Observation(token=7, committed=11, delivered=11),
        Observation(token=7, committed=10, delivered=11, unacked_count=1),
    ],
)
def test_change_of_delivered_or_committed_resets_the_slots(change: Observation) -> None:
    table = owned_by_a()
    for slot in range(3):
        observe(table, DRAINED, slot * SLOT_MS)
    drained_again = Observation(token=7, committed=11, delivered=11)
    observe(table, change, 2 * SLOT_MS + 1)
    observe(table, drained_again, 3 * SLOT_MS)
    assert isinstance(decide(table, 3 * SLOT_MS), WaitDecision)
    for slot in range(4, 7):
        observe(table, drained_again, slot * SLOT_MS + 1)
    assert isinstance(decide(table, 6 * SLOT_MS + 1), GrantDecision)


def test_keep_alive_of_the_owner_does_not_reset_the_slots() -> None:
    table = owned_by_a()
    for slot in range(4):
        keep_alive(table, slot * SLOT_MS)
        observe(table, DRAINED, slot * SLOT_MS)
    assert isinstance(decide(table, 3 * SLOT_MS), GrantDecision)


def test_slots_are_reset_by_a_hand_over() -> None:
    table = owned_by_a()
    for slot in range(4):
        observe(table, DRAINED, slot * SLOT_MS)
    table.begin_change(KEY, ChangeStep.FENCE)
    lock = LockRecord(owner=B, token=8, acquire_seq=1, attempt="y", generation=6)
    table.end_granted(KEY, lock, 2, 3 * SLOT_MS, newly_acquired=True)
    observe(table, Observation(token=8, committed=10, delivered=10), 4 * SLOT_MS)
    assert isinstance(decide(table, 4 * SLOT_MS, Requester(A, 4, 7)), WaitDecision)


def test_requesters_share_one_observation_per_slot() -> None:
    table = owned_by_a()
    assert table.needs_observation(KEY, OTHER_REQUESTER, 0)
    observe(table, DRAINED, 0)
    assert not table.needs_observation(KEY, OTHER_REQUESTER, SLOT_MS - 1)
    assert table.needs_observation(KEY, OTHER_REQUESTER, SLOT_MS)


def test_failed_observation_waits_for_its_slot() -> None:
    table = owned_by_a()
    table.observation_failed(KEY, 100)
    assert table.due_ms(KEY, 100) == SLOT_MS


def test_request_of_the_owner_needs_a_new_observation() -> None:
    table = owned_by_a()
    observe(table, DRAINED, 0)
    assert table.needs_observation(KEY, Requester(A, 4, 5), 1)


def test_observation_that_spans_a_hand_over_is_not_used() -> None:
    table = owned_by_a()
    version = table.begin_observation(KEY)
    table.begin_change(KEY, ChangeStep.FENCE)
    lock = LockRecord(owner=B, token=8, acquire_seq=1, attempt="y", generation=6)
    table.end_granted(KEY, lock, 2, 10, newly_acquired=True)
    table.end_observation(KEY, DRAINED, version, 20)
    entry = table.get(KEY)
    assert entry is not None
    assert entry.observation is None
    assert entry.state is LockState.HELD


# Keep-alives


def test_keep_alive_of_the_owner_renews_its_lease() -> None:
    table = owned_by_a()
    assert keep_alive(table, LEASE_MS) is HoldState.OK
    assert lease_age_ms(table, LEASE_MS) == 0
    observe(table, DRAINED, LEASE_MS + 1)
    assert isinstance(decide(table, LEASE_MS + 1), WaitDecision)


def test_listed_lease_is_expired_from_the_end_of_the_silence_until_the_next_keep_alive() -> None:
    table = owned_by_a()
    entry = table.get(KEY)
    assert entry is not None
    end_ms = POLICY.silence_ms
    expired = [entry_to_pb(entry, ms, end_ms).lease_expired for ms in (0, end_ms - 1, end_ms)]
    assert expired == [False, False, True]
    keep_alive(table, end_ms)
    assert not entry_to_pb(entry, end_ms, end_ms).lease_expired
    entry.lock = replace(entry.lock, owner=None)
    assert not entry_to_pb(entry, 9 * end_ms, end_ms).lease_expired


def test_keep_alive_shows_the_handler_that_its_queue_waits_for_until_the_next_token() -> None:
    table = owned_by_a()
    entry = table.get(KEY)
    assert entry is not None
    assert not entry_to_pb(entry, 5, POLICY.silence_ms).HasField("running")
    queue = QueueRef(KEY.topic, KEY.broker, KEY.queue_id)
    running = {KEY: RunningHandler(7, queue, 41, 3_000, abandoned=True)}
    call = KeepAliveCall(incarnation=A, acquire_seq=3, holds=[(KEY, 7)], running=running)
    table.keep_alive(call, 10)
    handler = entry_to_pb(entry, 1_010, POLICY.silence_ms).running
    assert (handler.offset, handler.running_ms, handler.abandoned) == (41, 4_000, True)
    assert handler.queue.topic == KEY.topic
    entry.lock = replace(entry.lock, token=8)
    assert not entry_to_pb(entry, 1_010, POLICY.silence_ms).HasField("running")
    entry.lock = replace(entry.lock, token=7)
    keep_alive(table, 20)
    assert not entry_to_pb(entry, 30, POLICY.silence_ms).HasField("running")


def test_keep_alive_renews_an_expired_lease_before_a_hand_over_begins() -> None:
    table = owned_by_a()
    assert keep_alive(table, LEASE_MS + 1) is HoldState.OK
    assert lease_age_ms(table, LEASE_MS + 1) == 0


@pytest.mark.parametrize("token", [6, 8])
def test_keep_alive_with_another_token_does_not_renew(token: int) -> None:
    table = owned_by_a()
    assert keep_alive(table, 5, token) is HoldState.NOT_OWNER
    assert lease_age_ms(table, 5) == 5


def test_keep_alive_of_another_client_reports_the_token_of_the_entry() -> None:
    table = owned_by_a()
    call = KeepAliveCall(incarnation=B, acquire_seq=1, holds=[(KEY, 7), (OTHER, 7)])
    reports = table.keep_alive(call, 5)
    assert [(r.state, r.token) for r in reports] == [
        (HoldState.NOT_OWNER, 7),
        (HoldState.NOT_OWNER, 0),
    ]


def test_keep_alive_reports_the_client_that_waits_longest() -> None:
    table = owned_by_a()
    table.add_waiter(KEY, B, 5)
    table.add_waiter(KEY, Incarnation("c", 1), 6)
    (report,) = table.keep_alive(KeepAliveCall(incarnation=A, acquire_seq=3, holds=[(KEY, 7)]), 10)
    assert (report.state, report.wanted) == (
        HoldState.WANTED,
        WantedNotice(WantedReason.WAITER, "b"),
    )
    assert lease_age_ms(table, 10) == 0


def test_waiter_is_dropped_some_time_after_its_last_request() -> None:
    table = owned_by_a()
    table.add_waiter(KEY, B, 0)
    table.drop_old_waiters(POLICY.waiter_memory_ms)
    assert keep_alive(table, POLICY.waiter_memory_ms) is HoldState.WANTED
    table.drop_old_waiters(POLICY.waiter_memory_ms + 1)
    assert keep_alive(table, POLICY.waiter_memory_ms + 1) is HoldState.OK


def test_held_request_counts_as_waiting_until_it_ends() -> None:
    table = owned_by_a()
    table.add_waiter(KEY, B, 0, held_delta=1)
    table.drop_old_waiters(POLICY.waiter_memory_ms * 5)
    assert keep_alive(table, 1) is HoldState.WANTED
    table.add_waiter(KEY, B, POLICY.waiter_memory_ms * 5, held_delta=-1)
    table.drop_old_waiters(POLICY.waiter_memory_ms * 7)
    assert keep_alive(table, 1) is HoldState.OK


def test_repeated_grant_renews_the_lease() -> None:
    """The owner's lease starts when it sends the repeated request."""
    table = owned_by_a()
    table.renew_lease(KEY, 20_000)
    assert lease_age_ms(table, 20_000) == 0


def test_story_06_keep_alive_during_a_fence_does_not_renew() -> None:
    """A renewed owner would start messages that the new owner gets too."""
    table = owned_by_a()
    observe(table, DRAINED, LEASE_MS + 1)
    assert decide(table, LEASE_MS + 1) == GrantDecision((FenceCondition.IDLE,), DRAINED)
    table.begin_change(KEY, ChangeStep.FENCE)
    assert keep_alive(table, LEASE_MS + 2) is HoldState.PENDING
    assert lease_age_ms(table, LEASE_MS + 2) == LEASE_MS + 2


def test_story_07_keep_alive_between_fence_and_persist_does_not_renew() -> None:
    """etcd still has the old owner, but its token is invalid already."""
    table = owned_by_a()
    pending = table.begin_change(KEY, ChangeStep.FENCE)
    pending.step = ChangeStep.PERSIST
    assert keep_alive(table, 10) is HoldState.PENDING
    assert lease_age_ms(table, 10) == 10
    lock = LockRecord(owner=B, token=8, acquire_seq=1, attempt="y", generation=6)
    table.end_granted(KEY, lock, 2, 20, newly_acquired=True)
    assert keep_alive(table, 30) is HoldState.NOT_OWNER


def test_keep_alive_after_a_rejected_hand_over_renews_again() -> None:
    table = owned_by_a()
    table.begin_change(KEY, ChangeStep.FENCE)
    table.end_unchanged(KEY)
    assert keep_alive(table, 10) is HoldState.OK


def test_fenced_owner_without_a_persisted_successor_is_not_renewed() -> None:
    table = owned_by_a()
    table.begin_change(KEY, ChangeStep.FENCE)
    table.end_reloaded(KEY, lock_of(A), 1, fenced=True)
    assert keep_alive(table, 10) is HoldState.NOT_OWNER
    entry = table.get(KEY)
    assert entry is not None
    assert entry.state is LockState.PHANTOM


def test_owner_that_a_refused_hand_over_has_fenced_is_not_renewed() -> None:
    """The answer of the fence was lost, and a reset has raised the token before it was repeated."""
    table = owned_by_a()
    table.begin_change(KEY, ChangeStep.FENCE)
    table.end_unchanged(KEY, fenced=True)
    assert keep_alive(table, 10) is HoldState.NOT_OWNER
    assert lease_age_ms(table, 10) == 10


def test_story_12_new_leader_does_not_renew_a_phantom() -> None:
    """The previous leader fenced the owner and crashed before it persisted the next one."""
    table = owned_by_a(offsets_token=8)
    assert keep_alive(table, 10) is HoldState.NOT_OWNER
    assert lease_age_ms(table, 10) == 10
    entry = table.get(KEY)
    assert entry is not None
    assert entry.state is LockState.PHANTOM


def test_phantom_ends_when_its_owner_is_granted_the_queue_again() -> None:
    table = owned_by_a(offsets_token=8)
    table.begin_change(KEY, ChangeStep.FENCE)
    table.end_granted(KEY, lock_of(A, 9, 4), 2, 10, newly_acquired=False)
    assert keep_alive(table, 20, 9, seq=4) is HoldState.OK


def test_owner_with_an_invalid_token_at_offsets_is_not_renewed() -> None:
    table = owned_by_a()
    observe(table, Observation(token=8, closed=True), 5)
    assert keep_alive(table, 10) is HoldState.NOT_OWNER


def test_entry_not_listed_by_its_owner_is_reported_as_orphan() -> None:
    table = owned_by_a()
    reports = table.keep_alive(KeepAliveCall(incarnation=A, acquire_seq=3, holds=[]), 10)
    assert [(r.key, r.state, r.token) for r in reports] == [(KEY, HoldState.ORPHAN, 7)]
    assert lease_age_ms(table, 10) == 10


def test_entry_whose_grant_is_in_flight_is_no_orphan() -> None:
    table = owned_by_a()
    assert table.keep_alive(KeepAliveCall(incarnation=A, acquire_seq=2, holds=[]), 10) == []


def test_evicted_owner_is_notified_and_renewed_for_a_minute() -> None:
    table = owned_by_a()
    assert keep_alive(table, 1_000, evicted=True) is HoldState.WANTED
    last_ms = 1_000 + POLICY.evicted_renewal_ms
    assert keep_alive(table, last_ms, evicted=True) is HoldState.WANTED
    assert keep_alive(table, last_ms + 1, evicted=True) is HoldState.NOT_OWNER
    assert lease_age_ms(table, last_ms + 1) == 1


def test_owner_that_rejoins_its_group_is_renewed_as_before() -> None:
    table = owned_by_a()
    keep_alive(table, 0, evicted=True)
    assert keep_alive(table, 50_000) is HoldState.OK
    assert keep_alive(table, 60_000, evicted=True) is HoldState.WANTED
    assert keep_alive(table, 110_000, evicted=True) is HoldState.WANTED


# Changes


def test_second_hand_over_of_a_queue_waits_for_the_first() -> None:
    table = owned_by_a()
    table.begin_change(KEY, ChangeStep.FENCE)
    decision = decide(table, 1, Requester(Incarnation("c", 1), 1, 7))
    assert isinstance(decision, WaitDecision)
    assert isinstance(decision.error, HandoverPending)


def test_grant_reports_the_time_since_the_first_refusal_of_the_new_owner() -> None:
    table = owned_by_a()
    table.add_waiter(KEY, B, 100)
    table.add_waiter(KEY, B, 400)
    table.begin_change(KEY, ChangeStep.FENCE)
    lock = LockRecord(owner=B, token=8, acquire_seq=1, attempt="y", generation=6)
    assert table.end_granted(KEY, lock, 2, 1_000, newly_acquired=True) == 900


def test_freed_entry_keeps_token_and_generation() -> None:
    table = owned_by_a()
    table.begin_change(KEY, ChangeStep.RELEASE)
    table.end_freed(KEY, LockRecord(token=7, generation=5), 2, 1_000)
    entry = table.get(KEY)
    assert entry is not None
    assert entry.lock == LockRecord(token=7, generation=5)
    assert (entry.revision, entry.state) == (2, LockState.FREE)
    assert table.keep_alive(KeepAliveCall(incarnation=A, acquire_seq=9, holds=[]), 10) == []


def test_release_requires_owner_and_token() -> None:
    table = owned_by_a()
    assert table.owns(KEY, A, 7)
    assert not table.owns(KEY, A, 6)
    assert not table.owns(KEY, B, 7)
    assert not table.owns(OTHER, A, 7)


def test_freed_queue_keeps_the_observation_of_its_token() -> None:
    """The next owner does not wait for an observation."""
    table = owned_by_a()
    observation = Observation(token=7, committed=10, delivered=12, unacked_count=2)
    observe(table, observation, 0)
    error = decide(table, 1)
    assert isinstance(error, WaitDecision)
    assert isinstance(error.error, Unacked)
    table.begin_change(KEY, ChangeStep.RELEASE)
    table.end_freed(KEY, LockRecord(token=7, generation=5), 2, 1_000)
    assert not table.needs_observation(KEY, OTHER_REQUESTER, 1_002)
    assert decide(table, 1_002) == GrantDecision(FREE, observation)


def test_release_counts_as_an_observation_of_a_closed_token() -> None:
    table = owned_by_a()
    started = table.begin_observation(KEY)
    table.begin_change(KEY, ChangeStep.RELEASE)
    table.end_freed(KEY, LockRecord(token=7, generation=5), 2, 1_000)
    table.end_observation(KEY, Observation(token=7, committed=1, delivered=2), started, 1_001)
    assert not table.needs_observation(KEY, OTHER_REQUESTER, 1_499)
    assert decide(table, 1_499) == GrantDecision(FREE, Observation(token=7, closed=True))
    assert table.needs_observation(KEY, OTHER_REQUESTER, 1_500)


def test_release_is_no_poll_of_the_profile_defibus() -> None:
    table = LockTable(LockPolicy(profile=DecisionProfile.DEFIBUS))
    table.load(KEY, lock_of(A), 1, 0)
    table.confirm(KEY, 7, 0)
    table.begin_change(KEY, ChangeStep.RELEASE)
    table.end_freed(KEY, LockRecord(token=7, generation=5), 2, 1_000)
    assert table.decide(KEY, OTHER_REQUESTER, 1_001) is None


def test_contradicted_observation_is_repeated() -> None:
    table = owned_by_a()
    observe(table, DRAINED, 0)
    table.discard_observation(KEY)
    assert table.decide(KEY, OTHER_REQUESTER, 1) is None
    assert table.needs_observation(KEY, OTHER_REQUESTER, 1)


def test_leases_start_with_the_term() -> None:
    table = owned_by_a(now_ms=1_000_000)
    observe(table, DRAINED, 1_000_000)
    decision = decide(table, 1_000_000 + LEASE_MS)
    assert isinstance(decision, WaitDecision)
    assert isinstance(decision.error, Held)
    assert isinstance(decide(table, 1_000_001 + LEASE_MS), GrantDecision)


def test_entries_are_listed_in_order_and_filtered() -> None:
    table = LockTable(POLICY)
    keys = [GroupQueue(g, t, "b", q) for g in ("g", "h") for t in ("t", "u") for q in (2, 10)]
    for key in reversed(keys):
        table.load(key, lock_of(A), 1, 0)
        table.confirm(key, 7, 0)
    assert [entry.key for entry in table.entries()] == keys
    assert [entry.key for entry in table.entries("h", "u")] == keys[6:]
    assert table.counts()[LockState.HELD] == 8


def test_entry_of_a_queue_that_was_only_requested_is_dropped() -> None:
    table = LockTable(POLICY)
    observe(table, Observation(), 0)
    table.add_waiter(KEY, B, 0)
    table.drop_old_waiters(POLICY.waiter_memory_ms + 1)
    assert table.get(KEY) is None
    assert list(table.entries()) == []


# Owners that are not known


def test_lock_without_a_known_owner_is_kept_and_listed_for_its_incarnation() -> None:
    """Access control was switched on since the grant."""
    table, incarnation = owned_by_a(), A._replace(owner=11)
    call = KeepAliveCall(incarnation=incarnation, acquire_seq=3, holds=[(KEY, 7)])
    assert [report.state for report in table.keep_alive(call, 20_000)] == [HoldState.OK]
    assert lease_age_ms(table, 20_000) == 0
    assert table.owned_by(incarnation) == [KEY]
    reports = table.keep_alive(replace(call, holds=()), 20_000)
    assert [report.state for report in reports] == [HoldState.ORPHAN]


def test_lock_of_a_known_owner_is_not_kept_by_another_owner() -> None:
    table = LockTable(POLICY)
    table.load(KEY, lock_of(A._replace(owner=11)), 1, 0)
    table.confirm(KEY, 7, 0)
    call = KeepAliveCall(incarnation=A._replace(owner=12), acquire_seq=3, holds=[(KEY, 7)])
    assert [report.state for report in table.keep_alive(call, 1)] == [HoldState.NOT_OWNER]
    assert table.owned_by(call.incarnation) == []
