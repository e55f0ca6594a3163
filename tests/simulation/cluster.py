"""A whole cluster in one loop: real services and clients, each process a host of its own.

    etcd            twin, never dies
    ns-a ns-b       nameserver, two replicas
    lock-a lock-b   lock manager, leader and standby
    offsets         one node, on a disk that outlives it
    broker-a        storage, likewise
    c1 c2 ...       consumers of one group
    producer

A process can be killed, frozen and restarted at any event. What a killed process would still do
is never done; its disk stays, and in the network remains what it had sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from batonmq.common.clock import Clock
from batonmq.common.errors import BatonError, NoQuorum
from batonmq.consumer import Consumer
from batonmq.consuming.handling import Handler
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.session import ConsumerSettings, OwnershipEvent
from batonmq.core.subscription import TagFilter
from batonmq.directory import Surroundings
from services.lockmgr import app as lockmgr_app
from services.lockmgr.config import LockmgrSettings
from services.nameserver import __main__ as nameserver_app
from services.nameserver.config import NameserverSettings
from services.offsets import app as offsets_app
from services.offsets.config import OffsetsSettings
from services.runtime.gates import PREFIX as GATES_PREFIX
from services.runtime.interceptor import EdgeInterceptor
from services.runtime.mirror import Mirror
from services.runtime.process import App, Runtime
from services.runtime.settings import ServiceSettings
from services.storage import app as storage_app
from services.storage.config import StorageSettings
from services.storage.node import recovered
from tests.simulation.checker import Checker
from tests.simulation.disks import OffsetsDisk, away
from tests.simulation.etcd import EtcdTwin, TwinSession
from tests.simulation.trace import Trace
from tests.storage.memory import MemoryDisk
from tests.support.network import Call, Network
from tests.support.virtual_time import Host, VirtualTimeLoop
from tests.support.wire import Server, connector

GROUP, TOPIC = "readers", "orders"
LEASE_MS = 12_000
"""Of a lock; short, so that much can happen in a run. Its margins are those of production."""
UNIX_MS = 1_700_000_000_000
GRACE_MS = 3_000

Build = Callable[[Any, Runtime], AbstractAsyncContextManager[App]]


class JumpingClock(Clock):
    """Monotonic time is the loop's; wall time jumps as a test likes."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def unix_ms(self) -> int:
        return UNIX_MS + self.monotonic_ms() + self.ahead_ms


class World:
    """What all processes of a run share, and who looks at it."""

    def __init__(self, seed: str, *, kept_max: int | None = 4_000) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.loop, self.seed = loop, seed
        self.trace = Trace(self.now_ms, kept_max=kept_max)
        self.checker = Checker(GROUP, TOPIC, LEASE_MS, self.trace, self.now_ms)
        self.network = Network(loop, self.random("network"), self)
        self.etcd = EtcdTwin(self.network)
        self.etcd.on_put.append(self.checker.etcd.written)
        self.offsets_disk = OffsetsDisk(self.random("offsets disk"))
        self.offsets_disk.on_write.append(self.checker.offsets.written)
        self.storage_disk = MemoryDisk()
        self.hosts: list[Host] = []
        loop.set_exception_handler(self._unexpected)

    def now_ms(self) -> int:
        return int(self.loop.time() * 1000)

    def random(self, purpose: str) -> Random:
        """A stream of chance of its own, so that one use does not shift another."""
        return Random(f"{self.seed}/{purpose}")

    def host(self, name: str) -> Host:
        host = Host(name)
        self.hosts.append(host)
        return host

    def called(self, call: Call, request: Any) -> None:
        self.trace.called(call, request)
        self.checker.answers.called(request)

    def answered(self, call: Call, request: Any, answer: Any) -> None:
        self.checker.answers.answered(call.target, request, answer)

    def told(self, call: Call, answer: Any) -> None:
        self.trace.told(call, answer)

    def _unexpected(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.checker.books.fail(
            "unexpected", f"{context.get('message')} {context.get('exception')!r}"
        )


@dataclass(frozen=True, slots=True)
class Service:
    """How a service is started.

    Attributes:
        name: Of the process; its address is `name:1`.
        kind: Folder name of the service.
    """

    name: str
    kind: str
    settings: ServiceSettings
    build: Build


class Process:
    """One life of one process.

    Attributes:
        alive: Whether it has not ended yet.
        leaving: Whether it was told to stop; `stopping` is set once it has noticed.
    """

    def __init__(self, world: World, name: str, life: int) -> None:
        self.world, self.name = world, name
        self.clock = JumpingClock()
        self.host = world.host(name)
        self.random = world.random(f"{name}/{life}")
        self.alive, self.leaving = True, False
        self.stopping = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    @property
    def frozen(self) -> bool:
        return self.host.frozen

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Begin; `main` is the whole life."""
        self._main = self.host.spawn(self._live(main))

    def stop(self) -> None:
        """Ask for an end, as SIGTERM does."""
        self.leaving = True
        self.host.post(self.stopping.set)

    def kill(self, *, noticed: bool = True) -> None:
        """End now, in the middle of anything.

        Args:
            noticed: Clients see their connections reset; otherwise they wait for their deadlines.
        """
        self.alive = False
        self.host.freeze()
        self.world.network.crash(self.host)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.host.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        if self.alive:
            self.world.checker.forget_pause()
            self.host.thaw()

    async def _live(self, main: Callable[[], Awaitable[None]]) -> None:
        try:
            await main()
        except Exception as error:  # noqa: BLE001  the run has failed, whatever it is
            self.world.checker.books.fail("unexpected", f"process {self.name} ends with {error!r}")
        self.alive = False

    def surroundings(self) -> Surroundings:
        return Surroundings(
            clock=self.clock, random=self.random, connect=connector(self.world.network, self.host)
        )


class ServiceProcess(Process):
    """A life of a service, as `services.runtime.process` leads it."""

    def __init__(self, world: World, service: Service, life: int) -> None:
        super().__init__(world, service.name, life)
        self.service = service
        self.server: Server | None = None
        self.leads: Callable[[], bool] = lambda: False
        self.run(self._serve)

    def kill(self, *, noticed: bool = True) -> None:
        if self.server is not None:
            self.server.crash(noticed)
        super().kill(noticed=noticed)

    async def _serve(self) -> None:
        world, settings = self.world, self.service.settings
        etcd = TwinSession(world.etcd, self.host, self.clock, self.random)
        runtime = Runtime(
            self.service.kind,
            settings,
            etcd,
            random=self.random,
            connect=connector(world.network, self.host),
        )
        address = f"{self.name}:1"
        async with asyncio.TaskGroup() as following:
            nodes = following.create_task(runtime.nodes.run())
            async with self.service.build(settings, runtime) as app:
                edge = EdgeInterceptor(self.clock, runtime.registry, app.held)
                self.server = Server(world.network, self.host, address, edge)
                for add in app.servicers.values():
                    add(self.server)  # type: ignore[arg-type]
                runtime.bound(address, "")
                self.server.start()
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(loop()) for loop in app.loops]
                    await self._register(runtime, app)
                    running.append(tasks.create_task(runtime.keep_registered()))
                    await self.stopping.wait()
                    edge.drain()
                    await runtime.unregister()
                    await self.server.stop(GRACE_MS / 1000)
                    await app.drain()
                    for task in running:
                        task.cancel()
            nodes.cancel()

    @staticmethod
    async def _register(runtime: Runtime, app: App) -> None:
        while not runtime.registered:
            try:
                await runtime.register(epoch=app.epoch, leader=app.leader)
            except NoQuorum:
                await asyncio.sleep(0.5)


class ConsumerProcess(Process):
    """A life of a member; it leaves gracefully when asked to stop.

    Attributes:
        expression: What it subscribes to.
    """

    def __init__(
        self,
        world: World,
        client_id: str,
        life: int,
        expression: str,
        settings: ConsumerSettings,
        handle: Callable[[Process, ReceivedMessage], Awaitable[None]],
    ) -> None:
        super().__init__(world, client_id, life)
        self.expression, self._asked = expression, TagFilter.parse(expression)
        self._settings, self._handle = settings, handle
        self._consumer: Consumer | None = None
        self.run(self._consume)

    async def _consume(self) -> None:
        while not self.stopping.is_set():
            consumer = self._consumer = Consumer(
                NAMESERVERS,
                GROUP,
                {TOPIC: self.expression},
                self._settings,
                client_id=self.name,
                on_ownership=self._on_ownership,
                surroundings=self.surroundings(),
            )
            try:
                async with consumer, asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._stop(consumer))
                    await consumer.run(self._handler())
                    self.stopping.set()
            except BatonError as error:
                # Refused: the client id is still in use by the life before, for example.
                self.world.trace.note(self.name, "starts anew", error)
                await asyncio.sleep(1)

    async def _stop(self, consumer: Consumer) -> None:
        await self.stopping.wait()
        consumer.stop()

    def _handler(self) -> Handler:
        async def handler(message: ReceivedMessage) -> None:
            self.world.checker.clients.started(self.name, self._asked, message)
            await self._handle(self, message)
            self.world.checker.clients.finished(self.name, message)

        return handler

    def _on_ownership(self, event: OwnershipEvent) -> None:
        consumer, checks = self._consumer, self.world.checker.clients
        assert consumer is not None
        if event.kind == "granted":
            incarnation_id = consumer._session.incarnation.incarnation_id
            checks.granted(self.name, incarnation_id, event.queue, event.token)
            return
        checks.ended(self.name, event.kind, event.queue, event.token)
        if event.kind == "fenced":
            runner = consumer._runners[event.queue]
            if runner._deadline_ms <= event.monotonic_ms:
                checks.deadline_passed(self.name, event.queue)


NAMESERVERS = "ns-a:1,ns-b:1"


def services(world: World, random: Random) -> list[Service]:
    """The services of the cluster, in the order in which they start."""
    common: dict[str, Any] = {"cluster": "sim", "node_lease_ms": 6_000}

    def nameserver(name: str) -> Service:
        settings = NameserverSettings(
            node_id=name, member_lease_ms=10_000, heartbeat_interval_ms=3_000, **common
        )
        return Service(name, "nameserver", settings, nameserver_app.build)

    def lockmgr(name: str) -> Service:
        settings = LockmgrSettings(node_id=name, lock_lease_ms=LEASE_MS, **common)
        return Service(name, "lockmgr", settings, lockmgr_app.build)

    @asynccontextmanager
    async def offsets(settings: OffsetsSettings, runtime: Runtime) -> AsyncIterator[App]:
        built = offsets_app.recovered(
            world.offsets_disk,
            settings.limits,
            runtime.clock,
            runtime.registry,
            runtime.hub,
            Mirror(runtime.etcd, GATES_PREFIX),
        )
        world.checker.offsets.watch_table(built.table)
        yield offsets_app.served(built)

    @asynccontextmanager
    async def storage(settings: StorageSettings, runtime: Runtime) -> AsyncIterator[App]:
        node = recovered(
            world.storage_disk,
            segment_bytes=settings.segment_bytes,
            monotonic_ms=runtime.clock.monotonic_ms,
        )
        with node as opened:
            world.checker.watch_store(opened.store, settings.node_id)
            async with storage_app.served(settings, runtime, opened, away(runtime.random)) as app:
                yield app

    return [
        nameserver("ns-a"),
        nameserver("ns-b"),
        Service(
            "offsets",
            "offsets",
            OffsetsSettings(
                node_id="offsets",
                data_dir=Path("unused"),
                span_max=random.choice([8, 50]),
                **common,
            ),
            offsets,
        ),
        Service(
            "broker-a",
            "storage",
            StorageSettings(
                node_id="broker-a", segment_bytes=16_384, touch_interval_ms=3_000, **common
            ),
            storage,
        ),
        lockmgr("lock-a"),
        lockmgr("lock-b"),
    ]
