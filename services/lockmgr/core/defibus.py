"""The decision table of DeFiBus (domain 7.3) to the letter, for comparison: profile `defibus`.

It counts polls of all contenders together, knows no generations, and takes a queue from an owner
that was silent for 100 ms. Its decisions are carried out as all others are, by a conditional
fence: so what an owner still has in hand is flagged for the next one, and the owner is fenced.

Source: DeFiBus, AccessLockManager.updateAccessControlTable. Deviations: the owner is an
incarnation, not a client id; a keep-alive counts as an access, since pulls are not seen here.
"""

from __future__ import annotations

from batonmq_server.lockmgr.core.access import (
    Condition,
    Decision,
    Deny,
    Grant,
    decide_own,
    has_no_owner,
    held,
    unacked,
)
from batonmq_server.lockmgr.core.locks import Asker, Count, Entry, Observation, Policy

UNCHANGED_MIN = 3
"""Source: maxDeliverOffsetNoChangeTimes."""


def decide_access_defibus(
    entry: Entry | None, asker: Asker, seen: Observation, now_ms: int, policy: Policy
) -> tuple[Decision, Count]:
    """What to do about `asker`'s poll, and what to remember of it.

    Pure: changes nothing. A queue of which nothing was ever delivered nor acked, -1 and -1, is
    drained.

    Args:
        entry: None if nobody has ever owned the queue.
        seen: The queue at offsets, at this poll.
    """
    taken = Count(seen.delivered)
    if entry is None or has_no_owner(entry, seen):
        return Grant((Condition.CLOSED_OR_DRAINED, Condition.IDLE), seen.token), taken
    if entry.lock.owner == asker.incarnation:
        return decide_own(entry, asker, seen), Count(seen.delivered, entry.count.unchanged)
    same = seen.delivered == entry.count.delivered
    unchanged = entry.count.unchanged + 1 if same else 0
    conditions: list[Condition] = []
    if seen.drained and unchanged >= UNCHANGED_MIN:
        conditions.append(Condition.CLOSED_OR_DRAINED)
    if now_ms - entry.lease_start_ms > policy.silence_ms:
        conditions.append(Condition.IDLE)
    if conditions:
        return Grant(tuple(conditions), seen.token), taken
    error = held(entry, now_ms, policy) if seen.drained else unacked(entry, seen, policy)
    return Deny(error, clears=True), Count(seen.delivered, unchanged)
