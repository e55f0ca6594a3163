"""Goal: no fault of a member process loses a message or repeats one without the redelivered flag.

Method: a real cluster; members are processes that log the start and the end of each handler
call. They are killed, paused, started with a used client id, or given other tags; then their logs
are compared with the sent messages. Tests that kill an owner use leases of 10 s, so that the owner
is replaced soon; the others use the default, so that no lease expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.channels import connect
from batonmq.admin.admin import Admin
from batonmq.errors import Fenced
from batonmq_server.local.cluster import LocalCluster
from tests.e2e.worker_group import Worker, WorkerGroup, send, started_again, worker_group
from tests.support.cluster import local_cluster
from tests.support.conditions import until
from tests.support.member import now_us

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TOPIC = "numbers"
LEASE_S = 30
SHORT_MS = 10_000
SHORT: dict[str, Any] = {
    "lockmgr": {"lock_lease_ms": SHORT_MS},
    "nameserver": {"member_lease_ms": SHORT_MS, "heartbeat_interval_ms": 2_000},
}


@asynccontextmanager
async def ownership_cluster(
    folder: Path, queues: int, *, an_owner_dies: bool = False
) -> AsyncIterator[tuple[LocalCluster, WorkerGroup]]:
    """Run a cluster with one topic; yield it with a group without workers."""
    settings = SHORT if an_owner_dies else {}
    async with local_cluster(folder / "cluster", **settings) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, queues)
        async with worker_group(cluster.nameserver, TOPIC, folder) as workers:
            yield cluster, workers


async def until_owned(worker: Worker, count: int) -> None:
    """Wait until the member owns that many queues."""
    await until(lambda: len(worker.owned) == count, timeout_s=60)


async def test_closing_member_hands_over_its_queues_within_a_second(tmp_path: Path) -> None:
    async with ownership_cluster(tmp_path, 4) as (cluster, workers):
        first = await workers.join("first")
        await until_owned(first, 4)
        await send(cluster.nameserver, TOPIC, range(2_000))
        second = await workers.join("second")
        await until_owned(second, 2)
        await until(lambda: len(workers.done()) == 2_000, timeout_s=60)
        assert await first.leave() == 0
        await until_owned(second, 4)
        released = {o.queue_id: o.at_us for o in first.ownerships() if o.kind == "released"}
        late = [
            (o.at_us - released[o.queue_id]) / 1e6
            for o in second.ownerships()
            if o.kind == "granted"
        ]
        assert min(late) < 1, "no waiting member acquired a closed queue at once"
        assert max(late) < LEASE_S / 2, "a closed queue had no owner until a lease expired"
        await send(cluster.nameserver, TOPIC, range(2_000, 4_000))
        await until(lambda: len(workers.done()) == 4_000, timeout_s=60)
        assert started_again(workers.handlings()) == []
        assert not any(handling.redelivered for handling in workers.handlings())


async def test_kill_9_of_an_owner_redelivers_at_most_its_messages_in_flight_flagged(
    tmp_path: Path,
) -> None:
    async with ownership_cluster(tmp_path, 2, an_owner_dies=True) as (cluster, workers):
        # The victim needs 9 s for all messages: it does not finish before the kill.
        victim = await workers.join("victim", parallel=8, handle_ms=25)
        await until_owned(victim, 2)
        await send(cluster.nameserver, TOPIC, range(6_000))
        await until(lambda: len(workers.done()) > 1_500, timeout_s=60)
        victim.kill()
        await victim.process.ended()
        successor = await workers.join("heir", parallel=8)
        await until_owned(successor, 2)
        await until(lambda: workers.done() == set(range(6_000)), timeout_s=60)
        again = started_again(workers.handlings())
        assert again, "the killed member had no message in flight"
        assert all(later.redelivered for _, later in again)
        for queue_id in range(2):
            mine = [h for h in victim.handlings() if h.queue_id == queue_id]
            lowest = min(later.offset for _, later in again if later.queue_id == queue_id)
            assert max(h.offset for h in mine) - lowest <= 2_000
        assert await successor.leave() == 0


@pytest.mark.long
async def test_messages_after_a_kill_of_owner_and_offsets_are_not_flagged(tmp_path: Path) -> None:
    async with ownership_cluster(tmp_path, 1, an_owner_dies=True) as (cluster, workers):
        victim = await workers.join("victim")
        await until_owned(victim, 1)
        await send(cluster.nameserver, TOPIC, range(20))
        await until(lambda: _committed(cluster, workers.group, 20), timeout_s=60)
        victim.kill()
        await cluster.kill("offsets")
        await victim.process.ended()
        await cluster.serving("offsets")
        async with Admin(cluster.nameserver) as admin:
            (queue,) = (await admin.group_progress(workers.group)).queues
            assert (queue.lag, queue.unacked_count) == (0, 0)

        async def drained() -> bool:
            return (await _progress(cluster, workers.group)).unacked_count == 0

        await until(drained, timeout_s=60)
        successor = await workers.join("heir")
        await send(cluster.nameserver, TOPIC, range(20, 25))
        await until(lambda: workers.done() == set(range(25)), timeout_s=60)
        assert started_again(workers.handlings()) == []
        assert not any(handling.redelivered for handling in workers.handlings())
        assert await successor.leave() == 0


async def test_owner_frozen_beyond_its_lease_is_fenced(
    tmp_path: Path,
) -> None:
    async with ownership_cluster(tmp_path, 1, an_owner_dies=True) as (cluster, workers):
        paused = await workers.join("zombie", parallel=4, handle_ms=50)
        await until_owned(paused, 1)
        await send(cluster.nameserver, TOPIC, range(400))
        await until(lambda: len(workers.done()) > 50, timeout_s=60)
        await paused.freeze()
        successor = await workers.join("heir", parallel=4)
        await until_owned(successor, 1)
        old = paused.ownerships()[-1].token
        await until(lambda: workers.done() == set(range(400)), timeout_s=60)
        await until(lambda: _committed(cluster, workers.group, 400), timeout_s=60)
        before = await _progress(cluster, workers.group)
        resumed_us = now_us()
        paused.thaw()
        await until(lambda: any(o.kind == "fenced" for o in paused.ownerships()), timeout_s=60)
        await _refused_everywhere(cluster, workers.group, old)
        late = [h for h in paused.handlings() if h.start_us > resumed_us and h.token == old]
        assert late == [], "a message was started under the old token"
        after = await _progress(cluster, workers.group)
        assert (after.token, after.committed_offset) == (before.token, before.committed_offset)
        assert all(later.redelivered for _, later in started_again(workers.handlings()))


async def test_second_process_with_the_same_client_id_is_rejected(
    tmp_path: Path,
) -> None:
    async with ownership_cluster(tmp_path, 4) as (cluster, workers):
        first = await workers.join("twin")
        await until_owned(first, 4)
        second = await workers.join("twin", life="-2", start_ms=0)
        assert await second.process.ended() == 3
        assert second.failure == "CLIENT_ID_IN_USE"
        await send(cluster.nameserver, TOPIC, range(500))
        await until(lambda: workers.done() == set(range(500)), timeout_s=60)
        assert [o.kind for o in first.ownerships()] == ["joined", *["granted"] * 4]


async def test_member_with_other_tags_is_rejected_and_no_message_is_lost(tmp_path: Path) -> None:
    async with ownership_cluster(tmp_path, 4) as (cluster, workers):
        first = await workers.join("first", expression="even || odd")
        await until_owned(first, 4)
        second = await workers.join("second", expression="even")
        assert await second.process.ended() == 3
        assert second.failure == "SUBSCRIPTION_CONFLICT"
        await send(cluster.nameserver, TOPIC, range(1_000), "even", "odd")
        await until(lambda: workers.done() == set(range(1_000)), timeout_s=60)
        assert started_again(workers.handlings()) == []
        assert len(first.owned) == 4


async def _progress(cluster: LocalCluster, group: str) -> offsets_pb.Progress:
    """Return the progress of the only queue."""
    async with connect(cluster.addresses["offsets"]) as channel:
        answer = await offsets_grpc.OffsetsServiceStub(channel).QueryGroup(
            offsets_pb.QueryGroupRequest(group=group), timeout=30
        )
    (progress,) = answer.queues
    return progress


async def _committed(cluster: LocalCluster, group: str, offset: int) -> bool:
    return (await _progress(cluster, group)).committed_offset == offset


async def _refused_everywhere(cluster: LocalCluster, group: str, token: int) -> None:
    """Assert that pull, ack and close under an old token are rejected."""
    progress = await _progress(cluster, group)
    key = progress.queue
    async with (
        connect(cluster.addresses["offsets"]) as to_offsets,
        connect(cluster.addresses["storage"]) as to_storage,
    ):
        offsets = offsets_grpc.OffsetsServiceStub(to_offsets)
        ack = [queue_pb2.OffsetRange(first_offset=0, next_offset=1)]
        committed = await offsets.Commit(
            offsets_pb.CommitRequest(
                items=[offsets_pb.CommitItem(queue=key, token=token, acked=ack)]
            ),
            timeout=30,
        )
        closed = await offsets.Close(
            offsets_pb.CloseRequest(items=[offsets_pb.CloseItem(queue=key, token=token)]),
            timeout=30,
        )
        for outcome in (committed.outcomes[0], closed.outcomes[0]):
            assert isinstance(error_from_pb(outcome.error), Fenced)
        pull = storage_pb.PullRequest(queue=key, token=token, offset=0, pull_id=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await storage_grpc.StorageServiceStub(to_storage).Pull(pull, timeout=30)
        assert isinstance(from_rpc_error(raised.value), Fenced)


async def test_rebalance_storm_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    total = 30_000
    async with ownership_cluster(tmp_path, 16) as (cluster, workers), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send(cluster.nameserver, TOPIC, range(total)))
        present: list[Worker] = []
        for wave in ((1, 0), (5, 0), (0, 3), (10, 1), (7, 0), (0, 12), (2, 7)):
            joining, leaving = wave
            present += [
                await workers.join(f"m{len(workers.members)}", handle_ms=1) for _ in range(joining)
            ]
            await until(lambda: all(worker.lines for worker in workers.members), timeout_s=90)
            leavers, present = present[:leaving], present[leaving:]
            leaves = [tasks.create_task(worker.leave()) for worker in leavers]
            for leave in leaves:
                assert await leave == 0
        await sending
        await until(lambda: workers.done() == set(range(total)), timeout_s=120)
        assert started_again(workers.handlings()) == [], "a message was handled twice"
        assert not any(handling.redelivered for handling in workers.handlings())
        last: dict[int, int] = {}
        for handling in workers.handlings():
            assert handling.offset > last.get(handling.queue_id, -1), "out of order"
            last[handling.queue_id] = handling.offset


@pytest.mark.long
@pytest.mark.parametrize("restarts", [3])
async def test_lock_manager_killed_during_hand_overs_loses_and_duplicates_nothing(
    tmp_path: Path, restarts: int
) -> None:
    total = 8_000
    async with ownership_cluster(tmp_path, 8) as (cluster, workers), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send(cluster.nameserver, TOPIC, range(total)))
        members = [await workers.join("m0", handle_ms=2)]
        await until_owned(members[0], 8)
        for number in range(1, restarts + 1):
            worker = await workers.join(f"m{number}", handle_ms=2)
            members.append(worker)
            # When the first queue has a new owner, the other hand-overs are in progress.
            await until(lambda worker=worker: worker.owned, timeout_s=60)  # type: ignore[misc]
            await cluster.kill("lockmgr")
            await cluster.serving("lockmgr")
            await until(
                lambda: sorted(q for w in members for q in w.owned) == list(range(8)),
                timeout_s=90,
            )
        await sending
        await until(lambda: workers.done() == set(range(total)), timeout_s=90)
        again = started_again(workers.handlings())
        assert [pair for pair in again if not pair[1].redelivered] == []
        assert again == [], "the restart of the lock manager caused a duplicate"
