"""What one look at all groups has found, as series of Prometheus.

What is gone has no series any more: a group or a topic that was deleted, a queue that moves again.
Broadcasting groups have no lag that anybody here could know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from batonmq._core.queues import QueueRef
from batonmq_server.nameserver.core.evidence import QueueEvidence
from batonmq_server.nameserver.inspector import QueueDiagnosis
from batonmq_server.nameserver.queue_queries import Key

RESET, UNASKED = "reset", "unasked"
"""Why progress went back: an operator wanted it, or made the topic anew; or nobody did."""
_BY_TOPIC = ("group", "topic")
_COMPATIBLE = ("consumer_group", "topic")

Labels = tuple[str, ...]
Values = dict[Labels, float]


class _Place(NamedTuple):
    """Where a queue stood at a look."""

    committed_offset: int
    reset_epoch: int


class GroupMetrics:
    """Series by group and topic, one per stuck queue, and how often progress went back."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, meaning: str, labels: Labels = _BY_TOPIC) -> Gauge:
            return Gauge(name, meaning, labels, registry=registry)

        self._members = gauge("baton_group_members", "Live members.", ("group",))
        self._lag_messages = gauge(
            "baton_group_lag_messages",
            "Messages that the group has not handled, filtered ones included; of all its queues "
            "of the topic.",
        )
        self._lag_seconds = gauge(
            "baton_group_lag_seconds",
            "Age of the oldest message of the topic that the group has not handled.",
        )
        self._stuck = gauge(
            "baton_queue_stuck",
            "1 for each queue that does not move although messages wait, by reason.",
            (*_BY_TOPIC, "broker", "queue_id", "reason"),
        )
        self._ready = gauge(
            "rocketmq_consumer_ready_messages", "Messages that were not delivered yet.", _COMPATIBLE
        )
        self._in_flight = gauge(
            "rocketmq_consumer_inflight_messages",
            "Messages that were delivered and are not acknowledged.",
            _COMPATIBLE,
        )
        self._lag = gauge(
            "rocketmq_consumer_lag_messages", "Ready and in flight together.", _COMPATIBLE
        )
        self._lag_latency = gauge(
            "rocketmq_consumer_lag_latency",
            "As baton_group_lag_seconds, in milliseconds.",
            _COMPATIBLE,
        )
        self._rewinds = Counter(
            "baton_group_offset_rewinds",
            "Queues whose progress was lower at a look than at the one before, by cause: reset "
            "(an operator wanted it, or the topic was made anew) or unasked.",
            (*_BY_TOPIC, "cause"),
            registry=registry,
        )
        self._inspections = Counter(
            "baton_nameserver_inspections",
            "Looks at all groups; only one replica does it.",
            registry=registry,
        )
        self._shown: dict[Gauge, set[Labels]] = defaultdict(set)
        self._places: dict[Key, _Place] = {}
        self._moved: set[Labels] = set()

    def show(self, diagnoses: Iterable[QueueDiagnosis], members: Mapping[str, int]) -> None:
        """Show what one look has found, and nothing else.

        Args:
            members: How many each group has.
        """
        found: dict[Gauge, Values] = {gauge: defaultdict(float) for gauge in self._by_topic()}
        stuck: Values = {}
        known: set[Labels] = set()
        places: dict[Key, _Place] = {}
        for diagnosis in diagnoses:
            e, topic = diagnosis.evidence, (diagnosis.evidence.group.name, diagnosis.evidence.topic)
            known.add(topic)
            self._add(found, topic, e)
            if diagnosis.finding.reason.stuck:
                stuck[(*topic, e.broker, str(e.queue_id), diagnosis.finding.reason)] = 1
            self._follow(places, topic, e)
        self._places = places
        for gauge, values in found.items():
            self._set(gauge, values)
        self._set(self._stuck, stuck)
        self._set(self._members, {(group,): count for group, count in members.items()})
        self._keep(known)

    def looked(self) -> None:
        """Count a look."""
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

    def _add(self, found: dict[Gauge, Values], topic: Labels, e: QueueEvidence) -> None:
        """Add a queue to the sums of its topic."""
        if e.lag_count >= 0:
            in_flight = e.progress.unacked_count if e.progress else 0
            ready = e.lag_count
            if e.progress is not None and e.log is not None:
                ready = e.log.next_offset - max(e.progress.delivered_offset, e.log.first_offset)
            found[self._lag_messages][topic] += e.lag_count
            found[self._ready][topic] += max(0, ready)
            found[self._in_flight][topic] += in_flight
            found[self._lag][topic] += max(0, ready) + in_flight
        if e.lag_ms >= 0:
            oldest = found[self._lag_seconds]
            oldest[topic] = max(oldest[topic], e.lag_ms / 1000)
            found[self._lag_latency][topic] = oldest[topic] * 1000

    def _follow(self, places: dict[Key, _Place], topic: Labels, e: QueueEvidence) -> None:
        """Compare a queue's progress with what it was, and note it in `places`."""
        key = e.group.name, QueueRef(e.topic, e.broker, e.queue_id)
        before = self._places.get(key)
        if e.progress is None:
            if before is not None and e.progress_error:
                places[key] = before
            return
        now = places[key] = _Place(e.progress.committed_offset, e.progress.reset_epoch)
        for cause in (RESET, UNASKED):  # so that the first one is an increase, too
            self._rewinds.labels(*topic, cause)
        self._moved.add(topic)
        if before is not None and now.committed_offset < before.committed_offset:
            cause = RESET if now.reset_epoch > before.reset_epoch else UNASKED
            self._rewinds.labels(*topic, cause).inc()

    def _keep(self, known: set[Labels]) -> None:
        for group, topic in self._moved - known:
            self._rewinds.remove_by_labels({"group": group, "topic": topic})
        self._moved &= known

    def _set(self, gauge: Gauge, values: Mapping[Labels, float]) -> None:
        for labels, value in values.items():
            gauge.labels(*labels).set(value)
        for labels in self._shown[gauge] - values.keys():
            gauge.remove(*labels)
        self._shown[gauge] = set(values)
