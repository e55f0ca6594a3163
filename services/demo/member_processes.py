"""The members of a demo group: processes that are told to join and to leave."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from batonmq._connection.security import Security, to_json

LEAVE_TIMEOUT_S = 60.0


class MemberFailed(Exception):
    """A member process ended without being told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """What every member of one group is told.

    Attributes:
        pace: Messages a member handles in a second, at most; 0 for no limit.
        security: How to use TLS; None for none.
    """

    nameserver: str
    group: str
    topic: str
    expression: str
    folder: Path
    pace: int = 0
    security: Security | None = None


class MemberProcess:
    """One process; started, and idle until it is told to join.

    Attributes:
        handled: Messages it has handled, as it says.
    """

    def __init__(self, part: MemberOptions, name: str) -> None:
        self._part, self.name = part, name
        self.journal = part.folder / f"{name}.journal"
        self.handled = 0
        self._process: Process | None = None
        self._ready = asyncio.Event()
        self._leaving = False

    async def run(self) -> None:
        """Start the process and follow it to its end.

        Raises:
            MemberFailed: it ended badly.
        """
        options = {
            "nameserver": self._part.nameserver,
            "group": self._part.group,
            "topic": self._part.topic,
            "expression": self._part.expression,
            "client-id": self.name,
            "journal": str(self.journal),
            "pace": str(self._part.pace),
        }
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "batonmq_server.demo.member",
            *(text for name, value in options.items() for text in (f"--{name}", value)),
            stdin=PIPE,
            stdout=PIPE,
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                if line.strip() == b"ready":
                    self._ready.set()
                else:
                    self.handled = int(line)
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if code != 0 or not self._leaving:
            raise MemberFailed(f"member {self.name} ended with status {code}")

    async def ready(self) -> None:
        """Until the process can join at once."""
        await self._ready.wait()

    def join(self) -> None:
        """Tell it to become a member; on standard input, as other people see a command line."""
        security = self._part.security
        told = to_json(security) if security is not None else ""
        self._say(f"join {told}".rstrip().encode() + b"\n")

    def leave(self) -> None:
        """Tell it to leave gracefully and end."""
        self._leaving = True
        self._say(b"leave\n")

    def _say(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line)


class MemberGroup:
    """All members of one group, present and future; use it as an async context manager."""

    def __init__(self, part: MemberOptions, size: int) -> None:
        self.members = [
            MemberProcess(part, f"{part.group}-{number}") for number in range(1, size + 1)
        ]
        self._exits = AsyncExitStack()
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def handled(self) -> int:
        """Messages that all members together have handled."""
        return sum(member.handled for member in self.members)

    @property
    def journals(self) -> list[Path]:
        """The journals that were begun."""
        return [member.journal for member in self.members if member.journal.exists()]

    async def __aenter__(self) -> Self:
        tasks = await self._exits.enter_async_context(asyncio.TaskGroup())
        self._running = {m.name: tasks.create_task(m.run()) for m in self.members}
        for member in self.members:
            await member.ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        for task in self._running.values():
            task.cancel()
        return await self._exits.__aexit__(kind, error, trace)

    async def ended(self, members: list[MemberProcess]) -> None:
        """Until the processes of `members`, told to leave, have ended."""
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await asyncio.wait([self._running[member.name] for member in members])
