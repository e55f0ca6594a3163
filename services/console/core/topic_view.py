"""Views of the topic pages: the list with rates, and one topic with its queues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batonmq._core.names import is_system_topic
from batonmq._core.queues import QueueRef
from batonmq._core.retries import group_of
from batonmq.admin.reports import Topic
from batonmq.admin.topic_stats import QueueStats


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One topic of the list.

    Attributes:
        kind: topic, retry, dead or system.
        messages: Stored messages; None if a broker does not answer.
        per_s: Messages a second since the look before; None at the first look.
    """

    topic: Topic
    kind: str
    messages: int | None
    per_s: float | None
    stored_bytes: int | None


@dataclass(frozen=True, slots=True)
class TopicTotals:
    """Sums over the queues of one topic."""

    messages: int | None
    per_s: float | None
    stored_bytes: int | None
    last_store_unix_ms: int | None


def kind_of(name: str) -> str:
    """Return what a topic is: topic, retry or dead of a group, or system."""
    if is_system_topic(name):
        return "system"
    if group_of(name):
        return "dead" if name.startswith("%DLQ%") else "retry"
    return "topic"


def visible(topics: Iterable[Topic], *, show_all: bool) -> list[Topic]:
    """Return the topics to list: those of users, or all."""
    return [topic for topic in topics if show_all or kind_of(topic.name) == "topic"]


def topic_row(
    topic: Topic,
    extents: Mapping[QueueRef, tuple[int, int]],
    rates: Mapping[QueueRef, float],
    stored_bytes: Mapping[QueueRef, int],
) -> TopicRow:
    """Return one row from the values that are known of its queues."""
    queues = topic.queues
    known = all(queue in extents for queue in queues)
    rated = [rates[queue] for queue in queues if queue in rates]
    sized = [stored_bytes[queue] for queue in queues if queue in stored_bytes]
    return TopicRow(
        topic=topic,
        kind=kind_of(topic.name),
        messages=sum(extents[q][1] - extents[q][0] for q in queues) if known else None,
        per_s=sum(rated) if rated else None,
        stored_bytes=sum(sized) if len(sized) == len(queues) else None,
    )


def totals(queues: Sequence[QueueStats]) -> TopicTotals:
    """Return the sums over queues; a sum is None if no queue has the value."""
    counts = [queue.count for queue in queues if queue.count is not None]
    rated = [queue.per_s for queue in queues if queue.per_s is not None]
    sized = [queue.stored_bytes for queue in queues if queue.stored_bytes is not None]
    times = [queue.last_store_unix_ms for queue in queues if queue.last_store_unix_ms]
    return TopicTotals(
        sum(counts) if counts else None,
        sum(rated) if rated else None,
        sum(sized) if sized else None,
        max(times, default=None),
    )


def rates_between(
    before: Mapping[QueueRef, int], now: Mapping[QueueRef, tuple[int, int]], seconds: float
) -> dict[QueueRef, float]:
    """Return messages a second of the queues that are in both looks."""
    if seconds <= 0:
        return {}
    return {
        queue: max(0, end - before[queue]) / seconds
        for queue, (_, end) in now.items()
        if queue in before
    }
