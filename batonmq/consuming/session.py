"""What all parts of one consumer share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb

from batonmq.common.clock import Clock
from batonmq.consuming.group import GroupView
from batonmq.core.ranges import Range
from batonmq.core.route import QueueId
from batonmq.directory import Directory

ConsumeFrom = Literal["first", "last"]

CONSUME_FROM: Mapping[ConsumeFrom, pb.ConsumeFrom.ValueType] = {
    "first": pb.CONSUME_FROM_FIRST,
    "last": pb.CONSUME_FROM_LAST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """How a consumer behaves.

    Attributes:
        consume_from: Where a group without progress starts: `last` (after the messages that are
            there) or `first`. All members must agree.
        concurrency: Messages handled at once in all; `run` only.
        queue_concurrency: Messages of one queue handled at once; with more than 1 they are started
            in order and may end in any; `run` only.
        buffer_messages_max: Messages of one queue that wait in the client.
        pull_messages_max: Offsets taken by one pull.
        pull_bytes_max: Bytes taken by one pull, about.
        pull_hold_ms: How long storage holds a pull that finds nothing.
        span_max: Offsets of one queue between the committed one and the last received; bounds
            what is delivered again after a crash.
        commit_interval_ms: Acks are committed at least so often, and sooner when a quarter of
            `span_max` waits; three quarters with `commit_on_pull`.
        commit_on_pull: Acks travel with pulls too, so that a busy consumer commits on its way.
        keep_alive_ms: How often the ownership of queues is renewed.
        drain_timeout_ms: How long handlers may run on when a queue is lost or the consumer
            closes; what is not done by then is delivered again, flagged. None waits until they
            end. A consumer that closes keeps its queues for 60 s at most: what runs longer is
            delivered again in any case.
        room: Machine room, for groups whose queues are dealt out by room; empty for none.
        retry_first_ms: Wait so long before a failed message is handled again; doubles.
        retry_ms_max: The longest such wait.
        start_timeout_ms: How long to wait for a nameserver at the start.
    """

    consume_from: ConsumeFrom = "last"
    concurrency: int = 20
    queue_concurrency: int = 1
    buffer_messages_max: int = 1_000
    pull_messages_max: int = 1_000
    pull_bytes_max: int = 1024 * 1024
    pull_hold_ms: int = 15_000
    span_max: int = 2_000
    commit_interval_ms: int = 5_000
    commit_on_pull: bool = True
    keep_alive_ms: int = 5_000
    drain_timeout_ms: int | None = 30_000
    room: str = ""
    retry_first_ms: int = 1_000
    retry_ms_max: int = 60_000
    start_timeout_ms: int = 30_000


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
    queue: QueueId
    token: int
    monotonic_ms: int


@dataclass(slots=True)
class Session:
    """One consumer's identity and what it has learnt.

    Attributes:
        view: The group by the newest generation of its record.
        offsets_epoch: Highest epoch of offsets seen in any answer.
        acquire_seq: Number of the last Acquire.
        available: Set when some queue may have a message to handle.
        commit_soon: Set when enough acks wait to be committed.
        keep_alive_soon: Set when lockmgr may have granted something nobody wants any more.
        heartbeat_soon: Set when `view` may be old, or we may be no member any more.
    """

    group: str
    incarnation: queue_pb2.Incarnation
    settings: ConsumerSettings
    directory: Directory
    clock: Clock
    random: Random
    on_ownership: Callable[[OwnershipEvent], None]
    view: GroupView = field(default_factory=GroupView)
    offsets_epoch: int = 0
    acquire_seq: int = 0
    available: asyncio.Event = field(default_factory=asyncio.Event)
    commit_soon: asyncio.Event = field(default_factory=asyncio.Event)
    keep_alive_soon: asyncio.Event = field(default_factory=asyncio.Event)
    heartbeat_soon: asyncio.Event = field(default_factory=asyncio.Event)

    def note_unconfirmed(self, count: int) -> None:
        """So many acks of one queue are not committed."""
        quarters = 3 if self.settings.commit_on_pull and self.view.owned else 1
        if 4 * count >= quarters * self.settings.span_max:
            self.commit_soon.set()

    def next_acquire_seq(self) -> int:
        """A number for an Acquire that is not a repetition."""
        self.acquire_seq += 1
        return self.acquire_seq

    def saw_epoch(self, epoch: int) -> bool:
        """Note an epoch of offsets; False if it is older than one seen: drop the answer."""
        if epoch < self.offsets_epoch:
            return False
        self.offsets_epoch = epoch
        return True

    def key(self, queue: QueueId) -> queue_pb2.GroupQueue:
        """The queue as offsets and lockmgr name it."""
        return queue_pb2.GroupQueue(group=self.group, queue=queue_to_pb(queue))


def queue_to_pb(queue: QueueId) -> queue_pb2.Queue:
    """The queue for the wire."""
    return queue_pb2.Queue(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)


def queue_of(key: queue_pb2.GroupQueue) -> QueueId:
    """Inverse of `Session.key`."""
    return QueueId(key.queue.topic, key.queue.broker, key.queue.queue_id)


def ranges_to_pb(ranges: Iterable[Range]) -> list[queue_pb2.OffsetRange]:
    """Runs of offsets for the wire."""
    return [queue_pb2.OffsetRange(first_offset=first, next_offset=end) for first, end in ranges]


def ranges_from_pb(ranges: Iterable[queue_pb2.OffsetRange]) -> tuple[Range, ...]:
    """Inverse of `ranges_to_pb`."""
    return tuple((r.first_offset, r.next_offset) for r in ranges)
