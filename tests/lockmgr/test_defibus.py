"""Goal: the profile `defibus` decides exactly like DeFiBus (domain 7.3).

Method: the pure function with plain values; the lock table, poll by poll; random polls compared
with a literal transcript of DeFiBus's method; and a lock manager with real etcd and offsets. A is
the owner, B and C are other clients; the owner's last poll was at 1,000 ms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, Fenced, Held, OldRequest, Unacked
from batonmq_server.lockmgr.core.decision import (
    Decision,
    DenyDecision,
    FenceCondition,
    GrantDecision,
    RenewDecision,
    WaitDecision,
)
from batonmq_server.lockmgr.core.defibus_decision import UNCHANGED_MIN, decide_defibus
from batonmq_server.lockmgr.core.lock_entry import (
    DEFIBUS_SILENCE_MS,
    ChangeStep,
    DecisionProfile,
    LockEntry,
    LockPolicy,
    LockRecord,
    Observation,
    PollCount,
    Requester,
)
from batonmq_server.lockmgr.core.lock_table import KeepAliveCall, LockTable
from tests.lockmgr.scene import Member, Scene

KEY = GroupQueue("g", "t", "broker-a", 0)
A, B, C = Incarnation("a", 1), Incarnation("b", 1), Incarnation("c", 1)
POLICY = LockPolicy(profile=DecisionProfile.DEFIBUS)
START_MS = 1_000
END_MS = START_MS + DEFIBUS_SILENCE_MS

CLOSED_OR_DRAINED, IDLE = FenceCondition.CLOSED_OR_DRAINED, FenceCondition.IDLE
SAME_HOLDER = FenceCondition.SAME_HOLDER
DRAINED = Observation(token=7, committed=10, delivered=10)
IN_FLIGHT = Observation(token=7, committed=10, delivered=14, unacked_count=4)


def owned(unchanged: int = 0, delivered: int = 10) -> LockEntry:
    lock = LockRecord(owner=A, token=7, acquire_seq=3, attempt="x", generation=5)
    count = PollCount(delivered, unchanged)
    return LockEntry(KEY, lock, revision=1, lease_start_ms=START_MS, poll_count=count)


def poll(
    entry: LockEntry | None,
    seen: Observation,
    now_ms: int = START_MS,
    requester: Incarnation = B,
    generation: int = 6,
) -> tuple[Decision, PollCount]:
    return decide_defibus(entry, Requester(requester, 4, generation), seen, now_ms, POLICY)


# No owner


@pytest.mark.parametrize(
    "entry", [None, LockEntry(KEY, LockRecord(token=7, generation=9), revision=1)]
)
@pytest.mark.parametrize("seen", [DRAINED, IN_FLIGHT])
def test_queue_without_an_owner_is_granted_to_the_first_poll(
    entry: LockEntry | None, seen: Observation
) -> None:
    decision, count = poll(entry, seen)
    assert decision == GrantDecision((CLOSED_OR_DRAINED, SAME_HOLDER, IDLE), seen)
    assert count == PollCount(seen.delivered, 0)


# Rows of the table: drained, polls without change, silence


@pytest.mark.parametrize(
    ("seen", "unchanged", "now_ms", "conditions"),
    [
        (DRAINED, 2, START_MS, (CLOSED_OR_DRAINED,)),
        (DRAINED, 1, START_MS, ()),
        (DRAINED, 0, START_MS, ()),
        (IN_FLIGHT, 2, START_MS, ()),
        (IN_FLIGHT, 99, START_MS, ()),
        (IN_FLIGHT, 0, END_MS + 1, (IDLE,)),
        (DRAINED, 0, END_MS + 1, (IDLE,)),
        (DRAINED, 2, END_MS + 1, (CLOSED_OR_DRAINED, IDLE)),
    ],
    ids=[
        "drained and three polls: clean hand-over",
        "drained and two polls: waits",
        "drained and one poll: waits",
        "in flight and three polls: waits",
        "in flight and a hundred polls: waits",
        "in flight and silent: taken",
        "drained and silent: taken",
        "drained, three polls and silent: taken",
    ],
)
def test_row(
    seen: Observation, unchanged: int, now_ms: int, conditions: tuple[FenceCondition, ...]
) -> None:
    decision, count = poll(owned(unchanged, seen.delivered), seen, now_ms)
    if conditions:
        assert decision == GrantDecision(conditions, seen)
        assert count == PollCount(seen.delivered, 0)
    else:
        assert isinstance(decision, WaitDecision)
        assert isinstance(decision.error, Held if seen.drained else Unacked)
        assert count == PollCount(seen.delivered, unchanged + 1)


# Edge cases


def test_owner_silent_for_exactly_the_timeout_keeps_its_queue() -> None:
    assert isinstance(poll(owned(), IN_FLIGHT, END_MS)[0], WaitDecision)
    assert poll(owned(), IN_FLIGHT, END_MS + 1)[0] == GrantDecision((IDLE,), IN_FLIGHT)


def test_queue_without_deliveries_and_acks_is_drained() -> None:
    no_progress = Observation(token=7, committed=-1, delivered=-1)
    decision, _ = poll(owned(2, -1), no_progress)
    assert decision == GrantDecision((CLOSED_OR_DRAINED,), no_progress)


def test_ack_without_delivery_is_never_drained() -> None:
    """As after a restart of the broker: only the timeout frees the queue."""
    acked = Observation(token=7, committed=10, delivered=-1)
    assert isinstance(poll(owned(99, -1), acked)[0], WaitDecision)
    assert poll(owned(99, -1), acked, END_MS + 1)[0] == GrantDecision((IDLE,), acked)


def test_delivery_resets_the_count() -> None:
    entry = owned(2, delivered=9)
    decision, count = poll(entry, DRAINED)
    assert isinstance(decision, WaitDecision)
    assert count == PollCount(10, 0)


def test_poll_of_the_owner_does_not_reset_the_count() -> None:
    entry = owned(2)
    decision, entry.poll_count = poll(entry, DRAINED, requester=A)
    assert isinstance(decision, GrantDecision)
    assert not decision.newly_acquired
    assert entry.poll_count == PollCount(10, 2)
    assert poll(entry, DRAINED)[0] == GrantDecision((CLOSED_OR_DRAINED,), DRAINED)


def test_owner_with_a_new_delivery_and_a_poll_does_not_keep_its_queue() -> None:
    """The owner's poll stores the new delivery, so the count of the other clients continues."""
    entry = owned(2, delivered=9)
    _, entry.poll_count = poll(entry, DRAINED, requester=A)
    assert entry.poll_count == PollCount(10, 2)
    assert isinstance(poll(entry, DRAINED)[0], GrantDecision)


@pytest.mark.parametrize("generation", [1, 5, 99])
def test_generation_is_ignored(generation: int) -> None:
    assert isinstance(poll(owned(2), DRAINED, generation=generation)[0], GrantDecision)
    assert isinstance(poll(owned(2), DRAINED, requester=A, generation=generation)[0], GrantDecision)


def test_older_and_repeated_requests_of_the_owner_are_distinguished() -> None:
    for seq, seen, outcome in (
        (2, DRAINED, OldRequest),
        (3, DRAINED, RenewDecision),
        (3, replace(DRAINED, token=8), Fenced),
    ):
        decision, _ = decide_defibus(owned(), Requester(A, seq, 1), seen, START_MS, POLICY)
        assert isinstance(
            decision.error if isinstance(decision, DenyDecision) else decision, outcome
        )


# The leader's table


def table_of_a(now_ms: int = START_MS) -> LockTable:
    table = LockTable(POLICY)
    table.load(KEY, owned().lock, 1, now_ms)
    table.confirm(KEY, 7, now_ms)
    return table


def poll_table(
    table: LockTable, requester: Incarnation, seen: Observation, now_ms: int
) -> Decision:
    request = Requester(requester, 9, 5)
    assert table.needs_observation(KEY, request, now_ms), "every poll needs an observation"
    table.end_observation(KEY, seen, table.begin_observation(KEY), now_ms)
    decision = table.decide(KEY, request, now_ms)
    assert decision is not None
    return decision


def hand_over(table: LockTable, to: Incarnation, token: int, now_ms: int) -> None:
    table.begin_change(KEY, ChangeStep.FENCE)
    lock = LockRecord(owner=to, token=token, acquire_seq=1, attempt="y", generation=5)
    table.end_granted(KEY, lock, token, now_ms, newly_acquired=True)


def test_count_is_shared_by_all_requesters() -> None:
    """Four polls of four clients at one time count like four polls of one client."""
    table = table_of_a()
    clients = [Incarnation(f"c{number}", 1) for number in range(UNCHANGED_MIN + 1)]
    decisions = [poll_table(table, client, DRAINED, START_MS) for client in clients]
    assert [type(d) for d in decisions] == [WaitDecision, WaitDecision, WaitDecision, GrantDecision]


def test_two_members_take_an_idle_queue_from_each_other_repeatedly() -> None:
    """Both members poll as owners of the queue; see domain 7.3."""
    table, owner, other = table_of_a(), A, B
    flips = 0
    for token in range(8, 12):
        seen = replace(DRAINED, token=token - 1)
        while not isinstance(poll_table(table, other, seen, START_MS), GrantDecision):
            pass
        hand_over(table, other, token, START_MS)
        owner, other = other, owner
        flips += 1
    assert flips == 4


def test_keep_alive_renews_the_owner() -> None:
    table = table_of_a()
    call = KeepAliveCall(incarnation=A, acquire_seq=3, holds=[(KEY, 7)])
    table.keep_alive(call, END_MS)
    expiry_ms = END_MS + DEFIBUS_SILENCE_MS
    assert isinstance(poll_table(table, B, IN_FLIGHT, expiry_ms), WaitDecision)
    assert isinstance(poll_table(table, B, IN_FLIGHT, expiry_ms + 1), GrantDecision)


# The original, transcribed


@dataclass
class Original:
    """updateAccessControlTable, line by line; a poll is (client, delivered, acked, now)."""

    client: Incarnation | None = None
    stamp_ms: int = 0
    deliver: int = 0
    no_change: int = 0

    def update(self, client: Incarnation, deliver: int, ack: int, now_ms: int) -> bool:
        if self.client is None:
            self.client, self.stamp_ms, self.deliver, self.no_change = client, now_ms, deliver, 0
            return True
        if self.client == client:
            self.stamp_ms, self.deliver = now_ms, deliver
            return False
        timed_out = now_ms - self.stamp_ms > 100
        if deliver == self.deliver:
            self.no_change += 1
        else:
            self.deliver, self.no_change = deliver, 0
        drained = deliver - ack == 0
        if (drained and self.no_change >= 3) or timed_out:
            self.stamp_ms, self.deliver, self.no_change = now_ms, deliver, 0
            self.client = client
            return True
        return False


POLLS = st.lists(
    st.tuples(
        st.sampled_from([A, B, C]),
        st.integers(0, 60),
        st.integers(-1, 2),
        st.integers(-1, 2),
    ),
    max_size=60,
)


@given(POLLS)
def test_random_polls_are_decided_as_by_defibus(
    polls: list[tuple[Incarnation, int, int, int]],
) -> None:
    original, table, now_ms, token = Original(), LockTable(POLICY), START_MS, 0
    for client, later_ms, deliver, ack in polls:
        now_ms += later_ms
        own = original.client == client
        acquired = original.update(client, deliver, ack, now_ms)
        seen = Observation(token=token, committed=ack, delivered=deliver)
        decision = poll_table(table, client, seen, now_ms)
        assert isinstance(decision, GrantDecision) == (acquired or own)
        if isinstance(decision, GrantDecision):
            assert decision.newly_acquired == acquired
            token += 1
            hand_over(table, client, token, now_ms)


# A lock manager with this profile


async def test_silent_owner_loses_its_queue_after_100_ms_and_redeliveries_are_flagged(
    scene: Scene,
) -> None:
    node, a, b = await scene.leader(profile="defibus"), Member("a"), Member("b")
    generation = await scene.set_group(a, b)
    grant = await a.acquire(node, generation)
    assert grant.lease_ms == 30_000
    await scene.deliver(1, 0, 5)
    node.clock.ahead_ms = scene.offsets_clock.ahead_ms = DEFIBUS_SILENCE_MS + 1
    next_grant = await b.acquire(node, generation)
    assert next_grant.token == 2
    assert [(r.first_offset, r.next_offset) for r in next_grant.maybe_seen] == [(0, 5)]
    with pytest.raises(Fenced):
        await scene.commit(1, 5)


async def test_third_poll_of_a_drained_queue_is_granted_to_any_client(scene: Scene) -> None:
    """The owner is active all the time and still loses the queue, as in DeFiBus."""
    node, a, b, c = await scene.leader(profile="defibus"), Member("a"), Member("b"), Member("c")
    generation = await scene.set_group(a, b, c)
    await a.acquire(node, generation)
    outcomes = []
    for member in (b, c, b):
        node.clock.ahead_ms -= 1_000  # the owner was active just now, however slow the machine is
        outcomes.append(await member.acquire_each(node, generation))
    assert [isinstance(outcome[0], BatonError) for outcome in outcomes] == [True, True, False]
