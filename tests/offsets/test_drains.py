"""Goal: a drained leader hands over, and is not elected until it is undrained, also after a
restart; it goes on leading while no other node could.

Method: a replica set in one process with a real etcd; marks are written as the nameserver does.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq_server.runtime.election import drain_key
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.replication.in_sync_set import InSyncSet
from batonmq_server.runtime.replication.replica_node import ReplicaNode
from tests.offsets.replica_cluster import Replica, ReplicaSet, commit, committed, hold, three
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(180)


def mark(name: str) -> str:
    """Return the key that excludes a node from the elections of the set."""
    return drain_key("elections/offsets/offsets", name)


async def drain(etcd: EtcdSession, name: str) -> None:
    await etcd.put(mark(name), b"")


async def vacant(etcd: EtcdSession, key: str) -> bool:
    return await etcd.get(key) is None


async def next_leader(scene: ReplicaSet, old: Replica) -> Replica:
    """Return the serving leader once it is another node than `old`."""

    async def changed() -> bool:
        return (await scene.set_record()).leader != old.name

    await until(changed)
    return await scene.leader()


async def test_drained_leader_hands_over_and_is_not_elected_until_undrained(
    scene: ReplicaSet,
) -> None:
    first = await three(scene)
    await hold(first, 0)
    await commit(first, 42)
    await scene.wait_in_sync("a", "b", "c")
    async with first.session.another() as etcd:
        await drain(etcd, first.name)
        second = await next_leader(scene, first)
        assert await committed(second) == 42
        await first.stop()
        await scene.start(first.name)
        await scene.wait_in_sync("a", "b", "c")
        (last,) = scene.nodes.keys() - {first.name, second.name}
        await drain(etcd, second.name)
        third = await next_leader(scene, second)
        assert third.name == last, "the restarted node is still drained"
        await scene.wait_in_sync("a", "b", "c")
        await etcd.delete(mark(first.name))
        await drain(etcd, third.name)
        fourth = await next_leader(scene, third)
        assert fourth.name == first.name
        assert await committed(fourth) == 42


async def test_drained_leader_goes_on_until_another_node_could_lead(
    scene: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = await three(scene)
    await hold(leader, 0)
    await scene.wait_in_sync("a", "b", "c")
    others = sorted(scene.nodes.keys() - {leader.name})
    real, looks = ReplicaNode._hands_over, 0

    def counted(self: ReplicaNode[Any], in_sync_set: InSyncSet) -> bool:
        nonlocal looks
        looks += self.election.drained == {"a", "b", "c"}
        return real(self, in_sync_set)

    async with leader.session.another() as etcd:
        for name in [*others, leader.name]:
            await drain(etcd, name)
        monkeypatch.setattr(ReplicaNode, "_hands_over", counted)
        await until(lambda: looks >= 3)
        assert await leader.serves()
        await etcd.delete(mark(others[0]))
        assert (await next_leader(scene, leader)).name == others[0]


async def test_drained_node_leads_only_after_undrain_even_if_all_others_are_down(
    scene: ReplicaSet,
) -> None:
    leader = await three(scene)
    async with leader.session.another() as etcd:
        await drain(etcd, leader.name)
        second = await next_leader(scene, leader)
        (third,) = scene.nodes.keys() - {leader.name, second.name}
        await scene.wait_in_sync("a", "b", "c")
        for name in (second.name, third):
            await scene.nodes[name].stop()
        key = "elections/offsets/offsets"
        await until(lambda: vacant(etcd, key))
        await etcd.delete(mark(leader.name))
        assert (await scene.leader()).name == leader.name
