"""The life cycle of a service process: load settings, start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import NoReturn, TypeVar

import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from batonmq._common.aio import unless
from batonmq._common.clock import Clock
from batonmq._connection.channels import connector
from batonmq._process import logs
from batonmq._process.config import ConfigError, ConfigProblem, load
from batonmq._process.settings_help import settings_help
from batonmq.errors import NoQuorum
from batonmq_server.runtime.app import App, FurtherPorts, Loop
from batonmq_server.runtime.call_streams import ServerWithCalls
from batonmq_server.runtime.connection_limiter import ConnectionLimiter
from batonmq_server.runtime.connection_pauser import ConnectionPauser
from batonmq_server.runtime.descriptors import (
    DescriptorShares,
    open_descriptors,
    raise_limit,
    share_descriptors,
)
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.event_stream_server import add_event_stream
from batonmq_server.runtime.health import Health, serve_health
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.metrics import export_descriptors
from batonmq_server.runtime.metrics_server import MetricsServer
from batonmq_server.runtime.process_state import process_state
from batonmq_server.runtime.server_options import (
    SERVER_OPTIONS,
    with_connections_max,
    with_ping_interval,
)
from batonmq_server.runtime.service_runtime import Runtime, StopRequested
from batonmq_server.runtime.service_stream import ServiceStream
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.runtime.settings_server import SettingsServicer, add_settings
from batonmq_server.runtime.tls import check_files, export_expiry, listen

log = logging.getLogger(__name__)

PRIVATE_UMASK = 0o077
"""What a service stores is for its own user only: files have mode 0600, folders 0700."""
METRICS_SERVICE = "baton.metrics.v1.MetricsService"
SETTINGS_SERVICE = "baton.settings.v1.SettingsService"
CALL_SERVICE = "baton.calls.v1.CallService"
_COMMON_SERVICES = (METRICS_SERVICE, SETTINGS_SERVICE, CALL_SERVICE)


S = TypeVar("S", bound=ServiceSettings)
Build = Callable[[S, Runtime], AbstractAsyncContextManager[App]]


def run(
    service: str,
    kind: type[S],
    build: Build[S],
    clock: Callable[[S], Clock] = lambda _: Clock(),
) -> NoReturn:
    """Run a service until SIGTERM or SIGINT. The exit status is 2 for a bad configuration.

    Args:
        service: Folder name of the service, such as "storage".
        kind: Class of its settings.
        build: Recovers the state and yields the app; on exit closes what it opened.
        clock: Makes the clock of the process.
    """
    prefix = f"BATON_{service.upper()}"
    usage = f"usage: python -m batonmq_server.{service} [--print-config | --explain-config]"
    usage += f"; settings: {prefix}_*"
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(usage)
        sys.exit(0)
    if "--explain-config" in sys.argv[1:]:
        described, problems = settings_help(kind, prefix)
        report = {"settings": list(map(asdict, described)), "problems": list(map(asdict, problems))}
        print(json.dumps(report, indent=2))
        sys.exit(0)
    try:
        settings = load(kind, prefix)
        if not sys.argv[1:]:  # a user that prints the settings may not have the files
            check_files(settings)
    except ConfigError as error:
        _exit_with_usage_error(f"{service}: {error}")
    if "--print-config" in sys.argv[1:]:
        print(json.dumps(settings.model_dump(mode="json"), indent=2))
        sys.exit(0)
    if sys.argv[1:]:
        _exit_with_usage_error(usage)
    os.umask(PRIVATE_UMASK)
    logs.configure(settings.log_level, settings.log_format, service=service, node=settings.node_id)
    described, _ = settings_help(kind, prefix)
    servicer = SettingsServicer(service, settings.node_id, described)
    try:
        asyncio.run(_main(service, settings, build, clock(settings), servicer))
    except Exception as error:
        if rejected := _config_error(error):
            _exit_with_usage_error(f"{service}: {rejected}")
        cause = _first_of(error)
        log.critical("process ends error=%s: %s", type(cause).__name__, cause, exc_info=True)
        sys.exit(1)
    sys.exit(0)


def _config_error(error: Exception) -> Exception | None:
    """Return the first ConfigError in `error`, which may be a group; None if there is none.

    It says that a setting does not match the state of the cluster.
    """
    config_errors = error.subgroup(ConfigError) if isinstance(error, ExceptionGroup) else error
    first = _first_of(config_errors) if config_errors is not None else None
    return first if isinstance(first, ConfigError) else None


def _first_of(error: Exception) -> Exception:
    """Return the first exception of a group, or `error` itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _exit_with_usage_error(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


async def _main(
    service: str, settings: S, build: Build[S], clock: Clock, described: SettingsServicer
) -> None:
    shares = _share_descriptors(settings)
    etcd = EtcdSession(settings.etcd, settings.cluster, clock, security=settings.etcd_security)
    runtime = Runtime(service, settings, etcd, connect=connector(settings.security))
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, runtime.stop_requested.set)
    try:
        async with (
            etcd,
            serve_health(settings.host, settings.health_port, shares.health) as status,
            _following_etcd(runtime),
            build(settings, runtime) as app,
        ):
            await _serve(runtime, app, status, shares, described)
    except* StopRequested:
        log.info("stopped while waiting for etcd; nothing was served")
    log.info("stopped")


def _share_descriptors(settings: ServiceSettings) -> DescriptorShares:
    limit = raise_limit()
    try:
        return share_descriptors(
            limit, settings.connections_max, settings.connections_per_address_max
        )
    except ValueError as error:
        raise ConfigError(ConfigProblem("connections_max", str(error))) from error


@asynccontextmanager
async def _following_etcd(runtime: Runtime) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        loops = [runtime.etcd.run, runtime.nodes.run]
        if runtime.guard.on:
            loops += [runtime.guard.mirror.run, runtime.guard.quota_mirror.run]
        if runtime.oidc is not None:
            loops.append(runtime.oidc.keys.run)
        running = [tasks.create_task(loop()) for loop in loops]
        yield
        for task in running:
            task.cancel()


async def _serve(
    runtime: Runtime,
    app: App,
    status: Health,
    shares: DescriptorShares,
    described: SettingsServicer,
) -> None:
    settings = runtime.settings
    runtime.guard.add_rules(app.rules, app.own_admission)
    expiries = export_expiry(settings, runtime.registry)
    described.state = partial(process_state, runtime.clock, expiries, access_on=runtime.guard.on)
    pauser = ConnectionPauser(runtime.registry)
    edge = EdgeInterceptor(
        runtime.clock,
        runtime.registry,
        app.long_polls,
        runtime.guard,
        pauser.pause,
        services=frozenset(app.servicers),
    )
    server = _server(runtime, app, status, edge, shares.clients)
    add_settings(described, server)
    port, further = listen(server, settings), _listen_further(runtime, app, server)
    ports = (port, *further.ports)
    export_descriptors(runtime.registry, shares)
    limiter = ConnectionLimiter(ports, shares.per_address, runtime.registry, open_descriptors)
    http = MetricsServer(settings.host, settings.metrics_port, runtime.registry, shares.metrics)
    http.start()
    address = settings.advertise_address or f"{settings.host}:{port}"
    runtime.node_entry.set_addresses(
        address, f"{address.rpartition(':')[0]}:{http.server_port}", further
    )
    stream = ServiceStream(runtime, app.data_dir)
    # Later garbage collections skip modules and the recovered state: 26 to 62 ms for each full one.
    gc.freeze()
    await _start(server, status, stream)
    try:
        async with asyncio.TaskGroup() as tasks:
            loops: list[Loop] = [limiter.run, partial(pauser.run, ports), *app.loops]
            running = [tasks.create_task(loop()) for loop in loops]
            stream.start(tasks)
            await unless(runtime.stop_requested, _register(runtime, app))
            if not runtime.stop_requested.is_set():
                running.append(tasks.create_task(runtime.node_entry.keep()))
                await status.set_serving([*app.servicers, *_COMMON_SERVICES])
                follow = status.follow_readiness(lambda: runtime.node_entry.listed, app.caught_up)
                running.append(tasks.create_task(follow))
                log.info(
                    "serving address=%s metrics_port=%d frozen_objects=%d",
                    address,
                    http.server_port,
                    gc.get_freeze_count(),
                )
                await runtime.stop_requested.wait()
            await _drain(app, edge, status, settings.shutdown_grace_ms)
            await _close(runtime, app, server)
            for task in running:
                task.cancel()
            await stream.end(running)
    finally:
        await server.stop(None)
        http.stop()


def _listen_further(runtime: Runtime, app: App, server: grpc.aio.Server) -> FurtherPorts:
    further = app.listen(server)
    if further.plain_address:
        runtime.guard.require_tls_for_tokens()
    return further


def _server(
    runtime: Runtime, app: App, status: Health, edge: EdgeInterceptor, connections_max: int
) -> grpc.aio.Server:
    """Return the server of the process, with all its services."""
    options = with_connections_max(SERVER_OPTIONS, connections_max)
    if app.ping_interval_ms:
        options = with_ping_interval(options, app.ping_interval_ms)
    server = grpc.aio.server(interceptors=[edge], options=options)
    status.add(server)
    with_calls = ServerWithCalls(server, edge)
    for add in app.servicers.values():
        add(with_calls)  # type: ignore[arg-type]
    add_event_stream(runtime.hub, server)
    names = [*app.servicers, *_COMMON_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    return server


async def _start(server: grpc.aio.Server, status: Health, stream: ServiceStream) -> None:
    stream.listen()  # before the first call, so that no event is missing
    await server.start()
    await status.set_started()


async def _drain(app: App, edge: EdgeInterceptor, status: Health, grace_ms: int) -> None:
    log.info("draining grace_ms=%d", grace_ms)
    await app.finish()
    app.resign()
    edge.drain()
    await status.set_draining()


async def _close(runtime: Runtime, app: App, server: grpc.aio.Server) -> None:
    await runtime.node_entry.remove()
    await server.stop(runtime.settings.shutdown_grace_ms / 1000)
    await app.drain()


async def _register(runtime: Runtime, app: App) -> None:
    """Write the node entry unless the service did; wait for etcd without a bound."""
    while not runtime.node_entry.defined:
        try:
            await runtime.node_entry.write(
                epoch=app.epoch,
                leader=app.leader,
                room=app.room,
                replica_set=app.replica_set,
            )
        except NoQuorum as error:
            log.warning("not registered yet error=%s", error)
            await asyncio.sleep(0.5)
