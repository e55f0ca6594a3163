"""Run the steps against one broker after the other, in rounds; a failure ends only its broker."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import process_tree
from bench.peers.brokers import Broker, Servers
from bench.peers.clients.task import Kind, Outcome, Task
from bench.peers.downloads import REPOSITORY, PeerFailed, environment, last_lines
from bench.peers.figures import Column, Report
from bench.peers.steps import (
    FSYNC,
    MEMORY,
    POST_RATE,
    WARM_UP,
    Measured,
    Step,
    add_cost,
    add_memory,
    add_speed,
)

_ANSWER_S = 120.0
"""How long a client may take for anything but the measured work."""
_LINE_BYTES_MAX = 1 << 26


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run.

    Attributes:
        seconds: Duration of each step.
        rounds: Number of rounds.
        fsync: Whether the steps with fsync are measured too.
    """

    seconds: float
    rounds: int
    fsync: bool = True


async def run(
    brokers: Sequence[Broker],
    sizes: Sizes,
    parent: Path | None,
    say: Callable[[str], None],
) -> Report:
    """Measure the brokers by turns; return what was measured and what failed.

    Args:
        parent: Folder on the disk to measure; None for the temporary folder.
        say: Called with each step.
    """
    report = Report()
    ready: list[Broker] = []
    for broker in brokers:
        say(f"{broker.name}: preparing")
        try:
            await broker.prepare()
        except (PeerFailed, OSError) as error:
            _fail(report, broker, error, say)
        else:
            ready.append(broker)
            report.columns[broker.name] = Column(broker.version(), broker.settings)
    for number in range(1, sizes.rounds + 1):
        for broker in tuple(ready):
            say(f"round {number}, {broker.name}")
            try:
                await _Round(broker, sizes, parent, report, say).run()
            except (PeerFailed, OSError) as error:
                _fail(report, broker, error, say)
                ready.remove(broker)
    report.columns = {name: one for name, one in report.columns.items() if one.figures}
    return report


def _fail(report: Report, broker: Broker, error: Exception, say: Callable[[str], None]) -> None:
    report.add_failure(f"{broker.name}: {error}")
    say(f"{broker.name} FAILED: {error}")


class _Round:
    def __init__(
        self,
        broker: Broker,
        sizes: Sizes,
        parent: Path | None,
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        self._broker, self._sizes, self._parent = broker, sizes, parent
        self._report, self._say = report, say
        self._column = report.columns[broker.name]

    async def run(self) -> None:
        """Measure all steps; one that fails is reported, and the others are measured.

        Raises:
            PeerFailed: The servers failed.
        """
        costs: list[tuple[Step, Measured]] = []
        memory = 0
        for steps, fsync in ((MEMORY, False), (FSYNC, True)):
            if fsync and not self._sizes.fsync:
                continue
            folder = Path(tempfile.mkdtemp(prefix="baton-peers-", dir=self._parent))
            try:
                self._say("  starting with fsync" if fsync else "  starting")
                async with self._broker.serve(folder, fsync=fsync) as servers:
                    bench = _Bench(self._broker, servers, self._sizes, folder, fsync)
                    await bench.do(Task(kind="create", address=servers.address))
                    costs += [
                        (step, measured)
                        for step in (*WARM_UP, *steps)
                        if (measured := await self._measure(bench, step)) and step in MEMORY
                    ]
                    if not fsync:
                        memory = process_tree.rss_bytes(servers.pids)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        for step, measured in costs:
            add_cost(self._column, step, measured)
        add_memory(self._column, memory)

    async def _measure(self, bench: _Bench, step: Step) -> Measured | None:
        self._say(f"  {step.title}")
        try:
            measured = await bench.measure(step)
        except PeerFailed as error:
            _fail(self._report, self._broker, PeerFailed(f"{step.title}: {error}"), self._say)
            return None
        if step not in WARM_UP:
            add_speed(self._column, step, measured)
        return measured


class _Bench:
    def __init__(
        self, broker: Broker, servers: Servers, sizes: Sizes, folder: Path, fsync: bool
    ) -> None:
        self._broker, self._servers, self._sizes = broker, servers, sizes
        self._folder, self._fsync = folder, fsync
        self._stored: dict[str, int] = {}

    async def measure(self, step: Step) -> Measured:
        if step.kind == "handle":
            return await self._handle(step)
        count = self._stored.get(step.topic, 0)
        if step.kind.startswith("consume") and not count:
            raise PeerFailed("no messages were produced before")
        measured = await self.do(self._task(step, step.kind, count=count))
        if not measured.outcome.count:
            raise PeerFailed("the work was over after the first batch")
        if step.kind == "produce":
            self._stored[step.topic] = measured.outcome.count
        return measured

    async def do(self, task: Task) -> Measured:
        """Run a client process; return its outcome."""
        async with client(self._broker, task, self._folder) as process:
            await process.expect("ready")
            return await self._watch([process], process)

    async def _handle(self, step: Step) -> Measured:
        count = int(POST_RATE * self._sizes.seconds)
        handle = self._task(step, "handle", count=count)
        post = self._task(step, "post", count=count)
        async with AsyncExitStack() as stack:
            consumer, producer = [
                await stack.enter_async_context(client(self._broker, task, self._folder))
                for task in (handle, post)
            ]
            await producer.expect("ready")
            await consumer.expect("ready")
            return await self._watch([consumer, producer], consumer)

    async def _watch(self, processes: Sequence[ClientProcess], counted: ClientProcess) -> Measured:
        """Let the processes work; return the outcome of `counted` and the CPU time of all."""
        pids = [process.pid for process in processes]
        before = process_tree.cpu_s(self._servers.pids), process_tree.cpu_s(pids)
        for process in processes:
            process.go()
        outcomes = {
            process: await process.expect("done", self._sizes.seconds) for process in processes
        }
        after = process_tree.cpu_s(self._servers.pids), process_tree.cpu_s(pids)
        return Measured(Outcome(**outcomes[counted]), after[0] - before[0], after[1] - before[1])

    def _task(self, step: Step, kind: Kind, *, count: int) -> Task:
        return Task(
            kind=kind,
            address=self._servers.address,
            topic=step.topic,
            group=step.group,
            size=step.size,
            fsync=self._fsync,
            seconds=self._sizes.seconds,
            count=count,
            rate=POST_RATE,
        )


class ClientProcess:
    """A running client process."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
        self._process, self._name, self._log = process, name, log
        self.pid = process.pid

    def go(self) -> None:
        """Let the measured work begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def expect(self, kind: str, work_s: float = 0) -> dict[str, Any]:
        """Return the next line of the process, which must be of this kind.

        Raises:
            PeerFailed: The process ended, or did not answer in time.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_ANSWER_S + work_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise PeerFailed(
                f"{self._name} did not report {kind!r} within {_ANSWER_S + work_s:g} s: "
                f"{self._said()}"
            ) from None
        if not line:
            raise PeerFailed(f"{self._name} ended before {kind!r}: {self._said()}")
        try:
            said: dict[str, Any] = json.loads(line)
            if said.pop("kind") == kind:
                return said
        except (ValueError, KeyError, AttributeError):
            pass
        raise PeerFailed(f"{self._name} printed {line[:200]!r} instead of {kind!r}")

    def _said(self) -> str:
        return last_lines(self._log.read_text(errors="replace"))


@asynccontextmanager
async def client(broker: Broker, task: Task, folder: Path) -> AsyncIterator[ClientProcess]:
    """Run a client process inside `async with`; it is killed at the end if it is still running."""
    name = f"{task.kind} client"
    log = folder / f"{task.kind}.log"
    paths = ":".join(map(str, (*broker.paths, REPOSITORY, REPOSITORY / "gen")))
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            broker.client,
            task.encode(),
            cwd=REPOSITORY,
            # A client library may write logs to the home folder.
            env=environment({"PYTHONPATH": paths, "HOME": str(folder)}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LINE_BYTES_MAX,
        )
    try:
        yield ClientProcess(process, name, log)
        process.stdin.close()  # type: ignore[union-attr]
        async with asyncio.timeout(_ANSWER_S):
            await process.wait()
    except TimeoutError:
        raise PeerFailed(f"{name} did not end") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
