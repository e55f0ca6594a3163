"""What offsets tells Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batonmq.common.errors import BatonError, Fenced
from services.offsets.core.calls import Committed, Condition, Grant
from services.offsets.core.table import ProgressTable

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class OffsetsMetrics:
    """Counters and gauges of one process."""

    def __init__(self, registry: CollectorRegistry, table: ProgressTable) -> None:
        self._commits = Counter(
            "baton_offsets_commits",
            "Commits and closes by outcome: changed, noop, or the reason of the refusal.",
            ("op", "outcome"),
            registry=registry,
        )
        self._fences = Counter(
            "baton_offsets_fences",
            "Fences by condition and outcome: granted, repeated, or the reason of the refusal.",
            ("condition", "outcome"),
            registry=registry,
        )
        self._fenced = Counter(
            "baton_offsets_fenced",
            "Items refused because their token is not in force.",
            ("op", "why"),
            registry=registry,
        )
        self.write_seconds = Histogram(
            "baton_offsets_durable_write_seconds",
            "Time of one synced write, which many calls share.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.write_entries = Counter(
            "baton_offsets_durable_entries",
            "Entries in synced writes.",
            registry=registry,
        )
        ack_ranges = Gauge(
            "baton_offsets_ack_ranges_max",
            "Acked ranges above the committed offset, of the queue that has most.",
            registry=registry,
        )
        # Scraped from another thread: list() of a dict's values is one step of the interpreter.
        ack_ranges.set_function(lambda: max(list(table.ack_ranges.values()), default=0))
        queues = Gauge("baton_offsets_queues", "Queues with progress.", registry=registry)
        queues.set_function(lambda: len(table))

    def fenced(self, op: str, error: Fenced) -> None:
        """Count an item whose token is not in force."""
        self._fenced.labels(op, error.facts["why"]).inc()

    def committed(self, op: str, results: Iterable[Committed | BatonError]) -> None:
        """Count commits or closes: whether they changed something, or why they were refused."""
        outcomes = Tally(
            result.reason
            if isinstance(result, BatonError)
            else ("changed" if result.changed else "noop")
            for result in results
        )
        for outcome, count in outcomes.items():
            self._commits.labels(op, outcome).inc(count)

    def fence(self, condition: Condition, result: Grant | BatonError) -> None:
        """Count a fence."""
        if isinstance(result, BatonError):
            outcome = result.reason
        else:
            outcome = "granted" if result.changed else "repeated"
        self._fences.labels(condition.value, outcome).inc()
