"""Prometheus metrics of the nameserver, by concern."""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.aio import in_steps
from batonmq._core.queues import GroupQueue
from batonmq.errors import ClientIdInUse, SubscriptionConflict
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.diagnosis import QueueDiagnosis
from batonmq_server.nameserver.core.evidence import QueueEvidence

RESET, UNASKED = "reset", "unasked"
"""Causes of a committed offset that went back. RESET: an operator reset it, or the topic was
created again. UNASKED: no reset caused it."""
_BY_TOPIC = ("group", "topic")
_ROCKETMQ_LABELS = ("consumer_group", "topic")
_SET_LABELS = ("kind", "replica_set")
_STORAGE = "storage"

Labels = tuple[str, ...]
Values = dict[Labels, float]


class EtcdMetrics:
    """Space and alarms of etcd."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.db_bytes = Gauge(
            "baton_nameserver_etcd_db_bytes",
            "Size of the file of an etcd member in bytes; its space quota counts this.",
            registry=registry,
        )
        self.in_use_bytes = Gauge(
            "baton_nameserver_etcd_db_in_use_bytes",
            "Bytes of that file that are in use; defragmentation frees the others.",
            registry=registry,
        )
        self.alarm = Gauge(
            "baton_nameserver_etcd_alarm",
            "1 while etcd has the alarm. With NOSPACE it accepts no writes.",
            ("alarm",),
            registry=registry,
        )


class CatalogMetrics:
    """Gauges of what this replica knows; each reads the catalog when it is scraped."""

    def __init__(self, registry: CollectorRegistry, catalog: Catalog) -> None:
        gauges: Mapping[str, tuple[str, Callable[[], float]]] = {
            "topics": ("Topics.", lambda: len(catalog.topics)),
            "shrinking_topics": (
                "Topics with retiring queues, which are removed once they are read.",
                lambda: sum(topic.shrinking for topic in list(catalog.topics.values())),
            ),
            "groups": (
                "Consumer groups, those without members included.",
                lambda: len(catalog.groups),
            ),
            "differing_members": (
                "Members with another subscription than their group.",
                lambda: sum(
                    m.differs for group in list(catalog.groups.values()) for m in group.members
                ),
            ),
            "draining_groups": (
                "Groups that are releasing all queues for a new subscription.",
                lambda: sum(group.draining for group in list(catalog.groups.values())),
            ),
            "paused_groups": (
                "Groups that an operator has paused.",
                lambda: sum(group.pause is not None for group in list(catalog.groups.values())),
            ),
            "refused_clients": (
                "Clients with refused heartbeats.",
                lambda: len(catalog.refused.values),
            ),
            "members": ("Live members of all groups.", lambda: len(catalog.live.values)),
            "watchers": (
                "Open streams of WatchRoute and WatchGroup.",
                lambda: catalog.watcher_count,
            ),
        }
        for name, (help_text, read) in gauges.items():
            Gauge(f"baton_nameserver_{name}", help_text, registry=registry).set_function(read)


class MembershipMetrics:
    """Counters of heartbeats, removed members and changed subscriptions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._heartbeats = Counter(
            "baton_nameserver_heartbeats", "Heartbeats accepted.", registry=registry
        )
        self._rejections = Counter(
            "baton_nameserver_rejections",
            "Heartbeats refused, by reason.",
            ("reason",),
            registry=registry,
        )
        for error in (SubscriptionConflict, ClientIdInUse):
            self._rejections.labels(error.reason)  # 0, so that increase() sees the first one
        self._expiries = Counter(
            "baton_nameserver_expiries",
            "Members removed because their lease expired.",
            registry=registry,
        )
        self._broken_sessions = Counter(
            "baton_nameserver_broken_sessions",
            "Members removed because their connection broke.",
            registry=registry,
        )
        self._subscription_changes = Counter(
            "baton_nameserver_subscription_changes",
            "Changes of the subscription of a group, by policy.",
            ("policy",),
            registry=registry,
        )
        self._replacements = Counter(
            "baton_nameserver_replacements",
            "Changes of a subscription under the policy WARN while other live members had another "
            "one: those members lose messages.",
            registry=registry,
        )

    def count_heartbeat(self) -> None:
        """Count an accepted heartbeat."""
        self._heartbeats.inc()

    def count_refused_heartbeat(self, reason: str) -> None:
        """Count a refused heartbeat, by the reason of the error."""
        self._rejections.labels(reason).inc()

    def count_expired_members(self, count: int) -> None:
        """Count members with an expired lease."""
        self._expiries.inc(count)

    def count_broken_session(self) -> None:
        """Count a member that was removed because its connection broke."""
        self._broken_sessions.inc()

    def count_subscription_change(self, policy: str) -> None:
        """Count a change of a group's subscription."""
        self._subscription_changes.labels(policy).inc()

    def count_replacement(self) -> None:
        """Count a subscription that replaced that of other live members."""
        self._replacements.inc()


class _QueueProgress(NamedTuple):
    """Progress of a queue at one inspection."""

    committed_offset: int
    reset_epoch: int


class LagMetrics:
    """Series of lag by group and topic, of stuck queues, and of committed offsets that went back.

    Deleted groups and topics, and queues that are no longer stuck, have no series. Broadcasting
    groups have none either: only their members know their progress.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, help_text: str, labels: Labels = _BY_TOPIC) -> Gauge:
            return Gauge(name, help_text, labels, registry=registry)

        self._members = gauge("baton_group_members", "Live members.", ("group",))
        self._lag_messages = gauge(
            "baton_group_lag_messages",
            "Messages that the group has not handled, filtered ones included: the sum over all "
            "queues of the topic.",
        )
        self._lag_seconds = gauge(
            "baton_group_lag_seconds",
            "Age of the oldest message of the topic that the group has not handled.",
        )
        self._stuck = gauge(
            "baton_queue_stuck",
            "1 for each stuck queue: its progress stalls while messages wait. By reason.",
            (*_BY_TOPIC, "broker", "queue_id", "reason"),
        )
        self._ready = gauge(
            "rocketmq_consumer_ready_messages",
            "Messages that were not delivered yet.",
            _ROCKETMQ_LABELS,
        )
        self._in_flight = gauge(
            "rocketmq_consumer_inflight_messages",
            "Messages in flight: delivered and not acknowledged.",
            _ROCKETMQ_LABELS,
        )
        self._lag = gauge(
            "rocketmq_consumer_lag_messages",
            "Messages ready and in flight together.",
            _ROCKETMQ_LABELS,
        )
        self._lag_latency = gauge(
            "rocketmq_consumer_lag_latency",
            "Same as baton_group_lag_seconds, in milliseconds.",
            _ROCKETMQ_LABELS,
        )
        self._rewinds = Counter(
            "baton_group_offset_rewinds",
            "Queues with a lower committed offset than at the previous inspection, by cause: "
            "reset (by an operator, or because the topic was created again) or unasked.",
            (*_BY_TOPIC, "cause"),
            registry=registry,
        )
        self._inspections = Counter(
            "baton_nameserver_inspections",
            "Inspections of all groups; only one replica inspects.",
            registry=registry,
        )
        self._shown: dict[Gauge, set[Labels]] = defaultdict(set)
        self._progress: dict[GroupQueue, _QueueProgress] = {}
        self._counted: set[Labels] = set()

    async def show(self, diagnoses: Iterable[QueueDiagnosis], members: Mapping[str, int]) -> None:
        """Set the series to the result of one inspection; remove all others.

        Args:
            members: Number of members by group.
        """
        values_by_gauge: dict[Gauge, Values] = {
            gauge: defaultdict(float) for gauge in self._by_topic()
        }
        stuck: Values = {}
        known: set[Labels] = set()
        progress: dict[GroupQueue, _QueueProgress] = {}
        async for diagnosis in in_steps(diagnoses):
            e, topic = diagnosis.evidence, (diagnosis.evidence.group.name, diagnosis.evidence.topic)
            known.add(topic)
            self._add(values_by_gauge, topic, e)
            if diagnosis.finding.reason.stuck:
                stuck[(*topic, e.broker, str(e.queue_id), diagnosis.finding.reason)] = 1
            self._count_rewind(progress, topic, e)
        self._progress = progress
        for gauge, values in values_by_gauge.items():
            self._set(gauge, values)
        self._set(self._stuck, stuck)
        self._set(self._members, {(group,): count for group, count in members.items()})
        for group_name, topic_name in self._counted - known:
            self._rewinds.remove_by_labels({"group": group_name, "topic": topic_name})
        self._counted &= known

    def count_inspection(self) -> None:
        """Count an inspection of all groups."""
        self._inspections.inc()

    def _by_topic(self) -> tuple[Gauge, ...]:
        return (
            self._lag_messages,
            self._lag_seconds,
            self._ready,
            self._in_flight,
            self._lag,
            self._lag_latency,
        )

    def _add(self, values_by_gauge: dict[Gauge, Values], topic: Labels, e: QueueEvidence) -> None:
        """Add a queue to the values of its topic."""
        if e.lag_count >= 0:
            in_flight, ready = 0, e.lag_count
            if e.progress is not None:
                in_flight = e.progress.in_flight_count
                if e.log is not None:
                    delivered_offset = e.progress.delivered_offset - e.progress.unsure_count
                    ready = e.log.next_offset - max(delivered_offset, e.log.first_offset)
            values_by_gauge[self._lag_messages][topic] += e.lag_count
            values_by_gauge[self._ready][topic] += max(0, ready)
            values_by_gauge[self._in_flight][topic] += in_flight
            values_by_gauge[self._lag][topic] += max(0, ready) + in_flight
        if e.lag_ms >= 0:
            oldest = values_by_gauge[self._lag_seconds]
            oldest[topic] = max(oldest[topic], e.lag_ms / 1000)
            values_by_gauge[self._lag_latency][topic] = oldest[topic] * 1000

    def _count_rewind(
        self, progress: dict[GroupQueue, _QueueProgress], topic: Labels, e: QueueEvidence
    ) -> None:
        """Count the queue if its committed offset went back; store its progress in `progress`."""
        before = self._progress.get(e.key)
        if e.progress is None:
            if before is not None and e.progress_error:
                progress[e.key] = before
            return
        now = progress[e.key] = _QueueProgress(e.progress.committed_offset, e.progress.reset_epoch)
        if topic not in self._counted:  # With 0 first, so that rate() sees the first rewind.
            self._counted.add(topic)
            for cause in (RESET, UNASKED):
                self._rewinds.labels(*topic, cause)
        if before is not None and now.committed_offset < before.committed_offset:
            cause = RESET if now.reset_epoch > before.reset_epoch else UNASKED
            self._rewinds.labels(*topic, cause).inc()

    def _set(self, gauge: Gauge, values: Mapping[Labels, float]) -> None:
        for labels, value in values.items():
            gauge.labels(*labels).set(value)
        for labels in self._shown[gauge] - values.keys():
            gauge.remove(*labels)
        self._shown[gauge] = set(values)


class ReplicaSetMetrics(Collector):
    """Nodes and leaders of each replica set; every nameserver shows them.

    A set is shown while one of its nodes is registered. A set of storage is also shown while a
    topic has queues there, so that an alert sees 0 leaders even if no node of the set is left.

    Prometheus collects in another thread, so the catalog is read through copies.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Return the families without values."""
        yield GaugeMetricFamily(
            "baton_set_nodes", "Registered nodes of a replica set.", labels=_SET_LABELS
        )
        yield GaugeMetricFamily(
            "baton_set_leaders",
            "Registered leaders of a replica set: 1, except during a change of leader.",
            labels=_SET_LABELS,
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the families with their present values."""
        nodes, leaders = Tally(self._sets_with_queues()), Tally(self._sets_with_queues())
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

    def _sets_with_queues(self) -> dict[tuple[str, str], int]:
        return {
            (_STORAGE, part.broker): 0
            for topic in list(self._catalog.topics.values())
            for part in topic.spread
        }
