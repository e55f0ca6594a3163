"""Who may have a queue: the decision table of protocol section 7 as one pure function."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from batonmq.errors import (
    BatonError,
    Draining,
    FenceCause,
    Fenced,
    FencedDetail,
    Held,
    NotAssigned,
    OldRequest,
    Unacked,
)
from batonmq_server.lockmgr.core.lock_entry import LockEntry, LockPolicy, Observation, Requester


class FenceCondition(Enum):
    """What offsets checks inside the swap of the token; only an operator's FORCED always passes."""

    CLOSED_OR_DRAINED = "CLOSED_OR_DRAINED"
    SAME_HOLDER = "SAME_HOLDER"
    IDLE = "IDLE"
    FORCED = "FORCED"


@dataclass(frozen=True, slots=True)
class GrantDecision:
    """Fence the queue for the asker: try the conditions in order, all expecting one token."""

    conditions: tuple[FenceCondition, ...]
    expected_token: int
    newly_acquired: bool = True


@dataclass(frozen=True, slots=True)
class RenewDecision:
    """The asker has the queue by this very request: repeat the answer."""


@dataclass(frozen=True, slots=True)
class DenyDecision:
    """Refuse. `clears`: the reason can go away by itself, so waiting makes sense."""

    error: BatonError
    clears: bool


@dataclass(frozen=True, slots=True)
class FreeDecision:
    """Its token is finished at offsets: nobody can do anything with it any more."""


Decision = GrantDecision | RenewDecision | DenyDecision


def decide(
    entry: LockEntry | None, asker: Requester, seen: Observation, now_ms: int, policy: LockPolicy
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
        decision = decide_own(entry, asker, seen)
        if isinstance(decision, GrantDecision) and asker.generation < entry.lock.generation:
            return _not_assigned(entry, asker)
        return decision
    if entry is None or has_no_owner(entry, seen):
        if entry is not None and asker.generation < entry.lock.generation:
            return _not_assigned(entry, asker)
        return GrantDecision((FenceCondition.CLOSED_OR_DRAINED, FenceCondition.IDLE), seen.token)
    return _decide_foreign(entry, asker, seen, now_ms, policy)


def decide_clear(
    entry: LockEntry, seen: Observation, now_ms: int, policy: LockPolicy
) -> GrantDecision | FreeDecision | None:
    """How to get an owned queue to nobody while the subscription of its group changes, if at all.

    An owner that lives closes and releases by itself. The owner of a phantom can't, nor acquire
    anew: offsets alone decides what is in its hands. An offsets that was restored from an old
    backup may not know the token, or the queue, which can't be fenced to nobody then.
    """
    silent = now_ms - entry.lease_start_ms > policy.lease_ms
    if seen.closed and (silent or seen.token >= entry.lock.token):
        return FreeDecision()
    if seen.token > entry.lock.token:
        return GrantDecision((FenceCondition.CLOSED_OR_DRAINED, FenceCondition.IDLE), seen.token)
    return GrantDecision((FenceCondition.IDLE,), seen.token) if silent else None


def has_no_owner(entry: LockEntry, seen: Observation) -> bool:
    """Whether the entry is free, or its owner's is an earlier topic of the name.

    A tombstone whose token is older than the owner's is one from an old backup of offsets.
    """
    if entry.lock.owner is None:
        return True
    return seen.begins_anew and seen.token > entry.lock.token


def decide_own(entry: LockEntry, asker: Requester, seen: Observation) -> Decision:
    """What to do about the wish of the owner itself, whatever its generation."""
    lock = entry.lock
    if asker.acquire_seq < lock.acquire_seq:
        return DenyDecision(
            OldRequest(
                f"request {asker.acquire_seq} for {entry.key} is older than "
                f"{lock.acquire_seq}, which was granted",
                facts={"acquire_seq": asker.acquire_seq, "current": lock.acquire_seq},
            ),
            clears=False,
        )
    if asker.acquire_seq == lock.acquire_seq:
        if seen.token == lock.token and not seen.closed:
            return RenewDecision()
        return DenyDecision(
            Fenced(
                f"token {lock.token} of request {asker.acquire_seq} for {entry.key} is finished",
                remedy="Acquire the queue again, with a higher acquire_seq.",
                detail=FencedDetail(
                    token=lock.token,
                    current=seen.token,
                    why=FenceCause.CLOSED if seen.token == lock.token else FenceCause.TAKEN,
                ),
            ),
            clears=False,
        )
    # Always a fence, never the stored token: what the earlier request left in flight must not
    # come back unflagged (story 5).
    conditions = (FenceCondition.SAME_HOLDER, FenceCondition.CLOSED_OR_DRAINED, FenceCondition.IDLE)
    return GrantDecision(conditions, seen.token, newly_acquired=False)


def _decide_foreign(
    entry: LockEntry, asker: Requester, seen: Observation, now_ms: int, policy: LockPolicy
) -> Decision:
    lock = entry.lock
    if asker.generation < lock.generation:
        return _not_assigned(entry, asker)
    owners_token = seen.token == lock.token
    quiet = seen.drained and entry.slots >= policy.slots_min
    lets_go = owners_token and (seen.closed or (asker.generation > lock.generation and quiet))
    if now_ms - entry.lease_start_ms > policy.lease_ms:
        willing = (FenceCondition.CLOSED_OR_DRAINED,) if lets_go else ()
        return GrantDecision((*willing, FenceCondition.IDLE), seen.token)
    if lets_go:
        return GrantDecision((FenceCondition.CLOSED_OR_DRAINED,), lock.token)
    if asker.generation == lock.generation:
        return _not_assigned(entry, asker)
    if owners_token and not seen.drained:
        return DenyDecision(unacked_error(entry, seen, policy), clears=True)
    return DenyDecision(held_error(entry, now_ms, policy), clears=True)


def held_error(entry: LockEntry, now_ms: int, policy: LockPolicy) -> Held | Draining:
    """The refusal of a queue that its owner keeps, or is letting go because it was told to."""
    owner = entry.lock.owner
    name, age_ms = owner.client_id if owner else "", now_ms - entry.lease_start_ms
    facts: dict[str, str | int] = {
        "owner": name,
        "age_ms": age_ms,
        "lease_ms_left": max(0, policy.silence_ms - age_ms),
        "phantom": str(entry.phantom).lower(),
    }
    if entry.told and not entry.phantom:
        message = f"{name} was told that {entry.key} is wanted, and has not closed it yet"
        return Draining(message, retry_after_ms=policy.slot_ms, facts=facts)
    message = f"{entry.key} is owned by {name or 'nobody'}"
    return Held(message, retry_after_ms=policy.slot_ms, facts=facts)


def unacked_error(entry: LockEntry, seen: Observation, policy: LockPolicy) -> Unacked:
    """The refusal of a queue whose messages are in its owner's hands."""
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


def _not_assigned(entry: LockEntry, asker: Requester) -> DenyDecision:
    error = NotAssigned(
        f"{entry.key} was granted by generation {entry.lock.generation}, "
        f"the request is of generation {asker.generation}",
        retry_after_ms=100,
        facts={"generation": asker.generation, "current": entry.lock.generation},
    )
    return DenyDecision(error, clears=False)
