"""A replica set of offsets whose leader crashes, is cut off, is slow or restarts.

Goal: answered progress is never lost and never goes back, whichever node is the leader; a node
whose lease may have expired does not answer; a node that lacks a confirmed change is never elected;
all copies are equal.
Method: three real nodes in one process (tests/offsets/replica_cluster.py). A test waits for a
state, never for a time.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import replication_service_pb2 as pb2
from batonmq._common.rpc import from_rpc_error
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, Unreachable
from batonmq_server.offsets import follower as following
from batonmq_server.offsets import leadership as leading
from batonmq_server.offsets import replication_server
from batonmq_server.offsets.codec import META, encode_key
from batonmq_server.offsets.core.change_log import Entry
from tests.offsets.replica_cluster import (
    Replica,
    ReplicaSet,
    commit,
    committed,
    hold,
    rejection,
    three,
)
from tests.support.conditions import until
from tests.support.replica_nodes import LAG_MS_MAX, TIMEOUT_S

pytestmark = pytest.mark.timeout(180)


def others(scene: ReplicaSet, leader: Replica) -> list[str]:
    return sorted(scene.nodes.keys() - {leader.name})


async def test_new_set_starts_only_when_all_its_replicas_are_up(scene: ReplicaSet) -> None:
    await scene.start("a", "b")
    registered = [node.session for node in scene.nodes.values()]

    async def both_listed() -> bool:
        entries, _ = await registered[0].get_prefix("nodes/offsets/")
        return len(entries) == 2

    await until(both_listed)
    assert (await scene.set_record()).epoch == 0
    await scene.start("c")
    leader = await scene.leader()
    assert (await scene.set_record()).leader == leader.name


async def test_followers_store_the_same_bytes_as_the_leader(scene: ReplicaSet) -> None:
    leader = await three(scene)
    await hold(leader, *range(20))
    for queue_id in range(20):
        await commit(leader, 5 + queue_id, (50, 60), queue_id=queue_id)
    await scene.wait_equal("a", "b", "c")
    assert len(leader.stored()) > 40


async def test_answered_changes_survive_a_crash_of_the_leader(
    scene: ReplicaSet,
) -> None:
    first = await three(scene)
    await hold(first, 0)
    await commit(first, 42, (60, 70))
    before = await scene.set_record()
    await first.crash()
    second = await scene.leader()
    assert second is not first
    assert (await scene.set_record()).epoch == before.epoch + 1
    answer = await second.stub.QueryGroup(pb.QueryGroupRequest(group="readers"), timeout=20)
    (progress,) = answer.queues
    assert (progress.committed_offset, progress.acked_count, progress.token) == (42, 10, 1)
    await commit(second, 80)
    await scene.start(first.name)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal("a", "b", "c")


async def test_old_leader_drops_its_unanswered_changes(scene: ReplicaSet) -> None:
    first = await three(scene)
    await hold(first, 0)
    await commit(first, 10)
    await scene.wait_equal("a", "b", "c")
    first.gate.shut |= {"a", "b", "c"}
    first.session.cut = True  # so it can't remove followers from the in-sync set
    before = first.stored()

    async def written() -> bool:
        with pytest.raises(Unreachable):
            await commit(first, 90, timeout_s=0.5)
        return first.stored() != before

    await until(written)
    await first.crash()
    second = await scene.leader()
    assert await committed(second) == 10
    await commit(second, 20)
    await scene.start(first.name)
    await scene.wait_equal("a", "b", "c")
    assert await committed(second) == 20


@pytest.mark.long
async def test_leader_cut_off_from_etcd_answers_no_call(
    scene: ReplicaSet,
) -> None:
    first = await three(scene)
    await hold(first, 0)
    await commit(first, 10)
    followers = [scene.nodes[name] for name in others(scene, first)]
    first.session.cut = True
    answered, refusals = 0, set[str]()

    async def another_begins() -> bool:
        nonlocal answered
        begun = any([await node.serves() for node in followers])
        try:
            await committed(first)
        except grpc.aio.AioRpcError as error:
            refusals.add(from_rpc_error(error).reason)
        else:
            assert not begun, "the leader stopped before another leader began"
            answered += 1
        return begun

    await until(another_begins)
    assert answered, "the leader answered while its lease was valid"
    assert "NO_QUORUM" in refusals
    second = await scene.leader()
    await commit(second, 20)
    assert isinstance(await rejection(first, 30), BatonError)


@pytest.mark.long
async def test_change_during_the_expiry_of_the_lease_has_an_unknown_outcome(
    scene: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await three(scene)
    await hold(first, 0, 1)
    for name in others(scene, first):
        await scene.nodes[name].stop()
    await scene.wait_in_sync(first.name)
    before = first.stored()
    begun, over, write_blocking = threading.Event(), threading.Event(), first.disk.write_blocking

    def slow(entries: Sequence[Entry], *, replace: bool = False) -> None:
        begun.set()
        over.wait(TIMEOUT_S)  # in a thread, as a stalled disk: the waiting call may be cancelled
        write_blocking(entries, replace=replace)

    monkeypatch.setattr(first.disk, "write_blocking", slow)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(rejection(first, 20))
        await until(begun.is_set)
        first.session.silent = True

        async def lease_over() -> bool:
            try:
                await committed(first, queue_id=1)
            except grpc.aio.AioRpcError as error:
                # UNREACHABLE: this call had begun before the lease expired, too.
                return from_rpc_error(error).reason in ("NOT_LEADER", "NO_QUORUM")
            return False

        await until(lease_over)
        over.set()
    assert isinstance(waiting.result(), Unreachable), "the change is on the disk and stays"
    await until(lambda: first.stored() != before)
    await first.crash()
    await scene.start(first.name)
    assert await committed(await scene.leader()) == 20


@pytest.mark.long
async def test_slow_follower_leaves_the_in_sync_set_before_changes_are_confirmed_without_it(
    scene: ReplicaSet,
) -> None:
    leader = await three(scene)
    await hold(leader, 0)
    slow, quick = others(scene, leader)
    leader.gate.shut.add(slow)
    await commit(leader, 10)
    assert (await scene.set_record()).in_sync == {leader.name, quick}
    ready = [name for name, node in scene.nodes.items() if await node.caught_up()]
    assert sorted(ready) == sorted((leader.name, quick)), "a follower that lags is not ready"
    assert scene.nodes[quick].stored() == leader.stored()
    leader.gate.shut.clear()
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal("a", "b", "c")
    assert await scene.nodes[slow].caught_up()


async def test_replica_that_is_not_in_sync_is_not_elected(scene: ReplicaSet) -> None:
    leader = await three(scene)
    await hold(leader, 0)
    for name in others(scene, leader):
        await scene.nodes[name].stop()
    await scene.wait_in_sync(leader.name)
    await commit(leader, 10)
    await leader.crash()
    first, _ = await scene.start(*others(scene, leader))

    async def vacant() -> bool:
        return await first.session.get("elections/offsets/offsets") is None

    await until(vacant)
    await scene.start(leader.name)
    again = await scene.leader()
    assert again.name == leader.name
    assert await committed(again) == 10


async def test_replica_that_lost_its_disk_is_not_elected_and_copies_everything(
    scene: ReplicaSet, tmp_path: Path
) -> None:
    leader = await three(scene)
    await hold(leader, 0)
    await commit(leader, 10)
    await scene.wait_equal("a", "b", "c")
    lost, kept = others(scene, leader)
    await scene.crash_all()
    assert (await scene.set_record()).in_sync == {"a", "b", "c"}
    shutil.rmtree(tmp_path / lost)
    await scene.start(lost, kept)
    again = await scene.leader()
    assert again.name == kept
    assert await committed(again) == 10
    await scene.wait_in_sync(lost, kept)
    await scene.wait_equal(lost, kept)


async def test_leader_describes_the_positions_of_all_replicas(scene: ReplicaSet) -> None:
    leader = await three(scene)
    await hold(leader, 0)
    slow, quick = others(scene, leader)
    leader.gate.shut.add(slow)
    await commit(leader, 10)
    answer = await leader.replication.DescribeReplicas(pb2.DescribeReplicasRequest(), timeout=20)
    by_name = {replica.node_id: replica for replica in answer.replicas}
    assert by_name.keys() == {"a", "b", "c"}
    assert (answer.replica_set, answer.min_in_sync) == ("offsets", 1)
    assert answer.confirmed == by_name[leader.name].position
    assert by_name[leader.name].leader
    assert (by_name[quick].in_sync, by_name[quick].lag) == (True, 0)
    assert not by_name[slow].in_sync
    assert by_name[slow].lag > 0
    assert by_name[slow].lag_ms >= LAG_MS_MAX


async def test_fetch_at_a_negative_position_is_rejected(scene: ReplicaSet) -> None:
    leader = await three(scene)
    at = pb2.Position(epoch=0, version=-(2**63))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await leader.replication.Fetch(pb2.FetchRequest(node_id="b", position=at), timeout=20)
    assert from_rpc_error(refused.value).facts["field"] == "position.version"
    answer = await leader.replication.DescribeReplicas(pb2.DescribeReplicasRequest(), timeout=20)
    assert [replica.lag for replica in answer.replicas] == [0, 0, 0]


async def test_changes_are_rejected_with_too_few_replicas_in_sync(scene: ReplicaSet) -> None:
    scene.settings["min_in_sync"] = 2
    leader = await three(scene)
    await hold(leader, 0)
    await commit(leader, 10)
    quick, last = others(scene, leader)
    await scene.nodes[quick].stop()
    await scene.wait_in_sync(leader.name, last)
    await scene.nodes[last].stop()
    await until(lambda: _keep_up(leader, 1))
    error = await rejection(leader, 20)
    assert (error.reason, error.retry.name) == ("NOT_ENOUGH_REPLICAS", "SAME_CALL")
    assert error.facts == {"in_sync": "1", "limit": "2"}
    assert await committed(leader) == 10
    assert (await scene.set_record()).in_sync == {leader.name, last}, (
        "the last follower can still be elected"
    )
    await scene.start(quick)
    await until(lambda: _accepts(leader, 20))
    await scene.wait_in_sync(leader.name, quick)


async def test_leader_that_starts_with_too_few_in_sync_waits_for_another_member(
    scene: ReplicaSet,
) -> None:
    """It may have changes that no other member has, and another member may be elected instead."""
    scene.settings["min_in_sync"] = 2
    leader = await three(scene)
    await hold(leader, 0)
    await commit(leader, 10)
    await scene.crash_all()
    epoch = (await scene.set_record()).epoch
    (again,) = await scene.start(leader.name)
    await scene.wait_epoch_above(epoch)
    assert not await again.serves()
    await scene.start(others(scene, leader)[0])
    assert await committed(await scene.leader()) == 10
    await until(lambda: _accepts(again, 20))


async def _keep_up(leader: Replica, count: int) -> bool:
    """Return whether this many replicas keep up, the leader included."""
    answer = await leader.replication.DescribeReplicas(pb2.DescribeReplicasRequest(), timeout=20)
    return sum(one.in_sync for one in answer.replicas) == count


async def _accepts(leader: Replica, offset: int) -> bool:
    try:
        await commit(leader, offset)
    except BatonError as error:
        assert error.reason == "NOT_ENOUGH_REPLICAS"
        return False
    return True


async def test_follower_with_a_different_copy_detects_it_and_copies_everything(
    scene: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SYNC_ALL_FIRST_MS", 0)
    monkeypatch.setattr(following, "SYNC_ALL_MS", 200)
    leader = await three(scene)
    await hold(leader, 0, 1)
    await commit(leader, 10)
    await scene.wait_equal("a", "b", "c")
    follower = scene.nodes[others(scene, leader)[0]]
    key = encode_key(GroupQueue("readers", "news", "broker-a", 0))
    follower.disk.write_blocking([(key, b"rotten"), (b"weed", b"not written by offsets")])
    await scene.wait_equal("a", "b", "c")


@pytest.mark.parametrize("damage", ["first", "middle", "last", "beyond"])
async def test_comparison_in_parts_finds_a_difference_anywhere(
    scene: ReplicaSet, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(following, "SYNC_ALL_FIRST_MS", 0)
    monkeypatch.setattr(following, "SYNC_ALL_MS", 200)
    monkeypatch.setattr(following, "COMPARED_BYTES", 500)
    monkeypatch.setattr(following, "COMPARE_PAUSE_MS", 10)
    leader = await three(scene)
    await hold(leader, *range(20))
    await scene.wait_equal("a", "b", "c")
    follower = scene.nodes[others(scene, leader)[0]]
    keys = [key for key, _ in follower.stored() if not key.startswith(META)]
    chosen = {"first": 0, "middle": len(keys) // 2, "last": -1}
    key = keys[chosen[damage]] if damage in chosen else b"\xff"
    follower.disk.write_blocking([(key, b"rotten")])
    await scene.wait_equal("a", "b", "c")


async def test_comparison_reads_a_bounded_part_at_a_time_and_in_the_end_everything(
    scene: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits wait for a follower while it compares."""
    monkeypatch.setattr(following, "SYNC_ALL_FIRST_MS", 0)
    monkeypatch.setattr(following, "SYNC_ALL_MS", 200)
    monkeypatch.setattr(following, "COMPARED_BYTES", 500)
    monkeypatch.setattr(following, "COMPARE_PAUSE_MS", 10)
    parts: list[tuple[str, bytes, bytes]] = []
    digest = replication_server.ReplicationServicer.Digest

    async def note(
        self: replication_server.ReplicationServicer, request: pb2.DigestRequest, context: Any
    ) -> pb2.DigestResponse:
        answer = await digest(self, request, context)
        parts.append((request.node_id, answer.after_key, answer.last_key))
        return answer

    monkeypatch.setattr(replication_server.ReplicationServicer, "Digest", note)
    leader = await three(scene)
    await hold(leader, *range(20))
    await scene.wait_equal("a", "b", "c")
    follower = others(scene, leader)[0]
    parts.clear()

    def passes() -> list[list[tuple[bytes, bytes]]]:
        """Return the parts of each complete comparison of the follower."""
        found: list[list[tuple[bytes, bytes]]] = []
        for first, last in [part[1:] for part in parts if part[0] == follower]:
            if not first:
                found.append([])
            if found:
                found[-1].append((first, last))
        return [one for one in found if not one[-1][1]]

    await until(lambda: bool(passes()))
    compared, entries = passes()[0], leader.stored()
    assert [first for first, _ in compared[1:]] == [last for _, last in compared[:-1]]
    sizes = [
        sum(len(key) + len(value) for key, value in entries if first < key <= (last or b"\xff"))
        for first, last in compared
    ]
    assert len(compared) > 3
    assert max(sizes) < 500 + max(len(key) + len(value) for key, value in entries)


async def test_change_too_large_for_an_answer_is_copied_in_parts(
    scene: ReplicaSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without that, no follower would ever follow again."""
    leader = await three(scene)
    await hold(leader, *range(50))
    await scene.wait_equal("a", "b", "c")
    monkeypatch.setattr(leading, "CHANGE_BYTES_MAX", 4_000, raising=False)
    caplog.clear()
    with caplog.at_level(logging.WARNING, following.__name__):
        request = pb.DeleteTopicRequest(topic="news", topic_id=7)
        answer = await leader.stub.DeleteTopic(request, timeout=TIMEOUT_S)
    assert answer.queue_count == 50
    assert caplog.text.count("replaces all its progress by that of the leader") == 2
    await hold(leader, 50)
    await scene.wait_equal("a", "b", "c")
    assert caplog.text.count("replaces all its progress by that of the leader") == 2
    assert (await scene.set_record()).in_sync == {"a", "b", "c"}


async def test_parts_of_a_copy_are_bounded_in_bytes(
    scene: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = await three(scene)
    await hold(leader, *range(20))
    monkeypatch.setattr(replication_server, "PART_BYTES", 1_000, raising=False)
    parts = [
        part
        async for part in leader.replication.ReadAll(
            pb2.ReadAllRequest(node_id="b"), timeout=TIMEOUT_S
        )
    ]
    entries = [(entry.key, entry.value) for part in parts for entry in part.entries]
    assert entries == leader.stored()
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    sizes = [sum(len(one.key) + len(one.value) for one in part.entries) for part in parts]
    largest = max(len(key) + len(value) for key, value in entries)
    assert max(sizes) < 1_000 + largest
