"""Goal: ReleaseAll frees closed queues, ForceRelease frees any queue and records the operation, and
Describe returns all details of a queue.

Method: lock managers with real etcd and offsets over gRPC; answers are lost and leaders crash.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.common.v1 import error_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import (
    BatonError,
    Fenced,
    Held,
    OffsetsUnreachable,
    Unacked,
    UnknownQueue,
    Unreachable,
)
from batonmq_server.lockmgr.queue_requests import QueueRequest
from tests.lockmgr.scene import (
    HOLD_MS,
    TIMEOUT_S,
    Member,
    Node,
    Scene,
    describe,
    entries,
    queue,
    waits,
)
from tests.support.conditions import until

LEASE_MS = 30_000


async def force(node: Node, op_id: str = "op-1", queue_id: int = 0) -> pb.ForceReleaseResponse:
    """Force the release of a queue; raise the error if it is rejected."""
    request = pb.ForceReleaseRequest(
        queue=queue(queue_id), op_id=op_id, by="operator", reason="stuck handler"
    )
    try:
        return await node.stub.ForceRelease(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def lost(*_: Any) -> Any:
    """Fail a call before it is carried out (a rule)."""
    raise Unreachable("lost on the way")


# ReleaseAll


async def test_release_all_frees_closed_or_drained_queues_and_lists_the_others(
    scene: Scene,
) -> None:
    node, a = await scene.leader(), Member("a")
    await a.acquire_each(node, await scene.set_group(a), range(5))
    for queue_id in (1, 4):
        await scene.deliver(1, 0, 3, queue_id=queue_id)
    for queue_id in (0, 2):
        await scene.close(1, queue_id=queue_id)
    answer = await a.release_all(node)
    assert answer.released_count == 2, "0 and 2 are closed"
    assert [kept.queue.queue_id for kept in answer.kept] == [1, 3, 4]
    states = [entry.state for entry in await entries(node)]
    free, held = pb.LOCK_STATE_FREE, pb.LOCK_STATE_HELD
    assert states == [free, held, free, held, held]
    second = await a.release_all(node, drained=True)
    assert second.released_count == 1, "3 is drained"
    assert [kept.queue.queue_id for kept in second.kept] == [1, 4]
    third = await a.release_all(node)
    assert (third.released_count, len(third.kept)) == (0, 2)


async def test_release_all_frees_a_queue_whose_grant_is_in_progress(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    arrived, go = asyncio.Event(), asyncio.Event()

    async def slow(_: Any, proceed: Any) -> Any:
        arrived.set()
        await go.wait()
        return await proceed()

    scene.rules.rules["Fence"] = slow
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(a.acquire_each(node, generation))
        await arrived.wait()
        acquiring.cancel()
        others = tasks.create_task(a.release_all(node, group="other", drained=True))
        releasing = tasks.create_task(a.release_all(node, group="group", drained=True))
        assert (await others).released_count == 0, "of another group: nothing to wait for"
        await describe(node)
        go.set()
    assert releasing.result().released_count == 1
    assert [entry.state for entry in await entries(node)] == [pb.LOCK_STATE_FREE]


async def test_release_all_of_another_group_or_client_frees_nothing(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    await a.acquire(node, await scene.set_group(a))
    await scene.close(1)
    for answer in (
        await a.release_all(node, group="other"),
        await Member("b").release_all(node),
        await Member("a", incarnation_id=2).release_all(node),
    ):
        assert (answer.released_count, len(answer.kept)) == (0, 0)
    assert (await a.release_all(node, group="group")).released_count == 1


async def test_release_all_wakes_waiting_requests(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    await a.acquire_each(node, await scene.set_group(a), range(3))
    generation = await scene.set_group(b)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(b.acquire_each(node, generation, range(3), hold_ms=HOLD_MS))
        await until(lambda: waits(node, "b"))
        for queue_id in range(3):
            await scene.close(1, queue_id=queue_id)
        assert (await a.release_all(node)).released_count == 3
    assert all(isinstance(outcome, pb.Grant) for outcome in acquiring.result().values())


async def test_release_all_without_offsets_frees_nothing(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    await a.acquire(node, await scene.set_group(a))
    await scene.close(1)
    scene.rules.rules["Query"] = lost
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await a.release_all(node)
    assert isinstance(from_rpc_error(refused.value), OffsetsUnreachable)
    assert await a.state(node, 1) == "OK"


# ForceRelease


async def test_forced_queue_is_free_its_owner_is_fenced_and_its_messages_are_flagged(
    scene: Scene,
) -> None:
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 10)
    await scene.commit(1, 4)
    events: list[metrics_pb.MetricEvent] = []
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_events(node, events))
        await until(lambda: node.runtime.hub.watched)
        answer = await force(node)
        await until(lambda: len(events) >= 1)
        watching.cancel()
    assert (answer.previous_owner, answer.token) == (a.incarnation, 2)
    assert answer.maybe_seen_count == 6
    forced = events[0].lock_forced
    assert (forced.previous_client_id, forced.token) == ("a", 2)
    assert (forced.by, forced.reason) == ("operator", "stuck handler")
    with pytest.raises(Fenced):
        await scene.commit(1, 10)
    assert await a.state(node, 1) == "NOT_OWNER"
    progress = await scene.progress()
    assert (progress.forced_by, progress.forced_reason) == ("operator", "stuck handler")
    (item,) = [i for i in scene.rules.fences() if not i.HasField("holder")]
    assert item.attempt == "force-op-1"
    stored = await scene.stored()
    assert stored is not None
    assert (stored.HasField("owner"), stored.token, stored.forced_op_id) == (False, 2, "op-1")
    grant = await b.acquire(node, await scene.set_group(b))
    assert (grant.token, grant.committed_offset) == (3, 4)
    assert [(r.first_offset, r.next_offset) for r in grant.maybe_seen] == [(4, 10)]


async def test_forced_queue_is_granted_to_a_waiting_client(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 10)
    generation = await scene.set_group(a, b)
    async with b.waiting(node, generation) as acquiring:
        await force(node)
    assert acquiring.result().token == 3


async def test_repeated_operation_changes_nothing_under_a_new_owner(scene: Scene) -> None:
    node, a, b = await scene.leader(), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    first = await force(node)
    assert await force(node) == first
    grant = await b.acquire(node, await scene.set_group(b))
    assert await force(node) == first
    assert await b.state(node, grant.token) == "OK"
    assert (await force(node, "op-2")).previous_owner == b.incarnation
    assert await b.state(node, grant.token) == "NOT_OWNER"


async def test_next_leader_answers_a_repeated_operation(scene: Scene) -> None:
    old, a, b = await scene.leader(), Member("a"), Member("b")
    await a.acquire(old, await scene.set_group(a))
    await force(old)
    grant = await b.acquire(old, await scene.set_group(b))
    await old.crash()
    new = await scene.leader()
    answer = await force(new)
    assert (answer.HasField("previous_owner"), answer.token) == (False, grant.token)
    assert await b.state(new, grant.token) == "OK"


async def test_operation_whose_leader_crashes_before_it_is_persisted_can_be_repeated(
    scene: Scene,
) -> None:
    old, a = await scene.leader(), Member("a")
    await a.acquire(old, await scene.set_group(a))
    await scene.deliver(1, 0, 3)

    async def cut_after(request: Any, proceed: Any) -> Any:
        del scene.rules.rules["Fence"]
        answer = await proceed()
        old.session.cut_until_leases_expire()
        return answer

    scene.rules.rules["Fence"] = cut_after
    with pytest.raises(BatonError):
        await force(old)
    await old.crash()
    new = await scene.leader()
    (entry,) = await entries(new)
    assert (entry.state, entry.owner) == (pb.LOCK_STATE_PHANTOM, a.incarnation)
    answer = await force(new)
    assert (answer.previous_owner, answer.token) == (a.incarnation, 2), "no second fence"
    assert answer.maybe_seen_count == 3


async def test_queue_that_was_never_owned_can_not_be_forced(scene: Scene) -> None:
    node = await scene.leader()
    with pytest.raises(UnknownQueue):
        await force(node)
    assert scene.rules.fences() == []


async def test_fence_whose_answer_is_lost_forces_once(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    await a.acquire(node, await scene.set_group(a))

    async def lose_once(request: Any, proceed: Any) -> Any:
        del scene.rules.rules["Fence"]
        await proceed()
        raise Unreachable("the answer is lost")

    scene.rules.rules["Fence"] = lose_once
    assert (await force(node)).token == (await scene.progress()).token == 2


async def test_previous_owner_of_a_forced_queue_can_acquire_it_again(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation)
    await scene.deliver(1, 0, 3)
    await force(node)
    grant = await a.acquire(node, generation, resume=[(0, 2)])
    assert (grant.token, grant.newly_acquired) == (3, True)
    assert [(r.first_offset, r.next_offset) for r in grant.maybe_seen] == [(0, 3)]


# Describe


async def test_description_of_a_queue_that_was_never_owned_is_free(scene: Scene) -> None:
    node = await scene.leader()
    description = await describe(node)
    assert (description.entry.state, description.entry.token) == (pb.LOCK_STATE_FREE, 0)
    assert (description.entry.queue, description.term > 0) == (queue(), True)
    assert await entries(node) == [], "a description creates no entry"


async def test_description_has_lease_owner_state_and_refusals(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    generation = await scene.set_group(a, b)
    with pytest.raises(Held):
        await b.acquire(node, generation)
    await scene.deliver(1, 0, 3)
    with pytest.raises(Unacked):
        await b.acquire(node, generation, hold_ms=100)
    await Member("x").refusal(node, generation)
    node.clock.ahead_ms = 10_000
    description = await describe(node)
    assert (description.entry.owner, description.entry.token) == (a.incarnation, 1)
    assert (description.offsets_token, description.owner_evicted) == (1, False)
    assert 10_000 <= description.entry.lease_age_ms < 20_000
    assert description.lease_left_ms == LEASE_MS - description.entry.lease_age_ms
    reasons = [(denial.client_id, denial.error.reason) for denial in description.denials]
    assert reasons == [("x", error_pb2.REASON_NOT_MEMBER), ("b", error_pb2.REASON_UNACKED)]
    assert all(10_000 <= denial.age_ms < 20_000 for denial in description.denials)
    assert list(description.entry.waiters) == ["b"]
    await scene.set_group(b)

    async def evicted() -> bool:
        return (await describe(node)).owner_evicted

    await until(evicted)
    node.clock.ahead_ms = LEASE_MS + 1_000
    assert (await describe(node)).lease_left_ms == 0


async def test_description_has_the_step_of_a_hand_over(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def stop(request: Any, proceed: Any) -> Any:
        reached.set()
        await go_on.wait()
        return await proceed()

    scene.rules.rules["Fence"] = stop
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(a.acquire(node, generation))
        await reached.wait()
        description = await describe(node)
        assert (description.entry.state, description.pending_step) == (
            pb.LOCK_STATE_PENDING,
            "fence",
        )
        assert description.pending_attempt == scene.rules.fences()[0].attempt
        go_on.set()
    description = await describe(node)
    assert (description.entry.state, description.pending_step, description.pending_attempt) == (
        pb.LOCK_STATE_HELD,
        "",
        "",
    )


async def test_description_of_a_phantom_has_both_tokens(scene: Scene) -> None:
    old, a = await scene.leader(), Member("a")
    await a.acquire(old, await scene.set_group(a))
    await _fence_as_a_crashed_leader(scene)
    await old.crash()
    new = await scene.leader()
    description = await describe(new)
    assert (description.entry.state, description.entry.token) == (pb.LOCK_STATE_PHANTOM, 1)
    assert description.offsets_token == 2


async def test_refusals_are_kept_for_sixteen_clients(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation)
    for number in range(20):
        await Member(f"m{number}").refusal(node, generation)
    names = [denial.client_id for denial in (await describe(node)).denials]
    assert names == [f"m{number}" for number in reversed(range(4, 20))]
    gc.collect()
    kept = [one for one in gc.get_objects() if isinstance(one, QueueRequest)]
    assert not kept, "a kept error keeps no frames, and so no requests"


async def _events(node: Node, events: list[metrics_pb.MetricEvent]) -> None:
    async for batch in node.runtime.hub.watch():
        events.extend(batch.events)


async def _fence_as_a_crashed_leader(s: Scene) -> None:
    """Fence the queue like a leader that crashed before it persisted the grant."""
    (item,) = s.rules.fences()
    (term,) = {call.term for method, call in s.rules.seen if method == "Announce"}
    again = type(item)()
    again.CopyFrom(item)
    again.attempt, again.expected_token = "elsewhere", 1
    fence = next(call for method, call in s.rules.seen if method == "Fence")
    request = type(fence)(term=term, items=[again])
    assert (await s.offsets.Fence(request, timeout=TIMEOUT_S)).outcomes[0].fenced.token == 2
