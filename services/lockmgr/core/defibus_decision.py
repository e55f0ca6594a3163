"""The decision table of DeFiBus (domain 7.3) to the letter, for comparison: profile `defibus`.

It counts polls of all contenders together, knows no generations, and takes a queue from an owner
that was silent for 100 ms. Its decisions are carried out as all others are, by a conditional
fence: so what an owner still has in hand is flagged for the next one, and the owner is fenced.

Source: DeFiBus, AccessLockManager.updateAccessControlTable. Deviations: the owner is an
incarnation, not a client id; a keep-alive counts as an access, since pulls are not seen here.
"""

from __future__ import annotations

from batonmq_server.lockmgr.core.decision import (
    Decision,
    DenyDecision,
    FenceCondition,
    GrantDecision,
    decide_own,
    has_no_owner,
    held_error,
    unacked_error,
)
from batonmq_server.lockmgr.core.lock_entry import (
    LockEntry,
    LockPolicy,
    Observation,
    PollCount,
    Requester,
)

UNCHANGED_MIN = 3
"""Source: maxDeliverOffsetNoChangeTimes."""


def decide_defibus(
    entry: LockEntry | None, asker: Requester, seen: Observation, now_ms: int, policy: LockPolicy
) -> tuple[Decision, PollCount]:
    """What to do about `asker`'s poll, and what to remember of it.

    Pure: changes nothing. A queue of which nothing was ever delivered nor acked, -1 and -1, is
    drained.

    Args:
        entry: None if nobody has ever owned the queue.
        seen: The queue at offsets, at this poll.
    """
    taken = PollCount(seen.delivered)
    if entry is None or has_no_owner(entry, seen):
        return GrantDecision(
            (FenceCondition.CLOSED_OR_DRAINED, FenceCondition.IDLE), seen.token
        ), taken
    if entry.lock.owner == asker.incarnation:
        return decide_own(entry, asker, seen), PollCount(seen.delivered, entry.count.unchanged)
    same = seen.delivered == entry.count.delivered
    unchanged = entry.count.unchanged + 1 if same else 0
    conditions: list[FenceCondition] = []
    if seen.drained and unchanged >= UNCHANGED_MIN:
        conditions.append(FenceCondition.CLOSED_OR_DRAINED)
    if now_ms - entry.lease_start_ms > policy.silence_ms:
        conditions.append(FenceCondition.IDLE)
    if conditions:
        return GrantDecision(tuple(conditions), seen.token), taken
    error = (
        held_error(entry, now_ms, policy) if seen.drained else unacked_error(entry, seen, policy)
    )
    return DenyDecision(error, clears=True), PollCount(seen.delivered, unchanged)
