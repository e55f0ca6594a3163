"""Comparison of the members' journals with the messages that were sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batonmq_server.demo.journal import HandledMessage, OwnershipRecord


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """What became of the messages of one group.

    Attributes:
        consumed: Different messages that were handled.
        lost: Messages that nobody handled.
        duplicated: Handlings beyond the first of a message.
        unflagged: Those of them that were not marked as redelivered.
        misordered: First handlings of a message after one that stands behind it in its queue.
        foreign: Handled messages that were never sent, or not meant for the group.
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
    """Compare what was handled with what was sent.

    Args:
        sent: Keys of all messages meant for the group, with their place in the order of sending.
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
    """Owners follow each other by token; within one token the journal has the order."""
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
            place = sent.get(h.key, -1)
            count += h.offset < offset or place < order
            offset, order = max(offset, h.offset), max(order, place)
    return count


def handovers_ms(events: Iterable[OwnershipRecord]) -> list[int]:
    """How long each queue that changed hands was without anybody handling it, in ms, ascending.

    From the moment the old owner started nothing more to the grant of the next one.
    """
    took = []
    let_go: dict[str, OwnershipRecord] = {}
    for event in sorted(events, key=lambda e: (e.token, e.monotonic_ms)):
        if event.kind == "draining":
            let_go[event.queue] = event
        elif event.kind == "granted":
            before = let_go.pop(event.queue, None)
            if before is not None and before.member != event.member:
                took.append(max(event.monotonic_ms - before.monotonic_ms, 0))
    return sorted(took)
