"""Goal: the metrics of a table show the fullest queue, and a former leader shows none of them.

Method: the metrics alone, with a table whose disk is full and which has a queue at its limit.
"""

from __future__ import annotations

import weakref

from prometheus_client import CollectorRegistry

from batonmq._core.queues import GroupQueue
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.values import Instant, QueueLimits
from batonmq_server.offsets.metrics import OffsetsMetrics

QUEUE = GroupQueue("billing", "orders", "broker-0", 0)
OF_TABLE = ("disk_full", "ack_window_used_ratio", "ack_ranges_max", "capped_queues", "epoch")


def test_former_leader_shows_and_keeps_no_table() -> None:
    registry = CollectorRegistry()
    metrics = OffsetsMetrics(registry)
    table = ProgressTable(QueueLimits(), 3, 1, Instant(0, 0))
    limit = table.limits.ack_ranges_max
    table.acked[QUEUE] = RangeSet(tuple((2 * at, 2 * at + 1) for at in range(limit)))
    table.capped.add(QUEUE)
    metrics.show_table(table, lambda: True)

    def shown() -> dict[str, float | None]:
        return {name: registry.get_sample_value(f"baton_offsets_{name}") for name in OF_TABLE}

    assert list(shown().values()) == [1, 1, limit, 1, 3]
    metrics.show_follower()
    assert set(shown().values()) == {0}
    known = weakref.ref(table)
    del table
    assert known() is None


def test_used_ack_window_counts_the_limit_that_is_closer() -> None:
    registry = CollectorRegistry()
    wide = RangeSet(((1, 2), (1 << 40, (1 << 40) + 1)))
    limits = QueueLimits(ack_ranges_max=100, ack_bytes_max=2 * len(wide.encoded))
    table = ProgressTable(limits, 3, 1, Instant(0, 0))
    table.acked[QUEUE] = wide
    table.acked[QUEUE._replace(queue_id=1)] = RangeSet(((1, 2), (3, 4), (5, 6)))
    OffsetsMetrics(registry).show_table(table, lambda: False)
    assert registry.get_sample_value("baton_offsets_ack_window_used_ratio") == 0.5
    assert registry.get_sample_value("baton_offsets_ack_ranges_max") == 3
