"""Goal: a node whose disk is full is the leader only while no other replica has room.

Method: nodes of one set in this process, with real etcd, disks and channels; the test decides how
much is free on each disk.
"""

from __future__ import annotations

from collections import Counter

import pytest

from batonmq.errors import DiskFull
from batonmq_server.storage.disk import RealDisk
from batonmq_server.storage.replica import StorageReplica
from tests.storage.batches import batch
from tests.storage.replicas import SEGMENT_BYTES, Replica, Scene
from tests.storage.test_disk_full import PROPER
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(180)

DISK_BYTES = 100 * SEGMENT_BYTES


class Rooms:
    """The free space of the disks, and how often a leader with a full disk looked for another."""

    def __init__(self, scene: Scene, patch: pytest.MonkeyPatch) -> None:
        self._scene, self._free_bytes = scene, dict[str, int]()
        self.looks: Counter[str] = Counter()
        may_give_way = StorageReplica._may_give_way

        def space(disk: RealDisk) -> tuple[int, int]:
            free_bytes = self._free_bytes.get(disk._folder.name, DISK_BYTES // 2)
            return DISK_BYTES - free_bytes, free_bytes

        def counted(replica: StorageReplica) -> bool:
            self.looks[replica._node_id] += 1
            return may_give_way(replica)

        patch.setattr(RealDisk, "space", space)
        patch.setattr(StorageReplica, "_may_give_way", counted)

    def fill(self, *nodes: Replica) -> None:
        self._free_bytes |= {node.name: SEGMENT_BYTES for node in nodes}

    def clear(self, *nodes: Replica) -> None:
        for node in nodes:
            del self._free_bytes[node.name]

    async def stays(self, leader: Replica) -> None:
        """Wait until a leader with a full disk has looked for another one, and goes on to lead."""
        epoch, looks = (await self._scene.set_record()).epoch, self.looks[leader.name]
        await until(lambda: self.looks[leader.name] > looks + 2)
        assert isinstance(await leader.rejection(batch(b"refused")), DiskFull)
        assert (await self._scene.set_record()).epoch == epoch


@pytest.fixture
def rooms(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Rooms:
    scene.settings |= PROPER
    return Rooms(scene, monkeypatch)


async def next_leader(scene: Scene, before: Replica) -> Replica:
    """Return the leader after this one, once it serves."""

    async def look() -> bool:
        name = (await scene.set_record()).leader
        return name != before.name and await scene.nodes[name].serves()

    await until(look)
    return scene.nodes[(await scene.set_record()).leader]


async def test_leader_with_a_full_disk_resigns_for_a_replica_with_room(
    scene: Scene, rooms: Rooms
) -> None:
    await scene.start("a", "b", "c")
    await scene.wait_in_sync("a", "b", "c")
    leader = await scene.leader()
    await leader.append(batch(b"before"))
    rooms.fill(leader)
    other = await next_leader(scene, leader)
    await other.append(batch(b"after"))
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    assert await other.bodies() == [b"before", b"after"]


async def test_leader_stays_while_all_disks_are_full_and_serves_reads(
    scene: Scene, rooms: Rooms
) -> None:
    await scene.start("a", "b", "c")
    await scene.wait_in_sync("a", "b", "c")
    leader = await scene.leader()
    await leader.append(batch(b"before"))
    rooms.fill(*scene.nodes.values())
    await rooms.stays(leader)
    assert await leader.bodies() == [b"before"]
    others = [node for node in scene.nodes.values() if node is not leader]
    rooms.clear(*others)
    await (await next_leader(scene, leader)).append(batch(b"after"))


async def test_nodes_with_disks_that_are_nearly_full_do_not_take_turns(
    scene: Scene, rooms: Rooms
) -> None:
    first, second, third = await scene.start("a", "b", "c")
    await scene.wait_in_sync("a", "b", "c")
    leader = await scene.leader()
    for node in (first, second, third):
        if node is not leader:
            await node.stop()
            break
    (other,) = (one for one in (first, second, third) if one not in (leader, node))
    await scene.wait_in_sync(leader.name, other.name)
    rooms.fill(leader)
    assert await next_leader(scene, leader) is other
    await scene.wait_in_sync(leader.name, other.name)
    rooms.clear(leader)
    rooms.fill(other)
    assert await next_leader(scene, other) is leader
    await scene.wait_in_sync(leader.name, other.name)
    rooms.clear(other)
    rooms.fill(leader)
    await rooms.stays(leader)
