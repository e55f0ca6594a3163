"""Who is there and who leads, of every replica set that is needed, as series of Prometheus.

Every nameserver shows it. A set is shown while one of its nodes is registered, and one of storage
also while a topic has queues there: then nobody may be left to say that nobody leads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq_server.nameserver.catalog import Catalog

_LABELS = ("kind", "replica_set")
_STORAGE = "storage"


class SetMetrics(Collector):
    """Looks at the catalog when it is asked, from another thread: so at copies."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The series without values."""
        yield GaugeMetricFamily(
            "baton_set_nodes", "Nodes of a replica set that are registered.", labels=_LABELS
        )
        yield GaugeMetricFamily(
            "baton_set_leaders",
            "Those of them that lead: 1, but for the moment of a change.",
            labels=_LABELS,
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The series as of now."""
        nodes, leaders = Counter(self._needed()), Counter(self._needed())
        for node in self._catalog.nodes()[0]:
            kind = pb.ServiceKind.Name(node.service).removeprefix("SERVICE_KIND_").lower()
            if kind == "nameserver":
                continue
            key = kind, node.replica_set or (node.node_id if kind == _STORAGE else kind)
            nodes[key] += 1
            leaders[key] += node.leader
        for family, counts in zip(self.describe(), (nodes, leaders), strict=True):
            for key, count in sorted(counts.items()):
                family.add_metric(key, count)
            yield family

    def _needed(self) -> dict[tuple[str, str], int]:
        return {
            (_STORAGE, part.broker): 0
            for topic in list(self._catalog.topics.values())
            for part in topic.spread
        }
