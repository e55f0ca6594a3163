"""The consumer processes of a run: they join, leave, and are killed or paused."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from batonmq_server.local.process_host import ProcessHost
from tests.support.cluster import REPO
from tests.support.member import now_us
from tools.faults.history import HandlerCall, MemberOutage, OwnershipChange, Queue

MEMBERS = 3
_LEAVE_S = 90.0


@dataclass(slots=True)
class PoolMember:
    """A consumer process; `busy` while a fault or a stop is in progress, `killed` after a kill."""

    client_id: str
    journal: Path
    process: Process
    busy: bool = False
    killed: bool = False

    @property
    def is_up(self) -> bool:
        """Whether the process runs and handles SIGTERM."""
        heard = self.journal.exists() and self.journal.stat().st_size > 0
        return heard and self.process.returncode is None

    @property
    def lines(self) -> list[list[str]]:
        """The complete lines of its journal."""
        if not self.journal.exists():
            return []
        whole, _, _ = self.journal.read_text().rpartition("\n")
        return [line.split() for line in whole.splitlines()]

    def handler_calls(self) -> Iterator[HandlerCall]:
        """Yield its handler calls in the order of their start."""
        started: list[tuple[list[str], int]] = []
        done: dict[tuple[str, ...], int] = {}
        for kind, *words in self.lines:
            if kind == "start":
                started.append((words[:-1], int(words[-1])))
            elif kind == "done":
                done.setdefault(tuple(words[:-1]), int(words[-1]))
        for words, start_us in started:
            broker, queue_id, offset, token, redelivered, number = words
            queue: Queue = (broker, int(queue_id))
            yield HandlerCall(
                self.client_id, queue, int(offset), int(token), redelivered == "1", int(number),
                start_us, done.get(tuple(words)),
            )  # fmt: skip

    def ownership_changes(self) -> Iterator[OwnershipChange]:
        """Yield the changes of its queue ownership."""
        for kind, *words in self.lines:
            if kind == "own":
                what, broker, queue_id, token, at_us = words
                yield OwnershipChange(
                    self.client_id, what, (broker, int(queue_id)), int(token), int(at_us)
                )


@dataclass(slots=True)
class MemberPool:
    """All members of a run and their outages.

    Attributes:
        place: Returns the host of the member with this name.
    """

    nameserver: str
    folder: Path
    place: Callable[[str], ProcessHost]
    members: list[PoolMember] = field(default_factory=list)
    outages: list[MemberOutage] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def join(self) -> PoolMember:
        """Start a member with a new name."""
        client_id = f"member-{len(self.members) + 1}"
        journal = self.folder / f"{client_id}.lines"
        with (self.folder / f"{client_id}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self.place(client_id).launcher,
                sys.executable, "-m", "tools.faults.member",
                self.nameserver, client_id, str(journal),
                cwd=REPO, stdin=DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        member = PoolMember(client_id, journal, process)
        self.members.append(member)
        return member

    def pick(self, rank: int) -> PoolMember | None:
        """Return the `rank`th member that is up and not busy; None if fewer than two are."""
        there = [one for one in self.members if one.is_up and not one.busy]
        return there[rank % len(there)] if len(there) > 1 else None

    async def kill(self, member: PoolMember, hold_ms: int) -> None:
        """Kill a member as `kill -9` does; a new one joins `hold_ms` later."""
        member.busy = member.killed = True
        member.process.kill()
        await member.process.wait()
        self.outages.append(MemberOutage(member.client_id, now_us(), None))
        await asyncio.sleep(hold_ms / 1000)
        await self.join()

    async def pause(self, member: PoolMember, hold_ms: int) -> None:
        """Pause a member for `hold_ms`."""
        member.busy = True
        begin_us = now_us()
        member.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(hold_ms / 1000)
        self.outages.append(MemberOutage(member.client_id, begin_us, now_us()))
        member.process.send_signal(signal.SIGCONT)
        member.busy = False

    async def leave(self, member: PoolMember) -> None:
        """Stop a member gracefully."""
        member.busy = True
        member.process.terminate()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await member.process.wait()
        except TimeoutError:
            self.problems.append(f"{member.client_id} did not leave within {_LEAVE_S:g} s")
            member.killed = True
            member.process.kill()
            await member.process.wait()
            self.outages.append(MemberOutage(member.client_id, now_us(), None))

    async def churn(self, random: Random) -> None:
        """Let a member join or leave every 4 to 12 s; run until cancelled."""
        while True:
            await asyncio.sleep(random.uniform(4, 12))
            there = sum(one.process.returncode is None for one in self.members)
            leaver = self.pick(random.randrange(12))
            if there > MEMBERS and leaver is not None:
                await self.leave(leaver)
            else:
                await self.join()

    async def leave_all(self) -> None:
        """Stop all members gracefully."""
        async with asyncio.TaskGroup() as tasks:
            for member in self.members:
                if member.is_up:
                    tasks.create_task(self.leave(member))
        for member in self.members:
            if not member.killed and member.process.returncode:
                last = " ".join((member.lines or [["nothing"]])[-1])
                self.problems.append(
                    f"{member.client_id} ended with {member.process.returncode}: {last}"
                )

    def handler_calls(self) -> list[HandlerCall]:
        """Return the handler calls of all members."""
        return [one for member in self.members for one in member.handler_calls()]

    def ownership_changes(self) -> list[OwnershipChange]:
        """Return the ownership changes of all members."""
        return [one for member in self.members for one in member.ownership_changes()]


@asynccontextmanager
async def member_pool(
    nameserver: str, folder: Path, place: Callable[[str], ProcessHost]
) -> AsyncIterator[MemberPool]:
    """Start a pool of members; kill the remaining processes at the end."""
    pool = MemberPool(nameserver, folder, place)
    try:
        for _ in range(MEMBERS):
            await pool.join()
        yield pool
    finally:
        for member in pool.members:
            if member.process.returncode is None:
                member.process.kill()
                await member.process.wait()
