"""The life of a service process: settings, start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, NoReturn, TypeVar

import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._common.aio import unless
from batonmq._common.clock import Clock
from batonmq._connection.channels import connect, connector
from batonmq._process import logs
from batonmq._process.config import ConfigError, load
from batonmq._process.settings_help import settings_help
from batonmq._telemetry.events import EventHub
from batonmq.errors import NoQuorum
from batonmq_server.runtime.etcd import EtcdSession, Lease
from batonmq_server.runtime.events import watchable
from batonmq_server.runtime.guard import Guard
from batonmq_server.runtime.health import Health, health_of
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.mirror import Mirror
from batonmq_server.runtime.options import SERVER_OPTIONS
from batonmq_server.runtime.position import NOWHERE, Position
from batonmq_server.runtime.rules import Rules
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.runtime.streaming import publisher_of
from batonmq_server.runtime.tls import check_files, listen, show_expiry

log = logging.getLogger(__name__)

Loop = Callable[[], Coroutine[Any, Any, None]]
METRICS_SERVICE = "baton.metrics.v1.MetricsService"
T = TypeVar("T")


class ToldToEnd(Exception):
    """SIGTERM or SIGINT came before the process served."""


async def _nothing() -> None:
    return


async def _at_once() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """What a service hands to the runtime.

    Attributes:
        servicers: Full proto service name to the function that adds the servicer to a server.
        rules: What the calls of all of them need of who makes them, while access is on.
        loops: Background work, each run as one task until the end. One that raises ends the
            process with status 1: no service runs on with a dead flusher.
        held: Names of methods whose calls may be held with nothing to do; on SIGTERM they are
            ended with NOT_SERVING.
        epoch: Registered with the node: among nodes of one name, the highest is the present one.
        leader: Registered with the node: False for a service that tells by itself when it leads.
        room: Registered with the node: its machine room; empty for none.
        replica_set: Registered with the node: the set it belongs to; empty for none.
        caught_up: Whether it has all that it is to follow; waits until that can be told.
        leave: Called before everything else when the process is to end: lead no more.
        drain: Called after the server has stopped taking calls: finish, flush, release.
    """

    servicers: Mapping[str, Callable[[grpc.aio.Server], None]]
    rules: Rules = field(default_factory=dict)
    loops: Sequence[Loop] = ()
    held: frozenset[str] = frozenset()
    epoch: int = 0
    leader: bool = True
    room: str = ""
    replica_set: str = ""
    caught_up: Callable[[], Awaitable[bool]] = _at_once
    leave: Callable[[], None] = lambda: None
    drain: Callable[[], Awaitable[None]] = _nothing


class Runtime:
    """What the runtime hands to a service.

    Args:
        random: Everything by chance in the process; freshly seeded by default.
        connect: Makes a channel to another service.

    Attributes:
        told_to_end: Set once SIGTERM or SIGINT has come.
    """

    def __init__(
        self,
        service: str,
        settings: ServiceSettings,
        etcd: EtcdSession,
        *,
        random: Random | None = None,
        connect: Callable[[str], grpc.aio.Channel] = connect,
    ) -> None:
        self.service, self.settings, self.etcd = service, settings, etcd
        self.clock = etcd.clock
        self.random = random or Random(secrets.randbits(64))
        self.connect = connect
        self.registry = CollectorRegistry()
        self.told_to_end = asyncio.Event()
        self.nodes = Mirror(etcd, "nodes/")
        self.guard = Guard(
            etcd,
            self.registry,
            on=settings.access,
            admins=settings.access_admins.split(","),
            certificates=settings.tls_require_client_cert,
        )
        self.hub = EventHub(
            f"{service}/{settings.node_id}", self.random.getrandbits(63) or 1, self.clock
        )
        self._node: nameserver_pb.Node | None = None
        self._position: Callable[[], Position] = lambda: NOWHERE
        self._lease: Lease | None = None
        self._writing = asyncio.Lock()
        self._left = self._listed = False
        self._start_unix_ms = self.clock.unix_ms()
        self._address = self._metrics_address = ""

    def bound(self, address: str, metrics_address: str) -> None:
        """Note the addresses others reach the process at."""
        self._address, self._metrics_address = address, metrics_address

    async def patiently(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns, which may wait for etcd as long as it takes.

        Raises:
            ToldToEnd: it would have gone on waiting.
        """
        result = await unless(self.told_to_end, work)
        if self.told_to_end.is_set():
            raise ToldToEnd
        return result

    async def register(
        self,
        *,
        epoch: int = 0,
        leader: bool = True,
        room: str = "",
        replica_set: str = "",
        position: Callable[[], Position] = lambda: NOWHERE,
    ) -> None:
        """Write, or write anew, this node's entry in etcd under the process's lease.

        Args:
            position: Of a replica's copy, at the moment of writing, also of a later one.

        Raises:
            NoQuorum: not known whether it stands there; the runtime tries again by itself.
        """
        self._position = position
        self._node = nameserver_pb.Node(
            service=nameserver_pb.ServiceKind.Value(f"SERVICE_KIND_{self.service.upper()}"),
            node_id=self.settings.node_id,
            address=self._address,
            outside_address=self.settings.outside_address,
            metrics_address=self._metrics_address,
            start_unix_ms=self._start_unix_ms,
            epoch=epoch,
            leader=leader,
            room=room,
            replica_set=replica_set,
        )
        await self._write_node()

    @property
    def registered(self) -> bool:
        """Whether the service has registered by itself."""
        return self._node is not None

    @property
    def listed(self) -> bool:
        """Whether this node's entry stands in etcd, for all that is known."""
        return self._listed

    async def keep_registered(self) -> None:
        """Refresh the lease until `unregister`; if it was lost, register under a new one.

        An entry that is gone although the lease lives is written again: a try that was given up
        may land late, over the entry, under a lease that nobody refreshes.
        """
        while not self._left:
            await asyncio.sleep(self.settings.node_lease_ms / 4000)
            try:
                if self._lease is None or not await self._lease.refresh():
                    log.warning("node entry lost, registering again")
                    self._lease, self._listed = None, False
                    await self._write_node()
                elif self._overwritten():
                    log.warning("node entry is not as it was written, writing it again")
                    await self._write_node()
            except NoQuorum as error:
                log.warning("node lease not refreshed error=%s", error)

    async def unregister(self) -> None:
        """Take the node's entry away; from now on nothing writes it again."""
        self._left = True
        async with self._writing:
            if self._lease is not None:
                with contextlib.suppress(NoQuorum):
                    await self._lease.revoke()
                self._lease = None

    def _overwritten(self) -> bool:
        """Whether the entry is gone, or is an earlier one of this process."""
        if self._node is None or self._lease is None:
            return False  # about to be written
        stored = self.nodes.values.get(f"{self.service}/{self.settings.node_id}")
        if stored is None:
            return True
        found = nameserver_pb.Node.FromString(stored.value)
        mine = found.start_unix_ms == self._start_unix_ms and found.address == self._address
        return mine and (stored.lease_id != self._lease.lease_id or found != self._node)

    async def _write_node(self) -> None:
        async with self._writing:  # else two writers could each take a lease, and one is lost
            if self._node is None or self._left:
                return
            # Without a lease until the write is known to stand, so that it is tried again.
            lease, self._lease = self._lease, None
            lease = lease or await self.etcd.lease(self.settings.node_lease_ms)
            position = self._position()
            self._node.replica_epoch = position.epoch
            self._node.replica_version = position.version
            key = self.etcd.key("nodes", self.service, self.settings.node_id)
            await self.etcd.put(key, self._node.SerializeToString(), lease)
            self._lease, self._listed = lease, True


S = TypeVar("S", bound=ServiceSettings)
Build = Callable[[S, Runtime], AbstractAsyncContextManager[App]]


def run(
    service: str,
    kind: type[S],
    build: Build[S],
    clock: Callable[[S], Clock] = lambda _: Clock(),
) -> NoReturn:
    """Run a service until SIGTERM or SIGINT. Exit status 2 for a bad configuration.

    Args:
        service: Folder name of the service, such as "storage".
        kind: Its settings.
        build: Recovers the state and gives the app; on leaving, closes what it opened.
        clock: Makes the clock of the process.
    """
    prefix = f"BATON_{service.upper()}"
    usage = f"usage: python -m batonmq_server.{service} [--print-config | --explain-config]"
    usage += f"; settings: {prefix}_*"
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(usage)
        sys.exit(0)
    if "--explain-config" in sys.argv[1:]:
        explained, problems = settings_help(kind, prefix)
        told = {"settings": list(map(asdict, explained)), "problems": list(map(asdict, problems))}
        print(json.dumps(told, indent=2))
        sys.exit(0)
    try:
        settings = load(kind, prefix)
        if not sys.argv[1:]:  # the files may be elsewhere than who looks at the settings
            check_files(settings)
    except ConfigError as error:
        _refuse(f"{service}: {error}")
    if "--print-config" in sys.argv[1:]:
        print(json.dumps(settings.model_dump(mode="json"), indent=2))
        sys.exit(0)
    if sys.argv[1:]:
        _refuse(usage)
    logs.configure(settings.log_level, settings.log_format, service=service, node=settings.node_id)
    try:
        asyncio.run(_main(service, settings, build, clock(settings)))
    except Exception as error:
        if refused := _config_error(error):
            _refuse(f"{service}: {refused}")
        why = _first_of(error)
        log.critical("process ends error=%s: %s", type(why).__name__, why, exc_info=True)
        sys.exit(1)
    sys.exit(0)


def _config_error(error: Exception) -> Exception | None:
    """The first one in `error`, which may be a group: settings that don't go with the cluster."""
    found = error.subgroup(ConfigError) if isinstance(error, ExceptionGroup) else error
    first = _first_of(found) if found is not None else None
    return first if isinstance(first, ConfigError) else None


def _first_of(error: Exception) -> Exception:
    """The first one that is no group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


async def _main(service: str, settings: S, build: Build[S], clock: Clock) -> None:
    etcd = EtcdSession(settings.etcd, settings.cluster, clock, security=settings.etcd_security)
    runtime = Runtime(service, settings, etcd, connect=connector(settings.security))
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, runtime.told_to_end.set)
    try:
        async with (
            etcd,
            health_of(settings.host, settings.health_port) as answers,
            _nodes_followed(runtime),
            build(settings, runtime) as app,
        ):
            await _serve(runtime, app, answers)
    except* ToldToEnd:
        log.info("told to end while waiting for etcd; nothing was served")
    log.info("stopped")


@asynccontextmanager
async def _nodes_followed(runtime: Runtime) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        loops = [runtime.etcd.run, runtime.nodes.run]
        if runtime.guard.on:
            loops.append(runtime.guard.mirror.run)
        running = [tasks.create_task(loop()) for loop in loops]
        yield
        for task in running:
            task.cancel()


async def _serve(runtime: Runtime, app: App, answers: Health) -> None:
    settings = runtime.settings
    runtime.guard.govern(app.rules)
    show_expiry(settings, runtime.registry)
    edge = EdgeInterceptor(runtime.clock, runtime.registry, app.held, runtime.guard)
    server = grpc.aio.server(interceptors=[edge], options=SERVER_OPTIONS)
    answers.add(server)
    for add in app.servicers.values():
        add(server)
    watchable(runtime.hub, server)
    names = [*app.servicers, METRICS_SERVICE]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    port = listen(server, settings)
    http, _ = start_http_server(settings.metrics_port, settings.host, runtime.registry)
    address = settings.advertise_address or f"{settings.host}:{port}"
    runtime.bound(address, f"{address.rpartition(':')[0]}:{http.server_port}")
    await server.start()
    await answers.recovered()
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(loop()) for loop in app.loops]
            if settings.metrics_stream:
                running.append(tasks.create_task(publisher_of(runtime).run()))
            await unless(runtime.told_to_end, _register(runtime, app))
            if not runtime.told_to_end.is_set():
                running.append(tasks.create_task(runtime.keep_registered()))
                await answers.serves(names)
                follow = answers.follow(lambda: runtime.listed, app.caught_up)
                running.append(tasks.create_task(follow))
                log.info("serving address=%s metrics_port=%d", address, http.server_port)
                await runtime.told_to_end.wait()
            log.info("draining grace_ms=%d", settings.shutdown_grace_ms)
            app.leave()
            edge.drain()
            await answers.drains()
            await _close(runtime, app, server)
            for task in running:
                task.cancel()
    finally:
        await server.stop(None)
        http.shutdown()
        http.server_close()


async def _close(runtime: Runtime, app: App, server: grpc.aio.Server) -> None:
    await runtime.unregister()
    await server.stop(runtime.settings.shutdown_grace_ms / 1000)
    await app.drain()


async def _register(runtime: Runtime, app: App) -> None:
    """Register unless the service did; wait for etcd as long as it takes."""
    while not runtime.registered:
        try:
            await runtime.register(
                epoch=app.epoch,
                leader=app.leader,
                room=app.room,
                replica_set=app.replica_set,
            )
        except NoQuorum as error:
            log.warning("not registered yet error=%s", error)
            await asyncio.sleep(0.5)
