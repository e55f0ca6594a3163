"""Mirrors of one direction in a run, as processes that are killed, frozen, cut off and stopped."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._connection.directory import ClientEnvironment
from batonmq.admin.admin import Admin
from batonmq.admin.mirror import Mirror
from batonmq.admin.mirror_reports import MirrorReport
from batonmq.errors import BatonError, Retry
from batonmq_server.testing import MemoryBroker
from batonmq_server.testing.memory_grpc import memory_connector
from batonmq_server.testing.memory_network import MemoryCall
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.mirror_checks import MirrorsRun

CUT_S_MAX, FREEZE_S_MAX = 12, 20
AGAIN_S = 1.0


class MirrorProcesses:
    """Processes, each with a mirror from one cluster to another.

    Args:
        clusters: Source and target.
        name: Prefix of the processes; unique in the run.
    """

    def __init__(
        self,
        run: MirrorsRun,
        clusters: tuple[MemoryBroker, MemoryBroker],
        name: str,
        topic: str,
        group: str,
    ) -> None:
        self._run, self._name, self._topic, self._group = run, name, topic, group
        self._source, self._target = clusters
        self.processes: list[SimulatedProcess] = []
        self.mirrors: list[Mirror] = []
        self._running: dict[SimulatedProcess, Mirror] = {}
        self._target._environment.answered = self._note_answer  # type: ignore[method-assign]

    def _note_answer(self, call: MemoryCall, request: Any, answer: Any) -> None:
        """Count batches of mirrors that the target had stored before, or rejects."""
        if call.source.startswith(self._name) and isinstance(answer, pb.AppendResponse):
            counts = self._run.counts
            for outcome in answer.outcomes:
                counts["batches repeated"] += outcome.receipt.duplicate
                counts["batches rejected"] += outcome.HasField("error")

    def alive(self) -> list[SimulatedProcess]:
        """Return the processes that run."""
        return [one for one in self.processes if one.alive and not one.frozen]

    def start(self) -> None:
        """Start a mirror."""
        name = f"{self._name}-{len(self.processes) + 1}"
        process = SimulatedProcess(self._source._environment, name, 0)
        self.processes.append(process)

        async def main() -> None:
            there = ClientEnvironment(
                clock=process.clock,
                random=process.random,
                connect=memory_connector(self._target._environment.network, process.host),
            )
            async with (
                Admin(self._source.nameserver, environment=process.client_environment()) as source,
                Admin(self._target.nameserver, environment=there) as target,
            ):
                while not process.stopping.is_set():
                    await self._mirror(process, source, target)

        process.run(main)

    async def _mirror(self, process: SimulatedProcess, source: Admin, target: Admin) -> None:
        """Run a mirror until it ends, or the process is asked to stop."""
        reports: list[MirrorReport] = []
        mirror = Mirror(source, target, [self._topic], [self._group])
        self.mirrors.append(mirror)
        self._running[process] = mirror
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._run_once(mirror, reports))
            stopping = tasks.create_task(process.stopping.wait())
            await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            stopping.cancel()

    async def _run_once(self, mirror: Mirror, reports: list[MirrorReport]) -> None:
        counts, began = self._run.counts, asyncio.get_running_loop().time()
        try:
            await mirror.run(on_report=reports.append, report_interval_s=1.0)
        except BaseExceptionGroup as error:
            self._run.fail("group", repr(error)[:200])
        except BatonError as error:
            counts[f"ends by {error.reason}"] += 1
            if reports or error.retry is Retry.NEVER:
                self._run.fail(
                    "ended",
                    f"{self._name} after "
                    f"{asyncio.get_running_loop().time() - began:.1f} s: {error!r}",
                )
            await asyncio.sleep(AGAIN_S)
        finally:
            counts["copied"] += mirror._reported(0.0).copied_count

    def kill(self, process: SimulatedProcess) -> None:
        """Kill a mirror at any point of its work."""
        network = self._target._environment.network
        calls = {call.method for call in network._open.get(process.host, ()) if not call.over}
        self._run.counts["kills in an append"] += "Append" in calls
        mirror = self._running.get(process)
        self._run.counts["kills with a lag"] += bool(mirror and mirror._reported(0.0).lag)
        process.kill()
        network.crash(process.host)

    async def disturb(self, random: Random) -> str:
        """Kill, freeze, cut off or stop a mirror, or start one; return what was done."""
        alive = self.alive()
        if not alive or (len(alive) < 2 and random.random() < 0.15):
            self.start()
            return "second starts" if alive else "starts"
        process = random.choice(alive)
        kind = random.choice(("kill", "kill", "kill", "freeze", "cut", "stop"))
        if kind == "kill":
            self.kill(process)
        elif kind == "freeze":
            process.freeze()
            await asyncio.sleep(FREEZE_S_MAX * random.random())
            process.thaw()
        elif kind == "cut":
            cluster = random.choice((self._source, self._target))
            with cluster._disconnected(process.name):
                await asyncio.sleep(CUT_S_MAX * random.random())
        else:
            process.stop()
        return f"mirror {kind}s"

    def settle(self) -> None:
        """Let every mirror run that can, and at least one."""
        for process in self.processes:
            if process.frozen:
                process.thaw()
        if not [one for one in self.alive() if not one.leaving]:
            self.start()

    def kill_all(self) -> None:
        """Kill every mirror."""
        for process in self.alive():
            self.kill(process)

    async def end(self) -> None:
        """Stop every mirror."""
        for process in self.processes:
            if process.alive:
                process.thaw()
                process.stop()
                await process.ended()
