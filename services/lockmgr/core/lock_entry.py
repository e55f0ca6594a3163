"""The values of the lock manager: the lock of a queue, what offsets showed of it, its waiters.

Independent of the wire, of etcd and of clocks: times are readings of the leader's monotonic clock
that the caller passes in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from batonmq._core.queues import GroupQueue, Incarnation, QueueRef
from batonmq.errors import BatonError


class DecisionProfile(Enum):
    """The rules by which queues change owners."""

    DEFAULT = "default"
    DEFIBUS = "defibus"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockPolicy:
    """The times of the decision table (protocol section 7).

    Attributes:
        profile: Which rules decide.
        lease_ms: An owner that is silent for longer may lose the queue.
        slot_ms: At most one observation of a queue counts in this time.
        slots_min: A drained queue goes to a new member after so many slots without a change.
        evicted_renewal_ms: The lease of an owner that left its group is renewed for so long.
        waiter_memory_ms: A refused requester counts as waiting for so long after its last request.
    """

    profile: DecisionProfile = DecisionProfile.DEFAULT
    lease_ms: int = 30_000
    slot_ms: int = 500
    slots_min: int = 3
    evicted_renewal_ms: int = 60_000
    waiter_memory_ms: int = 10_000

    @property
    def silence_ms(self) -> int:
        """Time after which a silent owner may lose the queue in this profile."""
        if self.profile is DecisionProfile.DEFIBUS:
            return DEFIBUS_SILENCE_MS
        return self.lease_ms


DEFIBUS_SILENCE_MS = 100
"""Source: DeFiBus, lockQueueTimeout. Owners are still told the lease of the default profile: a
queue that is taken sooner is fenced, and its messages are flagged."""
DENIALS_MAX = 16
"""Clients per queue with a remembered last refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRecord:
    """The lock of a queue as etcd has it; `owner` is None if the queue is free."""

    owner: Incarnation | None = None
    token: int = 0
    acquire_seq: int = 0
    attempt: str = ""
    generation: int = 0
    subscription_generation: int = 0
    forced_op_id: str = ""

    def freed(self) -> LockRecord:
        """Return the record without an owner; what it keeps must outlive the owner."""
        return LockRecord(
            token=self.token, generation=self.generation, forced_op_id=self.forced_op_id
        )


@dataclass(frozen=True, slots=True)
class Requester:
    """The incarnation, its acquire sequence number, and the group generation it has seen."""

    incarnation: Incarnation
    acquire_seq: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A queue as offsets showed it; a queue without progress is closed.

    Attributes:
        token: The token that a fence has to expect.
        delivered: D, with the offsets of an open advance; a fence of a drained queue expects it.
        reset_epoch: R; such a fence expects it too.
        floor_token: Of a queue without progress: the next token is greater than this; else 0.
        deleted: Whether the topic or the group was deleted, and the queue was not fenced since:
            its last owner has no message of the present topic. Offsets has a tombstone.
    """

    token: int = 0
    closed: bool = False
    committed: int = 0
    delivered: int = 0
    reset_epoch: int = 0
    unacked_count: int = 0
    floor_token: int = 0
    deleted: bool = False

    @property
    def drained(self) -> bool:
        """Whether no message is in flight."""
        return self.delivered == self.committed


class ChangeStep(Enum):
    """The step that a change of an entry has reached."""

    ANNOUNCE = "announce"
    FENCE = "fence"
    PERSIST = "persist"
    RELEASE = "release"


@dataclass(slots=True)
class PendingChange:
    """A change of an entry with an unknown outcome.

    Attributes:
        next_owner: The owner after it; None if it frees the queue.
    """

    step: ChangeStep
    next_owner: Incarnation | None = None
    attempt: str = ""


@dataclass(slots=True)
class Waiter:
    """A requester that was refused for a reason that can clear by itself."""

    since_ms: int
    last_request_ms: int
    held_count: int = 0


@dataclass(frozen=True, slots=True)
class Denial:
    """The last refusal of the queue to one client."""

    client_id: str
    error: BatonError
    at_ms: int


@dataclass(frozen=True, slots=True)
class RunningHandler:
    """A handler call of the owner, as its last keep-alive showed it.

    Attributes:
        token: Token of the queue that waits for the call.
        queue: Queue of the message.
        running_ms: Time since the call began, or has failed, at the keep-alive.
        abandoned: Whether its result is discarded.
        ordering_key: Ordering key of the message; empty without one.
        failed_count: Failed calls, if the message waits to be handled again; else 0.
        failed_reason: Reason of the error of the last one, if an operator has to resolve it.
    """

    token: int
    queue: QueueRef
    offset: int
    running_ms: int
    abandoned: bool
    ordering_key: str = ""
    failed_count: int = 0
    failed_reason: str = ""


@dataclass(frozen=True, slots=True)
class PollCount:
    """What the profile `defibus` remembers between two polls of a queue.

    Attributes:
        delivered: Delivered offset at the last poll.
        unchanged: Polls in a row, of all requesters together, that found the same delivered offset.
    """

    delivered: int = -1
    unchanged: int = 0


class WantedReason(Enum):
    """Why an owner should release a queue."""

    WAITER = "WAITER"
    NOT_MEMBER = "NOT_MEMBER"
    SUBSCRIPTION = "SUBSCRIPTION"


class WantedNotice(NamedTuple):
    """Tells an owner to release a queue; `by` is the client that waits longest, if one waits."""

    reason: WantedReason
    by: str


class LockState(Enum):
    """The state of an entry, for operators."""

    FREE = "free"
    HELD = "held"
    PENDING = "pending"
    PHANTOM = "phantom"


@dataclass(slots=True)
class LockEntry:
    """A queue at the leader: its lock, and what only the leader's memory has.

    Attributes:
        lock: As etcd has it; without an owner if `revision` is 0.
        revision: Modification revision in etcd; 0 if the queue has never been granted.
        lease_start_ms: When the owner's lease was last renewed.
        held_since_ms: When the owner was granted the queue, or the leader's term began.
        newly_acquired: Whether the last grant went to a new owner.
        phantom: Whether offsets has a newer token than the lock, so the owner's token is invalid.
        pending: The change in progress, if there is one.
        observation: The last one; None if it is out of date.
        observed_ms: When the last observation was made, or failed.
        quiet_slots: Slots in a row without a change of token, committed or delivered offset.
        slot_start_ms: When the present slot began.
        version: Changes with the lock; an observation that began under another version is not used.
        waiters: Refused requesters, oldest first.
        evicted_since_ms: Since when the owner is not a member of the group; None if it is.
        owner_notified: Whether the owner was told to release the queue.
        poll_count: For the profile `defibus`.
        offsets_token: Last known token at offsets; 0 if not known.
        denials: The last refusal of each client, oldest first.
        running: The handler call that the queue waits for; None if there is none.
        running_at_ms: When the owner reported it.
    """

    key: GroupQueue
    lock: LockRecord = field(default_factory=LockRecord)
    revision: int = 0
    lease_start_ms: int = 0
    held_since_ms: int = 0
    newly_acquired: bool = True
    phantom: bool = False
    pending: PendingChange | None = None
    observation: Observation | None = None
    observed_ms: int = 0
    quiet_slots: int = 0
    slot_start_ms: int = 0
    version: int = 0
    waiters: dict[Incarnation, Waiter] = field(default_factory=dict)
    evicted_since_ms: int | None = None
    owner_notified: bool = False
    poll_count: PollCount = PollCount()
    offsets_token: int = 0
    denials: dict[str, Denial] = field(default_factory=dict)
    running: RunningHandler | None = None
    running_at_ms: int = 0

    @property
    def state(self) -> LockState:
        """The state of the entry now."""
        if self.pending is not None:
            return LockState.PENDING
        if self.lock.owner is None:
            return LockState.FREE
        return LockState.PHANTOM if self.phantom else LockState.HELD
