"""Goal: while a group's subscription changes, no queue is granted, every queue becomes free, and no
earlier grant is persisted; groups without ownership get no queue (protocol sections 14 and 15).

Method: one lock manager with real etcd and offsets; the test writes the gate like a nameserver, and
blocks hand-overs between their steps.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from batonmq.errors import (
    Fenced,
    ModeChanged,
    NotMember,
    SubscriptionDraining,
)
from tests.lockmgr.scene import GROUP, HOLD_MS, Member, Scene, describe, entries, waits
from tests.support.conditions import until

LEASE_MS = 30_000


async def all_free(s: Scene) -> bool:
    """Return whether no queue has an owner in etcd."""
    stored = [await s.stored(queue_id) for queue_id in range(await s.stored_count())]
    return all(entry is not None and not entry.HasField("owner") for entry in stored)


# Grants are bound to a subscription


async def test_grant_has_the_generation_of_its_subscription(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a, subscription_generation=4)
    grant = await a.acquire(node, generation)
    assert grant.subscription_generation == 4
    stored, (entry,) = await scene.stored(), await entries(node)
    assert stored is not None
    assert stored.subscription_generation == entry.subscription_generation == 4
    assert (await scene.progress()).subscription_generation == 4
    with pytest.raises(Fenced) as refusal:
        await scene.deliver(1, 0, 5, generation=3)
    assert refusal.value.facts["why"] == "SUBSCRIPTION"
    await scene.deliver(1, 0, 5, generation=4)
    assert (await a.acquire(node, generation, seq=1)) == grant
    await scene.close(1)
    await a.release(node, 1)
    stored = await scene.stored()
    assert stored is not None
    assert stored.subscription_generation == 0


async def test_grant_of_a_group_that_does_not_bind_has_no_subscription_generation(
    scene: Scene,
) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a, subscription_generation=4, bound=False)
    assert (await a.acquire(node, generation)).subscription_generation == 0
    await scene.deliver(1, 0, 5, generation=9)


# Groups without ownership


@pytest.mark.parametrize(
    "gate",
    [
        {"model": nameserver_pb.MESSAGE_MODEL_BROADCASTING},
        {"ownership": nameserver_pb.OWNERSHIP_OFF},
    ],
    ids=["broadcasting", "ownership off"],
)
async def test_group_without_ownership_is_denied(scene: Scene, gate: dict[str, Any]) -> None:
    node, a = await scene.leader(), Member("a")
    async with asyncio.timeout(HOLD_MS / 2000):
        with pytest.raises(ModeChanged):
            await a.acquire(node, await scene.set_group(a, **gate), hold_ms=HOLD_MS)
    assert (await scene.stored_count(), scene.rules.fences()) == (0, [])


async def test_waiting_request_is_denied_when_the_mode_changes(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    generation = await scene.set_group(a, b)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(b.refusal(node, generation, hold_ms=HOLD_MS))
        await until(lambda: waits(node, "b"))
        await scene.set_group(a, b, ownership=nameserver_pb.OWNERSHIP_OFF)
    assert isinstance(acquiring.result(), ModeChanged)


async def test_group_without_a_gate_is_denied(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await scene.etcd.delete(f"gates/{GROUP}")

    async def is_refused() -> bool:
        try:
            await a.acquire(node, generation)
        except NotMember:
            return True
        await a.release(node, 1)
        return False

    await until(is_refused)


# Draining


async def test_no_queue_is_granted_while_the_group_drains(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a, draining=True)
    with pytest.raises(SubscriptionDraining) as refusal:
        await a.acquire(node, generation)
    assert refusal.value.retry_after_ms > 0
    assert refusal.value.facts["subscription_generation"] == "1"
    assert (await scene.stored_count(), scene.rules.fences()) == (0, [])


async def test_waiting_request_is_granted_when_the_new_subscription_begins(scene: Scene) -> None:
    node, a = await scene.leader(slot_ms=60_000), Member("a")
    generation = await scene.set_group(a, draining=True)
    async with a.waiting(node, generation) as acquiring:
        await scene.set_group(a, subscription_generation=2)
    assert acquiring.result().subscription_generation == 2


async def test_owner_in_a_draining_group_is_notified_and_renewed_until_it_releases(
    scene: Scene,
) -> None:
    node, a = await scene.leader(), Member("a")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 5)
    await scene.set_group(a, draining=True)

    async def is_notified() -> bool:
        (report,) = await a.keep_alive(node, 1)
        return report.wanted_reason == pb.WANTED_REASON_SUBSCRIPTION

    await until(is_notified)
    node.clock.ahead_ms = LEASE_MS - 1_000
    assert await a.state(node, 1) == "WANTED"
    await scene.commit(1, 5)
    await scene.close(1, 5)
    await a.release(node, 1)
    assert await all_free(scene)
    assert len(scene.rules.fences()) == 1, "a released queue needs no fence"


async def test_closed_queue_is_cleared_after_a_lost_release(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    await a.acquire_each(node, await scene.set_group(a), range(3))
    for queue_id in range(3):
        await scene.close(1, queue_id=queue_id)
    await scene.set_group(a, draining=True)
    await until(lambda: all_free(scene))
    assert len(scene.rules.fences()) == 3, "a closed queue needs no fence"
    value = node.runtime.registry.get_sample_value
    assert value("baton_lockmgr_cleared_total") == 3


async def test_queue_of_a_dead_owner_is_fenced_and_freed_after_its_lease(scene: Scene) -> None:
    node, a, b = await scene.leader(), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 5)
    await scene.commit(1, 2)
    await scene.set_group(b, draining=True)
    node.clock.ahead_ms = LEASE_MS + 1_000
    await until(lambda: _fenced(scene))
    assert not await all_free(scene), "the owner called offsets within the lease"
    scene.offsets_clock.ahead_ms = LEASE_MS + 1_000
    await until(lambda: all_free(scene))
    progress = await scene.progress()
    assert (progress.token, progress.closed, progress.HasField("holder")) == (2, True, False)
    with pytest.raises(Fenced):
        await scene.commit(1, 5)
    generation = await scene.set_group(b, subscription_generation=2)
    grant = await b.acquire(node, generation, hold_ms=HOLD_MS)
    assert (grant.token, grant.committed_offset) == (3, 2)
    assert [(r.first_offset, r.next_offset) for r in grant.maybe_seen] == [(2, 5)]


async def test_new_leader_continues_draining(scene: Scene) -> None:
    old, a = await scene.leader(), Member("a")
    await a.acquire(old, await scene.set_group(a))
    await old.crash()
    await scene.close(1)
    generation = await scene.set_group(a, draining=True)
    new = await scene.leader()
    await until(lambda: all_free(scene))
    with pytest.raises(SubscriptionDraining):
        await a.acquire(new, generation)


# A change of the gate during a grant


async def test_grant_is_not_persisted_after_a_change_of_the_gate(scene: Scene) -> None:
    """The queue was free: it stays free, and the issued token has no owner."""
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation)
    await scene.close(1)
    await a.release(node, 1)
    await _change_during_fence(scene, draining=True)
    with pytest.raises(SubscriptionDraining):
        await a.acquire(node, generation)
    assert await all_free(scene)
    assert (await scene.progress()).token == 2
    generation = await scene.set_group(a, subscription_generation=2)
    grant = await a.acquire(node, generation, hold_ms=HOLD_MS)
    assert (grant.token, grant.subscription_generation) == (3, 2)


async def test_fenced_queue_whose_grant_was_not_persisted_is_a_phantom_and_is_cleared(
    scene: Scene,
) -> None:
    """The previous owner is fenced, so it can't close the queue."""
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    await scene.close(1)
    generation = await scene.set_group(a, b)
    await _change_during_fence(scene, draining=True)
    with pytest.raises(SubscriptionDraining):
        await b.acquire(node, generation)
    await until(lambda: all_free(scene))
    assert await a.state(node, 1) == "NOT_OWNER"
    assert (await scene.progress()).token == 3


async def test_request_is_tried_again_under_the_new_gate(scene: Scene) -> None:
    """The gate changed for another reason, such as a pause: the requester gets its grant."""
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await _change_during_fence(scene, pause=nameserver_pb.Pause(by="operator"))
    grant = await a.acquire(node, generation)
    assert grant.token == 2
    assert await a.state(node, 2) == "OK"
    assert (await describe(node)).entry.state == pb.LOCK_STATE_HELD


async def test_rejected_grant_does_not_fail_others_of_the_same_transaction(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await _change_during_fence(scene, pause=nameserver_pb.Pause(by="operator"))
    outcomes = await a.acquire_each(node, generation, range(50))
    assert len(outcomes) == 50
    assert [one for one in outcomes.values() if not isinstance(one, pb.Grant)] == []


async def _change_during_fence(s: Scene, **gate: Any) -> None:
    """Change the gate between the next fence and its write."""

    async def change(request: Any, proceed: Any) -> Any:
        del s.rules.rules["Fence"]
        answer = await proceed()
        entry = await s.etcd.get(f"gates/{GROUP}")
        assert entry is not None
        opened = StoredGate.FromString(entry.value)
        opened.MergeFrom(StoredGate(**gate))
        await s.etcd.put(f"gates/{GROUP}", opened.SerializeToString())
        return answer

    s.rules.rules["Fence"] = change


async def _fenced(s: Scene) -> bool:
    """Return whether a fence without a holder was sent."""
    return any(not item.HasField("holder") for item in s.rules.fences())
