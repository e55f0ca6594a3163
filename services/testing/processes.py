"""The processes of a cluster in one event loop, and what they share."""

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
from batonmq_server.runtime.event_publisher import event_publisher
from batonmq_server.runtime.event_stream_server import add_event_stream
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.storage.node import StorageNode
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryOffsetsDisk
from batonmq_server.testing.memory_etcd import MemoryEtcd, MemoryEtcdSession
from batonmq_server.testing.memory_grpc import MemoryServer, memory_connector
from batonmq_server.testing.memory_network import MemoryNetwork, NetworkObserver
from batonmq_server.testing.virtual_time import VirtualHost, VirtualTimeLoop

log = logging.getLogger(__name__)

Build = Callable[[Any, Runtime], AbstractAsyncContextManager[App]]
START_UNIX_MS = 1_700_000_000_000
"""The wall clock at the start of virtual time: 2023-11-14 22:13:20 UTC."""
GRACE_MS = 3_000


class LoopClock(Clock):
    """Wall time that goes with the loop's, too; `ahead_ms` makes it jump."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def unix_ms(self) -> int:
        """See Clock."""
        return START_UNIX_MS + self.monotonic_ms() + self.ahead_ms


class MemoryEnvironment(NetworkObserver):
    """The network, etcd and disks of one cluster. They outlive processes.

    Args:
        seed: Of everything by chance. In virtual time two worlds with one seed go the same way.

    Attributes:
        virtual: Whether time is.
        offsets_disks: By node id; a node's is made when it first starts.
        storage_disks: By node id, likewise.
    """

    def __init__(self, seed: str) -> None:
        self.loop, self.seed = asyncio.get_running_loop(), seed
        self.virtual = isinstance(self.loop, VirtualTimeLoop)
        self.network = MemoryNetwork(self.random("network"), self)
        self.etcd = MemoryEtcd(self.network)
        self.offsets_disks: dict[str, MemoryOffsetsDisk] = {}
        self.storage_disks: dict[str, MemoryDisk] = {}
        self.hosts: list[VirtualHost] = []

    def now_ms(self) -> int:
        """Time of the loop."""
        return int(self.loop.time() * 1000)

    def random(self, purpose: str) -> Random:
        """A stream of chance of its own, so that one use does not shift another."""
        return Random(f"{self.seed}/{purpose}")

    def host(self, name: str) -> VirtualHost:
        """Where a new process runs."""
        host = VirtualHost(name)
        self.hosts.append(host)
        return host

    def clock(self) -> Clock:
        """The clock of a new process."""
        return LoopClock() if self.virtual else Clock()

    def write_s(self, _: Random) -> float:
        """How long a synced write takes, in seconds."""
        return 0

    def offsets_disk_of(self, node_id: str) -> MemoryOffsetsDisk:
        """The disk of a node of offsets."""
        if node_id not in self.offsets_disks:
            random = self.random(f"offsets disk {node_id}")
            self.offsets_disks[node_id] = MemoryOffsetsDisk(random, self.write_s)
        return self.offsets_disks[node_id]

    def crash_disk(self, name: str) -> None:
        """What is done to the disk of a service from now on does not happen."""
        if name in self.storage_disks:
            self.storage_disks[name] = self.storage_disks[name].killed()

    # ---- what happens to processes

    def offsets_opened(self, offsets: OffsetsEpoch) -> None:
        """A life of offsets, or a leadership, begins to serve what is on its disk."""

    def storage_opened(self, node_id: str, node: StorageNode) -> None:
        """A life of storage has; or a replica has opened its copy, again if it was cut."""

    def thawed(self) -> None:
        """A process goes on that was frozen."""

    def failed(self, process: str, error: BaseException) -> None:
        """A process has ended by itself."""
        log.critical("process ends name=%s", process, exc_info=error)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How a service is started.

    Attributes:
        name: Of the process; its address is `name:1`.
        kind: Folder name of the service.
    """

    name: str
    kind: str
    settings: ServiceSettings
    build: Build


class SimulatedProcess:
    """One life of one process.

    Attributes:
        life: How many there were before, under the name.
        alive: Whether it has not ended yet.
        leaving: Whether it was told to stop; `stopping` is set once it has noticed.
    """

    def __init__(self, world: MemoryEnvironment, name: str, life: int) -> None:
        self.world, self.name, self.life = world, name, life
        self.clock = world.clock()
        self.host = world.host(name)
        self.random = world.random(f"{name}/{life}")
        self.alive, self.leaving = True, False
        self.stopping = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    @property
    def frozen(self) -> bool:
        """Whether it stands still."""
        return self.host.frozen

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Begin; `main` is the whole life."""
        self._main = self.host.spawn(self._live(main))

    def stop(self) -> None:
        """Ask for an end, as SIGTERM does."""
        self.leaving = True
        self.host.post(self.stopping.set)

    async def ended(self) -> None:
        """Until the life is over."""
        if self._main is not None:
            await asyncio.wait([self._main])

    async def abort(self) -> None:
        """End where it waits; what it still tries to tell others is not heard."""
        self.world.network.crash(self.host)
        if self._main is not None:
            self._main.cancel()
            await self.ended()

    def kill(self, *, noticed: bool = True) -> None:
        """End now, in the middle of anything; in virtual time only.

        Args:
            noticed: Clients see their connections reset; otherwise they wait for their deadlines.
        """
        self.alive = False
        self.host.freeze()
        self.world.network.crash(self.host)

    def freeze(self) -> None:
        """SIGSTOP; in virtual time only."""
        self.host.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        if self.alive:
            self.world.thawed()
            self.host.thaw()

    def surroundings(self) -> ClientEnvironment:
        """What its clients take from outside."""
        return ClientEnvironment(
            clock=self.clock,
            random=self.random,
            connect=memory_connector(self.world.network, self.host),
        )

    async def _live(self, main: Callable[[], Awaitable[None]]) -> None:
        try:
            await main()
        except ExceptionGroup as group:
            self.world.failed(self.name, only_error(group))
        except Exception as error:  # noqa: BLE001  the world is told, whatever it is
            self.world.failed(self.name, error)
        finally:
            self.alive = False


class SimulatedService(SimulatedProcess):
    """A life of a service, as `batonmq_server.runtime.process` leads it."""

    def __init__(self, world: MemoryEnvironment, service: ServiceSpec, life: int) -> None:
        super().__init__(world, service.name, life)
        self.service = service
        self.server: MemoryServer | None = None
        self.run(self._serve)

    def kill(self, *, noticed: bool = True) -> None:
        """See SimulatedProcess."""
        if self.server is not None:
            self.server.crash(noticed)
        super().kill(noticed=noticed)

    async def abort(self) -> None:
        """See SimulatedProcess."""
        if self.server is not None:
            self.server.crash(noticed=True)
        await super().abort()
        if self.server is not None:
            await self.server.stop(0)

    async def _serve(self) -> None:
        world, settings = self.world, self.service.settings
        etcd = MemoryEtcdSession(world.etcd, self.host, self.clock, self.random)
        runtime = Runtime(
            self.service.kind,
            settings,
            etcd,
            random=self.random,
            connect=memory_connector(world.network, self.host),
        )
        address = f"{self.name}:1"
        async with asyncio.TaskGroup() as following:
            nodes = following.create_task(runtime.nodes.run())
            async with self.service.build(settings, runtime) as app:
                edge = EdgeInterceptor(self.clock, runtime.registry, app.long_polls)
                self.server = MemoryServer(world.network, self.host, address, edge)
                for add in app.servicers.values():
                    add(self.server)  # type: ignore[arg-type]
                add_event_stream(runtime.hub, self.server)  # type: ignore[arg-type]
                runtime.node_entry.set_addresses(address, "")
                self.server.start()
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(loop()) for loop in app.loops]
                    if settings.metrics_stream:
                        running.append(tasks.create_task(event_publisher(runtime).run()))
                    await self._register(runtime, app)
                    running.append(tasks.create_task(runtime.node_entry.keep()))
                    await self.stopping.wait()
                    app.resign()
                    edge.drain()
                    await runtime.node_entry.remove()
                    await self.server.stop(GRACE_MS / 1000)
                    await app.drain()
                    for task in running:
                        task.cancel()
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
