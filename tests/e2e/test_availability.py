"""Goal: a highly available cluster keeps every promise while any one leader fails.

Method: a real cluster of three etcds, two brokers of two nodes, three offsets, two lock managers
and two nameservers; one producer and two consumers that run throughout. In turn, each leader
is killed, or paused until another node leads and then resumed with its old state; so is each etcd.
Sending and handling must continue during each failure. In the end every message with a receipt was
handled exactly once, in order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq.admin.admin import Admin
from batonmq.admin.replication import Replica, replicas
from tests.e2e.leadership import in_sync, leader
from tests.e2e.numbered_traffic import QUEUES, TOPIC, NumberedTraffic
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEP = 1_000
SLOW = {"replica_lag_ms_max": 10_000}
"""A slow machine must not remove the only possible successor from the in-sync set."""


async def until_all_in_sync(admin: Admin) -> None:
    """Wait until every replica is reported with epoch and lag, and is in sync."""

    def is_in_sync(replica: Replica) -> bool:
        has_lag = replica.epoch > 0 and replica.lag >= 0 and replica.lag_ms is not None
        return has_lag and replica.in_sync and replica.problem == ""

    async def are_in_sync() -> bool:
        by_process, problems = await replicas(admin, (await admin.cluster()).nodes)
        return not problems and len(by_process) == 7 and all(map(is_in_sync, by_process.values()))

    await until(are_in_sync, timeout_s=60)


@pytest.mark.long
async def test_leader_of_each_service_may_be_killed_or_paused(tmp_path: Path) -> None:
    async with local_cluster(
        tmp_path, available=True, auto_restart=False, storage=SLOW, offsets=SLOW
    ) as cluster:
        traffic = NumberedTraffic(cluster.nameserver)
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
            async with traffic.running("first", "second"):
                await traffic.proceed(STEP)
                for service, broker in (("storage", "broker-0"), ("offsets", ""), ("lockmgr", "")):
                    victim = await leader(admin, cluster, service, broker=broker)
                    await in_sync(admin, service, broker)
                    await cluster.kill(victim)
                    successor = await leader(admin, cluster, service, victim, broker)
                    await traffic.proceed(STEP)
                    await cluster.start(victim)
                    await in_sync(admin, service, broker)
                    cluster.pause(successor)
                    await leader(admin, cluster, service, successor, broker)
                    await traffic.proceed(STEP)
                    cluster.resume(successor)
                    await traffic.proceed(STEP)
                for name in ("etcd", "etcd-1", "etcd-2"):  # one of them is the leader of etcd
                    cluster.pause(name)
                    await traffic.proceed(STEP)
                    cluster.resume(name)
                await until_all_in_sync(admin)
                for victim in ("nameserver-1", "etcd-1"):
                    await cluster.kill(victim)
                    await traffic.proceed(STEP)
                    await cluster.start(victim)
