"""A leader that its followers can't reach, and that then crashes.

Goal: two of three nodes that hold everything acknowledged, and reach each other and etcd, serve
again whatever happened to the third: no step of its failure takes them out of the election.
Method: three real nodes in one process (tests/offsets/replica_cluster.py); the leader rejects all
calls of its followers, and reaches etcd all the time.
"""

from __future__ import annotations

import pytest

from batonmq.errors import BatonError, NotEnoughReplicas
from tests.offsets.replica_cluster import Replica, ReplicaSet, commit, committed, hold, three
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(180)


async def cut_off_leader(scene: ReplicaSet) -> Replica:
    """Return the leader of three nodes, two of which are required, once none reaches it."""
    scene.settings["min_in_sync"] = 2
    leader = await three(scene)
    await hold(leader, 0)
    await commit(leader, 10)
    leader.gate.shut |= {"a", "b", "c"}
    return leader


async def successor(scene: ReplicaSet, first: Replica) -> Replica:
    """Return the node that leads instead of `first`, once it serves."""
    leaders: list[Replica] = []

    async def look() -> bool:
        others = [node for node in scene.nodes.values() if node is not first]
        leaders.extend([node for node in others if await node.serves()])
        return bool(leaders)

    await until(look)
    return leaders[0]


@pytest.mark.long
async def test_survivors_serve_after_a_cut_off_leader_has_crashed(scene: ReplicaSet) -> None:
    first = await cut_off_leader(scene)

    async def is_refused() -> bool:
        try:
            await commit(first, 11, timeout_s=0.5)
        except NotEnoughReplicas:
            return True
        except BatonError:
            return False
        return False

    await until(is_refused)
    await first.crash()
    second = await successor(scene, first)
    assert await committed(second) in (10, 11)
    await commit(second, 20)
    assert len((await scene.set_record()).in_sync) >= 2


@pytest.mark.long
async def test_leader_that_its_followers_can_not_reach_resigns(scene: ReplicaSet) -> None:
    first = await cut_off_leader(scene)
    second = await successor(scene, first)
    await commit(second, 20)
    assert await committed(second) == 20
    assert not await first.serves()
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal("a", "b", "c")


@pytest.mark.long
async def test_leader_whose_followers_do_not_renew_their_entries_stays(scene: ReplicaSet) -> None:
    first = await cut_off_leader(scene)
    followers = [node for node in scene.nodes.values() if node is not first]
    for node in followers:
        node.session.cut = True  # as if the node were paused
    record = await scene.set_record()

    async def unlisted() -> bool:
        entries, _ = await first.session.get_prefix("nodes/offsets/")
        return len(entries) == 1

    await until(unlisted)
    assert await first.serves(), "the leader answers reads"
    now = await scene.set_record()
    assert (now.leader, now.epoch) == (record.leader, record.epoch), "no node was elected"
    assert len(now.in_sync) >= 2, "a leader keeps as many as it needs, whichever follower is late"
    for node in followers:
        node.session.cut = False
    first.gate.shut.clear()

    async def is_accepted() -> bool:
        try:
            await commit(first, 20)
        except NotEnoughReplicas:
            return False
        return True

    await until(is_accepted)
