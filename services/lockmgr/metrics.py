"""Prometheus metrics of the lock manager, and its live events."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.common.v1 import error_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq._telemetry.event_hub import EventHub
from batonmq.errors import BatonError
from batonmq_server.lockmgr.core.lock_entry import LockState
from batonmq_server.lockmgr.core.lock_table import HoldReport
from batonmq_server.lockmgr.lock_proto import key_to_pb

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class LockmgrMetrics:
    """Counts decisions and publishes them as events."""

    def __init__(self, registry: CollectorRegistry, hub: EventHub) -> None:
        self._hub = hub
        self._denied: Tally[tuple[GroupQueue, str, str]] = Tally()
        hub.gatherers.append(self._denied_events)
        self._grants = Counter(
            "baton_lockmgr_grants",
            "Queues granted, by kind: new (to another client), same (to its owner again), stolen "
            "(the owner's lease had expired), repeated (the same grant answered again).",
            ("kind",),
            registry=registry,
        )
        self._denials = Counter(
            "baton_lockmgr_denials",
            "Requests for a queue that were denied, by reason.",
            ("reason",),
            registry=registry,
        )
        self._steals = Counter(
            "baton_lockmgr_steals",
            "Queues granted after the lease of their owner had expired.",
            registry=registry,
        )
        self._releases = Counter(
            "baton_lockmgr_releases", "Queues released by their owners.", registry=registry
        )
        self._forced = Counter(
            "baton_lockmgr_forced",
            "Queues taken from their owners by operators.",
            registry=registry,
        )
        self._cleared = Counter(
            "baton_lockmgr_cleared",
            "Queues freed by the lock manager because the owner did not release them, and the "
            "subscription of the group changed or no member is to take them.",
            registry=registry,
        )
        self._watchers = Gauge(
            "baton_lockmgr_watchers", "Clients with an open Watch stream.", registry=registry
        )
        self._reports = Counter(
            "baton_lockmgr_keep_alive_reports",
            "Entries reported in keep-alive answers, by state.",
            ("state",),
            registry=registry,
        )
        self._keep_alives = Counter(
            "baton_lockmgr_keep_alives", "Keep-alive calls answered.", registry=registry
        )
        self._seconds = Histogram(
            "baton_lockmgr_handover_seconds",
            "Time of successful hand-overs in seconds, by phase: fence, persist, total.",
            ("phase",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._entries = Gauge(
            "baton_lockmgr_entries",
            "Lock entries, by state: free, held, pending, phantom.",
            ("state",),
            registry=registry,
        )
        self._term = Gauge(
            "baton_lockmgr_term",
            "Term of this node if it leads; 0 if it does not.",
            registry=registry,
        )

    def granted(self, key: GroupQueue, event: pb.LockGranted, *, newly_acquired: bool) -> None:
        """Record a successful hand-over."""
        kind = "stolen" if event.stolen else "new" if newly_acquired else "same"
        self._grants.labels(kind).inc()
        self._steals.inc(event.stolen)
        if self._hub.watched:
            self._hub.publish(pb.MetricEvent(queue=key_to_pb(key), lock_granted=event))

    def grant_repeated(self) -> None:
        """Record a grant that was answered again."""
        self._grants.labels("repeated").inc()

    def denied(self, key: GroupQueue, requester: Incarnation, error: BatonError) -> None:
        """Record a refused request."""
        self._denials.labels(error.reason).inc()
        if self._hub.watched:
            self._denied[key, requester.client_id, error.reason] += 1

    def released(self, key: GroupQueue, owner: Incarnation, token: int) -> None:
        """Record a queue released by its owner."""
        self._releases.inc()
        if self._hub.watched:
            event = pb.LockReleased(client_id=owner.client_id, token=token)
            self._hub.publish(pb.MetricEvent(queue=key_to_pb(key), lock_released=event))

    def handed_over(self, key: GroupQueue, event: pb.HandedOver) -> None:
        """Record a queue that has a new owner."""
        if self._hub.watched:
            self._hub.publish(pb.MetricEvent(queue=key_to_pb(key), handed_over=event))

    def forced(self, key: GroupQueue, event: pb.LockForced) -> None:
        """Record a queue that an operator took from its owner."""
        self._forced.inc()
        if self._hub.watched:
            self._hub.publish(pb.MetricEvent(queue=key_to_pb(key), lock_forced=event))

    def cleared(self) -> None:
        """Record a queue that the lock manager has freed by itself."""
        self._cleared.inc()

    def kept_alive(self, reports: Sequence[HoldReport]) -> None:
        """Record an answered keep-alive."""
        self._keep_alives.inc()
        for state, count in Tally(report.state for report in reports).items():
            self._reports.labels(state.value).inc(count)

    def observe_phases(self, **phase_ms: int) -> None:
        """Record the time of each phase of a hand-over, in milliseconds."""
        for phase, ms in phase_ms.items():
            self._seconds.labels(phase).observe(ms / 1000)

    def set_gauges(self, term: int, counts: Tally[LockState], watchers: int) -> None:
        """Set the gauges to the state of the lock table and the Watch streams."""
        self._term.set(term)
        self._watchers.set(watchers)
        for state in LockState:
            self._entries.labels(state.value).set(counts[state])

    def _denied_events(self) -> Iterator[pb.MetricEvent]:
        """Yield the refusals since the last call."""
        denied, self._denied = self._denied, Tally()
        for (key, client_id, name), count in denied.items():
            reason = error_pb2.Reason.Value(f"REASON_{name}")
            event = pb.LockDenied(client_id=client_id, reason=reason, count=count)
            yield pb.MetricEvent(queue=key_to_pb(key), lock_denied=event)
