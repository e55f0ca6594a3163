"""Processes that take part in a measurement: they report in lines of JSON, and begin when told."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any


class MeasuredProcess:
    """A process of `measured_process`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    def go(self) -> None:
        """Let `wait_for_go` of the process return."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def expect(self, kind: str) -> dict[str, Any]:
        """Return what the process says next, which must be of this kind."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        said: dict[str, Any] = json.loads(line)
        assert said["kind"] == kind, said
        return said


@asynccontextmanager
async def measured_process(module: str, *arguments: str) -> AsyncIterator[MeasuredProcess]:
    """Run `python -m MODULE ARGUMENT…`; kill it at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 30,
    )
    try:
        yield MeasuredProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def say(kind: str, **values: object) -> None:
    """Say something to the process that measures."""
    print(json.dumps({"kind": kind, **values}), flush=True)


async def wait_for_go() -> None:
    """Wait until the process that measures calls `go`."""
    await asyncio.to_thread(sys.stdin.readline)


async def ticks(rate: int, count: int) -> AsyncIterator[float]:
    """Yield the monotonic time `count` times, `rate` times a second."""
    begin_s = monotonic()
    for number in range(count):
        delay_s = begin_s + number / rate - monotonic()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        yield monotonic()


def process_cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((path / "schedstat").read_text().split()[0]) for path in threads) / 1e9
