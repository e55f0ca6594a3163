"""The decision table of the lock manager (protocol section 7): what to do about a requested queue.

`TABLE` is the whole rule set of the default profile; the first row that fits decides. `markdown()`
prints it, as in docs/explanation/ownership.md. Everything here is pure: it reads the lock entry,
the observation and the time that the caller passes in, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple, TypeAlias

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

# Decisions


class FenceCondition(Enum):
    """What offsets tests, atomically with the change of token, before a fence passes.

    FORCED, for operators only, always passes.
    """

    CLOSED_OR_DRAINED = "CLOSED_OR_DRAINED"
    SAME_HOLDER = "SAME_HOLDER"
    IDLE = "IDLE"
    FORCED = "FORCED"


@dataclass(frozen=True, slots=True)
class GrantDecision:
    """Fence the queue for the requester.

    Attributes:
        conditions: Tried in order until one passes.
        observation: The queue as it was when this was decided. Each try expects its token.
        newly_acquired: Whether the requester did not own the queue before.
    """

    conditions: tuple[FenceCondition, ...]
    observation: Observation
    newly_acquired: bool = True


@dataclass(frozen=True, slots=True)
class RenewDecision:
    """The requester owns the queue by this very request: renew its lease and repeat the grant."""


@dataclass(frozen=True, slots=True)
class WaitDecision:
    """Refuse for a reason that can clear by itself: the request may be held until it does."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class DenyDecision:
    """Refuse; waiting does not help."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class FreeDecision:
    """Free the entry without a fence: its token is closed at offsets."""


Decision: TypeAlias = GrantDecision | RenewDecision | WaitDecision | DenyDecision


ABANDONED_MS = 600_000
"""An owner that has not renewed its lease for so long does not come back: far more than a lease."""

# What the table looks at


class OwnerKind(Enum):
    """The owner of the entry, as the requester sees it."""

    NONE = "none"
    REQUESTER = "requester"
    OTHER = "another"


class RelativeAge(Enum):
    """Age of a number of the request, compared with that of the grant."""

    OLDER = "older"
    SAME = "same"
    NEWER = "newer"


class TokenState(Enum):
    """The token of the entry at offsets.

    QUIET means drained, and unchanged for `LockPolicy.slots_min` slots. REPLACED means that offsets
    has another token: the entry is a phantom. VACANT means that this token is newer, and closed or
    drained: no member was told of it, so nothing can be delivered under it.
    """

    REPLACED = "replaced"
    VACANT = "vacant"
    CLOSED = "closed"
    IN_FLIGHT = "in flight"
    DRAINED = "drained"
    QUIET = "quiet"


class LeaseState(Enum):
    """The lease of the owner."""

    VALID = "valid"
    EXPIRED = "expired"


class Situation(NamedTuple):
    """A request for a queue, in the terms of the table."""

    owner: OwnerKind
    acquire_seq: RelativeAge
    generation: RelativeAge
    token: TokenState
    lease: LeaseState


class Action(Enum):
    """What a row of the table decides."""

    GRANT = "grant"
    RENEW = "renew"
    WAIT = "wait"
    DENY = "deny"


AllowedValues: TypeAlias = tuple[Enum, ...]


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One row: a condition on each part of a situation, and what is decided if all hold.

    Attributes:
        owner, acquire_seq, generation, token, lease: Values that fit; `ANY` if all do.
        action: What is decided.
        result: The conditions of the fence for GRANT; the error for WAIT and DENY.
    """

    owner: AllowedValues
    acquire_seq: AllowedValues
    generation: AllowedValues
    token: AllowedValues
    lease: AllowedValues
    action: Action
    result: tuple[FenceCondition, ...] | type[BatonError] = ()

    @property
    def conditions(self) -> tuple[AllowedValues, ...]:
        """The cells that are compared with a `Situation`, in its order."""
        return self.owner, self.acquire_seq, self.generation, self.token, self.lease

    def fits(self, situation: Situation) -> bool:
        """Return whether the row decides about the situation, if no earlier one does."""
        return all(
            not cell or value in cell
            for cell, value in zip(self.conditions, situation, strict=True)
        )


# The table

ANY: AllowedValues = ()
_NONE, _SELF, _OTHER = (OwnerKind.NONE,), (OwnerKind.REQUESTER,), (OwnerKind.OTHER,)
_OLDER, _SAME, _NEWER = (RelativeAge.OLDER,), (RelativeAge.SAME,), (RelativeAge.NEWER,)
_CLOSED, _IN_FLIGHT = (TokenState.CLOSED,), (TokenState.IN_FLIGHT,)
_AT_REST = (TokenState.QUIET, TokenState.VACANT)
_OPEN = (TokenState.IN_FLIGHT, TokenState.DRAINED, TokenState.QUIET)
_EXPIRED = (LeaseState.EXPIRED,)
_GRANT, _RENEW, _WAIT, _DENY = Action.GRANT, Action.RENEW, Action.WAIT, Action.DENY
_UNUSED, _IDLE = (FenceCondition.CLOSED_OR_DRAINED,), (FenceCondition.IDLE,)
_RESUME = (FenceCondition.SAME_HOLDER, *_UNUSED, *_IDLE)
"""The owner's own new request. Always a fence, never the stored token: messages that the earlier
request left in flight must not be delivered again unflagged (story 5)."""
FREE = (*_UNUSED, FenceCondition.SAME_HOLDER, *_IDLE)
"""A request for a queue without owner. If the token is open and has messages in flight, its holder
may be the requester itself, which then does not wait for its own lease."""

# fmt: off
TABLE: tuple[DecisionRow, ...] = (
    #           owner   acquire_seq generation token    lease     action  result
    DecisionRow(_SELF,  _OLDER,    ANY,     ANY,        ANY,      _DENY,  OldRequest),
    DecisionRow(_SELF,  _SAME,     ANY,     _OPEN,      ANY,      _RENEW),
    DecisionRow(_SELF,  _SAME,     ANY,     ANY,        ANY,      _DENY,  Fenced),
    DecisionRow(_SELF,  _NEWER,    _OLDER,  ANY,        ANY,      _DENY,  NotAssigned),
    DecisionRow(_SELF,  _NEWER,    ANY,     ANY,        ANY,      _GRANT, _RESUME),
    DecisionRow(_NONE,  ANY,       _OLDER,  ANY,        ANY,      _DENY,  NotAssigned),
    DecisionRow(_NONE,  ANY,       ANY,     ANY,        ANY,      _GRANT, FREE),
    DecisionRow(_OTHER, ANY,       _OLDER,  ANY,        ANY,      _DENY,  NotAssigned),
    DecisionRow(_OTHER, ANY,       ANY,     _CLOSED,    _EXPIRED, _GRANT, _UNUSED + _IDLE),
    DecisionRow(_OTHER, ANY,       _NEWER,  _AT_REST,   _EXPIRED, _GRANT, _UNUSED + _IDLE),
    DecisionRow(_OTHER, ANY,       ANY,     ANY,        _EXPIRED, _GRANT, _IDLE),
    DecisionRow(_OTHER, ANY,       ANY,     _CLOSED,    ANY,      _GRANT, _UNUSED),
    DecisionRow(_OTHER, ANY,       _NEWER,  _AT_REST,   ANY,      _GRANT, _UNUSED),
    # Two views of one generation never pass a queue back and forth.
    DecisionRow(_OTHER, ANY,       _SAME,   ANY,        ANY,      _DENY,  NotAssigned),
    DecisionRow(_OTHER, ANY,       _NEWER,  _IN_FLIGHT, ANY,      _WAIT,  Unacked),
    DecisionRow(_OTHER, ANY,       _NEWER,  ANY,        ANY,      _WAIT,  Held),
)
# fmt: on


def deciding_rows(table: Sequence[DecisionRow]) -> dict[Situation, DecisionRow]:
    """Return, for every situation, the first row that fits."""
    parts = product(OwnerKind, RelativeAge, RelativeAge, TokenState, LeaseState)
    situations = [Situation(*values) for values in parts]
    return {s: next(row for row in table if row.fits(s)) for s in situations}


ROWS = deciding_rows(TABLE)
"""Looked up in place of the table, since a decision is made for every requested queue."""


def decide(
    entry: LockEntry | None,
    requester: Requester,
    observation: Observation,
    now_ms: int,
    policy: LockPolicy,
) -> Decision:
    """Return what the default profile decides about a request for a queue.

    The caller makes sure that no change of the entry is in progress.

    Args:
        entry: None if the queue has never been owned.
        observation: The queue at offsets. It may be out of date: offsets tests the condition again
            inside the fence.
        now_ms: Of the clock that `entry.lease_start_ms` was read from.
    """
    if entry is None:
        return GrantDecision(FREE, observation)
    request = _Request(entry, requester, observation, now_ms, policy)
    return _decide(request, request.situation())


def decide_own(
    entry: LockEntry, requester: Requester, observation: Observation, policy: LockPolicy
) -> Decision:
    """Return what is decided about a request of the owner itself, whatever its generation."""
    request = _Request(entry, requester, observation, 0, policy)
    situation = request.situation()._replace(
        owner=OwnerKind.REQUESTER, generation=RelativeAge.NEWER
    )
    return _decide(request, situation)


def decide_clear(
    entry: LockEntry, observation: Observation, now_ms: int, policy: LockPolicy
) -> GrantDecision | FreeDecision | None:
    """Return how to free an owned queue that is to have no owner; None to wait.

    The subscription of its group changes, or its owner is gone and no member is to take it.

    A live owner closes and releases by itself. The owner of a phantom can't, and can't acquire anew
    either: offsets alone decides about its messages in flight. An offsets that was restored from an
    old backup may not know the token or the queue, which then can't be fenced.
    """
    expired = now_ms - entry.lease_start_ms > policy.lease_ms
    if observation.closed and (expired or observation.token >= entry.lock.token):
        return FreeDecision()
    if observation.token > entry.lock.token:
        return GrantDecision(_UNUSED + _IDLE, observation)
    return GrantDecision(_IDLE, observation) if expired else None


def is_removable(
    entry: LockEntry, observation: Observation, now_ms: int, policy: LockPolicy
) -> bool:
    """Return whether etcd needs the lock no more: its progress was deleted, and no client uses it.

    The next token must be greater than the lock's in any case. An offsets that was restored from an
    old backup does not know that: then the lock's token is needed.
    """
    return is_unused(entry, now_ms, policy) and 0 < entry.lock.token <= observation.floor_token


def is_abandoned(entry: LockEntry, now_ms: int, policy: LockPolicy) -> bool:
    """Return whether the owner of a stored lock has been silent for so long that it is gone."""
    silent = now_ms - entry.lease_start_ms > ABANDONED_MS
    return silent and entry.lock.owner is not None and is_unused(entry, now_ms, policy)


def is_unused(entry: LockEntry, now_ms: int, policy: LockPolicy) -> bool:
    """Return whether a stored lock has no live owner, no waiter, and no change in progress."""
    expired = now_ms - entry.lease_start_ms > policy.lease_ms
    free = entry.lock.owner is None or expired
    return bool(entry.revision) and free and entry.pending is None and not entry.waiters


def is_ownerless(entry: LockEntry, observation: Observation) -> bool:
    """Return whether the entry is free, or its owner belongs to an earlier topic of the same name.

    If the token of a recreated topic is older than the owner's, it comes from an old backup of
    offsets, and the owner counts.
    """
    if entry.lock.owner is None:
        return True
    return observation.deleted and observation.token > entry.lock.token


class _Request(NamedTuple):
    entry: LockEntry
    requester: Requester
    observation: Observation
    now_ms: int
    policy: LockPolicy

    def situation(self) -> Situation:
        lock = self.entry.lock
        expired = self.now_ms - self.entry.lease_start_ms > self.policy.lease_ms
        return Situation(
            self._owner(),
            _relative_age(self.requester.acquire_seq, lock.acquire_seq),
            _relative_age(self.requester.generation, lock.generation),
            self._token(),
            LeaseState.EXPIRED if expired else LeaseState.VALID,
        )

    def _owner(self) -> OwnerKind:
        if self.requester.incarnation.matches(self.entry.lock.owner):
            return OwnerKind.REQUESTER
        return OwnerKind.NONE if is_ownerless(self.entry, self.observation) else OwnerKind.OTHER

    def _token(self) -> TokenState:
        token, observed = self.entry.lock.token, self.observation
        if observed.token != token:
            vacant = observed.token > token and (observed.closed or observed.drained)
            return TokenState.VACANT if vacant else TokenState.REPLACED
        if observed.closed:
            return TokenState.CLOSED
        if not observed.drained:
            return TokenState.IN_FLIGHT
        quiet = self.entry.quiet_slots >= self.policy.slots_min
        return TokenState.QUIET if quiet else TokenState.DRAINED


def _relative_age(value: int, granted: int) -> RelativeAge:
    if value == granted:
        return RelativeAge.SAME
    return RelativeAge.OLDER if value < granted else RelativeAge.NEWER


def _decide(request: _Request, situation: Situation) -> Decision:
    row = ROWS[situation]
    if row.action is Action.RENEW:
        return RenewDecision()
    if isinstance(row.result, tuple):
        newly_acquired = situation.owner is not OwnerKind.REQUESTER
        return GrantDecision(row.result, request.observation, newly_acquired)
    error = _ERRORS[row.result](request)
    return WaitDecision(error) if row.action is Action.WAIT else DenyDecision(error)


# Errors


def held_error(entry: LockEntry, now_ms: int, policy: LockPolicy) -> Held | Draining:
    """Return the error for a queue that its owner keeps, or drains because it was notified."""
    owner = entry.lock.owner
    name, age_ms = owner.client_id if owner else "", now_ms - entry.lease_start_ms
    facts: dict[str, str | int] = {
        "owner": name,
        "age_ms": age_ms,
        "lease_ms_left": max(0, policy.silence_ms - age_ms),
        "phantom": str(entry.phantom).lower(),
    }
    if entry.owner_notified and not entry.phantom:
        message = f"{entry.key} is owned by {name}, which was notified and has not closed it yet"
        return Draining(message, retry_after_ms=policy.slot_ms, facts=facts)
    message = f"{entry.key} is owned by {name or 'no client'}"
    return Held(message, retry_after_ms=policy.slot_ms, facts=facts)


def unacked_error(entry: LockEntry, observation: Observation, policy: LockPolicy) -> Unacked:
    """Return the error for a queue with messages in flight at its owner."""
    owner = entry.lock.owner
    return Unacked(
        f"{observation.unacked_count} messages of {entry.key} are in flight at "
        f"{owner.client_id if owner else 'no client'}",
        retry_after_ms=policy.slot_ms,
        facts={
            "owner": owner.client_id if owner else "",
            "unacked": observation.unacked_count,
            "lowest_offset": observation.committed,
        },
    )


def _old_request(request: _Request) -> OldRequest:
    seq, granted_seq = request.requester.acquire_seq, request.entry.lock.acquire_seq
    return OldRequest(
        f"request {seq} for {request.entry.key} is older than {granted_seq}, which was granted",
        facts={"acquire_seq": seq, "current": granted_seq},
    )


def _fenced(request: _Request) -> Fenced:
    token, current = request.entry.lock.token, request.observation.token
    return Fenced(
        f"token {token} of request {request.requester.acquire_seq} for {request.entry.key} is "
        "no longer valid",
        remedy="Acquire the queue again, with a higher acquire_seq.",
        detail=FencedDetail(
            token=token,
            current=current,
            why=FenceCause.CLOSED if current == token else FenceCause.TAKEN,
        ),
    )


def _not_assigned(request: _Request) -> NotAssigned:
    generation, granted = request.requester.generation, request.entry.lock.generation
    return NotAssigned(
        f"{request.entry.key} was granted in generation {granted} of the group; "
        f"the request has generation {generation}",
        retry_after_ms=100,
        facts={"generation": generation, "current": granted},
    )


_ERRORS: dict[type[BatonError], Callable[[_Request], BatonError]] = {
    OldRequest: _old_request,
    Fenced: _fenced,
    NotAssigned: _not_assigned,
    Unacked: lambda r: unacked_error(r.entry, r.observation, r.policy),
    Held: lambda r: held_error(r.entry, r.now_ms, r.policy),
}


# The table in print

_HEADINGS = ("Owner", "`acquire_seq`", "Generation", "Token at offsets", "Lease", "Decision")


def markdown() -> str:
    """Return the table as Markdown, one line per row, in the order in which rows are tried."""
    lines = [_HEADINGS, tuple("---" for _ in _HEADINGS), *map(_cells, TABLE)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: DecisionRow) -> Iterator[str]:
    for cell in row.conditions:
        yield " or ".join(value.value for value in cell) or "any"
    if isinstance(row.result, tuple):
        result = ", else ".join(f"`{condition.value}`" for condition in row.result)
    else:
        result = f"`{row.result.reason}`"
    yield f"{row.action.value} {result}".strip()


if __name__ == "__main__":
    print(markdown())
