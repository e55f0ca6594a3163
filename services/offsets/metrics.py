"""Every Prometheus metric of the offsets service."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batonmq.errors import BatonError, Fenced
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetOrder, ResetOutcome
from batonmq_server.offsets.core.values import CommitResult, FenceCondition, FenceGrant
from batonmq_server.runtime.replication.in_sync_set import InSyncSet

CUT_OFF = "CUT_OFF"
"""Cause of duplicates: a queue was released while a handler was running."""
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class OffsetsMetrics:
    """The metrics of one process; `show_table` and `show_leadership` bind the gauges.

    A follower has no table, so the gauges of the table are 0 there.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._commits = Counter(
            "baton_offsets_commits",
            "Commits, closes and acks of pulls, by result: changed, noop, or the error reason.",
            ("op", "outcome"),
            registry=registry,
        )
        self._fences = Counter(
            "baton_offsets_fences",
            "Fences by condition and result: granted, repeated, or the error reason.",
            ("condition", "outcome"),
            registry=registry,
        )
        self._fenced = Counter(
            "baton_offsets_fenced",
            "Items rejected because their token is fenced, by cause.",
            ("op", "why"),
            registry=registry,
        )
        self._duplicates = Counter(
            "baton_offsets_duplicates",
            "Messages redelivered with the maybe-seen flag, by cause. In flight at a hand-over: "
            "CLOSED_OR_DRAINED (always 0 by the rules), CUT_OFF (released while a handler was "
            "running), SAME_HOLDER (acquired again by its owner), IDLE (lease of the owner "
            "expired), FORCED. Handled before and moved back by an operator: RESET, CLONE.",
            ("cause",),
            registry=registry,
        )
        for cause in (*(each.value for each in FenceCondition), CUT_OFF, "RESET", "CLONE"):
            self._duplicates.labels(cause)
        self._moves = Counter(
            "baton_offsets_moves",
            "Queues in resets, undos and clones, by result: moved, repeated, or the error reason.",
            ("op", "outcome"),
            registry=registry,
        )
        self.write_seconds = Histogram(
            "baton_offsets_durable_write_seconds",
            "Time of one synced write to disk, in seconds; many calls share a write.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.write_entries = Counter(
            "baton_offsets_durable_entries",
            "Entries written in synced writes.",
            registry=registry,
        )
        self._ack_ranges = Gauge(
            "baton_offsets_ack_ranges_max",
            "Acked ranges above the committed offset, of the queue with the most.",
            registry=registry,
        )
        self._ack_window = Gauge(
            "baton_offsets_ack_window_used_ratio",
            "Share of its ack window that a queue uses, by the number or by the stored size of its "
            "acked ranges: the greatest of all queues, 0 to 1.",
            registry=registry,
        )
        self._capped = Gauge(
            "baton_offsets_capped_queues",
            "Queues with paused deliveries: too many acked ranges above the committed offset.",
            registry=registry,
        )
        self._full = Gauge(
            "baton_offsets_disk_full",
            "1 while changes are rejected because the disk is full, else 0.",
            registry=registry,
        )
        self._queues = Gauge(
            "baton_offsets_queues", "Queues with progress; 0 on a follower.", registry=registry
        )
        self._arriving = Gauge(
            "baton_offsets_arriving_groups",
            "Groups that this replica set is importing from another one.",
            registry=registry,
        )
        self._gone = Gauge(
            "baton_offsets_gone_groups",
            "Groups that moved to another replica set and are sealed in this one.",
            registry=registry,
        )
        self._of_table = (
            self._ack_ranges,
            self._ack_window,
            self._capped,
            self._full,
            self._queues,
            self._arriving,
            self._gone,
        )
        self._epoch = Gauge(
            "baton_offsets_epoch",
            "Epoch in which this node serves; 0 on a follower.",
            registry=registry,
        )
        self.replicas = Gauge(
            "baton_offsets_replicas",
            "Configured members of the replica set.",
            registry=registry,
        )
        self._in_sync = Gauge(
            "baton_offsets_in_sync_replicas",
            "Members of the in-sync set that keep up, including the leader; 0 on followers.",
            registry=registry,
        )
        self._lag = Gauge(
            "baton_offsets_replica_lag_changes",
            "Changes that a follower lacks, reported by the leader.",
            ("replica",),
            registry=registry,
        )
        self.stuck = Gauge(
            "baton_offsets_replica_stuck",
            "1 if this node can't follow its leader because of a fault that needs an operator.",
            registry=registry,
        )

    def show_leadership(self, in_sync_set: InSyncSet) -> None:
        """Show the in-sync set and the lag of the followers, until `show_follower`."""
        tracker = in_sync_set.tracker
        self._in_sync.set_function(lambda: len(in_sync_set.current))
        for name in in_sync_set.node_ids - {tracker.leader}:
            self._lag.labels(name).set_function(partial(tracker.lag, name))

    def show_follower(self) -> None:
        """Show that this node is not the leader; the table of `show_table` is released."""
        self._epoch.set(0)
        for gauge in (*self._of_table, self._in_sync):
            gauge.set_function(lambda: 0)
        self._lag.clear()

    def show_table(self, table: ProgressTable, disk_full: Callable[[], bool]) -> None:
        """Show the state of this table from now on."""
        self._epoch.set(table.epoch)

        # Scraped in another thread: list() copies the values in one step of the interpreter.
        def ranges() -> int:
            return max((len(one.runs) for one in list(table.acked.values())), default=0)

        def used() -> float:
            return max(map(table.limits.used_ratio, list(table.acked.values())), default=0)

        self._ack_ranges.set_function(ranges)
        self._ack_window.set_function(used)
        self._capped.set_function(lambda: len(table.capped))
        self._full.set_function(disk_full)
        self._queues.set_function(lambda: len(table))
        self._arriving.set_function(lambda: table.placements.counts()[0])
        self._gone.set_function(lambda: table.placements.counts()[1])

    def count_fenced(self, op: str, error: Fenced) -> None:
        """Count an item that was rejected because its token is fenced."""
        self._fenced.labels(op, error.detail.why.value).inc()

    def count_commits(self, op: str, results: Iterable[CommitResult | BatonError]) -> None:
        """Count commits or closes by result."""
        outcomes = Tally(
            result.reason
            if isinstance(result, BatonError)
            else ("changed" if result.changed else "noop")
            for result in results
        )
        for outcome, count in outcomes.items():
            self._commits.labels(op, outcome).inc(count)

    def count_fence(self, condition: FenceCondition, result: FenceGrant | BatonError) -> None:
        """Count a fence by condition and result."""
        if isinstance(result, BatonError):
            outcome = result.reason
        else:
            outcome = "granted" if result.changed else "repeated"
        self._fences.labels(condition.value, outcome).inc()

    def count_duplicates(self, cause: str, count: int) -> None:
        """Count messages that are redelivered."""
        self._duplicates.labels(cause).inc(count)

    def count_resets(self, order: ResetOrder, outcome: ResetOutcome) -> None:
        """Count the queues of a reset, an undo or a clone by result."""
        op = "undo" if order.undone_op_id else order.kind.name.lower()
        applied = {step.key for step in outcome.applied}
        for result in outcome.results:
            if isinstance(result, BatonError):
                label = result.reason
            else:
                label = "moved" if result.key in applied else "repeated"
            self._moves.labels(op, label).inc()
