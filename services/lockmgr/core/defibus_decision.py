"""The decisions of DeFiBus (domain 7.3), for comparison: profile `defibus`.

It counts the polls of all requesters together, knows no generations, and takes a queue from an
owner that was silent for 100 ms. Its decisions are carried out like all others, by a conditional
fence: messages in flight at the old owner are flagged for the next one, and the old owner is
fenced.

Source: DeFiBus, AccessLockManager.updateAccessControlTable. Deviations: the owner is an
incarnation, not a client id; a keep-alive counts as a poll, since the lock manager sees no pulls.
"""

from __future__ import annotations

from batonmq_server.lockmgr.core.decision import (
    FREE,
    Decision,
    FenceCondition,
    GrantDecision,
    WaitDecision,
    decide_own,
    held_error,
    is_ownerless,
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
    entry: LockEntry | None,
    requester: Requester,
    observation: Observation,
    now_ms: int,
    policy: LockPolicy,
) -> tuple[Decision, PollCount]:
    """Return what is decided about a poll, and what the entry has to remember of it.

    Pure: changes nothing. A queue of which nothing was ever delivered or acknowledged, -1 and -1,
    is drained.

    Args:
        entry: None if the queue has never been owned.
        observation: The queue at offsets, at this poll.
    """
    granted = PollCount(observation.delivered)
    if entry is None or is_ownerless(entry, observation):
        return GrantDecision(FREE, observation), granted
    if requester.incarnation.matches(entry.lock.owner):
        decision = decide_own(entry, requester, observation, policy)
        return decision, PollCount(observation.delivered, entry.poll_count.unchanged)
    same = observation.delivered == entry.poll_count.delivered
    unchanged = entry.poll_count.unchanged + 1 if same else 0
    conditions = []
    if observation.drained and unchanged >= UNCHANGED_MIN:
        conditions.append(FenceCondition.CLOSED_OR_DRAINED)
    if now_ms - entry.lease_start_ms > policy.silence_ms:
        conditions.append(FenceCondition.IDLE)
    if conditions:
        return GrantDecision(tuple(conditions), observation), granted
    held = observation.drained
    error = held_error(entry, now_ms, policy) if held else unacked_error(entry, observation, policy)
    return WaitDecision(error), PollCount(observation.delivered, unchanged)
