"""What a member of the demo writes down, and what can be told from all of it together.

A journal is a text file with one line per fact, written before the fact is acknowledged, so
that it survives whatever happens to its writer:

    H <queue> <offset> <token> <redelivered> <key>     a message was handled
    E <kind> <queue> <token> <monotonic ms>            a queue came or went

A queue is `<broker>/<queue id>`; all are of one topic.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.queues import QueueRef


class Journal:
    """An append-only file; a line is in the page cache when its method returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def handled(self, message: ReceivedMessage) -> None:
        """Note that a message is handled."""
        line = (
            f"H {_name(message.queue)} {message.offset} {message.token} "
            f"{int(message.redelivered)} {message.keys[0]}\n"
        )
        os.write(self._file, line.encode())

    def ownership(self, event: OwnershipEvent) -> None:
        """Note that a queue came or went."""
        line = f"E {event.kind} {_name(event.queue)} {event.token} {event.monotonic_ms}\n"
        os.write(self._file, line.encode())


def _name(queue: QueueRef) -> str:
    return f"{queue.broker}/{queue.queue_id}"


@dataclass(frozen=True, slots=True)
class Handled:
    """One handled message."""

    queue: str
    offset: int
    token: int
    redelivered: bool
    key: str


@dataclass(frozen=True, slots=True)
class Event:
    """One change of ownership, and who saw it."""

    member: str
    kind: str
    queue: str
    token: int
    monotonic_ms: int


def read(paths: Iterable[Path]) -> tuple[list[Handled], list[Event]]:
    """Everything in the journals; the file name is the member. A torn last line is left out."""
    handled, events = [], []
    for path in paths:
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            what, *fields = line.split()
            if what == "H":
                offset, token, redelivered = map(int, fields[1:4])
                handled.append(Handled(fields[0], offset, token, bool(redelivered), fields[4]))
            else:
                token, at_ms = map(int, fields[2:])
                events.append(Event(path.stem, fields[0], fields[1], token, at_ms))
    return handled, events


@dataclass(frozen=True, slots=True)
class Verdict:
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


def judge(handled: Sequence[Handled], sent: Mapping[str, int]) -> Verdict:
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
    return Verdict(
        consumed=sum(key in sent for key in times),
        lost=sum(key not in times for key in sent),
        duplicated=duplicated,
        unflagged=unflagged,
        misordered=_misordered(handled, sent),
        foreign=sum(key not in sent for key in times),
    )


def _misordered(handled: Sequence[Handled], sent: Mapping[str, int]) -> int:
    """Owners follow each other by token; within one token the journal has the order."""
    by_queue: dict[str, list[Handled]] = defaultdict(list)
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


def handovers_ms(events: Iterable[Event]) -> list[int]:
    """How long each queue that changed hands was without anybody handling it, in ms, ascending.

    From the moment the old owner started nothing more to the grant of the next one.
    """
    took = []
    let_go: dict[str, Event] = {}
    for event in sorted(events, key=lambda e: (e.token, e.monotonic_ms)):
        if event.kind == "draining":
            let_go[event.queue] = event
        elif event.kind == "granted":
            before = let_go.pop(event.queue, None)
            if before is not None and before.member != event.member:
                took.append(max(event.monotonic_ms - before.monotonic_ms, 0))
    return sorted(took)
