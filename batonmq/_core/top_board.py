"""What `baton top` shows: made of the events of all nodes, as they come. Pure: time comes in.

Rates are those of the last seconds. Lags, owners and members are what was asked for at the start,
and what events have said since.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batonmq._core.queues import QueueRef

WINDOW_MS = 5_000
RECENT_MAX = 50
CHURN_MS = 60_000
"""Hand-overs, denials and conflicts are counted over so long."""


class RecentEvent(NamedTuple):
    """Something that a person wants to have seen."""

    unix_ms: int
    group: str
    text: str


@dataclass(frozen=True, slots=True)
class GroupQueueStatus:
    """A queue of a group, as asked for: -1 for what is not known."""

    group: str
    place: QueueRef
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
    """One group; counts are those of the last minute. A lag that is not known is -1."""

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
    """What one client owns of a group."""

    group: str
    client_id: str
    queues: int
    lag: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is to show.

    Attributes:
        sources: Processes that were heard of, and how many events each has dropped for us.
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


class Board:
    """Takes events, gives snapshots.

    Args:
        begin_ms: Monotonic; rates of the first seconds are over less than the window.
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

    def begin(self, standings: Iterable[GroupQueueStatus], members: dict[str, int]) -> None:
        """Where queues stood, and how many members groups had, when events began to come."""
        for name, count in members.items():
            self._groups[name].members = count
        for one in standings:
            group = self._groups[one.group]
            if one.committed_offset >= 0:
                group.committed.setdefault(one.place, one.committed_offset)
            if one.next_offset >= 0:
                self._ends[one.place] = max(one.next_offset, self._ends.get(one.place, 0))
            if one.owner:
                group.owners.setdefault(one.place, one.owner)

    def heard(self, source: str, dropped_count: int) -> None:
        """A process has told something, and what it had no room for."""
        self._sources[source] = dropped_count

    def take(self, event: Any, now_ms: int) -> None:
        """One `MetricEvent`; kinds that nothing is shown of pass by."""
        kind = event.WhichOneof("kind")
        queue = event.queue.queue
        place = QueueRef(queue.topic, queue.broker, queue.queue_id)
        told: Any = getattr(event, kind) if kind else None
        if kind == "appended":
            self._rates["in"].add(place.topic, told.message_count, now_ms)
            self._rates["bytes"].add(place.topic, told.byte_count, now_ms)
            self._ends[place] = max(told.next_offset, self._ends.get(place, 0))
        elif kind == "delivered":
            self._rates["out"].add(place.topic, told.message_count, now_ms)
            self._rates["group out"].add(event.queue.group, told.message_count, now_ms)
            self._counts["redelivered"].add(event.queue.group, told.redelivered_count, now_ms)
        elif kind in _OF_QUEUES:
            self._take_of_queue(kind, self._groups[event.queue.group], place, told)
        if event.queue.group and kind:
            self._note(event, kind, told, place, now_ms)

    def snapshot(self, now_ms: int) -> Snapshot:
        """What is known now."""
        for window in (*self._rates.values(), *self._counts.values()):
            window.forget(now_ms)
        seconds = max(1.0, min(now_ms - self._begin_ms, WINDOW_MS) / 1000)
        rates = {name: window.sums for name, window in self._rates.items()}
        topics = {*rates["in"], *rates["out"], *(place.topic for place in self._ends)}
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

    def _take_of_queue(self, kind: str, group: _Group, place: QueueRef, told: Any) -> None:
        if kind in ("committed", "queue_lag"):
            group.committed[place] = told.committed_offset
        elif kind == "progress_reset":
            group.committed[place] = told.to_offset
        if kind == "queue_lag":
            self._ends[place] = max(told.next_offset, self._ends.get(place, 0))
        if kind in ("lock_granted", "queue_lag") and told.client_id:
            group.owners[place] = told.client_id
        elif kind in ("lock_released", "lock_forced"):
            group.owners.pop(place, None)

    def _note(self, event: Any, kind: str, told: Any, place: QueueRef, now_ms: int) -> None:
        name = event.queue.group
        if kind == "group_changed":
            self._groups[name].members = told.member_count
        elif kind == "lock_denied":
            self._counts["denials"].add(name, told.count or 1, now_ms)
        elif kind in _TEXTS:
            counted = {"handed_over": "hand-overs", "subscription_refused": "conflicts"}.get(kind)
            if counted:
                self._counts[counted].add(name, 1, now_ms)
            text = _TEXTS[kind].format(told=told, place=place)
            self._recent.append(RecentEvent(event.unix_ms, name, text))

    def _lag(self, group: _Group, places: Iterable[QueueRef]) -> int:
        known = [
            max(0, self._ends[place] - group.committed[place])
            for place in places
            if place in self._ends and place in group.committed
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
        for place, owner in group.owners.items():
            owned[owner].append(place)
        return [
            OwnerRow(name, owner, len(places), self._lag(group, places))
            for owner, places in sorted(owned.items())
        ]


_OF_QUEUES = frozenset(
    {"committed", "queue_lag", "progress_reset", "lock_granted", "lock_released", "lock_forced"}
)
_TEXTS = {
    "handed_over": "{place} passed from {told.previous_client_id} to {told.client_id}: waited "
    "{told.contend_ms} + {told.drain_ms} ms, fence {told.fence_ms} ms",
    "subscription_refused": "{told.client_id} was refused for its subscription",
    "subscription_changed": "subscription changed by {told.client_id}",
    "member_expired": "{told.client_id} was silent for {told.silent_ms} ms and is no member now",
    "lock_forced": "{place} was taken from {told.previous_client_id} by {told.by}",
    "progress_reset": "{place} was moved from {told.from_offset} to {told.to_offset} by {told.by}",
    "fenced": "{place}: {told.call} of {told.client_id} refused, token {told.token} is over",
    "stuck_changed": "{place}: {told.reason}",
}
