"""Members of a demo group, each a process that joins and leaves on request."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from batonmq._common import timeouts
from batonmq._connection.security import Security, to_json
from batonmq._process.environment import with_absolute_python_path

LEAVE_TIMEOUT_S = 60.0


class MemberFailed(Exception):
    """A member process ended before it was asked to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """Options that all members of a group share.

    Attributes:
        nameserver: host:port of the nameservers.
        folder: Folder of the journals, and working directory of the members.
        pace: Messages that a member handles per second, at most; 0 for no limit.
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
    """A member in a process of its own, which is idle until `join`.

    Attributes:
        handled: Number of messages that the member has reported as handled.
    """

    def __init__(self, options: MemberOptions, name: str) -> None:
        self._options, self.name = options, name
        self.journal = options.folder.absolute() / f"{name}.journal"
        self.handled = 0
        self._process: Process | None = None
        self._ready = asyncio.Event()
        self._leaving = False

    async def run(self) -> None:
        """Start the process, and read its reports until it ends.

        Raises:
            MemberFailed: it failed, or ended before `leave`.
        """
        arguments = {
            "nameserver": self._options.nameserver,
            "group": self._options.group,
            "topic": self._options.topic,
            "expression": self._options.expression,
            "client-id": self.name,
            "journal": str(self.journal),
            "pace": str(self._options.pace),
        }
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "batonmq_server.demo.member",
            *(text for name, value in arguments.items() for text in (f"--{name}", value)),
            stdin=PIPE,
            stdout=PIPE,
            cwd=self._options.folder,
            env=with_absolute_python_path(os.environ),  # noqa: TID251  inherited
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
        """Wait until the process has started."""
        await self._ready.wait()

    def join(self) -> None:
        """Ask the process to join the group.

        TLS options go over standard input, because other users can read command lines. Paths are
        made absolute, because the process has another working directory.
        """
        security = self._options.security
        text = to_json(_with_absolute_paths(security)) if security is not None else ""
        self._send(f"join {text}".rstrip().encode() + b"\n")

    def leave(self) -> None:
        """Ask the process to leave the group gracefully, and to end."""
        self._leaving = True
        self._send(b"leave\n")

    def _send(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line)


class MemberGroup:
    """All members of a group, joined or not; an async context manager."""

    def __init__(self, options: MemberOptions, size: int) -> None:
        self.members = [
            MemberProcess(options, f"{options.group}-{number}") for number in range(1, size + 1)
        ]
        self._exits = AsyncExitStack()
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def handled(self) -> int:
        """Number of messages that all members together have handled."""
        return sum(member.handled for member in self.members)

    @property
    def journals(self) -> list[Path]:
        """Journals of the members that have joined."""
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
        """Wait until the processes of `members`, which were asked to leave, have ended."""
        async with timeouts.timeout(LEAVE_TIMEOUT_S):
            await asyncio.wait([self._running[member.name] for member in members])


def _with_absolute_paths(security: Security) -> Security:
    names = ("ca_file", "cert_file", "key_file", "token_file")
    paths = {name: getattr(security, name) for name in names}
    absolute = {name: str(Path(path).absolute()) for name, path in paths.items() if path}
    return replace(security, **absolute)  # type: ignore[arg-type]
