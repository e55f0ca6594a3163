"""What the runtime hands to a service: settings, etcd, metrics registry, access guard, events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, TypeVar

import grpc.aio
from prometheus_client import CollectorRegistry

from batonmq._common.aio import unless
from batonmq._connection.channels import connect
from batonmq._telemetry.event_hub import EventHub
from batonmq_server.runtime.access.audit_events import AuditEvents
from batonmq_server.runtime.access.audit_log import AuditLog
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.node_entry import NodeEntry
from batonmq_server.runtime.oidc_settings import oidc_tokens
from batonmq_server.runtime.refusal import refuses
from batonmq_server.runtime.settings import ServiceSettings

T = TypeVar("T")


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived before the process served."""


class Runtime:
    """The shared parts of one service process.

    Args:
        random: Source of all random choices in the process; freshly seeded by default.
        connect: Makes a channel to another service.
        refuses: Returns whether connections to a host:port are refused.

    Attributes:
        nodes: Mirror of the nodes that are registered in etcd.
        node_entry: This node's entry among them.
        oidc: The tokens of the OIDC issuer; None for none.
        stop_requested: Set when SIGTERM or SIGINT arrives.
    """

    def __init__(
        self,
        service: str,
        settings: ServiceSettings,
        etcd: EtcdSession,
        *,
        random: Random | None = None,
        connect: Callable[[str], grpc.aio.Channel] = connect,
        refuses: Callable[[str], Awaitable[bool]] = refuses,
    ) -> None:
        self.service, self.settings, self.etcd = service, settings, etcd
        self.clock = etcd.clock
        self.random = random or Random(secrets.randbits(64))
        self.connect, self.refuses = connect, refuses
        self.registry = CollectorRegistry()
        self.stop_requested = asyncio.Event()
        self.nodes = EtcdMirror(etcd, "nodes/")
        self.node_entry = NodeEntry(service, settings, etcd, self.nodes)
        source = f"{service}/{settings.node_id}"
        self.hub = EventHub(source, self.random.getrandbits(63) or 1, self.clock)
        self.oidc = oidc_tokens(settings, self.clock, self.registry)
        self.guard = Guard(
            etcd,
            self.registry,
            on=settings.access,
            admins=settings.access_admins.split(","),
            certificates=settings.tls_require_client_cert,
            oidc=self.oidc,
        )
        if settings.access:
            self.guard.audits.append(AuditEvents(self.hub, self.clock))
        if settings.access and settings.audit_file:
            self.guard.audits.append(
                AuditLog(settings.audit_file, settings.audit_bytes_max, source, self.clock)
            )

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, which may wait for etcd without a bound.

        Raises:
            StopRequested: the process was told to stop first.
        """
        result = await unless(self.stop_requested, work)
        if self.stop_requested.is_set():
            raise StopRequested
        return result
