"""Goal: kill -9 of any one service under load loses and duplicates nothing.

Method: a real cluster; one producer that keeps sending numbered messages, two consumers of one
group, and a service that is killed and restarted under load. Afterwards every message
with a receipt was handled exactly once, in the order of its queue.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq.admin.admin import Admin
from tests.e2e.numbered_traffic import QUEUES, TOPIC, NumberedTraffic
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

BEFORE, DURING, AFTER = 2_000, 3_000, 2_000


@pytest.mark.parametrize("victim", ["storage", "offsets", "lockmgr", "nameserver", "etcd"])
async def test_kill_9_of_a_service_loses_and_duplicates_nothing(
    tmp_path: Path, victim: str
) -> None:
    async with local_cluster(tmp_path) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        traffic = NumberedTraffic(cluster.nameserver)
        async with traffic.running("first", count_min=BEFORE + DURING + AFTER):
            await until(lambda: len(traffic.handled) >= BEFORE, timeout_s=60)
            await cluster.kill(victim)
            traffic.join("second")
            await cluster.serving(victim)
            receipt_count = len(traffic.receipts)
            await until(lambda: len(traffic.receipts) >= receipt_count + AFTER, timeout_s=60)
            await until(lambda: traffic.handled_by("second"), timeout_s=60)
