"""Real Celery workers for tests, and what their tasks noted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from celery import Celery

import batonmq.kombu  # noqa: F401  makes the URL scheme known
from batonmq._kombu.client_link import LINKS
from tests.kombu import task_app

REPO = Path(__file__).parents[2]


class Worker:
    """A worker as a program."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self.log = process, log

    def kill(self) -> None:
        """Kill its main process; those of its pool end by themselves."""
        self._process.kill()

    async def stop(self) -> int:
        """Ask it to end as an orchestrator does; return its exit status."""
        self._process.terminate()
        return await self._process.wait()

    async def end(self) -> None:
        """Kill the worker and its pool."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            await self._process.wait()


class Tasks:
    """The application of the tests, for a sender.

    Attributes:
        folder: Where its workers run.
    """

    def __init__(self, nameserver: str, folder: Path) -> None:
        self.folder = folder
        self.app = Celery("sender", broker=f"batonmq://{nameserver}")
        self.app.conf.broker_transport_options = task_app.app.conf.broker_transport_options
        self.nameserver = nameserver

    async def send(self, name: str, argument: str, **options: object) -> None:
        """Send a task."""
        await asyncio.to_thread(
            self.app.send_task, f"tests.kombu.task_app.{name}", (argument,), **options
        )

    def notes(self, *begin: str) -> list[str]:
        """Return the lines of all workers that begin with these words, in order."""
        log = self.folder / task_app.LOG
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.split()[: len(begin)] == list(begin)]

    def done(self) -> list[str]:
        """Return the names of the tasks that ran to their end, sorted."""
        return sorted(line.split()[1] for line in self.notes("done"))

    def open_gate(self) -> None:
        """Let the tasks that wait go on."""
        (self.folder / task_app.GATE).touch()

    @asynccontextmanager
    async def worker(self, name: str, *options: str) -> AsyncIterator[Worker]:
        """Run a worker in the block."""
        log = self.folder / f"{name}.log"
        command = (
            *(sys.executable, "-m", "celery", "-A", "tests.kombu.task_app"),
            *("-b", f"batonmq://{self.nameserver}", "worker", "-n", f"{name}@test"),
            *("--loglevel", "info", *options),
        )
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(REPO)},  # noqa: TID251  handed on
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        worker = Worker(process, log)
        try:
            yield worker
        finally:
            await worker.end()


@asynccontextmanager
async def tasks_of(nameserver: str, folder: Path) -> AsyncIterator[Tasks]:
    """Send tasks in the block; its connections are closed at the end."""
    tasks = Tasks(nameserver, folder)
    try:
        yield tasks
    finally:
        await asyncio.to_thread(tasks.app.close)
        await asyncio.to_thread(LINKS.close_all)
