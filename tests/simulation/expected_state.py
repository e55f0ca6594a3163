"""What the checker keeps of the group and of each queue, in words of its own."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from baton.common.v1 import queue_pb2
from batonmq._core.queues import GroupQueue, Incarnation, QueueRef
from batonmq._core.retries import retry_producer_id, retry_topic
from batonmq._core.subscription import TagFilter
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.ranges import EMPTY, RangeSet
from tests.simulation.trace import Trace


class Violation(AssertionError):
    """A property does not hold; the text has the events before it."""


@dataclass(slots=True)
class HandlerStart:
    """A message that a handler began."""

    client: str
    at_ms: int
    excused: bool = False


@dataclass(eq=False, slots=True)
class ResetEpoch:
    """What counts as handled between two resets of a queue.

    Attributes:
        given: What the reset said is handled: it was handled before, or is skipped.
        handled: Offsets that somebody has handled under a token of this epoch.
    """

    given: RangeSet = EMPTY
    handled: set[int] = field(default_factory=set)


@dataclass(slots=True)
class ExpectedQueue:
    """What the checker knows of one queue.

    Attributes:
        durable: Progress as the disk has it.
        issued: Incarnation by token, of every fence that became durable.
        fenced: Incarnation by token, None for nobody, of every fence that passed, durable or not.
        persisted: Owner by token, as etcd had it.
        stored: Message id and tag by offset, as the log has them.
        stored_ms: When, by offset.
        starts: Who began a message, by offset.
        epochs: By reset epoch; and `epoch_of` by token.
        judged: Generations of the subscription by which an offset was passed, by offset.
        generation_of: Generation that a token is bound to, 0 for none.
        revoked: Tokens that a reset or an operator ended, unknown to their owner; and by what.
        told: Tokens of which their owner knows that they are over.
        resets: How many have come that are not durable yet.
        moved_ms: When delivered or committed changed last; `committed_ms`, when committed did.
        etcd_token: Token in etcd; with it `owner`, None if it is free, and `acquire_seq`.
    """

    durable: Progress | None = None
    issued: dict[int, Incarnation] = field(default_factory=dict)
    fenced: dict[int, Incarnation | None] = field(default_factory=dict)
    persisted: dict[int, Incarnation] = field(default_factory=dict)
    stored: dict[int, tuple[str, str]] = field(default_factory=dict)
    stored_ms: dict[int, int] = field(default_factory=dict)
    starts: dict[int, list[HandlerStart]] = field(default_factory=lambda: defaultdict(list))
    epochs: dict[int, ResetEpoch] = field(default_factory=lambda: defaultdict(ResetEpoch))
    epoch_of: dict[int, ResetEpoch] = field(default_factory=dict)
    judged: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    generation_of: dict[int, int] = field(default_factory=dict)
    revoked: dict[int, str] = field(default_factory=dict)
    told: dict[int, None] = field(default_factory=dict)
    resets: int = 0
    moved_ms: int = 0
    committed_ms: int = 0
    etcd_token: int = 0
    owner: Incarnation | None = None
    acquire_seq: int = 0

    @property
    def committed_offset(self) -> int:
        """C as the disk has it."""
        return self.durable.committed_offset if self.durable else 0

    def epoch(self) -> ResetEpoch:
        """The epoch of what is durable."""
        return self.epochs[self.durable.reset_epoch if self.durable else 0]


@dataclass(slots=True)
class ExpectedGroup:
    """What etcd says of the group.

    Attributes:
        filters: By generation of the subscription; and `generation`, the present one.
        bound: Whether two filters may not serve at one time.
        draining: Whether the subscription is being changed.
        paused: Why the group is paused; empty if it is not.
        pause_known_ms: Since when a node of storage knows of that, by node; not there if it may
            not know.
        served: Newest generation of which a delivery was accepted.
    """

    filters: dict[int, TagFilter] = field(default_factory=dict)
    generation: int = 0
    bound: bool = True
    draining: bool = False
    paused: str = ""
    pause_known_ms: dict[str, int] = field(default_factory=dict)
    served: int = 0

    def wants(self, tag: str, generations: Iterable[int]) -> bool:
        """Whether a message had to be handled that was passed by the filters of `generations`.

        Two of them are in force at one time only if nothing is bound: then either may count.
        """
        filters = [self.filters[one] for one in generations if one in self.filters]
        if self.bound:
            filters = filters[-1:]
        return all(each.accepts(tag) for each in filters)


@dataclass(frozen=True, slots=True)
class OffsetsCopy:
    """A message that was sent back, and waits for its time at storage or has come again.

    Attributes:
        name: As it will be called in the retry topic.
        place: Topic id, queue id and offset where it waits.
    """

    name: str
    place: tuple[int, int, int]


class ExpectedState:
    """What all checks of one run share.

    Args:
        group: Name of the consumer group.
        lease_ms: Length of a lock's lease.
        now_ms: Reads the time of the simulation.

    Attributes:
        retries: The retry topic of the group.
        topic_ids: Of topics that something was stored in.
        copies: What was sent back, by the id under which it was.
    """

    def __init__(self, group: str, lease_ms: int, trace: Trace, now_ms: Callable[[], int]) -> None:
        self.name, self.lease_ms, self.trace, self.now_ms = group, lease_ms, trace, now_ms
        self.counts: Counter[str] = Counter()
        self.queues: dict[GroupQueue, ExpectedQueue] = defaultdict(ExpectedQueue)
        self.group = ExpectedGroup()
        self.retries = retry_topic(group)
        self.topic_ids: dict[str, int] = {}
        self.copies: dict[int, OffsetsCopy] = {}
        self.tables: dict[str, ProgressTable] = {}
        self.watching = True
        self.violation: Violation | None = None
        self.broken = asyncio.Event()

    def fail(self, rule: str, text: str) -> None:
        """Note that a property does not hold; the first one counts."""
        if not self.watching or self.violation is not None:
            return
        self.trace.note("checker", f"VIOLATION {rule}: {text}")
        self.violation = Violation(f"{rule}: {text}\n{self.trace.tail()}")
        self.broken.set()

    def excuse(
        self, key: GroupQueue, why: str, client: str = "", offsets: RangeSet | None = None
    ) -> None:
        """What was started until now, by `client` or anybody, may be started again (V6)."""
        if why:
            self.trace.note("checker", f"{key}: {why}")
        for offset, starts in self.queues[key].starts.items():
            if offsets is not None and not offsets.between(offset, offset + 1):
                continue
            for start in starts:
                start.excused |= client in ("", start.client)

    def in_force(self, key: GroupQueue, durable: Progress) -> int:
        """The token that counts now."""
        for table in self.tables.values():
            if key in table and table.placements.keeps(key.group):
                return table.query(key).token
        return durable.token

    def watches(self, table: ProgressTable) -> bool:
        """Whether a table is one of those that count: the newest of its replica set."""
        return any(each is table for each in self.tables.values())

    def wanted(self, key: GroupQueue, offset: int, tag: str, reset_epoch: int) -> bool:
        """Whether a message had to be handled: the filter let it pass, and it was not sent back."""
        if key.topic != self.retries and not self.group.wants(tag, self.queues[key].judged[offset]):
            return False
        place = QueueRef(key.topic, key.broker, key.queue_id)
        return (
            retry_producer_id(place, self.topic_ids[key.topic], offset, reset_epoch)
            not in self.copies
        )

    def key(self, queue: QueueRef) -> GroupQueue:
        """The queue as offsets names it."""
        return GroupQueue(self.name, queue.topic, queue.broker, queue.queue_id)


def copy_of(table: ProgressTable, key: GroupQueue) -> Progress | None:
    """The progress as it is now; what is kept of it never changes in place."""
    return replace(table.query(key)) if key in table else None


def done(progress: Progress) -> RangeSet:
    """Everything that is acked."""
    if not progress.committed_offset:
        return progress.acked
    return progress.acked.union(RangeSet.of(0, progress.committed_offset))


def token_of(progress: Progress | None) -> int:
    """T; 0 without progress."""
    return progress.token if progress is not None else 0


def key_of(queue: queue_pb2.GroupQueue) -> GroupQueue:
    """The queue as offsets names it."""
    return GroupQueue(queue.group, queue.queue.topic, queue.queue.broker, queue.queue.queue_id)


def holder_of(incarnation: queue_pb2.Incarnation) -> Incarnation:
    """The incarnation as offsets names it."""
    return Incarnation(incarnation.client_id, incarnation.incarnation_id)
