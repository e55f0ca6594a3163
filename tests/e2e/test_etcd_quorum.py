"""Goal: without a majority of etcd no queue is granted; leaders that need its lease reject calls
with a reason; owners in a cluster without leases continue. The cluster recovers by itself.

Method: real processes; two of three members of etcd are paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batonmq._common.clock import Clock
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tests.e2e.worker_group import Worker, WorkerGroup, send, worker_group
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TOPIC, QUEUES, STEP = "numbers", 4, 200
LEASE_MS = 30_000
HASTY = ProducerSettings(delivery_timeout_ms=4_000, request_timeout_ms=1_000)


@asynccontextmanager
async def cluster_at(folder: Path, offsets: int, replicas: int) -> AsyncIterator[LocalCluster]:
    options = ClusterOptions(
        etcds=3,
        offsets=offsets,
        storage_replicas=replicas,
        auto_restart=False,
        settings={"storage": {"segment_bytes": SEGMENT_BYTES}},
    )
    async with LocalCluster(folder / "cluster", options, start=fork_server().start) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        yield cluster


async def has_done(workers: WorkerGroup, count: int) -> None:
    await until(lambda: workers.done() == set(range(count)), timeout_s=60)


async def owning_at_last(workers: WorkerGroup, late: Worker) -> None:
    """Wait until the member that joined without a quorum owns a queue.

    Such a member may end with an error at any time; then a new one joins.
    """
    names = [late]

    async def owns() -> bool:
        if names[-1].failure:
            names.append(await workers.join(f"later-{len(names)}"))
        return bool(names[-1].owned)

    await until(owns, timeout_s=90)


@asynccontextmanager
async def without_majority(cluster: LocalCluster) -> AsyncIterator[None]:
    for name in ("etcd-1", "etcd-2"):
        cluster.pause(name)
    try:
        yield
    finally:
        for name in ("etcd-1", "etcd-2"):
            cluster.resume(name)


@pytest.mark.long
async def test_owners_continue_without_an_etcd_quorum_and_no_queue_is_granted(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with (
        cluster_at(tmp_path, offsets=1, replicas=1) as cluster,
        worker_group(cluster.nameserver, TOPIC, tmp_path) as workers,
        Producer(cluster.nameserver) as producer,
    ):
        for client_id in ("first", "second"):
            await workers.join(client_id)
        await send(cluster.nameserver, TOPIC, range(STEP))
        await until(lambda: len(workers.done()) == STEP, timeout_s=60)
        sent_count = STEP
        async with without_majority(cluster):
            begin_ms = clock.monotonic_ms()
            late = await workers.join("late")
            while clock.monotonic_ms() - begin_ms < LEASE_MS + 3_000:
                await producer.send(TOPIC, b"%d" % sent_count)
                sent_count += 1
                await has_done(workers, sent_count)
                await asyncio.sleep(0.2)  # do not load the machine
            assert late.owned == set()
        await owning_at_last(workers, late)
        await send(cluster.nameserver, TOPIC, range(sent_count, sent_count + STEP))
        await has_done(workers, sent_count + STEP)
        assert len(workers.handlings()) == sent_count + STEP, "a message was handled twice"


@pytest.mark.long
async def test_leaders_without_an_etcd_quorum_reject_with_a_reason_and_recover(
    tmp_path: Path,
) -> None:
    async with (
        cluster_at(tmp_path, offsets=3, replicas=2) as cluster,
        worker_group(cluster.nameserver, TOPIC, tmp_path) as workers,
        Producer(cluster.nameserver, HASTY) as hasty,
        Producer(cluster.nameserver) as patient,
        Admin(cluster.nameserver) as admin,
    ):
        await workers.join("first")
        await send(cluster.nameserver, TOPIC, range(STEP))
        await until(lambda: len(workers.done()) == STEP, timeout_s=60)
        async with without_majority(cluster), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(patient.send(TOPIC, b"%d" % STEP))

            async def is_refused() -> bool:
                try:
                    await hasty.send(TOPIC, b"0")
                except BatonError as error:
                    return "etcd does not answer" in error.message
                return False

            await until(is_refused, timeout_s=60)
            with pytest.raises(BatonError):  # a leader without a lease accepts nothing
                await hasty.send(TOPIC, b"0")

            async def offsets_is_silent() -> bool:
                try:
                    await admin.progress(workers.group)
                except BatonError:
                    return True
                return False

            await until(offsets_is_silent, timeout_s=60)
            for name in ("etcd-1", "etcd-2"):
                cluster.resume(name)
            await waiting
        await until(lambda: STEP in workers.done(), timeout_s=60)
