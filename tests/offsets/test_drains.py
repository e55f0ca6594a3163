"""Goal: a drained leader hands over, and is not elected until it is undrained, also after a
restart; it goes on leading while no other node could.

Method: a replica set in one process with a real etcd; marks are written as the nameserver does.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq_server.runtime.etcd.session import EtcdSession
from tests.offsets.replica_cluster import Replica, ReplicaSet, commit, committed, hold, three
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(180)


async def drain(etcd: EtcdSession, name: str) -> None:
    await etcd.put(f"drains/offsets/{name}", b"")


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
        await etcd.delete(f"drains/offsets/{first.name}")
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
    read, look_count = leader.session.get_prefix, 0

    async def counted(prefix: str) -> Any:
        nonlocal look_count
        look_count += prefix.startswith("drains/")
        return await read(prefix)

    async with leader.session.another() as etcd:
        for name in [*others, leader.name]:
            await drain(etcd, name)
        monkeypatch.setattr(leader.session, "get_prefix", counted)
        await until(lambda: look_count >= 3)
        assert await leader.serves()
        await etcd.delete(f"drains/offsets/{others[0]}")
        assert (await next_leader(scene, leader)).name == others[0]
