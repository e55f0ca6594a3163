"""Comparison of the members' journals with the messages that were sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batonmq_server.demo.journal import HandledMessage, OwnershipRecord


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """How the messages of a group were delivered.

    Attributes:
        consumed: Distinct messages that were handled.
        lost: Messages that no member handled.
        duplicated: Deliveries beyond the first of a message.
        unflagged: Duplicates that were not flagged as redelivered.
        misordered: Messages first handled after a later message of their queue.
        foreign: Handled messages that were never sent, or not to this group.
    """

    consumed: int
    lost: int
    duplicated: int
    unflagged: int
    misordered: int
    foreign: int


def compare_deliveries(
    handled: Sequence[HandledMessage], sent: Mapping[str, int]
) -> DeliveryReport:
    """Compare the handled messages with those that were sent.

    Args:
        sent: Keys of all messages for the group, with their position in the order of sending.
    """
    times = Counter(h.key for h in handled)
    repeats = Counter(h.key for h in handled if h.redelivered)
    duplicated = sum(n - 1 for key, n in times.items() if key in sent)
    unflagged = sum(
        max(n - 1 - repeats[key], 0) for key, n in times.items() if n > 1 and key in sent
    )
    return DeliveryReport(
        consumed=sum(key in sent for key in times),
        lost=sum(key not in times for key in sent),
        duplicated=duplicated,
        unflagged=unflagged,
        misordered=_misordered(handled, sent),
        foreign=sum(key not in sent for key in times),
    )


def _misordered(handled: Sequence[HandledMessage], sent: Mapping[str, int]) -> int:
    """Count misordered messages; owners are ordered by token, their messages as recorded."""
    by_queue: dict[str, list[HandledMessage]] = defaultdict(list)
    for h in handled:
        by_queue[h.queue].append(h)
    count = 0
    for messages in by_queue.values():
        messages.sort(key=lambda h: h.token)
        seen: set[str] = set()
        offset = order = -1
        for h in messages:
            if h.key in seen:
                continue
            seen.add(h.key)
            position = sent.get(h.key, -1)
            count += h.offset < offset or position < order
            offset, order = max(offset, h.offset), max(order, position)
    return count


def handovers_ms(events: Iterable[OwnershipRecord]) -> list[int]:
    """Return how long each hand-over between two members durations, in ms, ascending.

    It counts from the start of draining at the old owner to the grant to the new owner.
    """
    durations = []
    draining: dict[str, OwnershipRecord] = {}
    for event in sorted(events, key=lambda e: (e.token, e.monotonic_ms)):
        if event.kind == "draining":
            draining[event.queue] = event
        elif event.kind == "granted":
            before = draining.pop(event.queue, None)
            if before is not None and before.member != event.member:
                durations.append(max(event.monotonic_ms - before.monotonic_ms, 0))
    return sorted(durations)
