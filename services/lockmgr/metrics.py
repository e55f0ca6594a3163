"""What the lock manager tells of itself: Prometheus series and live events."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.common.v1 import error_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq._telemetry.events import EventHub
from batonmq.errors import BatonError
from batonmq_server.lockmgr.core.lock_entry import LockState
from batonmq_server.lockmgr.core.lock_table import HoldReport
from batonmq_server.lockmgr.lock_proto import key_to_pb

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class LockmgrMetrics:
    """Counts and publishes decisions."""

    def __init__(self, registry: CollectorRegistry, hub: EventHub) -> None:
        self._hub = hub
        self._denied: Counts[tuple[GroupQueue, str, str]] = Counts()
        hub.gatherers.append(self._events)
        self._grants = Counter(
            "baton_lockmgr_grants",
            "Queues granted; kind is new, same (the owner again), stolen or repeated.",
            ("kind",),
            registry=registry,
        )
        self._denials = Counter(
            "baton_lockmgr_denials", "Queues denied, by reason.", ("reason",), registry=registry
        )
        self._steals = Counter(
            "baton_lockmgr_steals",
            "Queues taken after the owner's lease ran out.",
            registry=registry,
        )
        self._releases = Counter("baton_lockmgr_releases", "Queues released.", registry=registry)
        self._forced = Counter(
            "baton_lockmgr_forced", "Queues taken by operators.", registry=registry
        )
        self._cleared = Counter(
            "baton_lockmgr_cleared",
            "Queues freed because the subscription of their group changed and the owner could not.",
            registry=registry,
        )
        self._watchers = Gauge(
            "baton_lockmgr_watchers", "Clients that watch their queues.", registry=registry
        )
        self._reports = Counter(
            "baton_lockmgr_keep_alive_reports",
            "Entries reported to owners, by state.",
            ("state",),
            registry=registry,
        )
        self._keep_alives = Counter(
            "baton_lockmgr_keep_alives", "Keep-alives answered.", registry=registry
        )
        self._seconds = Histogram(
            "baton_lockmgr_handover_seconds",
            "Time of hand-overs that succeeded, by phase: fence, persist, total.",
            ("phase",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._entries = Gauge(
            "baton_lockmgr_entries", "Lock entries by state.", ("state",), registry=registry
        )
        self._term = Gauge(
            "baton_lockmgr_term", "Term of this leader; 0 for a standby.", registry=registry
        )

    def granted(self, key: GroupQueue, event: pb.LockGranted, *, newly_acquired: bool) -> None:
        """A hand-over has succeeded."""
        kind = "stolen" if event.stolen else "new" if newly_acquired else "same"
        self._grants.labels(kind).inc()
        self._steals.inc(event.stolen)
        if self._hub.watched:
            self._hub.publish(pb.MetricEvent(queue=key_to_pb(key), lock_granted=event))

    def repeated(self) -> None:
        """A grant was answered once more."""
        self._grants.labels("repeated").inc()

    def denied(self, key: GroupQueue, asker: Incarnation, error: BatonError) -> None:
        """An asker was told no."""
        self._denials.labels(error.reason).inc()
        if self._hub.watched:
            self._denied[key, asker.client_id, error.reason] += 1

    def released(self, key: GroupQueue, owner: Incarnation, token: int) -> None:
        """An owner gave a queue back."""
        self._releases.inc()
        if self._hub.watched:
            event = pb.LockReleased(client_id=owner.client_id, token=token)
            self._hub.publish(pb.MetricEvent(queue=key_to_pb(key), lock_released=event))

    def handed_over(self, key: GroupQueue, event: pb.HandedOver) -> None:
        """A queue has passed from one owner to the next."""
        if self._hub.watched:
            self._hub.publish(pb.MetricEvent(queue=key_to_pb(key), handed_over=event))

    def forced(self, key: GroupQueue, event: pb.LockForced) -> None:
        """An operator took a queue from its owner."""
        self._forced.inc()
        if self._hub.watched:
            self._hub.publish(pb.MetricEvent(queue=key_to_pb(key), lock_forced=event))

    def cleared(self) -> None:
        """A queue of a group whose subscription changes was freed."""
        self._cleared.inc()

    def kept_alive(self, reports: Sequence[HoldReport]) -> None:
        """An owner's keep-alive was judged."""
        self._keep_alives.inc()
        for state, count in Counts(report.state for report in reports).items():
            self._reports.labels(state.value).inc(count)

    def phases(self, **phase_ms: int) -> None:
        """How long the phases of a hand-over took."""
        for phase, ms in phase_ms.items():
            self._seconds.labels(phase).observe(ms / 1000)

    def standing(self, term: int, counts: Counts[LockState], watchers: int) -> None:
        """What the table holds now, and how many watch."""
        self._term.set(term)
        self._watchers.set(watchers)
        for state in LockState:
            self._entries.labels(state.value).set(counts[state])

    def _events(self) -> Iterator[pb.MetricEvent]:
        """Denials since the last call."""
        denied, self._denied = self._denied, Counts()
        for (key, client_id, name), count in denied.items():
            reason = error_pb2.Reason.Value(f"REASON_{name}")
            event = pb.LockDenied(client_id=client_id, reason=reason, count=count)
            yield pb.MetricEvent(queue=key_to_pb(key), lock_denied=event)
