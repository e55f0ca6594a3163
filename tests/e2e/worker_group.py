"""Members of a group as processes, and their journals."""

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
from tests.support.conditions import until, waits


@dataclass(frozen=True, slots=True)
class WorkerHandling:
    """A call of a message handler.

    Attributes:
        done_us: None if the call did not end.
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
    """A change of queue ownership; the kinds of `OwnershipEvent`, and `joined`."""

    client_id: str
    kind: str
    queue_id: int
    token: int
    at_us: int


@dataclass(slots=True)
class Worker:
    """A member process and its journal.

    Tests poll the journal: each call reads the new lines only.
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
        """Return the complete lines of its journal."""
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
        """Return the numbers whose handler call has ended."""
        return self._done if self.lines else set()

    def handlings(self) -> list[WorkerHandling]:
        """Return its handler calls in the order of their start."""
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
        """Return its ownership changes."""
        return self._ownerships if self.lines else []

    @property
    def owned(self) -> set[int]:
        """Return the queues that it owns now."""
        owned = set()
        for event in self.ownerships():
            if event.kind == "granted":
                owned.add(event.queue_id)
            elif event.kind in ("released", "fenced"):
                owned.discard(event.queue_id)
        return owned

    @property
    def failure(self) -> str:
        """Return the error that ended it; empty without an error."""
        return next((words[1] for words in self.lines if words[0] == "fail"), "")

    def kill(self) -> None:
        """Kill the process as `kill -9` does."""
        self.process.send(signal.SIGKILL)

    async def freeze(self) -> None:
        """Pause the process as `kill -STOP` does, while it waits.

        Else it might be paused between its look at the clock and the first line of a handler.
        """
        pid = self.process.pid
        assert pid is not None
        await until(lambda: waits(pid))
        self.process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the process as `kill -CONT` does."""
        self.process.send(signal.SIGCONT)

    async def leave(self) -> int:
        """Stop the process gracefully; return its exit status."""
        self.process.send(signal.SIGTERM)
        return await self.process.ended() or 0


@dataclass(slots=True)
class WorkerGroup:
    """The member processes of one group."""

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
            life: Suffix of the journal, for a process with the client id of an earlier process.
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
        """Return all handler calls in the order of their start."""
        return sorted((h for w in self.members for h in w.handlings()), key=lambda h: h.start_us)

    def done(self) -> set[int]:
        """Return the numbers whose handler call has ended."""
        return set().union(*(worker.done() for worker in self.members))


@asynccontextmanager
async def worker_group(nameserver: str, topic: str, folder: Path) -> AsyncIterator[WorkerGroup]:
    """Yield a group without workers; its processes are killed at the end."""
    members = WorkerGroup(nameserver, topic, folder)
    try:
        yield members
    finally:
        for worker in members.members:
            if worker.process.returncode is None:
                worker.kill()
                await worker.process.ended()


async def send(
    nameserver: str, topic: str, numbers: Iterable[int], *tags: str, key_count: int = 0
) -> dict[int, Receipt]:
    """Send numbers round-robin over the tags; wait for all receipts.

    Args:
        key_count: The ordering key is the number, or its remainder by this.
    """
    async with Producer(nameserver) as producer:
        pending = {
            number: await producer.submit(
                topic,
                Message(str(number).encode(), tag=tags[number % len(tags)] if tags else ""),
                ordering_key=str(number % key_count if key_count else number),
            )
            for number in numbers
        }
        return {number: await receipt for number, receipt in pending.items()}


async def _at_once() -> bool:
    return True


def started_again(
    handlings: Iterable[WorkerHandling],
) -> list[tuple[WorkerHandling, WorkerHandling]]:
    """Return the pairs of consecutive handler calls for one message."""
    by_message: dict[tuple[int, int], list[WorkerHandling]] = defaultdict(list)
    for handling in handlings:
        by_message[handling.queue_id, handling.offset].append(handling)
    return [pair for group in by_message.values() for pair in pairwise(group)]
