"""What is known of a queue and of its group: the values that a diagnosis is made of.

They come from several services at about the same time. What is not known is None, empty or -1,
and beside it stands why.
"""

from __future__ import annotations

from dataclasses import dataclass

from batonmq._core.queues import GroupQueue, QueueRef


@dataclass(frozen=True, slots=True)
class SubscriptionMismatch:
    """One point on which a client's subscription differs from the group's.

    Attributes:
        topic: The topic, or the setting.
    """

    topic: str
    wants: str
    has: str


@dataclass(frozen=True, slots=True)
class ExcludedClient:
    """A client that gets no queue because of its subscription.

    Attributes:
        member_client_id: A member that has the group's.
        waits: Whether it is to become the group's; else it is refused.
    """

    client_id: str
    member_client_id: str
    unlike: tuple[SubscriptionMismatch, ...]
    waits: bool = False


@dataclass(frozen=True, slots=True)
class PauseEvidence:
    """An operator has stopped the group."""

    by: str
    reason: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class SubscriptionChangeEvidence:
    """The subscription is being changed.

    Attributes:
        since_ms: Since the first member asked for it.
        open_grants: Queues of the group that still have an owner.
    """

    since_ms: int
    open_grants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvidence:
    """The group, the same for all its queues.

    Attributes:
        from_first: Where a queue without progress starts: at its first message, or after the last.
        owned: Whether one member at a time owns a queue.
        refused: Clients that get no queue because of their subscription.
    """

    name: str
    generation: int
    member_count: int
    from_first: bool = False
    owned: bool = True
    broadcasting: bool = False
    paused: PauseEvidence | None = None
    change: SubscriptionChangeEvidence | None = None
    refused: tuple[ExcludedClient, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockEvidence:
    """The queue's entry at the lock manager.

    Attributes:
        owner: Empty if nobody has the queue.
        lease_left_ms: Until the lease ends; -1 if not asked for.
        step: How far a hand-over that is under way is; empty if none is.
        refusal: Why somebody was refused the queue last; empty if not known.
    """

    owner: str = ""
    token: int = 0
    held_ms: int = 0
    lease_age_ms: int = 0
    lease_left_ms: int = -1
    waiters: tuple[str, ...] = ()
    step: str = ""
    attempt: str = ""
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvidence:
    """The queue at offsets.

    Attributes:
        idle_ms: Since the last access under the token.
        reset_epoch: Rises with every reset, undo and clone.
    """

    token: int
    committed_offset: int
    unacked_count: int = 0
    acked_count: int = 0
    delivered_offset: int = 0
    acked_range_count: int = 0
    capped: bool = False
    idle_ms: int = 0
    reset_epoch: int = 0


@dataclass(frozen=True, slots=True)
class LogExtent:
    """What the queue holds: offsets [first_offset, next_offset)."""

    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class OldestMessage:
    """The oldest message that is not handled."""

    offset: int
    message_id: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class DamagedMessage:
    """The oldest message that is not handled can't be read."""

    position: str
    error: str


@dataclass(frozen=True, slots=True)
class FilterScan:
    """How many of the messages that wait were looked at, and none passes the filter."""

    scanned_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEvidence:
    """All that is known of one queue.

    Attributes:
        permission: Of the topic; name of a `TopicPermission` without its prefix.
        expression: By which the group filters the topic; None if it does not subscribe to it.
        assigned: Member the queue is dealt to; empty if nobody.
        lock: None if nobody has ever owned the queue, or it is not known.
        lock_error: Why the lock manager did not answer; empty if it did. The others likewise.
        progress: None if the group has none on the queue, or it is not known.
        head: None if nothing waits, or it was not read.
        unmoved_ms: Since the committed offset was first seen as it is; -1 if it is not known.
        moved: Whether it was seen to become so.
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
    filtered: FilterScan | None = None
    unmoved_ms: int = -1
    moved: bool = False

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
        """The queue, for people."""
        return f"queue {self.queue_id} of {self.topic} on {self.broker}"

    @property
    def owner(self) -> str:
        """Who has the queue; empty if nobody, or not known."""
        if not self.group.owned:
            return self.assigned
        return self.lock.owner if self.lock else ""

    @property
    def committed_offset(self) -> int:
        """-1 without progress, or if it is not known."""
        return self.progress.committed_offset if self.progress else -1

    @property
    def head_offset(self) -> int:
        """The lowest offset that is kept and not handled; -1 if nothing waits, or not known."""
        if self.log is None or self.lag_count <= 0:
            return -1
        return max(self.committed_offset, self.log.first_offset)

    @property
    def lag_count(self) -> int:
        """Messages that are kept and not handled, filtered ones included; -1 if not known."""
        if self.log is None or self.progress_error:
            return -1
        kept = self.log.next_offset - self.log.first_offset
        if self.progress is None:
            known = self.group.from_first and not self.group.broadcasting
            return kept if known or not kept else -1
        return max(0, self.log.next_offset - max(self.committed_offset, self.log.first_offset))

    @property
    def lag_ms(self) -> int:
        """Age of the oldest message that is not handled; 0 without lag, -1 if not known."""
        if self.head is not None:
            return self.head.age_ms
        return 0 if self.lag_count == 0 else -1
