"""Evidence about a queue and its group: the values from which a diagnosis is made.

They are read from several services at about the same time. A value that is unknown is None, empty
or -1, with an error beside it that says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from batonmq._core.queues import GroupQueue, QueueRef


@dataclass(frozen=True, slots=True)
class SubscriptionMismatch:
    """One difference between a client's subscription and the group's.

    Attributes:
        topic: The topic, or the name of the setting.
    """

    topic: str
    wants: str
    has: str


@dataclass(frozen=True, slots=True)
class ExcludedClient:
    """A client that gets no queue because of its subscription.

    Attributes:
        member_client_id: A member with the group's subscription.
        staged: Whether the subscription is staged as the group's next one; else it is refused.
    """

    client_id: str
    member_client_id: str
    mismatches: tuple[SubscriptionMismatch, ...]
    staged: bool = False


@dataclass(frozen=True, slots=True)
class PauseEvidence:
    """A pause of the group by an operator."""

    by: str
    reason: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class SubscriptionChangeEvidence:
    """A change of the group's subscription that is decided and not finished.

    Attributes:
        since_ms: Time since the first heartbeat with the new subscription.
        open_grants: Number of queues of the group that still have an owner.
    """

    since_ms: int
    open_grants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvidence:
    """Evidence about the group, the same for all its queues.

    Attributes:
        from_first: Whether a queue without progress starts at its first message; else after its
            last.
        owned: Whether one member at a time owns a queue.
        excluded: Clients that get no queue because of their subscription.
    """

    name: str
    generation: int
    member_count: int
    from_first: bool = False
    owned: bool = True
    broadcasting: bool = False
    paused: PauseEvidence | None = None
    change: SubscriptionChangeEvidence | None = None
    excluded: tuple[ExcludedClient, ...] = ()


@dataclass(frozen=True, slots=True)
class HandlerEvidence:
    """A handler call of the owner that a queue waits for.

    Attributes:
        queue: Queue of the message, which may be another one.
        running_ms: Time since the call began, or has failed.
        abandoned: Whether the result is discarded, and the function runs on in its thread.
        ordering_key: Ordering key of the message; empty without one.
        failed_count: Failed calls, if the message waits to be handled again; else 0.
        failed_reason: Reason of the error of the last one, if an operator has to resolve it.
    """

    queue: QueueRef
    offset: int
    running_ms: int
    abandoned: bool = False
    ordering_key: str = ""
    failed_count: int = 0
    failed_reason: str = ""


class HeldState(StrEnum):
    """Where a message is that a gateway has started, as in its contract."""

    WAITING = "WAITING"
    READY = "READY"
    LEASED = "LEASED"
    ENDING = "ENDING"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMessage:
    """The oldest message of a queue that a gateway has started.

    Attributes:
        state: Where it is; the attributes of a client are empty unless it is LEASED.
        client: The remote client with its language, version and host, for messages.
        attempt: Deliveries so far.
        held_ms: Time since it was delivered.
        lease_left_ms: Time until its lease expires.
        renewed: Whether the gateway renews the lease as long as the client is alive.
    """

    offset: int
    state: HeldState
    attempt: int = 0
    client_id: str = ""
    client: str = ""
    held_ms: int = 0
    lease_left_ms: int = 0
    renewed: bool = False


@dataclass(frozen=True, slots=True)
class GatewayEvidence:
    """What the gateway that owns a queue says about it.

    Attributes:
        gateway: Node id of the gateway.
        waiting_count: Receive calls of the group that wait for a message.
        oldest: The oldest message that it has started; None if there is none.
    """

    gateway: str
    waiting_count: int = 0
    oldest: RemoteMessage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockEvidence:
    """The queue's entry at the lock manager.

    Attributes:
        owner: Client id of the owner; empty if the queue has none.
        lease_left_ms: Time until the lease expires; -1 if not queried.
        step: Step of the pending hand-over; empty if none is pending.
        denial: Why the last request for the queue was denied; empty if unknown.
        running: The handler call that the queue waits for; None if there is none, or if unknown.
    """

    owner: str = ""
    token: int = 0
    held_ms: int = 0
    lease_age_ms: int = 0
    lease_left_ms: int = -1
    waiters: tuple[str, ...] = ()
    step: str = ""
    attempt: str = ""
    denial: str = ""
    running: HandlerEvidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvidence:
    """The queue's progress at the offsets service.

    Attributes:
        unsure_count: Those of `unacked_count` of which offsets can't tell yet whether they were
            delivered, or exist: soon after its restart.
        idle_ms: Time since the last call with the token.
        reset_epoch: Rises with every reset, undo and clone.
        waiting_at: Storage node at which the owner's long poll waits; empty if unknown.
    """

    token: int
    committed_offset: int
    unacked_count: int = 0
    unsure_count: int = 0
    acked_count: int = 0
    delivered_offset: int = 0
    acked_range_count: int = 0
    capped: bool = False
    idle_ms: int = 0
    reset_epoch: int = 0
    waiting_at: str = ""

    @property
    def in_flight_count(self) -> int:
        """Messages that are in flight for sure."""
        return self.unacked_count - self.unsure_count


@dataclass(frozen=True, slots=True)
class LogExtent:
    """The offsets that the queue has: [first_offset, next_offset).

    Attributes:
        counts: Number of messages from an offset on, where a compaction may have removed some.
    """

    first_offset: int
    next_offset: int
    counts: Mapping[int, int] = field(default_factory=dict)

    def count_from(self, offset: int) -> int:
        """Return the number of messages at or after `offset`."""
        offset = max(offset, self.first_offset)
        return self.counts.get(offset, max(0, self.next_offset - offset))


@dataclass(frozen=True, slots=True)
class OldestMessage:
    """The oldest message that is not handled."""

    offset: int
    message_id: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class DamagedMessage:
    """The oldest message that is not handled, if it can't be read."""

    position: str
    error: str


@dataclass(frozen=True, slots=True)
class FilterScan:
    """The number of waiting messages that were read, of which none passes the filter."""

    scanned_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEvidence:
    """All evidence about one queue.

    Attributes:
        permission: Of the topic; name of a `TopicPermission` without its prefix.
        expression: The group's filter of the topic; None if it does not subscribe to the topic.
        assigned: Client id of the member that the queue is assigned to; empty if none.
        lock: None if the queue never had an owner, or if unknown.
        lock_error: Why the lock manager did not answer; empty if it did. Likewise `progress_error`
            and `log_error`.
        progress: None if the group has no progress on the queue, or if unknown.
        head: The oldest message that is not handled; None if no message waits, or if not read.
        tier_error: Why the broker can't read the oldest message from its object store; empty if it
            can, or the message is not there.
        unmoved_ms: Time since the present committed offset was first seen; -1 if unknown.
        moved: Whether another committed offset was seen before.
        leader: Node id of the broker's leader; empty if unknown.
        gateway: What the owner says, if it is a gateway; None if it is none, or if unknown.
    """

    group: GroupEvidence
    topic: str
    broker: str
    queue_id: int
    permission: str = "READ_WRITE"
    expression: str | None = "*"
    assigned: str = ""
    lock: LockEvidence | None = None
    lock_error: str = ""
    progress: ProgressEvidence | None = None
    progress_error: str = ""
    log: LogExtent | None = None
    log_error: str = ""
    head: OldestMessage | None = None
    damage: DamagedMessage | None = None
    tier_error: str = ""
    filtered: FilterScan | None = None
    unmoved_ms: int = -1
    moved: bool = False
    leader: str = ""
    gateway: GatewayEvidence | None = None

    @property
    def queue(self) -> QueueRef:
        """The queue."""
        return QueueRef(self.topic, self.broker, self.queue_id)

    @property
    def key(self) -> GroupQueue:
        """The queue as the group sees it."""
        return GroupQueue(self.group.name, self.topic, self.broker, self.queue_id)

    @property
    def name(self) -> str:
        """The queue, for messages."""
        return f"queue {self.queue_id} of {self.topic} on {self.broker}"

    @property
    def owner(self) -> str:
        """Client id of the owner, or without ownership of the assigned member; empty if unknown."""
        if not self.group.owned:
            return self.assigned
        return self.lock.owner if self.lock else ""

    @property
    def committed_offset(self) -> int:
        """Committed offset; -1 without progress, or if unknown."""
        return self.progress.committed_offset if self.progress else -1

    @property
    def head_offset(self) -> int:
        """The lowest offset that is not handled; -1 if no message waits, or if unknown."""
        if self.log is None or self.lag_count <= 0:
            return -1
        return max(self.committed_offset, self.log.first_offset)

    @property
    def lag_count(self) -> int:
        """Number of messages that are not handled, filtered ones included; -1 if unknown."""
        if self.log is None or self.progress_error:
            return -1
        kept = self.log.count_from(self.log.first_offset)
        if self.progress is None:
            known = self.group.from_first and not self.group.broadcasting
            return kept if known or not kept else -1
        return self.log.count_from(self.committed_offset)

    @property
    def lag_ms(self) -> int:
        """Age of the oldest message that is not handled; 0 without lag, -1 if unknown."""
        if self.head is not None:
            return self.head.age_ms
        return 0 if self.lag_count == 0 else -1
