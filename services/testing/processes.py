"""Simulated processes of a cluster in one event loop, and the environment that they share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Any

from batonmq._common.aio import only_error
from batonmq._common.clock import Clock
from batonmq._connection.directory import ClientEnvironment
from batonmq.errors import NoQuorum
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.runtime.app import App
from batonmq_server.runtime.event_stream_server import add_event_stream
from batonmq_server.runtime.health import Health
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.runtime.service_stream import ServiceStream
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.storage.node import StorageNode
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryOffsetsDisk
from batonmq_server.testing.memory_etcd import MemoryEtcd, MemoryEtcdSession
from batonmq_server.testing.memory_grpc import MemoryServer, memory_connector, memory_prober
from batonmq_server.testing.memory_network import MemoryNetwork, NetworkObserver
from batonmq_server.testing.memory_objects import MemoryObjects
from batonmq_server.testing.virtual_time import VirtualHost, VirtualTimeLoop

log = logging.getLogger(__name__)

Build = Callable[[Any, Runtime], AbstractAsyncContextManager[App]]
START_UNIX_MS = 1_700_000_000_000
"""The wall clock at the start of virtual time: 2023-11-14 22:13:20 UTC."""
GRACE_MS = 3_000


class LoopClock(Clock):
    """A clock with wall time that follows the event loop; `ahead_ms` makes it jump."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def unix_ms(self) -> int:
        """See Clock."""
        return START_UNIX_MS + self.monotonic_ms() + self.ahead_ms


class MemoryEnvironment(NetworkObserver):
    """The network, etcd and disks of one cluster, which outlive its processes.

    Args:
        seed: Seed of all random decisions; in virtual time, runs with the same seed are equal.

    Attributes:
        virtual: Whether the event loop has virtual time.
        offsets_disks: Disks of offsets nodes by node id; created at the first start of the node.
        storage_disks: Disks of storage nodes by node id; created at the first start of the node.
        objects: The object store of segments, for storage nodes with a `tier_url`.
    """

    def __init__(self, seed: str) -> None:
        self.loop, self.seed = asyncio.get_running_loop(), seed
        self.virtual = isinstance(self.loop, VirtualTimeLoop)
        self.network = MemoryNetwork(self.random("network"), self)
        self.etcd = MemoryEtcd(self.network)
        self.offsets_disks: dict[str, MemoryOffsetsDisk] = {}
        self.storage_disks: dict[str, MemoryDisk] = {}
        self.objects = MemoryObjects()
        self.hosts: list[VirtualHost] = []

    def now_ms(self) -> int:
        """Return the time of the event loop in ms."""
        return int(self.loop.time() * 1000)

    def random(self, purpose: str) -> Random:
        """Return a random generator of its own, so that one use does not influence another."""
        return Random(f"{self.seed}/{purpose}")

    def host(self, name: str) -> VirtualHost:
        """Return the host of a new process."""
        host = VirtualHost(name)
        self.hosts.append(host)
        return host

    def clock(self) -> Clock:
        """Return the clock of a new process."""
        return LoopClock() if self.virtual else Clock()

    def write_s(self, _: Random) -> float:
        """Return how long a synced write takes, in seconds."""
        return 0

    def offsets_disk_of(self, node_id: str) -> MemoryOffsetsDisk:
        """Return the disk of an offsets node."""
        if node_id not in self.offsets_disks:
            random = self.random(f"offsets disk {node_id}")
            self.offsets_disks[node_id] = MemoryOffsetsDisk(random, self.write_s)
        return self.offsets_disks[node_id]

    def crash_disk(self, name: str) -> None:
        """Detach the disk of a service: later writes of the running process have no effect."""
        if name in self.storage_disks:
            self.storage_disks[name] = self.storage_disks[name].killed()

    # ---- hooks

    def offsets_opened(self, offsets: OffsetsEpoch) -> None:
        """Called when an offsets node or a new leader starts to serve the data on its disk."""

    def storage_opened(self, node_id: str, node: StorageNode) -> None:
        """Called when a storage node has opened its log, also again after the log was truncated."""

    def thawed(self) -> None:
        """Called when a frozen process is thawed."""

    def failed(self, process: str, error: BaseException) -> None:
        """Called when a process has failed."""
        log.critical("process failed name=%s", process, exc_info=error)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Name, settings and start function of a service.

    Attributes:
        name: Name of the process; its address is `name:1`.
        kind: Folder name of the service.
    """

    name: str
    kind: str
    settings: ServiceSettings
    build: Build


class SimulatedProcess:
    """A simulated process, from its start to its end.

    Attributes:
        life: Number of earlier processes of the same name.
        alive: Whether the process has not ended yet.
        leaving: Whether the process was asked to stop; `stopping` is set when it has noticed.
    """

    def __init__(self, environment: MemoryEnvironment, name: str, life: int) -> None:
        self.environment, self.name, self.life = environment, name, life
        self.clock = environment.clock()
        self.host = environment.host(name)
        self.random = environment.random(f"{name}/{life}")
        self.alive, self.leaving = True, False
        self.stopping = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    @property
    def frozen(self) -> bool:
        """Whether the process is suspended."""
        return self.host.frozen

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Start the process, which ends with `main`."""
        self._main = self.host.spawn(self._live(main))

    def stop(self) -> None:
        """Ask the process to stop, as SIGTERM does."""
        self.leaving = True
        self.host.post(self.stopping.set)

    async def ended(self) -> None:
        """Wait until the process has ended."""
        if self._main is not None:
            await asyncio.wait([self._main])

    async def abort(self) -> None:
        """Cancel the process where it waits; its messages from then on are lost."""
        self.environment.network.crash(self.host)
        if self._main is not None:
            self._main.cancel()
            await self.ended()

    def kill(self, *, noticed: bool = True) -> None:
        """Kill the process at once, at any point of its work; in virtual time only.

        Args:
            noticed: Whether clients see their connections reset; otherwise they wait for deadlines.
        """
        self.alive = False
        self.host.freeze()
        self.environment.network.crash(self.host)

    def freeze(self) -> None:
        """Suspend the process, as SIGSTOP does; in virtual time only."""
        self.host.freeze()

    def thaw(self) -> None:
        """Resume the process, as SIGCONT does."""
        if self.alive:
            self.environment.thawed()
            self.host.thaw()

    def client_environment(self) -> ClientEnvironment:
        """Return what clients in this process take from their environment."""
        return ClientEnvironment(
            clock=self.clock,
            random=self.random,
            connect=memory_connector(self.environment.network, self.host),
        )

    async def _live(self, main: Callable[[], Awaitable[None]]) -> None:
        try:
            await main()
        except ExceptionGroup as group:
            self.environment.failed(self.name, only_error(group))
        except Exception as error:  # noqa: BLE001  every failure is reported
            self.environment.failed(self.name, error)
        finally:
            self.alive = False


class SimulatedService(SimulatedProcess):
    """A simulated service; starts and stops as in `batonmq_server.runtime.process`."""

    def __init__(self, environment: MemoryEnvironment, service: ServiceSpec, life: int) -> None:
        super().__init__(environment, service.name, life)
        self.service = service
        self.server: MemoryServer | None = None
        self.run(self._serve)

    def kill(self, *, noticed: bool = True) -> None:
        """See `SimulatedProcess`."""
        if self.server is not None:
            self.server.crash(noticed)
        super().kill(noticed=noticed)

    async def abort(self) -> None:
        """See `SimulatedProcess`."""
        if self.server is not None:
            self.server.crash(noticed=True)
        await super().abort()
        if self.server is not None:
            await self.server.stop(0)

    async def _serve(self) -> None:
        environment, settings = self.environment, self.service.settings
        etcd = MemoryEtcdSession(environment.etcd, self.host, self.clock, self.random)
        runtime = Runtime(
            self.service.kind,
            settings,
            etcd,
            random=self.random,
            connect=memory_connector(environment.network, self.host),
            refuses=memory_prober(environment.network, self.host),
        )
        address = f"{self.name}:1"
        async with asyncio.TaskGroup() as following:
            nodes = following.create_task(runtime.nodes.run())
            async with self.service.build(settings, runtime) as app:
                edge = EdgeInterceptor(
                    self.clock,
                    runtime.registry,
                    app.long_polls,
                    runtime.guard,
                    services=frozenset(app.servicers),
                )
                self.server = MemoryServer(environment.network, self.host, address, edge)
                for add in app.servicers.values():
                    add(self.server)  # type: ignore[arg-type]
                add_event_stream(runtime.hub, self.server)  # type: ignore[arg-type]
                status = Health()
                status.add(self.server)  # type: ignore[arg-type]
                await status.set_live()
                runtime.node_entry.set_addresses(address, "")
                stream = ServiceStream(runtime, app.data_dir)
                stream.listen()
                self.server.start()
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(loop()) for loop in app.loops]
                    stream.start(tasks)
                    await self._register(runtime, app)
                    running.append(tasks.create_task(runtime.node_entry.keep()))
                    await self.stopping.wait()
                    await app.finish()
                    app.resign()
                    edge.drain()
                    await runtime.node_entry.remove()
                    await self.server.stop(GRACE_MS / 1000)
                    await app.drain()
                    for task in running:
                        task.cancel()
                    await stream.end(running)
            nodes.cancel()

    @staticmethod
    async def _register(runtime: Runtime, app: App) -> None:
        while not runtime.node_entry.defined:
            try:
                await runtime.node_entry.write(
                    epoch=app.epoch,
                    leader=app.leader,
                    room=app.room,
                    replica_set=app.replica_set,
                )
            except NoQuorum:
                await asyncio.sleep(0.5)
