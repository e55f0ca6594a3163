"""The journal of a demo member: which messages it handled and which queues it owned.

A journal is a text file with one line per record. The line of a message is written before the
message is acknowledged, so it survives a crash of the member:

    H <queue> <offset> <token> <redelivered> <key>     a message was handled
    E <kind> <queue> <token> <monotonic ms>            the ownership of a queue changed

A queue is `<topic>/<broker>/<queue id>`: members own the queue of their retry topic, too.
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
        """Write that a message was handled."""
        line = (
            f"H {_name(message.queue)} {message.offset} {message.token} "
            f"{int(message.redelivered)} {message.keys[0]}\n"
        )
        os.write(self._file, line.encode())

    def ownership(self, event: OwnershipEvent) -> None:
        """Write that the ownership of a queue changed."""
        line = f"E {event.kind} {_name(event.queue)} {event.token} {event.monotonic_ms}\n"
        os.write(self._file, line.encode())


def _name(queue: QueueRef) -> str:
    return f"{queue.topic}/{queue.broker}/{queue.queue_id}"


@dataclass(frozen=True, slots=True)
class HandledMessage:
    """A message that was handled."""

    queue: str
    offset: int
    token: int
    redelivered: bool
    key: str


@dataclass(frozen=True, slots=True)
class OwnershipRecord:
    """A change of ownership, as its member recorded it."""

    member: str
    kind: str
    queue: str
    token: int
    monotonic_ms: int


def read(paths: Iterable[Path]) -> tuple[list[HandledMessage], list[OwnershipRecord]]:
    """Return all records of the journals; a file is named after its member.

    An incomplete last line is skipped.
    """
    handled, events = [], []
    for path in paths:
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            kind, *fields = line.split()
            if kind == "H":
                offset, token, redelivered = map(int, fields[1:4])
                handled.append(
                    HandledMessage(fields[0], offset, token, bool(redelivered), fields[4])
                )
            else:
                token, at_ms = map(int, fields[2:])
                events.append(OwnershipRecord(path.stem, fields[0], fields[1], token, at_ms))
    return handled, events
