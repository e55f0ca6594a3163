"""Goal: a former leader shows nothing of the table that it no longer has.

Method: the metrics alone, with a table whose disk is full and which has a queue at its limit.
"""

from __future__ import annotations

import weakref

from prometheus_client import CollectorRegistry

from batonmq._core.queues import GroupQueue
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.values import Instant, QueueLimits
from batonmq_server.offsets.metrics import OffsetsMetrics

QUEUE = GroupQueue("billing", "orders", "broker-0", 0)
OF_TABLE = ("disk_full", "ack_window_used_ratio", "ack_ranges_max", "capped_queues", "epoch")


def test_former_leader_shows_and_keeps_no_table() -> None:
    registry = CollectorRegistry()
    metrics = OffsetsMetrics(registry)
    table = ProgressTable(QueueLimits(), 3, 1, Instant(0, 0))
    table.ack_ranges[QUEUE] = table.limits.ack_ranges_max
    table.capped.add(QUEUE)
    metrics.show_table(table, lambda: True)

    def shown() -> dict[str, float | None]:
        return {name: registry.get_sample_value(f"baton_offsets_{name}") for name in OF_TABLE}

    limit = table.limits.ack_ranges_max
    assert list(shown().values()) == [1, 1, limit, 1, 3]
    metrics.show_follower()
    assert set(shown().values()) == {0}
    known = weakref.ref(table)
    del table
    assert known() is None
