"""State of the screen of `baton top`, computed from the events of all nodes.

Rates are those of the last seconds. Lags, owners and members are those queried at the start,
updated by events. This module has no I/O and no clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from batonmq._core.queues import QueueRef

WINDOW_MS = 5_000
RECENT_MAX = 50
CHURN_MS = 60_000
"""Window over which hand-overs, denials, conflicts and redeliveries are counted."""
Name = TypeVar("Name")


class RecentEvent(NamedTuple):
    """An event to show in the list of recent events."""

    unix_ms: int
    group: str
    text: str


@dataclass(frozen=True, slots=True)
class GroupQueueStatus:
    """A queue of a group, as queried at the start; -1 for unknown offsets."""

    group: str
    queue: QueueRef
    committed_offset: int = -1
    next_offset: int = -1
    owner: str = ""


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One topic; rates are per second."""

    topic: str
    in_messages: float
    in_bytes: float
    out_messages: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group; counts are those of the last minute. An unknown lag is -1."""

    group: str
    members: int
    out_messages: float
    redelivered: int
    lag: int
    hand_overs: int
    denials: int
    conflicts: int


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """The queues of a group that one client owns."""

    group: str
    client_id: str
    queues: int
    lag: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values to show.

    Attributes:
        sources: Processes that have sent events, and how many events each has dropped.
        recent: Newest first.
    """

    topics: tuple[TopicRow, ...]
    groups: tuple[GroupRow, ...]
    owners: tuple[OwnerRow, ...]
    recent: tuple[RecentEvent, ...]
    sources: dict[str, int]


class _Window:
    """Sums by name over the last `span_ms`."""

    def __init__(self, span_ms: int) -> None:
        self._span_ms = span_ms
        self._steps: deque[tuple[int, str, int]] = deque()
        self.sums: Counter[str] = Counter()

    def add(self, name: str, count: int, now_ms: int) -> None:
        if count:
            self._steps.append((now_ms, name, count))
            self.sums[name] += count

    def forget(self, now_ms: int) -> None:
        while self._steps and self._steps[0][0] <= now_ms - self._span_ms:
            _, name, count = self._steps.popleft()
            self.sums[name] -= count
            if not self.sums[name]:
                del self.sums[name]


@dataclass(slots=True)
class _Group:
    members: int = 0
    committed: dict[QueueRef, int] = field(default_factory=dict)
    owners: dict[QueueRef, str] = field(default_factory=dict)


class _Listed(Generic[Name]):
    """The names in the last two lists of the cluster."""

    def __init__(self) -> None:
        self._now = self._before = frozenset[Name]()

    def gone(self, names: Iterable[Name]) -> frozenset[Name]:
        """Return the listed names that are not in a new list.

        The last events of a name may arrive after the list without it, so it is gone twice.
        """
        listed, now = self._now | self._before, frozenset(names)
        self._now, self._before = now, self._now
        return listed - now


class Board:
    """Collects events and returns snapshots.

    Args:
        begin_ms: Monotonic start time; the first rates cover less than the window.
    """

    def __init__(self, begin_ms: int) -> None:
        self._begin_ms = begin_ms
        self._rates = {name: _Window(WINDOW_MS) for name in ("in", "bytes", "out", "group out")}
        self._counts = {
            name: _Window(CHURN_MS)
            for name in ("redelivered", "hand-overs", "denials", "conflicts")
        }
        self._ends: dict[QueueRef, int] = {}
        self._groups: defaultdict[str, _Group] = defaultdict(_Group)
        self._recent: deque[RecentEvent] = deque(maxlen=RECENT_MAX)
        self._sources: dict[str, int] = {}
        self._topics = _Listed[tuple[str, int]]()
        self._group_names = _Listed[str]()

    def begin(self, statuses: Iterable[GroupQueueStatus], members: dict[str, int]) -> None:
        """Set the state of queues and groups that was queried at the start."""
        for name, count in members.items():
            self._groups[name].members = count
        for one in statuses:
            group = self._groups[one.group]
            if one.committed_offset >= 0:
                group.committed.setdefault(one.queue, one.committed_offset)
            if one.next_offset >= 0:
                self._ends[one.queue] = max(one.next_offset, self._ends.get(one.queue, 0))
            if one.owner:
                group.owners.setdefault(one.queue, one.owner)

    def retain(self, topics: Iterable[tuple[str, int]], groups: Iterable[str]) -> None:
        """Forget the topics and groups that were deleted since the last call.

        What was never listed stays: it may be newer than the list, or hidden from the caller.

        Args:
            topics: Names and ids of all topics.
            groups: Names of all groups.
        """
        gone = {name for name, _ in self._topics.gone(topics)}
        for name in self._group_names.gone(groups):
            self._groups.pop(name, None)
        tables: list[dict[QueueRef, Any]] = [self._ends]
        for group in self._groups.values():
            tables += [group.committed, group.owners]
        for table in tables:
            for queue in [queue for queue in table if queue.topic in gone]:
                del table[queue]

    def note_source(self, source: str, dropped_count: int) -> None:
        """Record that a process has sent events, and how many it has dropped."""
        self._sources[source] = dropped_count

    def take(self, event: Any, now_ms: int) -> None:
        """Process one `MetricEvent`; kinds that are not shown are ignored."""
        kind = event.WhichOneof("kind")
        ref = event.queue.queue
        queue = QueueRef(ref.topic, ref.broker, ref.queue_id)
        details: Any = getattr(event, kind) if kind else None
        if kind == "appended":
            self._rates["in"].add(queue.topic, details.message_count, now_ms)
            self._rates["bytes"].add(queue.topic, details.byte_count, now_ms)
            self._ends[queue] = max(details.next_offset, self._ends.get(queue, 0))
        elif kind == "delivered":
            self._rates["out"].add(queue.topic, details.message_count, now_ms)
            self._rates["group out"].add(event.queue.group, details.message_count, now_ms)
            self._counts["redelivered"].add(event.queue.group, details.redelivered_count, now_ms)
        elif kind in _OF_QUEUES:
            self._take_queue_event(kind, self._groups[event.queue.group], queue, details)
        if event.queue.group and kind:
            self._note(event, kind, details, queue, now_ms)

    def snapshot(self, now_ms: int) -> Snapshot:
        """Return the current values."""
        for window in (*self._rates.values(), *self._counts.values()):
            window.forget(now_ms)
        seconds = max(1.0, min(now_ms - self._begin_ms, WINDOW_MS) / 1000)
        rates = {name: window.sums for name, window in self._rates.items()}
        topics = {*rates["in"], *rates["out"], *(queue.topic for queue in self._ends)}
        return Snapshot(
            topics=tuple(
                TopicRow(
                    topic,
                    rates["in"][topic] / seconds,
                    rates["bytes"][topic] / seconds,
                    rates["out"][topic] / seconds,
                )
                for topic in sorted(topics)
            ),
            groups=tuple(self._group_row(name, seconds) for name in sorted(self._groups)),
            owners=tuple(row for name in sorted(self._groups) for row in self._owner_rows(name)),
            recent=tuple(reversed(self._recent)),
            sources=dict(sorted(self._sources.items())),
        )

    def _take_queue_event(self, kind: str, group: _Group, queue: QueueRef, details: Any) -> None:
        if kind in ("committed", "queue_lag"):
            group.committed[queue] = details.committed_offset
        elif kind == "progress_reset":
            group.committed[queue] = details.to_offset
        if kind == "queue_lag":
            self._ends[queue] = max(details.next_offset, self._ends.get(queue, 0))
        if kind in ("lock_granted", "queue_lag") and details.client_id:
            group.owners[queue] = details.client_id
        elif kind in ("lock_released", "lock_forced"):
            group.owners.pop(queue, None)

    def _note(self, event: Any, kind: str, details: Any, queue: QueueRef, now_ms: int) -> None:
        name = event.queue.group
        if kind == "group_changed":
            self._groups[name].members = details.member_count
        elif kind == "lock_denied":
            self._counts["denials"].add(name, details.count or 1, now_ms)
        elif kind in _TEXTS:
            counted = {"handed_over": "hand-overs", "subscription_refused": "conflicts"}.get(kind)
            if counted:
                self._counts[counted].add(name, 1, now_ms)
            text = _TEXTS[kind].format(e=details, queue=queue)
            self._recent.append(RecentEvent(event.unix_ms, name, text))

    def _lag(self, group: _Group, queues: Iterable[QueueRef]) -> int:
        known = [
            max(0, self._ends[queue] - group.committed[queue])
            for queue in queues
            if queue in self._ends and queue in group.committed
        ]
        return sum(known) if known else -1

    def _group_row(self, name: str, seconds: float) -> GroupRow:
        group = self._groups[name]
        counts = {what: window.sums[name] for what, window in self._counts.items()}
        return GroupRow(
            group=name,
            members=group.members,
            out_messages=self._rates["group out"].sums[name] / seconds,
            redelivered=counts["redelivered"],
            lag=self._lag(group, group.committed),
            hand_overs=counts["hand-overs"],
            denials=counts["denials"],
            conflicts=counts["conflicts"],
        )

    def _owner_rows(self, name: str) -> list[OwnerRow]:
        group = self._groups[name]
        owned: defaultdict[str, list[QueueRef]] = defaultdict(list)
        for queue, owner in group.owners.items():
            owned[owner].append(queue)
        return [
            OwnerRow(name, owner, len(queues), self._lag(group, queues))
            for owner, queues in sorted(owned.items())
        ]


_OF_QUEUES = frozenset(
    {"committed", "queue_lag", "progress_reset", "lock_granted", "lock_released", "lock_forced"}
)
_TEXTS = {
    "handed_over": "{queue} passed from {e.previous_client_id} to {e.client_id}: waited "
    "{e.contend_ms} + {e.drain_ms} ms, fence {e.fence_ms} ms",
    "subscription_refused": "{e.client_id} was rejected for its subscription",
    "subscription_changed": "subscription changed by {e.client_id}",
    "member_expired": "{e.client_id} sent no heartbeat for {e.silent_ms} ms and left the group",
    "lock_forced": "{queue} was taken from {e.previous_client_id} by {e.by}",
    "progress_reset": "{queue} was reset from {e.from_offset} to {e.to_offset} by {e.by}",
    "fenced": "{queue}: {e.call} of {e.client_id} rejected, token {e.token} is fenced",
    "stuck_changed": "{queue}: {e.reason}",
}
