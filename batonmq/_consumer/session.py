"""What all parts of one consumer share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from baton.common.v1 import queue_pb2
from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory, OffsetsLeader
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.group_view import GroupView
from batonmq._consumer.local_offsets import LocalOffsets
from batonmq._core.epochs import SeenEpochs
from batonmq._core.flow_control import ByteBudget, FlowLimits
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range
from batonmq._core.start_offset import TIMESTAMP_AGE_MS
from batonmq._telemetry.client_metrics import ConsumerMetrics
from batonmq._telemetry.tallies import ConsumerTally


@dataclass(frozen=True, slots=True)
class OwnershipEvent:
    """A queue came or went.

    Attributes:
        kind: `granted`: it is ours. `draining`: no message is started any more. `released`:
            it is free for the next owner. `fenced`: it was taken from us.
        token: 0 in a group whose queues nobody owns.
        monotonic_ms: When.
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
        epochs: Of offsets, seen in any answer.
        acquire_seq: Number of the last Acquire.
        available: Set when some queue may have a message to handle.
        commit_soon: Set when enough acks wait to be committed.
        keep_alive_soon: Set when lockmgr may have granted something nobody wants any more.
        heartbeat_soon: Set when `view` may be old, or we may be no member any more.
        local: Progress of a broadcasting member; None for a clustering one.
        begin_unix_ms: Where to start by `timestamp`.
        budget: Bytes that wait, of all queues.
        wait_for_room: Events of queues that wait for room in `budget`.
        drain_timeout_ms: As in the settings, until `close` says otherwise.
        paused: Queues whose messages the user wants to wait, ours or not.
        metrics: What is counted; None if nobody wants to know.
        tally: What is told live; None if that is not wanted.
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
    keep_alive_soon: asyncio.Event = field(default_factory=asyncio.Event)
    heartbeat_soon: asyncio.Event = field(default_factory=asyncio.Event)
    begin_unix_ms: int = field(init=False)
    limits: FlowLimits = field(init=False)
    budget: ByteBudget = field(init=False)
    wait_for_room: dict[asyncio.Event, None] = field(default_factory=dict)
    drain_timeout_ms: int | None = field(init=False)
    paused: set[QueueRef] = field(default_factory=set)
    metrics: ConsumerMetrics | None = None
    tally: ConsumerTally | None = None

    def __post_init__(self) -> None:
        """Fill in what follows from the settings."""
        settings = self.settings
        begin = settings.start_unix_ms or self.clock.unix_ms() - TIMESTAMP_AGE_MS
        self.begin_unix_ms = begin
        self.limits = FlowLimits(
            messages_max=settings.buffer_messages_max, span_max=settings.span_max
        )
        self.budget = ByteBudget(settings.buffer_bytes_max)
        self.drain_timeout_ms = settings.drain_timeout_ms

    def room_again(self) -> None:
        """Queues that wait for room look again."""
        for event in self.wait_for_room:
            event.set()
        self.wait_for_room.clear()

    def note_unconfirmed(self, count: int) -> None:
        """So many acks of one queue are not committed."""
        quarters = 3 if self.settings.commit_on_pull and self.view.owned else 1
        if 4 * count >= quarters * self.settings.span_max:
            self.commit_soon.set()

    def next_acquire_seq(self) -> int:
        """A number for an Acquire that is not a repetition."""
        self.acquire_seq += 1
        return self.acquire_seq

    async def keeper(self) -> OffsetsLeader:
        """Who keeps the group's progress.

        Raises:
            Unreachable: nobody is registered, or no nameserver answers.
        """
        return await self.directory.offsets_leader(self.group)

    def key(self, queue: QueueRef) -> queue_pb2.GroupQueue:
        """The queue as offsets and lockmgr name it."""
        return queue_pb2.GroupQueue(group=self.group, queue=queue_to_pb(queue))


def queue_to_pb(queue: QueueRef) -> queue_pb2.QueueRef:
    """The queue for the wire."""
    return queue_pb2.QueueRef(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)


def queue_of(key: queue_pb2.GroupQueue) -> QueueRef:
    """Inverse of `Session.key`."""
    return QueueRef(key.queue.topic, key.queue.broker, key.queue.queue_id)


def ranges_to_pb(ranges: Iterable[Range]) -> list[queue_pb2.OffsetRange]:
    """Runs of offsets for the wire."""
    return [queue_pb2.OffsetRange(first_offset=first, next_offset=end) for first, end in ranges]


def ranges_from_pb(ranges: Iterable[queue_pb2.OffsetRange]) -> tuple[Range, ...]:
    """Inverse of `ranges_to_pb`."""
    return tuple((r.first_offset, r.next_offset) for r in ranges)
