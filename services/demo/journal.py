"""The journal of a demo member: which messages it handled and which queues it owned.

A journal is a text file with one line per fact, written before the fact is acknowledged, so
that it survives whatever happens to its writer:

    H <queue> <offset> <token> <redelivered> <key>     a message was handled
    E <kind> <queue> <token> <monotonic ms>            a queue came or went

A queue is `<broker>/<queue id>`; all are of one topic.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
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
class HandledMessage:
    """One handled message."""

    queue: str
    offset: int
    token: int
    redelivered: bool
    key: str


@dataclass(frozen=True, slots=True)
class OwnershipRecord:
    """One change of ownership, and who saw it."""

    member: str
    kind: str
    queue: str
    token: int
    monotonic_ms: int


def read(paths: Iterable[Path]) -> tuple[list[HandledMessage], list[OwnershipRecord]]:
    """Everything in the journals; the file name is the member. A torn last line is left out."""
    handled, events = [], []
    for path in paths:
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            what, *fields = line.split()
            if what == "H":
                offset, token, redelivered = map(int, fields[1:4])
                handled.append(
                    HandledMessage(fields[0], offset, token, bool(redelivered), fields[4])
                )
            else:
                token, at_ms = map(int, fields[2:])
                events.append(OwnershipRecord(path.stem, fields[0], fields[1], token, at_ms))
    return handled, events
