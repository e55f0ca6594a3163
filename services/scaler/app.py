"""The process of the scaler: a client of the cluster, and a gRPC server for KEDA."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._connection.directory import ClientEnvironment
from batonmq._process import logs
from batonmq.admin.admin import Admin
from batonmq_server.runtime.health import READY, Health, serve_health
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.metrics_server import MetricsServer
from batonmq_server.runtime.server_options import SERVER_OPTIONS, with_connections_max
from batonmq_server.runtime.tls import server_credentials
from batonmq_server.scaler.config import ScalerSettings
from batonmq_server.scaler.demand_reader import DemandReader
from batonmq_server.scaler.metrics import ScalerMetrics
from batonmq_server.scaler.server import OPEN_ENDED, SERVICE, ScalerServicer
from keda.externalscaler import externalscaler_pb2_grpc

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1_000
METRICS_CONNECTIONS_MAX = 16
CALL_TIMEOUT_S = 5.0
REQUEST_BYTES_MAX = 64 * 1024


def serve(settings: ScalerSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    logs.configure(settings.log_level, settings.log_format, service="scaler", node="scaler")
    asyncio.run(_serve(settings))


async def _serve(settings: ScalerSettings) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with (
        serve_health(settings.host, settings.health_port, CONNECTIONS_MAX) as health,
        serving(settings, health=health) as address,
    ):
        log.info("serving address=%s", address)
        await stop.wait()
        log.info("draining grace_ms=%d", settings.shutdown_grace_ms)
    log.info("stopped")


@asynccontextmanager
async def serving(
    settings: ScalerSettings,
    environment: ClientEnvironment | None = None,
    health: Health | None = None,
) -> AsyncIterator[str]:
    """Serve KEDA until the end of the block; yield host:port.

    Args:
        environment: Clock, random numbers and transport of its client, for tests.
        health: The health of the process.
    """
    clock = environment.clock if environment else Clock()
    registry, health = CollectorRegistry(), health or Health()
    edge = EdgeInterceptor(clock, registry, services=frozenset({SERVICE}), open_ended=OPEN_ENDED)
    options = tuple(
        {**dict(SERVER_OPTIONS), "grpc.max_receive_message_length": REQUEST_BYTES_MAX}.items()
    )
    server = grpc.aio.server(
        interceptors=[edge], options=with_connections_max(options, CONNECTIONS_MAX)
    )
    health.add(server)
    http = MetricsServer(settings.host, settings.metrics_port, registry, METRICS_CONNECTIONS_MAX)
    admin = Admin(
        settings.nameserver,
        timeout_s=CALL_TIMEOUT_S,
        security=settings.security,
        environment=environment,
    )
    async with admin:
        reader = DemandReader(
            admin,
            clock,
            ScalerMetrics(registry),
            age_ms=settings.age_ms,
            groups_max=settings.groups_max,
        )
        servicer = ScalerServicer(
            reader, refresh_ms=settings.refresh_ms, streams_max=settings.streams_max
        )
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(servicer, server)
        port = _listen(server, settings)
        http.start()
        await server.start()
        await health.set_started()
        await health.set_serving([SERVICE, READY])
        try:
            yield f"{settings.host}:{port}"
        finally:
            edge.drain()
            await health.set_draining()
            await server.stop(settings.shutdown_grace_ms / 1_000)
            http.stop()


def _listen(server: grpc.aio.Server, settings: ScalerSettings) -> int:
    """Bind the server, with TLS if the settings have a certificate; return the port."""
    address, security = f"{settings.host}:{settings.port}", settings.security
    if security is None:
        log.warning("TLS IS OFF: every program that reaches %s can read lags", settings.host)
        return server.add_insecure_port(address)
    required = settings.tls_require_client_cert
    credentials = server_credentials(security, require_client_cert=required)
    return server.add_secure_port(address, credentials)
