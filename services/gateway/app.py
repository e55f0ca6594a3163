"""Builds the gateway from its parts."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from apache.rocketmq.v2 import service_pb2_grpc
from baton.gateway.v1 import gateway_service_pb2_grpc
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._process.config import ConfigError, ConfigProblem
from batonmq._producer.producer import Producer
from batonmq_server.gateway.access import OPERATORS_RULES, RULES, SERVICE
from batonmq_server.gateway.client_commands import ClientCommands
from batonmq_server.gateway.clients import RemoteClients
from batonmq_server.gateway.config import PING_INTERVAL_MS, GatewaySettings
from batonmq_server.gateway.core.receipt_handles import KEY_BYTES_MIN, ReceiptSigner
from batonmq_server.gateway.events import RemoteEvents
from batonmq_server.gateway.gateway_parts import GatewayParts
from batonmq_server.gateway.groups import Groups
from batonmq_server.gateway.guarded_servicer import GuardedServicer
from batonmq_server.gateway.inspection import SERVICE as INSPECTION_SERVICE
from batonmq_server.gateway.inspection import GatewayServicer
from batonmq_server.gateway.metrics import GatewayMetrics
from batonmq_server.gateway.operator_commands import OperatorCommands, StoredMessages
from batonmq_server.gateway.ports import listen_further
from batonmq_server.gateway.remote_access import RemoteAccess
from batonmq_server.gateway.routes import Routes
from batonmq_server.gateway.server import MessagingServicer
from batonmq_server.runtime.access.sealing import sealing_keys
from batonmq_server.runtime.app import App
from batonmq_server.runtime.call_tasks import CallTasks
from batonmq_server.runtime.event_publisher import nameserver_addresses
from batonmq_server.runtime.service_runtime import Runtime

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 2.0
"""How often silent clients are forgotten, and gauges are set."""
_SERIAL_BITS = 62


@asynccontextmanager
async def build(settings: GatewaySettings, runtime: Runtime) -> AsyncIterator[App]:
    """Yield a gateway, ready to be run by the runtime."""
    signer = ReceiptSigner(_receipt_key(settings))
    nameserver = await runtime.unless_stopped(nameserver_addresses(runtime.nodes)) or ""
    tasks, metrics = CallTasks("the gateway"), GatewayMetrics(runtime.registry)
    environment = ClientEnvironment(
        clock=runtime.clock, random=runtime.random, connect=runtime.connect
    )
    clients = RemoteClients(runtime.clock, settings.client_timeout_ms)
    parts = GatewayParts(
        settings=settings,
        nameserver=nameserver,
        environment=environment,
        clients=clients,
        signer=signer,
        # Another process of this node never uses the numbers of this one.
        serials=count(runtime.random.getrandbits(_SERIAL_BITS)),
        spawn=tasks.spawn,
        events=RemoteEvents(runtime.hub, runtime.clock),
        commands=ClientCommands(),
    )
    groups = Groups(parts)
    directory = Directory(nameserver, runtime.random, runtime.connect)
    stored = StoredMessages(directory, environment)
    operators = OperatorCommands(clients, groups, parts.commands, stored, metrics)

    async def housekeeping() -> None:
        async with tasks.open():
            while True:
                await asyncio.sleep(HOUSEKEEPING_S)
                clients.forget_silent()
                _export(metrics, clients, groups, runtime)

    async def finish() -> None:
        await runtime.node_entry.remove()  # no route names this gateway any more
        await groups.stop()

    try:
        async with Producer(nameserver, environment=environment) as producer:
            servicer = MessagingServicer(
                parts,
                groups,
                Routes(runtime.nodes, settings.node_id),
                producer,
                directory,
                metrics,
            )
            served: Any = servicer
            if runtime.guard.on:
                sealing = sealing_keys(settings.sealing_key_file)
                remote = RemoteAccess(runtime.guard, settings, runtime.clock, sealing)
                served = GuardedServicer(servicer, remote, clients, metrics)
            yield App(
                servicers={
                    SERVICE: partial(
                        service_pb2_grpc.add_MessagingServiceServicer_to_server, served
                    ),
                    INSPECTION_SERVICE: partial(
                        gateway_service_pb2_grpc.add_GatewayServiceServicer_to_server,
                        GatewayServicer(clients, groups, runtime.clock, operators),
                    ),
                },
                rules={**RULES, **OPERATORS_RULES},
                own_admission=frozenset({SERVICE}),
                listen=partial(listen_further, settings),
                loops=[housekeeping],
                ping_interval_ms=PING_INTERVAL_MS,
                long_polls=frozenset({"ReceiveMessage", "PullMessage"}),
                finish=finish,
            )
    finally:
        await directory.close()


def _receipt_key(settings: GatewaySettings) -> bytes:
    if not settings.receipt_key_file:
        return secrets.token_bytes(KEY_BYTES_MIN)
    try:
        key = Path(settings.receipt_key_file).read_bytes().strip()
    except OSError as error:
        text = f"receipt_key_file: {error}"
        raise ConfigError(ConfigProblem("receipt_key_file", text)) from error
    if len(key) < KEY_BYTES_MIN:
        text = f"receipt_key_file has {len(key)} bytes; it needs {KEY_BYTES_MIN} at least"
        raise ConfigError(ConfigProblem("receipt_key_file", text))
    return key


def _export(
    metrics: GatewayMetrics, clients: RemoteClients, groups: Groups, runtime: Runtime
) -> None:
    begins = (group.oldest_lease_ms() for group in groups)
    now_ms = runtime.clock.monotonic_ms()
    oldest_ms = min((one for one in begins if one is not None), default=now_ms)
    metrics.set_gauges(
        clients=len(clients),
        groups=len(list(groups)),
        in_flight_messages=sum(group.leased_count for group in groups),
        waiting_receives=sum(group.waiting_count for group in groups),
        oldest_lease_seconds=(now_ms - oldest_ms) / 1_000,
    )
