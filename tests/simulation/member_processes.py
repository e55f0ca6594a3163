"""The consumers of a group in a run, as processes that are killed, frozen and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from random import Random
from typing import Any

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq.errors import NoQuorum, Unreachable
from batonmq_server.testing import MemoryBroker
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.other_tasks import cancel_other_tasks

Run = Callable[[Consumer, Random], Coroutine[Any, Any, None]]


class MemberProcesses:
    """Processes, each with one consumer.

    Args:
        seed: Seed of what the members draw.
        group: Group of the consumers, which subscribe to all messages of `topic`.
        usual_count: With fewer members than that, `disturb` starts one.
        run: Runs a consumer until it is stopped; gets what the member draws from.

    Attributes:
        failed_starts: Number of starts that failed because no service answered.
    """

    def __init__(
        self,
        broker: MemoryBroker,
        *,
        seed: str,
        group: str,
        topic: str,
        settings: ConsumerSettings,
        usual_count: int,
        run: Run,
    ) -> None:
        self._broker, self._seed, self._run = broker, seed, run
        self._group, self._topic, self._settings = group, topic, settings
        self._usual_count = usual_count
        self._processes: list[SimulatedProcess] = []
        self.failed_starts = 0

    def alive(self) -> list[SimulatedProcess]:
        """Return the processes that run."""
        return [one for one in self._processes if one.alive and not one.frozen]

    def start(self) -> None:
        """Start a member."""
        name = f"{self._group}-{len(self._processes) + 1}"
        process = SimulatedProcess(self._broker._environment, name, 0)
        draws = Random(f"{self._seed}/{name}")
        self._processes.append(process)

        async def main() -> None:
            while not process.stopping.is_set():
                async with AsyncExitStack() as stack:
                    try:
                        consumer = await stack.enter_async_context(self._consumer(process))
                    except (Unreachable, NoQuorum):
                        self.failed_starts += 1
                        continue
                    tasks = await stack.enter_async_context(asyncio.TaskGroup())
                    running = tasks.create_task(self._run(consumer, draws))
                    await process.stopping.wait()
                    consumer.stop()
                    await running

        process.run(main)

    def _consumer(self, process: SimulatedProcess) -> Consumer:
        return Consumer(
            self._broker.nameserver,
            self._group,
            {self._topic: "*"},
            self._settings,
            client_id=process.name,
            environment=process.client_environment(),
        )

    async def disturb(self, random: Random) -> str:
        """Kill, freeze or stop a member, or start one if there are few; return what was done."""
        alive = self.alive()
        if len(alive) < self._usual_count:
            self.start()
            return "starts"
        process = random.choice(alive)
        kind = random.choice(("kill", "kill", "freeze", "stop"))
        if kind == "kill":
            process.kill(noticed=random.random() < 0.7)
        elif kind == "freeze":
            process.freeze()
            await asyncio.sleep(random.choice((2, 20, 45)) * random.random())
            process.thaw()
        else:
            process.stop()
        return f"{kind}s"

    def settle(self) -> None:
        """Let every member run that can, and at least one that does not leave."""
        for process in self._processes:
            if process.frozen:
                process.thaw()
        if all(process.leaving for process in self.alive()):
            self.start()

    async def end(self) -> None:
        """Stop all members."""
        for process in self._processes:
            if process.alive:
                process.stop()
                await process.ended()


async def bury(*groups: MemberProcesses) -> None:
    """Cancel the tasks of killed members, so that the loop can close."""
    for members in groups:
        for process in members._processes:
            process.host.thaw()
    await cancel_other_tasks()
