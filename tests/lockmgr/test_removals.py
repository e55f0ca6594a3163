"""Goal: locks of deleted progress leave etcd, those of owners that are gone become free, all others
stay, and tokens go on.

Method: lock managers with real etcd and offsets over gRPC, which look for such locks all the time.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq.errors import NoQuorum
from batonmq_server.lockmgr import lock_remover
from batonmq_server.lockmgr.core.decision import ABANDONED_MS
from tests.lockmgr.scene import GROUP, TIMEOUT_S, Member, Node, Scene, entries
from tests.support.conditions import until

LEASE_MS = 30_000


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_remover, "INTERVAL_S", 0.01)


async def used_and_released(scene: Scene, member: Member, node: Node) -> int:
    """Let a member own the queue and release it; return the token that it had."""
    grant = await member.acquire(node, await scene.set_group(member))
    await scene.close(grant.token)
    await member.release(node, grant.token)
    return grant.token


async def delete_group(scene: Scene) -> None:
    """Delete the progress of the group, as a nameserver does once the group is gone."""
    await scene.etcd.delete(f"gates/{GROUP}")
    scene.gate = b"none"
    await scene.offsets.DeleteGroup(offsets_pb.DeleteGroupRequest(group=GROUP), timeout=TIMEOUT_S)


async def removed(scene: Scene, node: Node) -> None:
    async def gone() -> bool:
        return await scene.stored_count() == 0 and not await entries(node)

    await until(gone)


async def two_looks(scene: Scene) -> None:
    """Return once the lock manager has asked offsets about unused queues twice more."""

    def looks() -> int:
        return sum(method == "Query" for method, _ in scene.rules.seen)

    before = looks()
    await until(lambda: looks() >= before + 2)


async def test_lock_of_a_deleted_group_is_removed_and_its_token_goes_on(scene: Scene) -> None:
    a, node = Member("a"), await scene.leader()
    token = await used_and_released(scene, a, node)
    await delete_group(scene)
    await removed(scene, node)
    again = await a.acquire(node, await scene.set_group(a))
    assert again.token == token + 2, "the tombstone has one of its own"
    assert (await scene.stored()) is not None


async def test_free_lock_of_a_group_that_exists_stays(scene: Scene) -> None:
    a, node = Member("a"), await scene.leader()
    token = await used_and_released(scene, a, node)
    await two_looks(scene)
    stored = await scene.stored()
    assert stored is not None
    assert stored.token == token


async def test_lock_without_progress_at_a_restored_offsets_stays(scene: Scene) -> None:
    """Its token protects against a second use of the tokens since the backup."""
    a, node = Member("a"), await scene.leader()
    await used_and_released(scene, a, node)
    seen = len(scene.rules.seen)

    async def restored(request: Any, proceed: Any) -> Any:
        answer = await proceed()
        for outcome in answer.outcomes:
            outcome.error.reason = "UNKNOWN_QUEUE"
            outcome.error.unknown_queue.SetInParent()
        return answer

    scene.rules.rules["Query"] = restored
    await two_looks(scene)
    assert len(scene.rules.seen) > seen
    assert await scene.stored() is not None


async def test_lock_with_an_owner_is_removed_once_its_lease_has_expired(scene: Scene) -> None:
    a, node = Member("a"), await scene.leader()
    await a.acquire(node, await scene.set_group(a))
    await delete_group(scene)
    assert await scene.stored() is not None
    node.clock.ahead_ms += LEASE_MS + 1
    await removed(scene, node)


async def test_lock_of_a_silent_owner_stays_while_the_queue_has_progress(scene: Scene) -> None:
    a, node = Member("a"), await scene.leader()
    grant = await a.acquire(node, await scene.set_group(a))
    await scene.deliver(grant.token, 0, 5)
    node.clock.ahead_ms += LEASE_MS + 1
    await two_looks(scene)
    stored = await scene.stored()
    assert stored is not None
    assert stored.owner.client_id == "a"


async def leave_to_none(scene: Scene, node: Node, a: Member) -> int:
    """Let the only member die with a message in flight; return its token."""
    grant = await a.acquire(node, await scene.set_group(a))
    await scene.deliver(grant.token, 0, 5)
    await Member("b").acquire_each(node, await scene.set_group())  # waits for the new record
    return grant.token


async def test_lock_of_an_owner_that_is_gone_is_freed_if_the_queue_is_assigned_to_no_member(
    scene: Scene,
) -> None:
    a, node = Member("a"), await scene.leader()
    token = await leave_to_none(scene, node, a)
    node.clock.ahead_ms = scene.offsets_clock.ahead_ms = ABANDONED_MS + 1

    async def free() -> bool:
        return [entry.state for entry in await entries(node)] == [pb.LOCK_STATE_FREE]

    await until(free)
    stored = await scene.stored()
    assert stored is not None
    assert (stored.HasField("owner"), stored.token) == (False, token + 1)
    again = await a.acquire(node, await scene.set_group(a))
    assert [(one.first_offset, one.next_offset) for one in again.maybe_seen] == [(0, 5)]


async def test_phantom_of_an_owner_that_is_gone_is_freed(scene: Scene) -> None:
    """An operator has reset the group after its only member was killed."""
    a, node = Member("a"), await scene.leader()
    await leave_to_none(scene, node, a)
    await scene.reset(to=1)
    node.clock.ahead_ms = ABANDONED_MS + 1

    async def free() -> bool:
        return [entry.state for entry in await entries(node)] == [pb.LOCK_STATE_FREE]

    await until(free)
    assert (await a.acquire(node, await scene.set_group(a))).committed_offset == 1


async def test_lock_of_an_owner_that_is_gone_stays_while_it_uses_offsets(scene: Scene) -> None:
    a, node = Member("a"), await scene.leader()
    token = await leave_to_none(scene, node, a)
    node.clock.ahead_ms = ABANDONED_MS + 1
    await two_looks(scene)
    await scene.commit(token, 5)
    assert (await scene.stored()).owner.client_id == "a"  # type: ignore[union-attr]


async def test_lock_of_an_owner_that_is_gone_stays_if_the_queue_is_assigned(scene: Scene) -> None:
    a, node = Member("a"), await scene.leader()
    grant = await a.acquire(node, await scene.set_group(a))
    node.clock.ahead_ms = scene.offsets_clock.ahead_ms = ABANDONED_MS + 1
    await two_looks(scene)
    assert (await scene.stored()).token == grant.token  # type: ignore[union-attr]
    assert (await scene.stored()).owner.client_id == "a"  # type: ignore[union-attr]


async def test_removal_with_a_lost_answer_is_made_once(scene: Scene) -> None:
    a, node = Member("a"), await scene.leader()
    token = await used_and_released(scene, a, node)
    transact = node.session.txn
    lost: list[int | None] = []

    async def lose_first_removal(**parts: Any) -> int | None:
        revision = await transact(**parts)
        if parts.get("delete") and not lost:
            lost.append(revision)
            raise NoQuorum("the answer is lost")
        return revision

    node.session.txn = lose_first_removal  # type: ignore[method-assign]
    await delete_group(scene)
    await removed(scene, node)
    assert lost
    assert (await a.acquire(node, await scene.set_group(a))).token == token + 2


async def test_deposed_leader_removes_no_lock(scene: Scene) -> None:
    a, old = Member("a"), await scene.leader()
    await used_and_released(scene, a, old)
    transact = old.session.txn
    outcomes: list[int | None] = []

    async def depose_first(**parts: Any) -> int | None:
        if not parts.get("delete"):
            return await transact(**parts)
        await scene.etcd.delete("elections/lockmgr")
        outcomes.append(await transact(**parts))
        return outcomes[-1]

    old.session.txn = depose_first  # type: ignore[method-assign]
    await delete_group(scene)
    await until(lambda: outcomes)
    assert outcomes == [None]
    assert await scene.stored() is not None
