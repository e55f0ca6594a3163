"""Goal: after any loss or crash between two steps of a hand-over, no queue is granted twice, no
invalid owner is renewed, and the queue can be acquired again.

Method: real etcd and offsets. Rules block, lose or repeat calls to offsets, one lock manager is cut
off from etcd, lock managers crash and others take over. Stories are those of protocol section 17.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq.errors import (
    BatonError,
    Fenced,
    HandoverPending,
    Held,
    Internal,
    NotAssigned,
    NotLeader,
    Unreachable,
)
from tests.lockmgr.scene import GROUP, HOLD_MS, TIMEOUT_S, Member, Node, Scene, entries, waits
from tests.support.conditions import until

LEASE_MS = 30_000
SHORT = {"slot_ms": 20}
Outcome = TypeVar("Outcome")


class Stop:
    """A rule that blocks calls until they are released."""

    def __init__(self) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def before(self, request: Any, proceed: Any) -> Any:
        self.reached.set()
        await self.go_on.wait()
        return await proceed()

    async def after(self, request: Any, proceed: Any) -> Any:
        answer = await proceed()
        self.reached.set()
        await self.go_on.wait()
        return answer


async def outcome_of(
    member: Member, node: Node, generation: int, **options: Any
) -> pb.Grant | BatonError:
    """Return the outcome of an Acquire, or the error of the whole call."""
    try:
        return (await member.acquire_each(node, generation, **options))[0]
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)


async def expire_leases(s: Scene, node: Node) -> None:
    """Expire the lease of every owner, at the lock manager and at offsets."""
    node.clock.ahead_ms += LEASE_MS + 1_000
    s.offsets_clock.ahead_ms += LEASE_MS + 1_000


@asynccontextmanager
async def blocked_fence(
    s: Scene, acquire: Coroutine[Any, Any, Outcome], *, applied: bool = False
) -> AsyncIterator[asyncio.Task[Outcome]]:
    """Run `acquire`; the block begins when its fence is blocked, and the fence goes on at its end.

    With `applied`, offsets has applied the fence and only its answer is blocked.
    """
    stop = Stop()
    s.rules.rules["Fence"] = stop.after if applied else stop.before
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(acquire)
        await stop.reached.wait()
        yield acquiring
        stop.go_on.set()


async def held_by_a(s: Scene, **settings: Any) -> tuple[Node, Member, Member, int]:
    """Return a leader, owner A with token 1, client B, and the generation of B."""
    node, a, b = await s.leader(**(SHORT | settings)), Member("a"), Member("b")
    await a.acquire(node, await s.set_group(a))
    return node, a, b, await s.set_group(a, b)


async def expired_at_a(s: Scene) -> tuple[Node, Member, Member, int]:
    """Return the same as `held_by_a`, after the lease of A has expired."""
    node, a, b, generation = await held_by_a(s)
    await expire_leases(s, node)
    return node, a, b, generation


# Keep-alives during a hand-over


async def test_story_06_keep_alive_is_pending_from_before_the_fence(scene: Scene) -> None:
    node, a, b, generation = await expired_at_a(scene)
    async with blocked_fence(scene, b.acquire(node, generation)) as acquiring:
        assert (await scene.progress()).token == 1, "offsets has not applied the fence"
        assert await a.state(node, 1) == "PENDING"
        (entry,) = await entries(node)
        assert entry.state == pb.LOCK_STATE_PENDING
        assert entry.lease_age_ms > LEASE_MS, "nothing was renewed"
    assert acquiring.result().token == 2
    assert await a.state(node, 1) == "NOT_OWNER"


async def test_story_07_keep_alive_is_pending_between_fence_and_persist(scene: Scene) -> None:
    node, a, b, generation = await expired_at_a(scene)
    async with blocked_fence(scene, b.acquire(node, generation), applied=True) as acquiring:
        assert (await scene.progress()).token == 2, "offsets has applied the fence"
        stored = await scene.stored()
        assert stored is not None
        assert stored.owner == a.incarnation, "A is still the owner in etcd"
        assert await a.state(node, 1) == "PENDING"
    assert acquiring.result().token == 2


async def test_keep_alive_is_pending_until_the_grant_is_known_to_be_persisted(scene: Scene) -> None:
    """etcd has applied the transaction, but its answers are lost for a while."""
    node, a, b, generation = await expired_at_a(scene)
    node.session.lose_txn_answers = True
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(b.acquire(node, generation))

        async def persisted() -> bool:
            stored = await scene.stored()
            return stored is not None and stored.owner == b.incarnation

        await until(persisted)
        assert await a.state(node, 1) == "PENDING"
        node.session.lose_txn_answers = False
    assert acquiring.result().token == 2
    assert await b.state(node, 2) == "OK"
    assert len(scene.rules.fences()) == 2


# Lost answers


async def test_fence_whose_answer_is_lost_is_repeated_with_the_same_attempt(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    answers_lost = 3

    async def lose(request: Any, proceed: Any) -> Any:
        nonlocal answers_lost
        answer = await proceed()
        answers_lost -= 1
        if answers_lost >= 0:
            raise Unreachable("the answer is lost")
        return answer

    scene.rules.rules["Fence"] = lose
    grant = await a.acquire(node, generation)
    fences = scene.rules.fences()
    assert len(fences) == 4
    assert len({item.attempt for item in fences}) == 1
    assert grant.token == (await scene.progress()).token == 1


async def test_request_cancelled_during_the_fence_leaves_an_orphan(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    stop = Stop()
    scene.rules.rules["Fence"] = stop.after
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(a.acquire(node, generation))
        await stop.reached.wait()
        acquiring.cancel()
    stop.go_on.set()

    async def orphaned() -> bool:
        return [r.state for r in await a.keep_alive(node)] == [pb.HOLD_STATE_ORPHAN]

    await until(orphaned)
    stored = await scene.stored()
    assert stored is not None
    assert stored.token == (await scene.progress()).token == 1
    again = await a.acquire(node, generation, seq=1)
    assert (again.token, again.newly_acquired) == (1, True)


async def test_second_request_waits_for_the_hand_over_in_progress(scene: Scene) -> None:
    node, a, b, generation = await expired_at_a(scene)
    async with (
        asyncio.TaskGroup() as tasks,
        blocked_fence(scene, b.acquire(node, generation)) as acquiring,
    ):
        with pytest.raises(HandoverPending) as refusal:
            await a.acquire(node, generation)
        assert refusal.value.facts["step"] == "fence"
        waiting = tasks.create_task(outcome_of(a, node, generation, hold_ms=300))
        await until(lambda: waits(node, "a"))
    assert acquiring.result().token == 2
    assert not isinstance(waiting.result(), pb.Grant)
    assert await b.state(node, 2) in ("OK", "WANTED")


async def test_owner_that_worked_since_the_decision_is_not_fenced(scene: Scene) -> None:
    """The decision saw a quiet queue; before its fence arrives, the owner handles a message."""
    node, _, b, generation = await held_by_a(scene)
    async with blocked_fence(scene, b.acquire(node, generation, hold_ms=HOLD_MS)) as acquiring:
        await scene.deliver(1, 0, 1)
        await scene.commit(1, 1)
        del scene.rules.rules["Fence"]
    assert acquiring.result().committed_offset == 1
    fences = [item for item in scene.rules.fences() if item.holder.client_id == "b"]
    assert [item.observed_delivered_offset for item in fences] == [0, 1]


async def test_release_waits_for_the_hand_over_in_progress(scene: Scene) -> None:
    node, a, b, generation = await expired_at_a(scene)
    async with (
        asyncio.TaskGroup() as tasks,
        blocked_fence(scene, b.acquire(node, generation)) as acquiring,
    ):
        releasing = tasks.create_task(a.release(node, 1))
        assert await a.state(node, 1) == "PENDING"
    assert releasing.result() == 0
    assert await b.state(node, acquiring.result().token) == "OK"


async def test_term_is_announced_again_to_offsets_that_lost_it(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    terms = [r.term for method, r in scene.rules.seen if method == "Announce"]

    async def raise_term_once(request: Any, proceed: Any) -> Any:
        del scene.rules.rules["Fence"]
        request.term += 1  # offsets answers as to an unknown term
        return await proceed()

    scene.rules.rules["Fence"] = raise_term_once
    assert (await a.acquire(node, generation)).token == 1
    assert [r.term for method, r in scene.rules.seen if method == "Announce"] == terms * 2


# etcd changed by another writer


async def test_unreadable_record_of_a_group_grants_nothing_and_owners_keep_their_queues(
    scene: Scene,
) -> None:
    node, a, b, generation = await held_by_a(scene)
    damaged = f"groups/{GROUP}/members/2"
    stored = await scene.etcd.get(damaged)
    assert stored is not None
    await scene.etcd.delete(damaged)

    def is_refused(outcome: pb.Grant | BatonError) -> bool:
        return isinstance(outcome, Internal) and "unreadable record" in outcome.message

    async def damage_is_seen() -> bool:  # by requests for a queue that nobody else wants
        return is_refused((await b.acquire_each(node, generation, [1]))[1])

    await until(damage_is_seen)
    assert is_refused(await outcome_of(b, node, generation))
    assert await a.state(node, 1) == "OK"
    await scene.etcd.put(damaged, stored.value)
    await scene.close(1)

    async def granted() -> bool:
        return isinstance(await outcome_of(b, node, generation), pb.Grant)

    await until(granted)


async def test_entry_changed_by_another_writer_is_not_overwritten(scene: Scene) -> None:
    node, a, b, generation = await held_by_a(scene)
    stored = await scene.stored()
    assert stored is not None
    stored.generation = generation + 1
    await scene.etcd.put(f"locks/{GROUP}/topic/broker-a/0", stored.SerializeToString())
    await scene.close(1)
    with pytest.raises(NotAssigned):
        await b.acquire(node, generation)
    assert await scene.stored() == stored
    assert await a.state(node, 1) == "NOT_OWNER"
    again = await a.acquire(node, await scene.set_group(a, b))
    assert again.token == 3, "token 2 was issued and not persisted"


# A leader crashes, another is elected


async def test_owned_queues_survive_a_new_leader_and_no_queue_is_granted_twice(
    scene: Scene,
) -> None:
    """Story 18 as well: the new leader does not begin with an empty table."""
    old, a, b = await scene.leader(**SHORT), Member("a"), Member("b")
    outcomes = await a.acquire_each(old, await scene.set_group(a), range(20))
    tokens = [o.token for o in outcomes.values() if isinstance(o, pb.Grant)]
    generation = await scene.set_group(a, b)
    await scene.deliver(1, 0, 10)
    new = await scene.lockmgr(**SHORT)
    await old.crash()
    await until(new.leads)
    assert len(await entries(new)) == 20
    assert isinstance((await b.acquire_each(new, generation))[0], BatonError)
    reports = await a.keep_alive(new, *tokens)
    assert [r.state for r in reports][1:] == [pb.HOLD_STATE_OK] * 19
    assert reports[0].state == pb.HOLD_STATE_WANTED
    await scene.commit(1, 10)
    assert len(scene.rules.fences()) == 20, "no queue has a new token"
    terms = [request.term for method, request in scene.rules.seen if method == "Announce"]
    assert len(terms) == 2, "the new leader led at once and did not lose the lead again"


async def test_story_18_lease_restarts_with_the_new_leader(scene: Scene) -> None:
    old, a, b, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 10)
    await expire_leases(scene, old)
    await old.crash()
    new = await scene.leader(**SHORT)
    with pytest.raises(BatonError) as refusal:
        await b.acquire(new, generation, hold_ms=200)
    assert refusal.value.reason == "UNACKED"
    assert await a.state(new, 1) == "WANTED"


async def test_stopped_leader_resigns_at_once(scene: Scene) -> None:
    old, a, _, _ = await held_by_a(scene, leader_lease_ms=60_000)
    new = await scene.lockmgr(leader_lease_ms=60_000)
    assert not await new.leads()
    with pytest.raises(NotLeader):
        raise await _refusal(new)
    old.stop.set()
    await until(new.leads)
    assert await a.state(new, 1) == "OK"


async def test_only_the_leader_is_registered_as_leader(scene: Scene) -> None:
    first = await scene.leader()
    await scene.lockmgr()

    async def registered() -> list[tuple[str, bool, bool]]:
        nodes = await scene.registered("lockmgr")
        return [(n.node_id, n.leader, n.epoch > 0) for n in nodes]

    expected = [("lockmgr-0", True, True), ("lockmgr-1", False, False)]

    async def settled() -> bool:
        return await registered() == expected

    await until(settled)
    listing = await first.stub.List(pb.ListRequest(), timeout=TIMEOUT_S)
    assert listing.term == (await scene.registered("lockmgr"))[0].epoch


async def test_deposed_leader_becomes_a_standby(scene: Scene) -> None:
    old, a, _, _ = await held_by_a(scene)
    new = await scene.lockmgr(**SHORT)
    await old.cut_until_leases_expire()
    await until(new.leads)
    old.session.cut = False

    async def standby() -> bool:
        nodes = await scene.registered("lockmgr")
        return [(n.leader, n.epoch > 0) for n in nodes] == [(False, False), (True, True)]

    await until(standby)
    assert not await old.leads()
    assert await a.state(new, 1) == "OK"


async def test_crash_between_fence_and_persist_costs_one_token_and_no_message(scene: Scene) -> None:
    """Sections 11 and 16: etcd has token 1, offsets has token 2; A acquires again and gets 3."""
    new, a, _, generation = await phantom_after_a_crash(scene)
    again = await a.acquire(new, generation, resume=[(0, 5)])
    assert (again.token, again.committed_offset) == (3, 0)
    assert await a.state(new, 3) in ("OK", "WANTED")
    await scene.commit(3, 5)
    assert (await scene.progress()).committed_offset == 5


async def test_drained_phantom_is_granted_while_the_lease_of_its_owner_is_valid(
    scene: Scene,
) -> None:
    """No member was told of token 2; the fence before the crash has flagged what A may handle."""
    new, a, b, generation = await phantom_after_a_crash(scene)
    grant = await b.acquire(new, generation)
    assert (grant.token, grant.committed_offset) == (3, 0)
    assert [(one.first_offset, one.next_offset) for one in grant.maybe_seen] == [(0, 5)]
    assert await a.state(new, 1) == "NOT_OWNER"
    with pytest.raises(Fenced):
        await scene.commit(2, 5)


async def test_phantom_with_messages_in_flight_waits_for_the_lease_of_its_owner(
    scene: Scene,
) -> None:
    """A acquires again and names what it handles; the leader dies before the grant is stored."""
    old, a, b, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(outcome_of(a, old, generation, resume=[(0, 5)]))
        await _fenced_then_cut(scene, old)
    assert isinstance(acquiring.result(), NotLeader)
    await old.crash()
    new = await scene.leader(**SHORT)
    with pytest.raises(Held):
        await b.acquire(new, generation, hold_ms=100)
    await expire_leases(scene, new)
    grant = await b.acquire(new, generation)
    assert [(one.first_offset, one.next_offset) for one in grant.maybe_seen] == [(0, 5)]


async def phantom_after_a_crash(scene: Scene) -> tuple[Any, Member, Member, int]:
    """Return a new leader, after a crash between a fence for B and the write of its grant."""
    old, a, b, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    await expire_leases(scene, old)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(outcome_of(b, old, generation))
        await _fenced_then_cut(scene, old)
    assert isinstance(acquiring.result(), NotLeader)
    await old.crash()
    new = await scene.leader(**SHORT)
    (entry,) = await entries(new)
    assert (entry.state, entry.token) == (pb.LOCK_STATE_PHANTOM, 1)
    with pytest.raises(Fenced):
        await scene.commit(1, 5)
    assert await a.state(new, 1) == "NOT_OWNER"
    return new, a, b, generation


async def test_story_12_new_leader_does_not_renew_a_fenced_owner(scene: Scene) -> None:
    """The owner of a phantom is not renewed, so the phantom ends with the lease."""
    old, a, b, generation = await expired_at_a(scene)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outcome_of(b, old, generation))
        await _fenced_then_cut(scene, old)
    await old.crash()
    new = await scene.leader(**SHORT)
    for _ in range(3):
        assert await a.state(new, 1) == "NOT_OWNER"
    await expire_leases(scene, new)
    grant = await b.acquire(new, generation)
    assert grant.token == 3
    assert await a.state(new, 1) == "NOT_OWNER"


async def test_story_19_late_fence_of_a_deposed_leader_changes_nothing(scene: Scene) -> None:
    old, a, b, generation = await expired_at_a(scene)
    stop = Stop()
    scene.rules.rules["Fence"] = stop.before
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(outcome_of(b, old, generation))
        await stop.reached.wait()
        request = scene.rules.seen[-1][1]
        await old.cut_until_leases_expire()
    assert isinstance(acquiring.result(), NotLeader)
    del scene.rules.rules["Fence"]
    new = await scene.leader(**SHORT)
    error = (await scene.offsets.Fence(request, timeout=TIMEOUT_S)).outcomes[0].error
    assert error_from_pb(error).reason == "OLD_EPOCH"
    assert (await scene.progress()).token == 1
    assert await a.state(new, 1) == "OK"


async def test_story_19_late_write_of_a_deposed_leader_changes_nothing(scene: Scene) -> None:
    old, a, b, generation = await expired_at_a(scene)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(outcome_of(b, old, generation))
        await _fenced_then_cut(scene, old)
    assert isinstance(acquiring.result(), NotLeader)
    transaction = next(parts for parts in old.session.stopped if parts["put"])
    assert transaction["put"][0].key == f"locks/{GROUP}/topic/broker-a/0"
    new = await scene.leader(**SHORT)
    assert await scene.etcd.txn(**transaction) is None, "the entry has not changed, the leader has"
    stored = await scene.stored()
    assert stored is not None
    assert (stored.owner, stored.token) == (a.incarnation, 1)
    assert (await a.acquire(new, generation)).token == 3
    assert await a.state(new, 3) == "OK"


@pytest.mark.long
async def test_leader_cut_off_from_etcd_stops_answering(scene: Scene) -> None:
    node, a, _, _ = await held_by_a(scene)
    node.session.cut = True

    async def is_no_leader() -> bool:
        try:
            await a.keep_alive(node, 1)
        except grpc.aio.AioRpcError as error:
            return isinstance(from_rpc_error(error), NotLeader)
        return False

    await until(is_no_leader)


async def test_leader_does_not_serve_before_offsets_has_its_term(scene: Scene) -> None:
    stop = Stop()
    scene.rules.rules["Announce"] = stop.before
    node = await scene.lockmgr()
    await stop.reached.wait()
    assert (await _refusal(node)).reason == "NOT_SERVING"
    stop.go_on.set()
    await until(node.leads)


async def _fenced_then_cut(s: Scene, node: Node) -> None:
    """Cut the leader off from etcd after its fence and before its write."""
    stop = Stop()
    s.rules.rules["Fence"] = stop.after
    await stop.reached.wait()
    node.session.cut = True
    del s.rules.rules["Fence"]
    stop.go_on.set()
    await until(lambda: any(parts.get("put") for parts in node.session.stopped))
    await node.cut_until_leases_expire()


async def _refusal(node: Node) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await node.stub.List(pb.ListRequest(), timeout=TIMEOUT_S)
    return from_rpc_error(raised.value)
