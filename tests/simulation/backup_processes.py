"""Processes that take and restore backups, and the store that they use, with faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from random import Random
from typing import Any, Generic, TypeVar

import pytest

from batonmq.admin.admin import Admin
from batonmq.errors import NoQuorum, NotLeader, NotServing, OffsetsUnreachable, Unreachable
from batonmq_server.testing import MemoryBroker
from batonmq_server.testing.memory_objects import MemoryObjects
from batonmq_server.testing.processes import SimulatedProcess
from batonmq_server.testing.virtual_time import VirtualTimeLoop
from tests.simulation.run_record import RunRecord

T = TypeVar("T")
LOST_CALL = (Unreachable, OffsetsUnreachable, NotLeader, NotServing, NoQuorum)
"""What a snapshot or a restore may raise while something does not answer."""
PAUSE_S_MAX, STORE_S_MAX = 6.0, 0.2
DISTURBED = 0.6
"""Part of the processes to which something happens."""


class FailingStore(MemoryObjects):
    """An object store that fails sometimes, until it is told not to.

    Attributes:
        rate: Part of the operations that fail.
    """

    def __init__(self, run: RunRecord) -> None:
        super().__init__()
        self._run, self._draws, self.rate = run, Random(f"{run.seed}/store"), 0.0
        self.before = self._fail

    def sound(self) -> MemoryObjects:
        """Return the same files without failures."""
        sound = MemoryObjects()
        sound.files = self.files
        return sound

    def _fail(self, operation: str, name: str) -> None:
        del operation, name
        if self._draws.random() < self.rate:
            self._run.counts["store failures"] += 1
            raise ConnectionError("the store does not answer")


@contextmanager
def calls_without_threads(draws: Random) -> Iterator[None]:
    """Let calls of a thread take some time in the loop instead.

    The call of a process that is killed meanwhile is carried out all the same: its store is remote.
    """

    def run_in_executor(
        loop: VirtualTimeLoop, executor: object, call: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        del executor
        done = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def answer() -> None:
            result, error = None, None
            try:
                result = call(*args)
            except Exception as failure:  # noqa: BLE001  the caller gets it
                error = failure
            delay_s = draws.uniform(0, STORE_S_MAX)
            loop.call_later(delay_s, settle, result, error, context=Context())

        loop.call_later(draws.uniform(0, STORE_S_MAX), answer, context=Context())
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualTimeLoop, "run_in_executor", run_in_executor)
        yield


class Killed(Exception):
    """The process was killed before its work was complete."""


class Attempts(Generic[T]):
    """Processes of an operator, one after the other, each with the same work.

    Args:
        name: Name of the processes, before their number.
    """

    def __init__(self, run: RunRecord, broker: MemoryBroker, name: str, random: Random) -> None:
        self._run, self._broker, self._name, self._random = run, broker, name, random
        self._count = 0

    async def once(self, work: Callable[[Admin], Awaitable[T]], *, calm: bool = False) -> T:
        """Run `work` in a new process, to which something may happen; return its result.

        Raises:
            Killed: The process was killed.
            Exception: What `work` raised.
        """
        self._count += 1
        process = SimulatedProcess(self._broker._environment, f"{self._name}-{self._count}", 0)
        results: list[T] = []
        errors: list[Exception] = []

        async def main() -> None:
            environment = process.client_environment()
            async with Admin(self._broker.nameserver, environment=environment) as admin:
                try:
                    results.append(await work(admin))
                except Exception as error:  # noqa: BLE001  raised below
                    errors.append(error)

        process.run(main)
        if not calm and self._random.random() < DISTURBED:
            await self._disturb(process)
        await process.ended()
        if errors:
            raise errors[0]
        return results[0]

    async def _disturb(self, process: SimulatedProcess) -> None:
        random, counts = self._random, self._run.counts
        with suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(0, random.choice((0.3, 1.5, PAUSE_S_MAX)))):
                await process.ended()
                return
        kind = random.choice(("kill", "kill", "freeze", "cut"))
        counts[f"{self._name} {kind}s"] += 1
        if kind == "kill":
            process.kill(noticed=random.random() < 0.7)
            raise Killed
        if kind == "freeze":
            process.freeze()
            await asyncio.sleep(random.uniform(0, PAUSE_S_MAX))
            process.thaw()
        else:
            with self._broker._disconnected(process.name):
                await asyncio.sleep(random.uniform(0, PAUSE_S_MAX))
