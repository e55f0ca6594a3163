"""Prometheus metrics of the scaler."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from batonmq_server.scaler.core.demand import Demand


class ScalerMetrics:
    """Gauges of the groups that KEDA has asked for; a forgotten group has no series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._usable = Gauge(
            "baton_scaler_queues",
            "Queues that members of the group can own: the scaler never asks for more members.",
            ("group",),
            registry=registry,
        )
        self._waiting = Gauge(
            "baton_scaler_waiting_messages",
            "Messages of the group that need a member.",
            ("group",),
            registry=registry,
        )
        self._stuck = Gauge(
            "baton_scaler_stuck_queues",
            "Stuck queues of the group, by reason: more members may not reduce their lag.",
            ("group", "reason"),
            registry=registry,
        )
        self._reasons: dict[str, set[str]] = {}

    def read(self, group: str, demand: Demand) -> None:
        """Set the gauges of a group."""
        self._usable.labels(group).set(demand.queue_count)
        self._waiting.labels(group).set(demand.waiting_messages)
        before = self._reasons.get(group, set())
        for reason in before - demand.stuck_counts.keys():
            self._stuck.remove(group, reason)
        for reason, count in demand.stuck_counts.items():
            self._stuck.labels(group, reason).set(count)
        self._reasons[group] = set(demand.stuck_counts)

    def forget(self, group: str) -> None:
        """Remove the series of a group."""
        if group not in self._reasons:
            return
        self._usable.remove(group)
        self._waiting.remove(group)
        for reason in self._reasons.pop(group):
            self._stuck.remove(group, reason)
