"""The metrics that each process registers, read from the code.

The program creates the metrics as the processes do and records what they register. It reads no
page of metrics, because a metric with labels has no samples before its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from batonmq._common.clock import Clock
from batonmq._process.config import load
from batonmq._telemetry.client_metrics import ClientMetrics
from batonmq._telemetry.event_hub import EventHub
from batonmq_server.gateway.metrics import GatewayMetrics
from batonmq_server.lockmgr.metrics import LockmgrMetrics
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.metrics import (
    CatalogMetrics,
    EtcdMetrics,
    LagMetrics,
    MembershipMetrics,
    ReplicaSetMetrics,
)
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.connection_limiter import ConnectionLimiter
from batonmq_server.runtime.connection_pauser import ConnectionPauser
from batonmq_server.runtime.descriptors import open_descriptors, share_descriptors
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.metrics import OidcMetrics, export_descriptors
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.runtime.tls import export_expiry
from batonmq_server.scaler.metrics import ScalerMetrics
from batonmq_server.storage.metrics import StorageMetrics
from batonspark.alert_writer import AlertGauges
from batonspark.progress import ProgressListener

SERVICES = ("storage", "offsets", "lockmgr", "nameserver", "gateway")


@dataclass(frozen=True, slots=True, order=True)
class Family:
    """One metric.

    Attributes:
        name: The name in queries; that of a counter ends in `_total`.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class _Recording(CollectorRegistry):
    """A registry that records what is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[Any] = []

    def register(self, collector: Collector) -> None:
        self.registered.append(collector)
        super().register(collector)


def families() -> dict[str, list[Family]]:
    """Return the metrics of each owner, by name; `common`: all services, `clients`: programs.

    `oidc`: services with the setting `oidc_issuer`.
    """
    return {owner: _families(make) for owner, make in _REGISTER.items()}


def _families(make: Callable[[CollectorRegistry], object]) -> list[Family]:
    registry = _Recording()
    kept = make(registry)
    found = []
    for collector in registry.registered:
        for metric in collector.describe():
            labels = getattr(metric, "_labelnames", ()) or getattr(collector, "_labelnames", ())
            name = metric.name + ("_total" if metric.type == "counter" else "")
            found.append(Family(name, metric.type, tuple(labels), metric.documentation))
    del kept
    return sorted(found)


def _nameserver(registry: CollectorRegistry) -> object:
    etcd = EtcdSession("127.0.0.1:1", "docs", Clock())
    catalog = Catalog(etcd, EtcdMirror(etcd, "nodes/"), watchers_max=1)
    CatalogMetrics(registry, catalog)
    registry.register(ReplicaSetMetrics(catalog))
    return MembershipMetrics(registry), LagMetrics(registry), EtcdMetrics(registry)


def _hub() -> EventHub:
    return EventHub("docs", 1, Clock())


def _common(registry: CollectorRegistry) -> object:
    etcd = EtcdSession("127.0.0.1:1", "docs", Clock())
    settings = load(ServiceSettings, "BATON_DOCS", {"BATON_DOCS_NODE_ID": "docs"})
    export_expiry(settings, registry)
    export_descriptors(registry, share_descriptors(1_024))
    ConnectionLimiter([], 1, registry, open_descriptors)
    ConnectionPauser(registry)
    return EdgeInterceptor(Clock(), registry), Guard(etcd, registry)


_REGISTER: Mapping[str, Callable[[CollectorRegistry], object]] = {
    "common": _common,
    "oidc": OidcMetrics,
    "storage": StorageMetrics,
    "offsets": OffsetsMetrics,
    "lockmgr": lambda registry: LockmgrMetrics(registry, _hub()),
    "nameserver": _nameserver,
    "gateway": GatewayMetrics,
    "scaler": ScalerMetrics,
    "clients": ClientMetrics,
    "spark": lambda registry: (ProgressListener(registry), AlertGauges(registry)),
}
