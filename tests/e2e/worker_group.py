"""Members of a group as processes, and what they have written down together."""

from __future__ import annotations

import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.receipts import Receipt
from batonmq_server.local.child_process import ChildProcess, Program
from tests.support.cluster import fork_server


@dataclass(frozen=True, slots=True)
class WorkerHandling:
    """A handler that was started.

    Attributes:
        done_us: None if it did not end.
    """

    client_id: str
    queue_id: int
    offset: int
    token: int
    redelivered: bool
    number: int
    start_us: int
    done_us: int | None


@dataclass(frozen=True, slots=True)
class WorkerOwnership:
    """A queue that came or went; the kinds of `OwnershipEvent`, and `joined`."""

    client_id: str
    kind: str
    queue_id: int
    token: int
    at_us: int


@dataclass(slots=True)
class Worker:
    """One process, and what it has written so far.

    Tests look again and again until something is there: each time only what is new is read.
    """

    client_id: str
    journal: Path
    process: ChildProcess
    _read_bytes: int = 0
    _lines: list[list[str]] = field(default_factory=list)
    _done: set[int] = field(default_factory=set)
    _ownerships: list[WorkerOwnership] = field(default_factory=list)

    @property
    def lines(self) -> list[list[str]]:
        """What it has written; a line that is being written is left out."""
        if self.journal.exists():
            with self.journal.open("rb") as journal:
                journal.seek(self._read_bytes)
                whole, newline, _ = journal.read().rpartition(b"\n")
            self._read_bytes += len(whole) + len(newline)
            new = [line.split() for line in whole.decode().splitlines()]
            self._lines += new
            self._done.update(int(words[5]) for words in new if words[0] == "done")
            self._ownerships += [
                WorkerOwnership(
                    self.client_id, words[1], int(words[2]), int(words[3]), int(words[4])
                )
                for words in new
                if words[0] == "own"
            ]
        return self._lines

    def done(self) -> set[int]:
        """Numbers whose handler has ended."""
        return self._done if self.lines else set()

    def handlings(self) -> list[WorkerHandling]:
        """Its handlers, as they were started."""
        done: dict[tuple[str, ...], int] = {}
        started = []
        for kind, *words in self.lines:
            if kind == "start":
                started.append(words)
            elif kind == "done":
                done[tuple(words[:5])] = int(words[5])
        return [
            WorkerHandling(
                self.client_id, int(queue), int(offset), int(token), redelivered == "1",
                int(number), int(start_us), done.get((queue, offset, token, redelivered, number)),
            )
            for queue, offset, token, redelivered, number, start_us in started
        ]  # fmt: skip

    def ownerships(self) -> list[WorkerOwnership]:
        """What it has owned."""
        return self._ownerships if self.lines else []

    @property
    def owned(self) -> set[int]:
        """Queues it owns by now."""
        owned = set()
        for event in self.ownerships():
            if event.kind == "granted":
                owned.add(event.queue_id)
            elif event.kind in ("released", "fenced"):
                owned.discard(event.queue_id)
        return owned

    @property
    def failure(self) -> str:
        """Why it ended by itself; empty if it did not."""
        return next((words[1] for words in self.lines if words[0] == "fail"), "")

    def kill(self) -> None:
        """As `kill -9`."""
        self.process.send(signal.SIGKILL)

    def freeze(self) -> None:
        """As `kill -STOP`."""
        self.process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """As `kill -CONT`."""
        self.process.send(signal.SIGCONT)

    async def leave(self) -> int:
        """Leave gracefully; the exit status."""
        self.process.send(signal.SIGTERM)
        return await self.process.ended() or 0


@dataclass(slots=True)
class WorkerGroup:
    """Members of one group."""

    nameserver: str
    topic: str
    folder: Path
    group: str = "workers"
    members: list[Worker] = field(default_factory=list)

    async def join(
        self, client_id: str, *, expression: str = "*", life: str = "", **options: int
    ) -> Worker:
        """Start a member.

        Args:
            life: Makes the journal another one, for a process with the client id of one before.
            options: Of `tests.support.member`.
        """
        journal = self.folder / f"{client_id}{life}.lines"
        named = {
            "nameserver": self.nameserver,
            "group": self.group,
            "topic": self.topic,
            "expression": expression,
            "client-id": client_id,
            "journal": str(journal),
        } | {name.replace("_", "-"): str(value) for name, value in options.items()}
        arguments = [text for name, value in named.items() for text in (f"--{name}", value)]
        process = ChildProcess(
            Program(
                name=client_id,
                command=[sys.executable, "-m", "tests.support.member", *arguments],
                log_path=self.folder / f"{client_id}{life}.log",
                is_ready=_at_once,
            ),
            fork_server().start,
        )
        process.spawn()
        worker = Worker(client_id, journal, process)
        self.members.append(worker)
        return worker

    def handlings(self) -> list[WorkerHandling]:
        """All handlers, as they were started."""
        return sorted((h for w in self.members for h in w.handlings()), key=lambda h: h.start_us)

    def done(self) -> set[int]:
        """Numbers whose handler has ended."""
        return set().union(*(worker.done() for worker in self.members))


@asynccontextmanager
async def worker_group(nameserver: str, topic: str, folder: Path) -> AsyncIterator[WorkerGroup]:
    """Workers whose processes are gone when the block ends."""
    members = WorkerGroup(nameserver, topic, folder)
    try:
        yield members
    finally:
        for worker in members.members:
            if worker.process.returncode is None:
                worker.kill()
                await worker.process.ended()


async def send(
    nameserver: str, topic: str, numbers: Iterable[int], *tags: str
) -> dict[int, Receipt]:
    """Send numbers, each confirmed, spread over the queues; tags are taken in turn."""
    async with Producer(nameserver) as producer:
        pending = {
            number: await producer.submit(
                topic,
                Message(str(number).encode(), tag=tags[number % len(tags)] if tags else ""),
                ordering_key=str(number),
            )
            for number in numbers
        }
        return {number: await receipt for number, receipt in pending.items()}


async def _at_once() -> bool:
    return True


def started_again(
    handlings: Iterable[WorkerHandling],
) -> list[tuple[WorkerHandling, WorkerHandling]]:
    """Pairs of handlers that were started for one message, one after the other."""
    by_message: dict[tuple[int, int], list[WorkerHandling]] = defaultdict(list)
    for handling in handlings:
        by_message[handling.queue_id, handling.offset].append(handling)
    return [pair for group in by_message.values() for pair in pairwise(group)]
