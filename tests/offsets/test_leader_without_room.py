"""Goal: a node whose disk is full is the leader only while no other replica can lead.

Method: nodes of one set in this process, with real etcd, disks and channels; the test decides how
much is free on each disk.
"""

from __future__ import annotations

import asyncio

import pytest

from baton.offsets.v1 import replication_service_pb2 as replication_pb
from batonmq.errors import BatonError, Unreachable
from batonmq_server.offsets.disk import FREE_BYTES_MIN
from tests.offsets.replica_cluster import (
    Replica,
    ReplicaSet,
    commit,
    committed,
    hold,
    three,
)
from tests.support.conditions import until
from tests.support.replica_nodes import TIMEOUT_S

PATIENCE_S = 45.0


class Rooms:
    """The free space of the disks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def fill(self, node: Replica) -> None:
        self._patch.setattr(node.disk, "_free_bytes", lambda: FREE_BYTES_MIN - 1)

    def clear(self, node: Replica) -> None:
        self._patch.setattr(node.disk, "_free_bytes", lambda: FREE_BYTES_MIN)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    return Rooms(monkeypatch)


async def ack_result(node: Replica, offset: int) -> BatonError | None:
    """Return the result of an ack that the node has applied when its disk becomes full."""
    try:
        await commit(node, offset, timeout_s=PATIENCE_S)
    except BatonError as error:
        return error
    return None


async def problems(leader: Replica) -> list[str]:
    """Return the problem that each follower reports."""
    answer = await leader.replication.DescribeReplicas(
        replication_pb.DescribeReplicasRequest(), timeout=TIMEOUT_S
    )
    return [one.problem.partition(":")[0] for one in answer.replicas if not one.leader]


async def next_leader(scene: ReplicaSet, before: Replica) -> Replica:
    """Return the next leader once it serves; this node may still claim to be the leader."""

    async def look() -> bool:
        name = (await scene.set_record()).leader
        return name != before.name and await scene.nodes[name].serves()

    await until(look, PATIENCE_S)
    return scene.nodes[(await scene.set_record()).leader]


async def test_replica_with_a_full_disk_does_not_block_an_election(
    scene: ReplicaSet, rooms: Rooms
) -> None:
    leader = await three(scene)
    await hold(leader, 0)
    full, stopped = (node for node in scene.nodes.values() if node is not leader)
    await stopped.stop()
    await scene.wait_in_sync(leader.name, full.name)
    rooms.fill(full)
    await leader.stop()  # no other node can be elected now
    (again,) = await scene.start(leader.name)
    await until(again.serves, PATIENCE_S)
    await commit(again, 10)
    rooms.clear(full)
    await scene.wait_in_sync(again.name, full.name)


@pytest.mark.long
async def test_leader_with_a_full_disk_resigns_for_a_replica_with_room(
    scene: ReplicaSet, rooms: Rooms
) -> None:
    leader = await three(scene)
    await hold(leader, 0)
    rooms.fill(leader)
    async with asyncio.TaskGroup() as tasks:
        ack = tasks.create_task(ack_result(leader, 5))
        other = await next_leader(scene, leader)
        assert isinstance(await ack, Unreachable), (
            "the outcome is not known, so it is not a rejection"
        )
    await commit(other, 10)
    rooms.clear(leader)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal("a", "b", "c")


async def test_leader_with_a_full_disk_stays_while_all_disks_are_full_and_answers_reads(
    scene: ReplicaSet, rooms: Rooms
) -> None:
    scene.settings = {
        "replica_lag_ms_max": 1_000,
        "leader_lease_ms": 8_000,
        "node_lease_ms": 8_000,
    }
    leader = await three(scene)
    await hold(leader, 0, 1)
    epoch = (await scene.set_record()).epoch
    one, other = (node for node in scene.nodes.values() if node is not leader)
    rooms.fill(one)
    rooms.fill(other)

    async def both_report_it() -> bool:
        return set(await problems(leader)) == {"DISK_FULL"}

    await until(both_report_it)
    rooms.fill(leader)
    async with asyncio.TaskGroup() as tasks:
        ack = tasks.create_task(ack_result(leader, 5))
        await asyncio.sleep(3)  # time in which the leader could have resigned
        assert (await scene.set_record()).epoch == epoch
        assert await committed(leader, queue_id=1) == 0
        rooms.clear(one)
        assert await next_leader(scene, leader) is one
        assert isinstance(await ack, Unreachable)
    await commit(one, 10)
