"""Who may have a queue: the decision table of protocol section 7 as one pure function."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from batonmq.common.errors import (
    BatonError,
    Fenced,
    Held,
    NotAssigned,
    OldRequest,
    Unacked,
)
from services.lockmgr.core.locks import Asker, Entry, Observation, Policy


class Condition(Enum):
    """What offsets checks inside the swap of the token. None of them is unconditional."""

    CLOSED_OR_DRAINED = "CLOSED_OR_DRAINED"
    SAME_HOLDER = "SAME_HOLDER"
    IDLE = "IDLE"


@dataclass(frozen=True, slots=True)
class Grant:
    """Fence the queue for the asker: try the conditions in order, all expecting one token."""

    conditions: tuple[Condition, ...]
    expected_token: int
    newly_acquired: bool = True


@dataclass(frozen=True, slots=True)
class Replay:
    """The asker has the queue by this very request: repeat the answer."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Refuse. `clears`: the reason can go away by itself, so waiting makes sense."""

    error: BatonError
    clears: bool


Decision = Grant | Replay | Deny


def decide_access(
    entry: Entry | None, asker: Asker, seen: Observation, now_ms: int, policy: Policy
) -> Decision:
    """What to do about `asker`'s wish for a queue.

    Pure: reads the lock, the lease start and the slots of `entry`, changes nothing. The caller
    makes sure that no change of the entry is under way.

    Args:
        entry: None if nobody has ever owned the queue.
        seen: The queue at offsets. It may be out of date: offsets checks again inside the fence.
        now_ms: Of the clock that `entry.lease_start_ms` was read from.
    """
    if entry is not None and entry.lock.owner == asker.incarnation:
        return _decide_own(entry, asker, seen)
    if entry is None or entry.lock.owner is None or _ended_with_its_topic(entry, seen):
        if entry is not None and asker.generation < entry.lock.generation:
            return _not_assigned(entry, asker)
        return Grant((Condition.CLOSED_OR_DRAINED, Condition.IDLE), seen.token)
    return _decide_foreign(entry, asker, seen, now_ms, policy)


def _ended_with_its_topic(entry: Entry, seen: Observation) -> bool:
    """Whether the entry is of an earlier topic of the name.

    A tombstone whose token is older than the owner's is one from an old backup of offsets.
    """
    return seen.begins_anew and seen.token > entry.lock.token


def _decide_own(entry: Entry, asker: Asker, seen: Observation) -> Decision:
    lock = entry.lock
    if asker.acquire_seq < lock.acquire_seq:
        return Deny(
            OldRequest(
                f"request {asker.acquire_seq} for {entry.key} is older than "
                f"{lock.acquire_seq}, which was granted",
                facts={"acquire_seq": asker.acquire_seq, "current": lock.acquire_seq},
            ),
            clears=False,
        )
    if asker.acquire_seq == lock.acquire_seq:
        if seen.token == lock.token and not seen.closed:
            return Replay()
        return Deny(
            Fenced(
                f"token {lock.token} of request {asker.acquire_seq} for {entry.key} is finished",
                remedy="Acquire the queue again, with a higher acquire_seq.",
                facts={
                    "token": lock.token,
                    "current": seen.token,
                    "why": "CLOSED" if seen.token == lock.token else "TAKEN",
                },
            ),
            clears=False,
        )
    if asker.generation < lock.generation:
        return _not_assigned(entry, asker)
    # Always a fence, never the stored token: what the earlier request left in flight must not
    # come back unflagged (story 5).
    conditions = (Condition.SAME_HOLDER, Condition.CLOSED_OR_DRAINED, Condition.IDLE)
    return Grant(conditions, seen.token, newly_acquired=False)


def _decide_foreign(
    entry: Entry, asker: Asker, seen: Observation, now_ms: int, policy: Policy
) -> Decision:
    lock = entry.lock
    if asker.generation < lock.generation:
        return _not_assigned(entry, asker)
    owners_token = seen.token == lock.token
    quiet = seen.drained and entry.slots >= policy.slots_min
    lets_go = owners_token and (seen.closed or (asker.generation > lock.generation and quiet))
    if now_ms - entry.lease_start_ms > policy.lease_ms:
        willing = (Condition.CLOSED_OR_DRAINED,) if lets_go else ()
        return Grant((*willing, Condition.IDLE), seen.token)
    if lets_go:
        return Grant((Condition.CLOSED_OR_DRAINED,), lock.token)
    if asker.generation == lock.generation:
        return _not_assigned(entry, asker)
    if owners_token and not seen.drained:
        return Deny(_unacked(entry, seen, policy), clears=True)
    return Deny(held(entry, now_ms, policy), clears=True)


def held(entry: Entry, now_ms: int, policy: Policy) -> Held:
    """The refusal of a queue that its owner keeps."""
    owner = entry.lock.owner
    name, age_ms = owner.client_id if owner else "", now_ms - entry.lease_start_ms
    return Held(
        f"{entry.key} is owned by {name or 'nobody'}",
        retry_after_ms=policy.slot_ms,
        facts={
            "owner": name,
            "age_ms": age_ms,
            "lease_ms_left": max(0, policy.lease_ms - age_ms),
            "phantom": str(entry.phantom).lower(),
        },
    )


def _unacked(entry: Entry, seen: Observation, policy: Policy) -> Unacked:
    owner = entry.lock.owner
    return Unacked(
        f"{seen.unacked_count} messages of {entry.key} are in the hands of "
        f"{owner.client_id if owner else 'nobody'}",
        retry_after_ms=policy.slot_ms,
        facts={
            "owner": owner.client_id if owner else "",
            "unacked": seen.unacked_count,
            "lowest_offset": seen.committed,
        },
    )


def _not_assigned(entry: Entry, asker: Asker) -> Deny:
    error = NotAssigned(
        f"{entry.key} was granted by generation {entry.lock.generation}, "
        f"the request is of generation {asker.generation}",
        retry_after_ms=100,
        facts={"generation": asker.generation, "current": entry.lock.generation},
    )
    return Deny(error, clears=False)
