"""The lists in docs/operations.md that the code decides: settings and metrics.

    python -m tests.docs.tables     writes them anew

A list stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of the page is
nobody's business here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from pydantic.fields import FieldInfo

from batonmq.common.clock import Clock
from batonmq.common.config import Settings
from batonmq.common.explain import allowed_of, default_of, meanings, unit_of
from batonmq.events import EventHub
from batonmq.metrics import ClientMetrics
from batonspark.alert_writer import AlertGauges
from batonspark.progress import ProgressListener
from batonspark.settings import JobSettings
from services.lockmgr.config import LockmgrSettings
from services.lockmgr.metrics import Recorder
from services.nameserver.catalog import Catalog
from services.nameserver.config import NameserverSettings
from services.nameserver.lookout import StuckMetrics
from services.nameserver.telemetry import Telemetry
from services.offsets.config import OffsetsSettings
from services.offsets.metrics import OffsetsMetrics
from services.runtime.etcd import EtcdSession
from services.runtime.interceptor import EdgeInterceptor
from services.runtime.mirror import Mirror
from services.runtime.settings import ServiceSettings
from services.storage.config import StorageSettings
from services.storage.metrics import StorageMetrics

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "storage": StorageSettings,
    "offsets": OffsetsSettings,
    "lockmgr": LockmgrSettings,
    "nameserver": NameserverSettings,
}
_BLOCK = re.compile(r"(<!-- begin ([a-z -]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def lists() -> dict[str, str]:
    """Every list by its name, as Markdown."""
    found = {"settings common": _settings(ServiceSettings, "<SERVICE>", _common_fields())}
    for service, kind in SETTINGS.items():
        own = [name for name in kind.model_fields if name in kind.__annotations__]
        found[f"settings {service}"] = _settings(kind, service.upper(), own)
    found["settings spark"] = _settings(JobSettings, "SPARK", JobSettings.model_fields)
    for service, make in _METRICS.items():
        found[f"metrics {service}"] = _metrics(make)
    return found


def rewritten(page: str, found: Mapping[str, str]) -> str:
    """`page` with the lists of `found` in place of its own."""
    return _BLOCK.sub(lambda block: block[1] + found.get(block[2], "") + block[3], page)


def names_of(page: str) -> list[str]:
    """Names of the lists on the page, in order."""
    return [block[2] for block in _BLOCK.finditer(page)]


def _common_fields() -> list[str]:
    return [name for name in ServiceSettings.model_fields if name != "node_id"]


def _settings(kind: type[Settings], service: str, names: Iterable[str]) -> str:
    told = meanings(kind)
    rows = []
    for name in names:
        field = kind.model_fields[name]
        variable = f"`BATON_{service}_{name.upper()}`"
        rows.append(
            (variable, unit_of(name, field), _default(field), allowed_of(field), told[name])
        )
    return _table(("Variable", "Unit", "Default", "Allowed", "Meaning"), rows)


def _default(field: FieldInfo) -> str:
    text = default_of(field)
    if text is None:
        return "**required**"
    return f"`{text}`" if text else "empty"


class _Recording(CollectorRegistry):
    """Remembers what was registered: a series with labels shows nothing before its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[Any] = []

    def register(self, collector: Collector) -> None:
        self.registered.append(collector)
        super().register(collector)


def _metrics(make: Callable[[CollectorRegistry], object]) -> str:
    registry = _Recording()
    kept = make(registry)
    rows = []
    for collector in registry.registered:
        (metric,) = collector.describe()
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        rows.append((f"`{name}`", metric.type, labels, metric.documentation))
    del kept
    return _table(("Name", "Type", "Labels", "Meaning"), sorted(rows))


def _offsets_metrics(registry: CollectorRegistry) -> object:
    return OffsetsMetrics(registry)


def _nameserver_metrics(registry: CollectorRegistry) -> object:
    etcd = EtcdSession("127.0.0.1:1", "docs", Clock())
    catalog = Catalog(etcd, Mirror(etcd, "nodes/"), watchers_max=1)
    return Telemetry(registry, _hub(), catalog, 30_000), StuckMetrics(registry)


def _hub() -> EventHub:
    return EventHub("docs", 1, Clock())


_METRICS: Mapping[str, Callable[[CollectorRegistry], object]] = {
    "common": lambda registry: EdgeInterceptor(Clock(), registry),
    "storage": StorageMetrics,
    "offsets": _offsets_metrics,
    "lockmgr": lambda registry: Recorder(registry, _hub()),
    "nameserver": _nameserver_metrics,
    "clients": ClientMetrics,
    "spark": lambda registry: (ProgressListener(registry), AlertGauges(registry)),
}


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(), lists()))
