"""The expected state of the group and of each queue, kept by the checker."""

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
    """A property does not hold; the text contains the events before the violation."""


@dataclass(slots=True)
class HandlerStart:
    """The start of a handler call.

    Attributes:
        excused: Whether the message may start again, because of what has happened since.
        failed: Whether the call has failed and the same client is to repeat it.
    """

    client: str
    at_ms: int
    token: int
    excused: bool = False
    failed: bool = False


@dataclass(eq=False, slots=True)
class ResetEpoch:
    """The messages that count as handled between two resets of a queue.

    Attributes:
        given: Offsets that the reset marked as handled: handled before, or skipped.
        handled: Offsets that were handled under a token of this epoch.
    """

    given: RangeSet = EMPTY
    handled: set[int] = field(default_factory=set)


@dataclass(slots=True)
class ExpectedQueue:
    """The expected state of one queue.

    Attributes:
        durable: Progress on the disk.
        issued: Incarnation by token, for every durable fence.
        fenced: Incarnation by token (None without owner), for every accepted fence, durable or not.
        persisted: Owner by token, from etcd.
        stored: Message id and tag by offset, from the log.
        keys: Ordering key by offset, of messages that have one.
        stored_ms: Time of storing, by offset.
        starts: Handler calls, by offset.
        epochs: State by reset epoch; `epoch_of`: reset epoch by token.
        judged: Generations of the subscription that filtered a message, by offset.
        generation_of: Generation of the subscription by token; 0 for none.
        revoked: Tokens ended by a reset or an operator, unknown to the owner; with the cause.
        told: Tokens whose owner has got the error that they have ended.
        resets: Number of resets that are not durable yet.
        moved_ms: Last change of delivered or committed; `committed_ms`: of committed.
        etcd_token: Token in etcd, with `owner` (None if free) and `acquire_seq`.
    """

    durable: Progress | None = None
    issued: dict[int, Incarnation] = field(default_factory=dict)
    fenced: dict[int, Incarnation | None] = field(default_factory=dict)
    persisted: dict[int, Incarnation] = field(default_factory=dict)
    stored: dict[int, tuple[str, str]] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
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
        """The durable committed offset C."""
        return self.durable.committed_offset if self.durable else 0

    def epoch(self) -> ResetEpoch:
        """The epoch of the durable progress."""
        return self.epochs[self.durable.reset_epoch if self.durable else 0]


@dataclass(slots=True)
class ExpectedGroup:
    """The state of the group in etcd.

    Attributes:
        filters: Filter by generation of the subscription; `generation`: the current one.
        bound: Whether only one filter may be active at a time.
        draining: Whether the subscription is changing.
        paused: Reason of the pause; empty without one.
        pause_known_ms: Time since which a storage node has seen the pause, by node; absent if it
            may not have.
        served: Newest generation with an accepted delivery.
        members: Incarnations in the record; `left_ms`: since when others are not any more.
        record: Generation of the record.
        assigned: Newest generation of the record that assigns a queue to an incarnation.
    """

    filters: dict[int, TagFilter] = field(default_factory=dict)
    generation: int = 0
    bound: bool = True
    draining: bool = False
    paused: str = ""
    pause_known_ms: dict[str, int] = field(default_factory=dict)
    served: int = 0
    members: frozenset[Incarnation] = frozenset()
    left_ms: dict[Incarnation, int] = field(default_factory=dict)
    record: int = 0
    assigned: dict[GroupQueue, dict[Incarnation, int]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def may_take(self, key: GroupQueue, owner: Incarnation, generation: int) -> bool:
        """Return whether a record of at least this generation assigns the queue to the owner."""
        by_member = self.assigned[key].items()
        return any(newest >= generation and one.matches(owner) for one, newest in by_member)

    def wants(self, tag: str, generations: Iterable[int]) -> bool:
        """Return whether a message that passed the filters of `generations` had to be handled.

        Two generations are active at a time only if `bound` is False: then either may decide.
        """
        filters = [self.filters[one] for one in generations if one in self.filters]
        if self.bound:
            filters = filters[-1:]
        return all(each.accepts(tag) for each in filters)


@dataclass(frozen=True, slots=True)
class OffsetsCopy:
    """A retry copy of a message: it waits at storage or was redelivered.

    Attributes:
        name: Its name in the retry topic.
        place: Topic id, queue id and offset of the waiting copy.
    """

    name: str
    place: tuple[int, int, int]


class ExpectedState:
    """The expected state of one run, shared by all checks.

    Args:
        group: Name of the consumer group.
        lease_ms: Length of a lock's lease.
        now_ms: Reads the time of the simulation.

    Attributes:
        retries: The retry topic of the group.
        topic_ids: Ids of the topics with messages.
        copies: Retry copies, by message id.
        by_key: Whether members handle messages in the order of their keys, and repeat failed calls.
    """

    def __init__(self, group: str, lease_ms: int, trace: Trace, now_ms: Callable[[], int]) -> None:
        self.name, self.lease_ms, self.trace, self.now_ms = group, lease_ms, trace, now_ms
        self.counts: Counter[str] = Counter()
        self.queues: dict[GroupQueue, ExpectedQueue] = defaultdict(ExpectedQueue)
        self.group = ExpectedGroup()
        self.retries = retry_topic(group)
        self.topic_ids: dict[str, int] = {}
        self.copies: dict[int, OffsetsCopy] = {}
        self.by_key = False
        self.tables: dict[str, ProgressTable] = {}
        self.watching = True
        self.violation: Violation | None = None
        self.broken = asyncio.Event()

    def fail(self, rule: str, text: str) -> None:
        """Record a violation; the first one is kept."""
        if not self.watching or self.violation is not None:
            return
        self.trace.note("checker", f"VIOLATION {rule}: {text}")
        self.violation = Violation(f"{rule}: {text}\n{self.trace.tail()}")
        self.broken.set()

    def excuse(
        self, key: GroupQueue, why: str, client: str = "", offsets: RangeSet | None = None
    ) -> None:
        """Allow the messages started so far, by `client` or any client, to start again (V6)."""
        if why:
            self.trace.note("checker", f"{key}: {why}")
        for offset, starts in self.queues[key].starts.items():
            if offsets is not None and not offsets.between(offset, offset + 1):
                continue
            for start in starts:
                start.excused |= client in ("", start.client)

    def in_force(self, key: GroupQueue, durable: Progress) -> int:
        """Return the token that is valid now."""
        progress = self.current(key)
        return durable.token if progress is None else progress.token

    def current(self, key: GroupQueue) -> Progress | None:
        """Return the progress at the newest leader of the set that keeps the group."""
        for table in self.tables.values():
            if key in table and table.placements.keeps(key.group):
                return table.query(key)
        return None

    def check_covered(self, key: GroupQueue, progress: Progress, offset: int) -> None:
        """Check that D covers a message that was started under T (V8): a fence would flag it."""
        if offset >= progress.delivered_offset and not done(progress).between(offset, offset + 1):
            self.fail(
                "V8",
                f"{key}@{offset} is started under token {progress.token}, and offsets regards "
                f"only what is below {progress.delivered_offset} as delivered",
            )

    def watches(self, table: ProgressTable) -> bool:
        """Return whether this is the table of the newest leader of a replica set."""
        return any(each is table for each in self.tables.values())

    def wanted(self, key: GroupQueue, offset: int, tag: str, reset_epoch: int) -> bool:
        """Return whether a message had to be handled: it matched and was not sent back."""
        if key.topic != self.retries and not self.group.wants(tag, self.queues[key].judged[offset]):
            return False
        place = QueueRef(key.topic, key.broker, key.queue_id)
        return (
            retry_producer_id(place, self.topic_ids[key.topic], offset, reset_epoch)
            not in self.copies
        )

    def key(self, queue: QueueRef) -> GroupQueue:
        """Convert a queue to its key at offsets."""
        return GroupQueue(self.name, queue.topic, queue.broker, queue.queue_id)


def copy_of(table: ProgressTable, key: GroupQueue) -> Progress | None:
    """Return a copy of the current progress."""
    return replace(table.query(key)) if key in table else None


def done(progress: Progress) -> RangeSet:
    """Return all acked offsets."""
    if not progress.committed_offset:
        return progress.acked
    return progress.acked.union(RangeSet.of(0, progress.committed_offset))


def token_of(progress: Progress | None) -> int:
    """Return the token T; 0 without progress."""
    return progress.token if progress is not None else 0


def key_of(queue: queue_pb2.GroupQueue) -> GroupQueue:
    """Convert a queue to its key at offsets."""
    return GroupQueue(queue.group, queue.queue.topic, queue.queue.broker, queue.queue.queue_id)


def holder_of(incarnation: queue_pb2.Incarnation) -> Incarnation:
    """Convert an incarnation to its form at offsets."""
    return Incarnation(incarnation.client_id, incarnation.incarnation_id, incarnation.owner)
