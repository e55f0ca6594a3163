"""Goal: a highly available cluster keeps every promise while any one leader fails.

Method: a real cluster of three etcds, two brokers of two nodes, three offsets, two lock managers
and two nameservers; one producer and two consumers that run throughout. In turn, each leader
is killed, or paused until another node leads and then resumed with its old state; so is each etcd.
Sending and handling must continue during each failure. In the end every message with a receipt was
handled exactly once, in order.
"""

from __future__ import annotations

import asyncio
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


async def goes_on(traffic: NumberedTraffic) -> None:
    """Wait until `STEP` more messages are sent and handled."""
    sent, handled = len(traffic.receipts), len(traffic.handled)
    await until(
        lambda: len(traffic.receipts) >= sent + STEP and len(traffic.handled) >= handled + STEP,
        timeout_s=60,
    )


async def shows_every_copy(admin: Admin) -> None:
    """Wait until every copy is reported with epoch and lag, and is in sync."""

    def is_told(copy: Replica) -> bool:
        told = copy.epoch > 0 and copy.lag >= 0 and copy.lag_ms is not None
        return told and copy.in_sync and copy.problem == ""

    async def look() -> bool:
        copies, problems = await replicas(admin, (await admin.cluster()).nodes)
        return not problems and len(copies) == 7 and all(map(is_told, copies.values()))

    await until(look, timeout_s=60)


async def test_leader_of_each_service_may_be_killed_or_paused(tmp_path: Path) -> None:
    async with local_cluster(
        tmp_path, available=True, auto_restart=False, storage=SLOW, offsets=SLOW
    ) as cluster:
        traffic, stop = NumberedTraffic(cluster.nameserver), asyncio.Event()
        async with Admin(cluster.nameserver) as admin, asyncio.TaskGroup() as tasks:
            await admin.create_topic(TOPIC, QUEUES)
            sending = tasks.create_task(traffic.send(0))
            tasks.create_task(traffic.consume("first", stop))
            tasks.create_task(traffic.consume("second", stop))
            await goes_on(traffic)
            for service, broker in (("storage", "broker-0"), ("offsets", ""), ("lockmgr", "")):
                victim = await leader(admin, cluster, service, broker=broker)
                await in_sync(admin, service, broker)
                await cluster.kill(victim)
                heir = await leader(admin, cluster, service, victim, broker)
                await goes_on(traffic)
                await cluster.start(victim)
                await in_sync(admin, service, broker)
                cluster.pause(heir)
                await leader(admin, cluster, service, heir, broker)
                await goes_on(traffic)
                cluster.resume(heir)
                await goes_on(traffic)
            for name in ("etcd", "etcd-1", "etcd-2"):  # one of them is the leader of etcd
                cluster.pause(name)
                await goes_on(traffic)
                cluster.resume(name)
            await shows_every_copy(admin)
            for victim in ("nameserver-1", "etcd-1"):
                await cluster.kill(victim)
                await goes_on(traffic)
                await cluster.start(victim)
            traffic.stop_sending.set()
            await sending
            await until(lambda: len(traffic.handled) >= len(traffic.receipts), timeout_s=60)
            stop.set()
    traffic.check()
