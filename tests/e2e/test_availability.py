"""Goal: a cluster that has several of each loses one, whoever leads, and keeps every promise.

Method: a real cluster of three etcds, two brokers of two nodes, three offsets, two lock managers
and two nameservers; one producer and two consumers that never stop. One after the other a leader is
killed, or stands still until somebody else leads and then goes on with what it had. Each time the
work has to go on while the victim is away. In the end every message with a receipt was handled
exactly once, in order.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from batonmq.admin import Admin
from batonmq.common.errors import BatonError
from batonmq.local.cluster import LocalCluster
from batonmq.replication import replicas_of
from tests.e2e.counting import QUEUES, TOPIC, Run
from tests.support.cluster import local_cluster
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

STEP = 1_000


async def leader(
    admin: Admin, cluster: LocalCluster, service: str, but: str = "", broker: str = ""
) -> str:
    """Name of the process that leads, once it is one and another than `but`.

    Args:
        broker: Of storage.
    """
    found: list[str] = []

    async def look() -> bool:
        nodes = (await admin.cluster()).nodes
        leading = [
            node
            for node in nodes
            if node.service == service and node.leader and broker in ("", node.replica_set)
        ]
        newest = max(leading, key=lambda node: node.epoch, default=None)
        found[:] = [
            name
            for name in cluster.options.names_of(service)
            if newest is not None and cluster.addresses[name] == newest.address
        ]
        return bool(found) and found[0] != but

    await until(look, timeout_s=60)
    return found[0]


async def in_sync(admin: Admin, service: str, broker: str) -> None:
    """Wait until every replica may be elected."""

    async def look() -> bool:
        if service == "lockmgr":
            return True
        try:
            found = await replicas_of(admin, service, broker)
        except BatonError:
            return False
        return bool(found) and all(one.in_sync for one in found)

    await until(look, timeout_s=60)


async def goes_on(run: Run) -> None:
    """Wait until much more is sent, and handled."""
    sent, handled = len(run.receipts), len(run.handled)
    await until(
        lambda: len(run.receipts) >= sent + STEP and len(run.handled) >= handled + STEP,
        timeout_s=60,
    )


async def test_whoever_leads_may_die_or_stand_still(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, available=True, auto_restart=False) as cluster:
        run, stop = Run(cluster.nameserver), asyncio.Event()
        async with Admin(cluster.nameserver) as admin, asyncio.TaskGroup() as tasks:
            await admin.create_topic(TOPIC, QUEUES)
            sending = tasks.create_task(run.send(0))
            tasks.create_task(run.consume("first", stop))
            tasks.create_task(run.consume("second", stop))
            await goes_on(run)
            for service, broker in (("storage", "broker-0"), ("offsets", ""), ("lockmgr", "")):
                victim = await leader(admin, cluster, service, broker=broker)
                await cluster.kill(victim)
                heir = await leader(admin, cluster, service, victim, broker)
                await goes_on(run)
                await cluster.start(victim)
                await in_sync(admin, service, broker)
                cluster.pause(heir)
                await leader(admin, cluster, service, heir, broker)
                await goes_on(run)
                cluster.resume(heir)
                await goes_on(run)
            for victim in ("nameserver-1", "etcd-1"):
                await cluster.kill(victim)
                await goes_on(run)
                await cluster.start(victim)
            run.stop_sending.set()
            await sending
            await until(lambda: len(run.handled) >= len(run.receipts), timeout_s=60)
            stop.set()
    run.check()
