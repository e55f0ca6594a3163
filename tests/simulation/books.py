"""What the checker keeps of each queue, in words of its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from baton.common.v1 import queue_pb2

from services.offsets.core.calls import Holder, QueueKey
from services.offsets.core.progress import Progress
from services.offsets.core.ranges import RangeSet
from services.offsets.core.table import ProgressTable


@dataclass(slots=True)
class Start:
    """A message that a handler began."""

    client: str
    at_ms: int
    excused: bool = False


@dataclass(slots=True)
class Queue:
    """What the checker knows of one queue.

    Attributes:
        durable: Progress as the disk has it.
        issued: Holder by token, of every fence that became durable.
        persisted: Owner by token, as etcd had it.
        stored: Message id and tag by offset, as the log has them.
        starts: Who began a message, by offset.
        handled: Offsets that somebody has handled.
        moved_ms: When delivered or committed changed last.
        etcd_token: Token in etcd; with it `owner`, None if it is free, and `acquire_seq`.
    """

    durable: Progress | None = None
    issued: dict[int, Holder] = field(default_factory=dict)
    persisted: dict[int, Holder] = field(default_factory=dict)
    stored: dict[int, tuple[str, str]] = field(default_factory=dict)
    starts: dict[int, list[Start]] = field(default_factory=lambda: defaultdict(list))
    handled: set[int] = field(default_factory=set)
    moved_ms: int = 0
    etcd_token: int = 0
    owner: Holder | None = None
    acquire_seq: int = 0


def copy_of(table: ProgressTable, key: QueueKey) -> Progress | None:
    """The progress as it is now; what is kept of it never changes in place."""
    if key not in table:
        return None
    now = table.query(key)
    return Progress(
        token=now.token,
        holder=now.holder,
        closed=now.closed,
        committed_offset=now.committed_offset,
        acked=now.acked,
        delivered_offset=now.delivered_offset,
        access_monotonic_ms=now.access_monotonic_ms,
    )


def done(progress: Progress) -> RangeSet:
    """Everything that is acked."""
    if not progress.committed_offset:
        return progress.acked
    return progress.acked.union(RangeSet.of(0, progress.committed_offset))


def token_of(progress: Progress | None) -> int:
    """T; 0 without progress."""
    return progress.token if progress is not None else 0


def key_of(queue: queue_pb2.GroupQueue) -> QueueKey:
    """The queue as offsets names it."""
    return QueueKey(queue.group, queue.queue.topic, queue.queue.broker, queue.queue.queue_id)


def holder_of(incarnation: queue_pb2.Incarnation) -> Holder:
    """The incarnation as offsets names it."""
    return Holder(incarnation.client_id, incarnation.incarnation_id)
