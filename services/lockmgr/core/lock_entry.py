"""The values of the lock manager: who owns a queue, what offsets showed, who waits.

Knows nothing of the wire, of etcd or of clocks: times are readings of the leader's monotonic
clock that the caller passes in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError


class DecisionProfile(Enum):
    """By which decision table queues change hands."""

    DEFAULT = "default"
    DEFIBUS = "defibus"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockPolicy:
    """The times of the decision table (protocol section 7).

    Attributes:
        profile: Which table.
        lease_ms: An owner that is silent for longer may lose the queue.
        slot_ms: At most one observation of a queue counts in this time.
        slots_min: So many slots without change let a drained queue go to a newcomer.
        evicted_renewal_ms: An owner that is no member any more is renewed for so long.
        waiter_memory_ms: A refused asker counts as waiting until it has not asked for so long.
    """

    profile: DecisionProfile = DecisionProfile.DEFAULT
    lease_ms: int = 30_000
    slot_ms: int = 500
    slots_min: int = 3
    evicted_renewal_ms: int = 60_000
    waiter_memory_ms: int = 10_000

    @property
    def silence_ms(self) -> int:
        """An owner that is silent for longer may lose the queue, by the profile's own measure."""
        return DEFIBUS_SILENCE_MS if self.profile is DecisionProfile.DEFIBUS else self.lease_ms


DEFIBUS_SILENCE_MS = 100
"""Source: DeFiBus, lockQueueTimeout. Owners are told the lease of the default profile all the same:
what is taken sooner than that is fenced and flagged."""
DENIALS_MAX = 16
"""Clients per queue whose last refusal is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRecord:
    """What stands in etcd for a queue. What `freed` keeps stays when nobody owns it."""

    owner: Incarnation | None = None
    token: int = 0
    acquire_seq: int = 0
    attempt: str = ""
    generation: int = 0
    subscription_generation: int = 0
    forced_op_id: str = ""

    def freed(self) -> LockRecord:
        """The same queue with nobody owning it."""
        return LockRecord(
            token=self.token, generation=self.generation, forced_op_id=self.forced_op_id
        )


@dataclass(frozen=True, slots=True)
class Requester:
    """Who asks, by its how manyth request, and by which view of its group."""

    incarnation: Incarnation
    acquire_seq: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A queue as offsets showed it; one without progress is closed.

    Attributes:
        token: What a fence has to expect.
        begins_anew: An earlier topic of the name had the queue, and nobody was fenced since it
            was deleted: whatever its last owner still does is none of this topic's messages.
    """

    token: int = 0
    closed: bool = False
    committed: int = 0
    delivered: int = 0
    unacked_count: int = 0
    begins_anew: bool = False

    @property
    def drained(self) -> bool:
        """Nothing is in flight."""
        return self.delivered == self.committed


class ChangeStep(Enum):
    """How far a change of an entry has come."""

    ANNOUNCE = "announce"
    FENCE = "fence"
    PERSIST = "persist"
    RELEASE = "release"


@dataclass(slots=True)
class PendingChange:
    """A change of an entry whose outcome is not known yet."""

    step: ChangeStep
    attempt: str = ""


@dataclass(slots=True)
class Waiter:
    """An asker that was refused for a reason that can clear."""

    since_ms: int
    seen_ms: int
    parked_count: int = 0


@dataclass(frozen=True, slots=True)
class Denial:
    """A client was refused the queue."""

    client_id: str
    error: BatonError
    at_ms: int


@dataclass(frozen=True, slots=True)
class PollCount:
    """What the profile `defibus` remembers between two polls of a queue.

    Attributes:
        delivered: Delivered offset at the last poll.
        unchanged: Polls of contenders in a row, of all together, that found it as it was.
    """

    delivered: int = -1
    unchanged: int = 0


class WantedReason(Enum):
    """Why an owner should give a queue back."""

    WAITER = "WAITER"
    NOT_MEMBER = "NOT_MEMBER"
    SUBSCRIPTION = "SUBSCRIPTION"


class WantedNotice(NamedTuple):
    """A queue is wanted from its owner; `by` names the client that waits longest, if one does."""

    reason: WantedReason
    by: str


class LockState(Enum):
    """What an entry is, for people."""

    FREE = "free"
    HELD = "held"
    PENDING = "pending"
    PHANTOM = "phantom"


@dataclass(slots=True)
class LockEntry:
    """A queue at the leader: its lock and what only memory knows of it.

    Attributes:
        lock: As etcd has it; nobody's if `revision` is 0.
        revision: Modification revision in etcd; 0 if the queue has never been granted.
        lease_start_ms: When the owner was last known to live.
        held_since_ms: When the owner was granted the queue, or the leader began.
        newly_acquired: Whether the last grant went to somebody new.
        phantom: offsets has a newer token than the lock: the owner's is dead.
        pending: A change under way; at most one.
        seen: Last observation; None if it is out of date.
        seen_ms: When that was made, or tried.
        slots: Slots in a row without a change of token, committed or delivered.
        slot_start_ms: When the present slot began.
        stamp: Changes with the lock; an observation begun under another stamp is not used.
        waiters: Who was refused, oldest first.
        evicted_since_ms: Since when the owner was seen to be no member; None if it is one.
        told: Whether the owner has been told to give it back.
        count: For the profile `defibus`.
        offsets_token: Token at offsets as last known; 0 if it is not.
        denials: The last refusal of each client, oldest first.
    """

    key: GroupQueue
    lock: LockRecord = field(default_factory=LockRecord)
    revision: int = 0
    lease_start_ms: int = 0
    held_since_ms: int = 0
    newly_acquired: bool = True
    phantom: bool = False
    pending: PendingChange | None = None
    seen: Observation | None = None
    seen_ms: int = 0
    slots: int = 0
    slot_start_ms: int = 0
    stamp: int = 0
    waiters: dict[Incarnation, Waiter] = field(default_factory=dict)
    evicted_since_ms: int | None = None
    told: bool = False
    count: PollCount = PollCount()
    offsets_token: int = 0
    denials: dict[str, Denial] = field(default_factory=dict)

    @property
    def state(self) -> LockState:
        """What the entry is at this moment."""
        if self.pending is not None:
            return LockState.PENDING
        if self.lock.owner is None:
            return LockState.FREE
        return LockState.PHANTOM if self.phantom else LockState.HELD
