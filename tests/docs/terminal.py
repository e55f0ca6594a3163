"""Runs the commands of a page in their order, and compares their output with the page."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.conditions import until
from tools.docs.pages import Page

HOST = "vm"
"""Host name on pages."""
_VARYING = re.compile(
    r"\b[0-9a-f]{14,16}\b|\d{4}-\d\d-\d\dT[\d:.]+Z|\bbroker-0-[0-9a-f]+-[0-9a-f]+\b"
    r"|\b[\d.]+ s\b|(?<=100  )[\d.]+(?=  +worker)|generation \d+(?=;)"
)
_ONCE = re.compile(r"\bbaton (produce|consume|topic|group update)\b")
"""Commands that change something and run once; other commands are repeated until they match."""


def same(output: str) -> list[list[str]]:
    """Return the words of each line, without the values that differ from run to run."""
    output = output.replace(socket.gethostname(), HOST)
    return [_VARYING.sub("…", line).split() for line in output.rstrip().splitlines()]


def commands(page: Page) -> Iterator[tuple[str, str]]:
    """Yield each command of the page with its output on the page."""
    for block in page.blocks(""):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


class Terminal:
    """Runs commands in a folder, against a cluster."""

    def __init__(self, folder: Path, nameserver: str) -> None:
        self.folder = folder
        inherited = dict(os.environ)  # noqa: TID251  a terminal inherits it, too
        path = f"{Path(sys.executable).parent}:{inherited['PATH']}"
        self._environment = inherited | {"PATH": path, "BATON_NAMESERVER": nameserver}
        self._jobs: list[Process] = []

    async def run(self, command: str, shown: str) -> None:
        """Run a command; `&` at its end starts a job, and `kill %1` ends the first job."""
        if command.endswith(" &"):
            await self._start(command.removesuffix(" &"))
        elif command.startswith("kill "):
            job = self._jobs[int(command[-1]) - 1]
            job.send_signal(signal.SIGKILL if "-9" in command else signal.SIGTERM)
            await job.wait()
        elif _ONCE.search(command):
            printed = await self._output(command)
            assert same(printed) == same(shown), printed
        else:
            await self._until_shown(command, shown)

    async def _start(self, command: str) -> None:
        program, _, file = command.partition(" > ")
        with (self.folder / file).open("wb") as output:
            job = await asyncio.create_subprocess_exec(
                *shlex.split(program),
                cwd=self.folder,
                env=self._environment,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._jobs.append(job)

    async def _until_shown(self, command: str, shown: str) -> None:
        printed = ""

        async def is_shown() -> bool:
            nonlocal printed
            printed = await self._output(command)
            return same(printed) == same(shown)

        try:
            await until(is_shown, timeout_s=60)
        except TimeoutError:
            assert printed == shown, f"$ {command}"
            raise

    async def _output(self, command: str) -> str:
        process = await asyncio.create_subprocess_shell(
            command, cwd=self.folder, env=self._environment, stdout=PIPE, stderr=STDOUT
        )
        return (await process.communicate())[0].decode()

    async def close(self) -> None:
        """Kill the jobs that still run."""
        for job in self._jobs:
            if job.returncode is None:
                job.kill()
                await job.wait()


@asynccontextmanager
async def terminal(folder: Path, nameserver: str) -> AsyncIterator[Terminal]:
    """Open a terminal whose jobs are killed at the end of the block."""
    opened = Terminal(folder, nameserver)
    try:
        yield opened
    finally:
        await opened.close()
