"""What offsets tells Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batonmq.errors import BatonError, Fenced
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetOrder, ResetOutcome
from batonmq_server.offsets.core.values import CommitResult, FenceCondition, FenceGrant
from batonmq_server.runtime.keeper import Keeper

CUT_OFF = "CUT_OFF"
"""Cause of duplicates: a queue was given back before a handler had ended."""
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class OffsetsMetrics:
    """Counters and gauges of one process; the gauges are those of the table that is shown."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._commits = Counter(
            "baton_offsets_commits",
            "Commits, closes and acks of pulls: changed, noop, or the reason of the refusal.",
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
        self._duplicates = Counter(
            "baton_offsets_duplicates",
            "Messages that come again, flagged. In flight when their queue changed hands: "
            "CLOSED_OR_DRAINED (in good order: none, by the rules), CUT_OFF (given back before its "
            "handler had ended), SAME_HOLDER (asked for anew), IDLE (the owner was silent), "
            "FORCED. Handled already, and wanted again by an operator: RESET, CLONE.",
            ("cause",),
            registry=registry,
        )
        for cause in (*(each.value for each in FenceCondition), CUT_OFF, "RESET", "CLONE"):
            self._duplicates.labels(cause)
        self._moves = Counter(
            "baton_offsets_moves",
            "Queues asked to be moved: moved, repeated, or the reason of the refusal.",
            ("op", "outcome"),
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
        self._ack_ranges = Gauge(
            "baton_offsets_ack_ranges_max",
            "Acked ranges above the committed offset, of the queue that has most.",
            registry=registry,
        )
        self._ack_window = Gauge(
            "baton_offsets_ack_window_used_ratio",
            "Acked ranges of that queue, as a part of how many there may be, 0 to 1.",
            registry=registry,
        )
        self._capped = Gauge(
            "baton_offsets_capped_queues",
            "Queues whose deliveries wait: too many acked ranges above the committed offset.",
            registry=registry,
        )
        self._full = Gauge(
            "baton_offsets_disk_full",
            "1 while changes are refused because the disk is full.",
            registry=registry,
        )
        self._queues = Gauge("baton_offsets_queues", "Queues with progress.", registry=registry)
        self._arriving = Gauge(
            "baton_offsets_arriving_groups",
            "Groups that another replica set is handing over to this one.",
            registry=registry,
        )
        self._gone = Gauge(
            "baton_offsets_gone_groups",
            "Groups that were handed over to another replica set, and are sealed here.",
            registry=registry,
        )
        self._epoch = Gauge(
            "baton_offsets_epoch",
            "Epoch in which this node serves; 0 for a follower.",
            registry=registry,
        )
        self.replicas = Gauge(
            "baton_offsets_replicas",
            "Members of the replica set, by its settings.",
            registry=registry,
        )
        self._in_sync = Gauge(
            "baton_offsets_in_sync_replicas",
            "Replicas that may be elected, the leader among them; 0 at a follower.",
            registry=registry,
        )
        self._lag = Gauge(
            "baton_offsets_replica_lag_changes",
            "Changes that a follower lacks, as the leader sees it.",
            ("replica",),
            registry=registry,
        )
        self.stuck = Gauge(
            "baton_offsets_replica_stuck",
            "1 while this node can't follow its leader for a reason that does not pass by itself.",
            registry=registry,
        )

    def lead(self, keeper: Keeper) -> None:
        """Show a leadership until `follow`."""
        books = keeper.books
        self._in_sync.set_function(lambda: len(books.in_sync))
        for name in keeper.members - {books.me}:
            self._lag.labels(name).set_function(partial(books.lag, name))

    def follow(self) -> None:
        """This node is no leader."""
        self._epoch.set(0)
        self._in_sync.set_function(lambda: 0)
        self._lag.clear()

    def show(self, table: ProgressTable, disk_full: Callable[[], bool]) -> None:
        """Show the state of this table from now on."""
        self._epoch.set(table.epoch)

        # Scraped from another thread: list() of a dict's values is one step of the interpreter.
        def ranges() -> int:
            return max(list(table.ack_ranges.values()), default=0)

        self._ack_ranges.set_function(ranges)
        self._ack_window.set_function(lambda: ranges() / table.limits.ack_ranges_max)
        self._capped.set_function(lambda: len(table.capped))
        self._full.set_function(disk_full)
        self._queues.set_function(lambda: len(table))
        self._arriving.set_function(lambda: table.placements.counts()[0])
        self._gone.set_function(lambda: table.placements.counts()[1])

    def fenced(self, op: str, error: Fenced) -> None:
        """Count an item whose token is not in force."""
        self._fenced.labels(op, error.detail.why.value).inc()

    def committed(self, op: str, results: Iterable[CommitResult | BatonError]) -> None:
        """Count commits or closes: whether they changed something, or why they were refused."""
        outcomes = Tally(
            result.reason
            if isinstance(result, BatonError)
            else ("changed" if result.changed else "noop")
            for result in results
        )
        for outcome, count in outcomes.items():
            self._commits.labels(op, outcome).inc(count)

    def fence(self, condition: FenceCondition, result: FenceGrant | BatonError) -> None:
        """Count a fence."""
        if isinstance(result, BatonError):
            outcome = result.reason
        else:
            outcome = "granted" if result.changed else "repeated"
        self._fences.labels(condition.value, outcome).inc()

    def duplicated(self, cause: str, count: int) -> None:
        """Count messages that come again."""
        self._duplicates.labels(cause).inc(count)

    def moved(self, order: ResetOrder, outcome: ResetOutcome) -> None:
        """Count the queues of a reset, an undo or a clone."""
        op = "undo" if order.undone_op_id else order.kind.name.lower()
        fresh = {step.key for step in outcome.fresh}
        for result in outcome.results:
            if isinstance(result, BatonError):
                what = result.reason
            else:
                what = "moved" if result.key in fresh else "repeated"
            self._moves.labels(op, what).inc()
