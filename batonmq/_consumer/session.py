"""What all parts of one consumer share: its identity, its settings and what it has learnt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

from baton.common.v1 import queue_pb2
from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory, OffsetsLeader
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.group_view import GroupView
from batonmq._consumer.local_offsets import LocalOffsets
from batonmq._consumer.running_calls import RunningCalls
from batonmq._consumer.wakeup import Wakeup
from batonmq._core.epochs import SeenEpochs
from batonmq._core.flow_control import ByteBudget, FlowLimits
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range
from batonmq._core.start_offset import TIMESTAMP_AGE_MS
from batonmq._telemetry.client_metrics import ConsumerMetrics

if TYPE_CHECKING:
    from batonmq._telemetry.event_counters import ConsumerEventCounter

COMMIT_GATHER_MS = 10
"""How long a commit waits for more acks, unless callers wait for theirs."""


@dataclass(frozen=True, slots=True)
class OwnershipEvent:
    """The consumer's ownership of a queue has changed.

    Attributes:
        kind: `granted`: the consumer owns the queue. `draining`: no message is started any more.
            `released`: the next owner may have the queue. `fenced`: the token is not valid any
            more, as another member or an operator took the queue, or the own deadline passed; no
            `released` follows.
        token: Fencing token of the ownership; 0 in a group without ownership.
        monotonic_ms: When it changed, by the monotonic clock.
    """

    kind: Literal["granted", "draining", "released", "fenced"]
    queue: QueueRef
    token: int
    monotonic_ms: int


@dataclass(slots=True)
class Session:
    """One consumer's identity and what it has learnt.

    Attributes:
        view: The group by the newest generation of its record.
        epochs: Highest epochs of offsets, seen in any answer.
        acquire_seq: Number of the last Acquire.
        available: Set when a message may wait for a handler.
        commit_soon: Set when enough acks wait to be committed.
        commit_gather_ms: Acks that arrive within this time after that are committed by the same
            call.
        keep_alive_soon: Set when the lock manager may have granted a queue that is not wanted.
        heartbeat_soon: Set when `view` may be old, or this consumer may be no member any more.
        local: Progress of a broadcasting member; None for a clustering one.
        start_at_unix_ms: The time that `consume_from` timestamp means.
        budget: Bytes of bodies that may wait, of all queues together.
        waiting_for_room: Wakeups of queues that wait for room in `budget`.
        leaving: Whether the consumer closes, so that no call is repeated for ever.
        drain_timeout_ms: As in the settings, until `Consumer.close` sets another one.
        paused: Queues that the application has paused, assigned or not.
        running: The handler calls that have not returned.
        metrics: Prometheus metrics; None if the application gave no registry.
        event_counter: Counts for the metrics stream; None if it is off.
    """

    group: str
    incarnation: queue_pb2.Incarnation
    settings: ConsumerSettings
    directory: Directory
    clock: Clock
    random: Random
    on_ownership: Callable[[OwnershipEvent], None]
    local: LocalOffsets | None = None
    view: GroupView = field(default_factory=GroupView)
    epochs: SeenEpochs = field(default_factory=SeenEpochs)
    acquire_seq: int = 0
    available: asyncio.Event = field(default_factory=asyncio.Event)
    commit_soon: asyncio.Event = field(default_factory=asyncio.Event)
    commit_gather_ms: int = COMMIT_GATHER_MS
    keep_alive_soon: asyncio.Event = field(default_factory=asyncio.Event)
    heartbeat_soon: asyncio.Event = field(default_factory=asyncio.Event)
    start_at_unix_ms: int = field(init=False)
    limits: FlowLimits = field(init=False)
    budget: ByteBudget = field(init=False)
    waiting_for_room: dict[Wakeup, None] = field(default_factory=dict)
    leaving: bool = False
    drain_timeout_ms: int | None = field(init=False)
    paused: set[QueueRef] = field(default_factory=set)
    running: RunningCalls = field(default_factory=RunningCalls)
    metrics: ConsumerMetrics | None = None
    event_counter: ConsumerEventCounter | None = None

    def __post_init__(self) -> None:
        """Fill in what follows from the settings."""
        settings = self.settings
        start = settings.start_unix_ms or self.clock.unix_ms() - TIMESTAMP_AGE_MS
        self.start_at_unix_ms = start
        self.limits = FlowLimits(
            messages_max=settings.buffer_messages_max, span_max=settings.span_max
        )
        self.budget = ByteBudget(settings.buffer_bytes_max)
        self.drain_timeout_ms = settings.drain_timeout_ms

    def notify_room(self) -> None:
        """Wake the queues that wait for room in the budget."""
        for wakeup in self.waiting_for_room:
            wakeup.notify()
        self.waiting_for_room.clear()

    def note_unconfirmed(self, count: int) -> None:
        """Ask for a commit if `count`, the acks of one queue that are not committed, is high."""
        quarters = 3 if self.settings.commit_on_pull and self.view.owned else 1
        if 4 * count >= quarters * self.settings.span_max:
            self.commit_soon.set()

    def next_acquire_seq(self) -> int:
        """Return a new number for an Acquire; a repetition keeps its number."""
        self.acquire_seq += 1
        return self.acquire_seq

    async def keeper(self) -> OffsetsLeader:
        """Return the offsets set that keeps the group's progress.

        Raises:
            Unreachable: no set is registered, or no nameserver answered.
        """
        return await self.directory.offsets_leader(self.group)

    def key(self, queue: QueueRef) -> queue_pb2.GroupQueue:
        """Return the key of the queue at offsets and at the lock manager."""
        return queue_pb2.GroupQueue(group=self.group, queue=queue_to_pb(queue))


def queue_to_pb(queue: QueueRef) -> queue_pb2.QueueRef:
    """Encode a queue."""
    return queue_pb2.QueueRef(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)


def queue_of(key: queue_pb2.GroupQueue) -> QueueRef:
    """Return the queue of a key; inverse of `Session.key`."""
    return QueueRef(key.queue.topic, key.queue.broker, key.queue.queue_id)


def ranges_to_pb(ranges: Iterable[Range]) -> list[queue_pb2.OffsetRange]:
    """Encode ranges of offsets."""
    return [queue_pb2.OffsetRange(first_offset=first, next_offset=end) for first, end in ranges]


def ranges_from_pb(ranges: Iterable[queue_pb2.OffsetRange]) -> tuple[Range, ...]:
    """Decode ranges of offsets; inverse of `ranges_to_pb`."""
    return tuple((r.first_offset, r.next_offset) for r in ranges)
