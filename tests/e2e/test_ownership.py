"""Goal: whatever happens to a member's process, nothing is lost, and nothing comes twice unflagged.

Method: a real cluster; members are processes that write down each handler's start and end.
They are killed, frozen, started under a name that is taken, or given other tags; then what they
have written together is compared with what was sent. Where an owner dies locks are leased for 10 s,
so that it is noticed soon; elsewhere as long as ever, since nobody's lease is to end.
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
from tests.e2e.crew import Crew, Worker, crew_of, send, started_again
from tests.support.cluster import local_cluster
from tests.support.member import now_us
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TOPIC = "numbers"
LEASE_S = 30
SHORT_MS = 10_000
SHORT: dict[str, Any] = {
    "lockmgr": {"lock_lease_ms": SHORT_MS},
    "nameserver": {"member_lease_ms": SHORT_MS, "heartbeat_interval_ms": 2_000},
}


@asynccontextmanager
async def scene(
    folder: Path, queues: int, *, an_owner_dies: bool = False
) -> AsyncIterator[tuple[LocalCluster, Crew]]:
    """A cluster with one topic, and a crew without members."""
    settings = SHORT if an_owner_dies else {}
    async with local_cluster(folder / "cluster", **settings) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, queues)
        async with crew_of(cluster.nameserver, TOPIC, folder) as crew:
            yield cluster, crew


async def owning(worker: Worker, count: int) -> None:
    """Until the member owns that many queues."""
    await until(lambda: len(worker.owned) == count, timeout_s=60)


async def test_a_member_that_closes_hands_its_queues_over_within_a_second(tmp_path: Path) -> None:
    async with scene(tmp_path, 4) as (cluster, crew):
        first = await crew.join("first")
        await owning(first, 4)
        await send(cluster.nameserver, TOPIC, range(2_000))
        second = await crew.join("second")
        await owning(second, 2)
        await until(lambda: len(crew.done()) == 2_000, timeout_s=60)
        assert await first.leave() == 0
        await owning(second, 4)
        released = {o.queue_id: o.at_us for o in first.ownerships() if o.kind == "released"}
        late = [
            (o.at_us - released[o.queue_id]) / 1e6
            for o in second.ownerships()
            if o.kind == "granted"
        ]
        assert min(late) < 1, "whoever waits for a closed queue does not hear of it at once"
        assert max(late) < LEASE_S / 2, "a closed queue was free until a lease ended"
        await send(cluster.nameserver, TOPIC, range(2_000, 4_000))
        await until(lambda: len(crew.done()) == 4_000, timeout_s=60)
        assert started_again(crew.handlings()) == []
        assert not any(handling.redelivered for handling in crew.handlings())


async def test_kill_9_of_an_owner_brings_back_at_most_what_it_had_in_hand_and_flags_it(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, 2, an_owner_dies=True) as (cluster, crew):
        # It would need 9 s for all: it does not finish while the test looks away.
        victim = await crew.join("victim", parallel=8, handle_ms=25)
        await owning(victim, 2)
        await send(cluster.nameserver, TOPIC, range(6_000))
        await until(lambda: len(crew.done()) > 1_500, timeout_s=60)
        victim.kill()
        await victim.process.ended()
        heir = await crew.join("heir", parallel=8)
        await owning(heir, 2)
        await until(lambda: crew.done() == set(range(6_000)), timeout_s=60)
        again = started_again(crew.handlings())
        assert again, "the victim was killed in mid-work, so something comes again"
        assert all(later.redelivered for _, later in again)
        for queue_id in range(2):
            mine = [h for h in victim.handlings() if h.queue_id == queue_id]
            lowest = min(later.offset for _, later in again if later.queue_id == queue_id)
            assert max(h.offset for h in mine) - lowest <= 2_000
        assert await heir.leave() == 0


async def test_nothing_that_a_frozen_owner_does_after_its_lease_is_accepted(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, 1, an_owner_dies=True) as (cluster, crew):
        zombie = await crew.join("zombie", parallel=4, handle_ms=50)
        await owning(zombie, 1)
        await send(cluster.nameserver, TOPIC, range(400))
        await until(lambda: len(crew.done()) > 50, timeout_s=60)
        zombie.freeze()
        heir = await crew.join("heir", parallel=4)
        await owning(heir, 1)
        old = zombie.ownerships()[-1].token
        await until(lambda: crew.done() == set(range(400)), timeout_s=60)
        await until(lambda: _committed(cluster, crew.group, 400), timeout_s=60)
        before = await _progress(cluster, crew.group)
        resumed_us = now_us()
        zombie.thaw()
        await until(lambda: any(o.kind == "fenced" for o in zombie.ownerships()), timeout_s=60)
        await _refused_everywhere(cluster, crew.group, old)
        late = [h for h in zombie.handlings() if h.start_us > resumed_us and h.token == old]
        assert late == [], "it started messages under a token that was over"
        after = await _progress(cluster, crew.group)
        assert (after.token, after.committed_offset) == (before.token, before.committed_offset)
        assert all(later.redelivered for _, later in started_again(crew.handlings()))


async def test_a_second_process_of_a_client_id_is_refused_and_the_first_is_not_touched(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, 4) as (cluster, crew):
        first = await crew.join("twin")
        await owning(first, 4)
        second = await crew.join("twin", life="-2")
        assert await second.process.ended() == 3
        assert second.failure == "CLIENT_ID_IN_USE"
        await send(cluster.nameserver, TOPIC, range(500))
        await until(lambda: crew.done() == set(range(500)), timeout_s=60)
        assert [o.kind for o in first.ownerships()] == ["joined", *["granted"] * 4]


async def test_a_member_with_other_tags_is_refused_and_no_message_is_lost(tmp_path: Path) -> None:
    async with scene(tmp_path, 4) as (cluster, crew):
        first = await crew.join("first", expression="even || odd")
        await owning(first, 4)
        second = await crew.join("second", expression="even")
        assert await second.process.ended() == 3
        assert second.failure == "SUBSCRIPTION_CONFLICT"
        await send(cluster.nameserver, TOPIC, range(1_000), "even", "odd")
        await until(lambda: crew.done() == set(range(1_000)), timeout_s=60)
        assert started_again(crew.handlings()) == []
        assert len(first.owned) == 4


async def _progress(cluster: LocalCluster, group: str) -> offsets_pb.Progress:
    """The progress of the only queue."""
    async with connect(cluster.addresses["offsets"]) as channel:
        answer = await offsets_grpc.OffsetsServiceStub(channel).QueryGroup(
            offsets_pb.QueryGroupRequest(group=group), timeout=30
        )
    (progress,) = answer.queues
    return progress


async def _committed(cluster: LocalCluster, group: str, offset: int) -> bool:
    return (await _progress(cluster, group)).committed_offset == offset


async def _refused_everywhere(cluster: LocalCluster, group: str, token: int) -> None:
    """Pull, ack and close under a token that is over: what a zombie's sockets may still send."""
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


async def test_storms_of_joins_and_leaves_lose_and_double_nothing(tmp_path: Path) -> None:
    total = 30_000
    async with scene(tmp_path, 16) as (cluster, crew), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send(cluster.nameserver, TOPIC, range(total)))
        present: list[Worker] = []
        for wave in ((1, 0), (5, 0), (0, 3), (10, 1), (7, 0), (0, 12), (2, 7)):
            joining, leaving = wave
            present += [
                await crew.join(f"m{len(crew.workers)}", handle_ms=1) for _ in range(joining)
            ]
            await until(lambda: all(worker.lines for worker in crew.workers), timeout_s=90)
            gone, present = present[:leaving], present[leaving:]
            leaves = [tasks.create_task(worker.leave()) for worker in gone]
            for leave in leaves:
                assert await leave == 0
        await sending
        await until(lambda: crew.done() == set(range(total)), timeout_s=120)
        assert started_again(crew.handlings()) == [], "something came twice"
        assert not any(handling.redelivered for handling in crew.handlings())
        last: dict[int, int] = {}
        for handling in crew.handlings():
            assert handling.offset > last.get(handling.queue_id, -1), "out of order"
            last[handling.queue_id] = handling.offset


@pytest.mark.parametrize("restarts", [3])
async def test_the_lock_manager_killed_in_the_middle_of_hand_overs_changes_nothing(
    tmp_path: Path, restarts: int
) -> None:
    total = 8_000
    async with scene(tmp_path, 8) as (cluster, crew), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send(cluster.nameserver, TOPIC, range(total)))
        workers = [await crew.join("m0", handle_ms=2)]
        await owning(workers[0], 8)
        for number in range(1, restarts + 1):
            worker = await crew.join(f"m{number}", handle_ms=2)
            workers.append(worker)
            # The moment the first queue has changed hands the others are on their way.
            await until(lambda worker=worker: worker.owned, timeout_s=60)  # type: ignore[misc]
            await cluster.kill("lockmgr")
            await cluster.serving("lockmgr")
            await until(
                lambda: sorted(q for w in workers for q in w.owned) == list(range(8)),
                timeout_s=90,
            )
        await sending
        await until(lambda: crew.done() == set(range(total)), timeout_s=90)
        again = started_again(crew.handlings())
        assert [pair for pair in again if not pair[1].redelivered] == []
        assert again == [], "the failover of the lock manager is no excuse for a duplicate"
