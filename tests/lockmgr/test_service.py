"""Goal: the lock manager grants queues by its rules, and refuses others with a reason.

Method: one lock manager with a real etcd and the real offsets service, in one process, over gRPC.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._common.rpc import error_from_pb
from batonmq.errors import (
    Fenced,
    Held,
    NotAssigned,
    NotMember,
    NotSubscribed,
    OffsetsUnreachable,
    OldRequest,
    Unacked,
    Unreachable,
)
from batonmq_server.lockmgr import entry_changes
from tests.lockmgr.scene import (
    HOLD_MS,
    QUEUE_COUNT,
    TIMEOUT_S,
    Member,
    Node,
    Scene,
    entries,
    queue,
    waits,
)
from tests.support.conditions import until

LEASE_MS = 30_000


async def lost(*_: Any) -> Any:
    """Fail a call before it is carried out (a rule)."""
    raise Unreachable("lost on the way")


async def fence_count(s: Scene) -> int:
    return len(s.rules.fences())


# Grants


async def test_free_queue_is_granted_persisted_and_listed(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    grant = await a.acquire(node, generation)
    assert (grant.token, grant.committed_offset, grant.newly_acquired) == (1, 0, True)
    assert (grant.lease_ms, grant.offsets_epoch) == (LEASE_MS, 1)
    stored = await scene.stored()
    assert stored is not None
    assert (stored.owner, stored.token, stored.acquire_seq) == (a.incarnation, 1, 1)
    assert (await scene.progress()).holder == a.incarnation
    (entry,) = await entries(node)
    assert (entry.owner, entry.token, entry.state) == (a.incarnation, 1, pb.LOCK_STATE_HELD)
    assert (entry.generation, entry.acquire_seq) == (generation, 1)


async def test_many_queues_are_granted_by_one_call(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine four fences may take longer than a call waits for a change.
    monkeypatch.setattr(entry_changes, "CHANGE_WAIT_S", TIMEOUT_S)
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    outcomes = await a.acquire_each(node, generation, range(200))
    assert {q for q, o in outcomes.items() if isinstance(o, pb.Grant)} == set(range(200))
    assert await scene.stored_count() == 200


async def test_group_without_progress_starts_at_the_requested_offset(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    request = pb.AcquireRequest(
        incarnation=a.incarnation,
        acquire_seq=1,
        generation=await scene.set_group(a),
        items=[pb.AcquireItem(queue=queue(), initial_offset=77)],
    )
    (answer,) = [r async for r in node.stub.Acquire(request, timeout=TIMEOUT_S)]
    assert answer.grant.committed_offset == 77


async def test_queue_of_another_owner_is_refused_with_its_owner_and_advice(scene: Scene) -> None:
    node, a, b = await scene.leader(), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    with pytest.raises(Held) as refusal:
        await b.acquire(node, await scene.set_group(a, b))
    assert refusal.value.facts["owner"] == "a"
    assert refusal.value.retry_after_ms > 0
    assert await fence_count(scene) == 1
    (report,) = await a.keep_alive(node, 1)
    assert (report.state, report.wanted_by) == (pb.HOLD_STATE_WANTED, "b")
    (entry,) = await entries(node)
    assert list(entry.waiters) == ["b"]


async def test_waiting_request_is_granted_when_the_owner_releases(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    grant = await a.acquire(node, await scene.set_group(a))
    generation = await scene.set_group(a, b)
    await scene.deliver(grant.token, 0, 10)
    async with b.waiting(node, generation) as acquiring:
        await scene.close(grant.token, committed=10)
        assert await a.release(node, grant.token) == 1
    granted = acquiring.result()
    assert (granted.token, granted.committed_offset) == (grant.token + 1, 10)
    assert not granted.maybe_seen
    assert await a.state(node, grant.token) == "NOT_OWNER"
    assert await b.state(node, granted.token) == "OK"


async def test_closed_queue_is_granted_after_a_lost_release(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=50), Member("a"), Member("b")
    grant = await a.acquire(node, await scene.set_group(a))
    await scene.deliver(grant.token, 0, 10)
    generation = await scene.set_group(a, b)
    async with b.waiting(node, generation) as acquiring:
        await scene.close(grant.token, committed=4)
    granted = acquiring.result()
    assert (granted.token, granted.committed_offset) == (2, 4)
    assert not granted.maybe_seen, "messages that were never started are not flagged"


async def test_drained_queue_is_granted_after_the_quiet_slots_and_not_sooner(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=100), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    generation = await scene.set_group(a, b)
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    grant = await b.acquire(node, generation, hold_ms=HOLD_MS)
    assert grant.token == 2
    assert loop.time() - start_s >= 0.3
    assert await fence_count(scene) == 2, "no fence is sent before its condition can hold"


async def test_queue_in_flight_is_refused_until_it_is_acked(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    grant = await a.acquire(node, await scene.set_group(a))
    await scene.deliver(grant.token, 0, 10)
    generation = await scene.set_group(a, b)
    with pytest.raises(Unacked) as refusal:
        await b.acquire(node, generation, hold_ms=300)
    facts = refusal.value.facts
    assert (facts["owner"], facts["unacked"], facts["lowest_offset"]) == ("a", "10", "0")
    async with b.waiting(node, generation) as acquiring:
        await scene.commit(grant.token, 10)
    assert acquiring.result().committed_offset == 10


async def test_silent_owner_loses_the_queue_and_its_messages_are_flagged(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    grant = await a.acquire(node, await scene.set_group(a))
    await scene.deliver(grant.token, 0, 10)
    await scene.commit(grant.token, 4)
    generation = await scene.set_group(b)
    node.clock.ahead_ms = scene.offsets_clock.ahead_ms = LEASE_MS + 1_000
    next_grant = await b.acquire(node, generation)
    assert (next_grant.token, next_grant.committed_offset) == (2, 4)
    assert [(r.first_offset, r.next_offset) for r in next_grant.maybe_seen] == [(4, 10)]
    assert await a.state(node, grant.token) == "NOT_OWNER"
    with pytest.raises(Fenced):
        await scene.commit(grant.token, 10)


async def test_owner_active_at_offsets_keeps_the_queue_without_keep_alives(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    grant = await a.acquire(node, await scene.set_group(a))
    await scene.deliver(grant.token, 0, 10)
    node.clock.ahead_ms = LEASE_MS + 1_000
    with pytest.raises(Held):
        await b.acquire(node, await scene.set_group(a, b), hold_ms=100)
    assert await a.state(node, grant.token) == "WANTED"
    await scene.commit(grant.token, 10)


async def test_request_for_a_queue_of_another_member_is_denied_at_once(scene: Scene) -> None:
    node, a, b = await scene.leader(), Member("a"), Member("b")
    generation = await scene.set_group(b, a)
    await a.acquire(node, generation)
    async with asyncio.timeout(HOLD_MS / 2000):
        with pytest.raises(NotAssigned):
            await b.acquire(node, generation, hold_ms=HOLD_MS)
    assert await a.state(node, 1) == "OK"


async def test_free_queue_is_denied_to_a_member_to_which_it_is_not_assigned(scene: Scene) -> None:
    """Otherwise its member would be denied it too, until the group changes."""
    node, a, b = await scene.leader(), Member("a"), Member("b")
    generation = await scene.set_group(b, a)
    with pytest.raises(NotAssigned, match="assigns it to a"):
        await b.acquire(node, generation)
    grant = await a.acquire(node, generation)
    await scene.close(grant.token)
    with pytest.raises(NotAssigned):
        await b.acquire(node, generation)
    await a.release(node, grant.token)
    with pytest.raises(NotAssigned):
        await b.acquire(node, generation)
    assert (await a.acquire(node, generation)).token == 2


async def test_late_request_is_denied_a_queue_that_was_assigned_to_another_member_since(
    scene: Scene,
) -> None:
    node, a, b = await scene.leader(), Member("a"), Member("b")
    old = await scene.set_group(a, b)
    generation = await scene.set_group(b, a)
    await a.acquire_each(node, generation, [QUEUE_COUNT])  # waits for the new record
    with pytest.raises(NotAssigned):
        await b.acquire(node, old)
    assert (await a.acquire(node, generation)).token == 1


async def test_waiting_request_is_denied_when_its_queue_is_assigned_to_another_member(
    scene: Scene,
) -> None:
    node, a, b, c = await scene.leader(slot_ms=20), Member("a"), Member("b"), Member("c")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 1)
    generation = await scene.set_group(a, c, b)
    async with asyncio.TaskGroup() as tasks:
        refused = tasks.create_task(b.refusal(node, generation, hold_ms=HOLD_MS))
        await until(lambda: waits(node, "b"))
        await scene.set_group(a, b, c)
    assert isinstance(refused.result(), NotAssigned)


async def test_owner_may_acquire_its_queue_again_after_it_was_assigned_to_another_member(
    scene: Scene,
) -> None:
    """Its handlers then end under the next token, before it hands the queue over."""
    node, a, b = await scene.leader(), Member("a"), Member("b")
    old = await scene.set_group(b, a)
    await a.acquire(node, old)
    await scene.deliver(1, 0, 5)
    await b.acquire_each(node, await scene.set_group(a, b), [QUEUE_COUNT])
    again = await a.acquire(node, old, resume=[(0, 5)])
    assert (again.token, list(again.maybe_seen)) == (2, [])


async def test_outcomes_are_streamed_while_others_wait(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    request = pb.AcquireRequest(
        incarnation=b.incarnation,
        acquire_seq=1,
        generation=await scene.set_group(a, b),
        items=[pb.AcquireItem(queue=queue(q)) for q in (0, 1, 2)],
        hold_ms=HOLD_MS,
    )
    call = node.stub.Acquire(request, timeout=TIMEOUT_S)
    first = {(await anext(aiter(call))).queue.queue.queue_id for _ in range(2)}
    assert first == {1, 2}
    await scene.close(1)
    await a.release(node, 1)
    assert (await anext(aiter(call))).queue.queue.queue_id == 0


@pytest.mark.parametrize(("reads_others", "responses"), [(True, 1), (False, 5)])
async def test_outcomes_of_one_moment_share_a_response_if_the_client_reads_them(
    scene: Scene, reads_others: bool, responses: int
) -> None:
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    await a.acquire_each(node, await scene.set_group(a), range(5))
    request = pb.AcquireRequest(
        incarnation=b.incarnation,
        acquire_seq=1,
        generation=await scene.set_group(a, b),
        items=[pb.AcquireItem(queue=queue(q)) for q in range(5)],
        reads_others=reads_others,
    )
    answers = [answer async for answer in node.stub.Acquire(request, timeout=TIMEOUT_S)]
    assert len(answers) == responses
    outcomes = [one for answer in answers for one in (answer, *answer.others)]
    assert sorted(one.queue.queue.queue_id for one in outcomes) == list(range(5))
    assert {error_from_pb(one.error).reason for one in outcomes} == {"HELD"}


@pytest.mark.parametrize(("reads_others", "responses"), [(True, 1), (False, 5)])
async def test_notices_of_one_moment_share_a_response_if_the_client_reads_them(
    scene: Scene, reads_others: bool, responses: int
) -> None:
    node, a, b = await scene.leader(slot_ms=60_000), Member("a"), Member("b")
    await a.acquire_each(node, await scene.set_group(a), range(5))
    await b.acquire_each(node, await scene.set_group(a, b), range(5))
    request = pb.WatchRequest(incarnation=a.incarnation, reads_others=reads_others)
    call = node.stub.Watch(request)
    answers = [await anext(aiter(call)) for _ in range(responses)]
    wanted = [one.wanted for answer in answers for one in (answer, *answer.others)]
    assert [one.queue.queue.queue_id for one in wanted] == list(range(5))
    assert {one.by for one in wanted} == {"b"}
    call.cancel()


@pytest.mark.long
async def test_fifty_waiting_requests_cost_one_observation_per_slot(scene: Scene) -> None:
    node, a = await scene.leader(slot_ms=100), Member("a")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 5)
    b = Member("b")
    generation = await scene.set_group(a, b)
    async with asyncio.TaskGroup() as tasks:
        acquiring = [
            tasks.create_task(b.acquire_each(node, generation, hold_ms=8_000)) for _ in range(50)
        ]
        await until(lambda: waits(node, "b"))
        before, start_ms = _observation_count(scene), node.clock.monotonic_ms()
        await until(lambda: _observation_count(scene) >= before + 8)
        assert node.clock.monotonic_ms() - start_ms >= 700
    assert [type(task.result()[0]) for task in acquiring] == [Unacked] * 50
    assert await fence_count(scene) == 1


async def test_cancelled_request_is_not_granted_later(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 5)
    generation = await scene.set_group(a, b)
    async with b.waiting(node, generation) as task:
        task.cancel()
    await until(lambda: not _open_acquires(node))
    await scene.close(1, committed=5)
    await a.release(node, 1)
    (entry,) = await entries(node)
    assert entry.state == pb.LOCK_STATE_FREE


# Admission


async def test_request_of_a_non_member_is_denied_and_nothing_is_written(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    restarted = Member("a", incarnation_id=2)
    async with asyncio.timeout(HOLD_MS / 2000):
        for client in (Member("x"), restarted):
            with pytest.raises(NotMember):
                await client.acquire(node, generation, hold_ms=HOLD_MS)
    assert (await scene.stored_count(), await fence_count(scene)) == (0, 0)


async def test_topic_outside_of_the_subscription_is_denied_at_once(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a, topics=["other"])
    with pytest.raises(NotSubscribed):
        await a.acquire(node, generation, hold_ms=HOLD_MS)
    assert (await scene.stored_count(), await fence_count(scene)) == (0, 0)


async def test_queue_that_does_not_exist_is_denied_at_once_and_leaves_no_lock(scene: Scene) -> None:
    """Else a member could create locks and progress that nothing removes."""
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a, queue_count=2)
    outcomes = await a.acquire_each(node, generation, range(4), hold_ms=HOLD_MS)
    assert [isinstance(outcomes[one], pb.Grant) for one in range(4)] == [True, True, False, False]
    assert {type(outcomes[2]), type(outcomes[3])} == {NotAssigned}
    elsewhere = acquire_item_on("broker-z")
    request = pb.AcquireRequest(
        incarnation=a.incarnation, acquire_seq=9, generation=generation, items=[elsewhere]
    )
    (answer,) = [one async for one in node.stub.Acquire(request, timeout=TIMEOUT_S)]
    assert isinstance(error_from_pb(answer.error), NotAssigned)
    assert await scene.stored_count() == 2
    assert {entry.queue.queue.queue_id for entry in await entries(node)} == {0, 1}
    grown = await scene.set_group(a, queue_count=4)
    outcomes = await a.acquire_each(node, grown, [2, 3], hold_ms=HOLD_MS)
    assert all(isinstance(one, pb.Grant) for one in outcomes.values())


def acquire_item_on(broker: str) -> pb.AcquireItem:
    item = pb.AcquireItem(queue=queue())
    item.queue.queue.broker = broker
    return item


async def test_request_with_a_newer_generation_waits_for_the_group_record(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(a.acquire(node, 1))
        await until(lambda: _open_acquires(node))
        assert await scene.set_group(a) == 1
    assert acquiring.result().token == 1


async def test_request_with_an_unknown_generation_is_denied(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    with pytest.raises(NotMember):
        await a.acquire(node, generation + 1)
    assert await scene.stored_count() == 0


async def test_member_evicted_while_it_waits_is_denied(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 5)
    generation = await scene.set_group(a, b)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(b.acquire_each(node, generation, hold_ms=HOLD_MS))
        await until(lambda: waits(node, "b"))
        await scene.set_group(a)
    assert isinstance(acquiring.result()[0], NotMember)


# Requests of the owner itself


async def test_repeated_request_is_answered_with_the_same_grant(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    first = await a.acquire(node, generation)
    node.clock.ahead_ms = 20_000
    assert await a.acquire(node, generation, seq=1) == first
    assert (await scene.progress()).token == 1
    (entry,) = await entries(node)
    assert entry.lease_age_ms < 20_000, "the lease of the owner starts with the repetition"


async def test_story_05_restarted_client_does_not_inherit_the_token(scene: Scene) -> None:
    """Messages in flight at the crashed process are flagged, and its late calls are rejected."""
    node, first, restarted = await scene.leader(slot_ms=20), Member("a", 1), Member("a", 2)
    await first.acquire(node, await scene.set_group(first))
    await scene.deliver(1, 0, 1)
    generation = await scene.set_group(restarted)
    with pytest.raises(Unacked):
        await restarted.acquire(node, generation)
    node.clock.ahead_ms = scene.offsets_clock.ahead_ms = LEASE_MS + 1_000
    grant = await restarted.acquire(node, generation)
    assert grant.token == 2
    assert [(r.first_offset, r.next_offset) for r in grant.maybe_seen] == [(0, 1)]
    with pytest.raises(Fenced):
        await scene.commit(1, 1)


async def test_new_request_of_the_owner_gets_a_new_token_and_flags_dropped_messages(
    scene: Scene,
) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation)
    await scene.deliver(1, 0, 10)
    again = await a.acquire(node, generation, resume=[(2, 5)])
    assert (again.token, again.newly_acquired) == (2, False)
    flagged = [(r.first_offset, r.next_offset) for r in again.maybe_seen]
    assert flagged == [(0, 2), (5, 10)]


async def test_holder_of_a_free_queue_gets_it_again_at_once_with_dropped_messages_flagged(
    scene: Scene,
) -> None:
    """The entry is free, the token at offsets is open: the holder is alive, since it sends
    a request."""
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 10)
    assert await a.release(node, 1) == 1
    with pytest.raises(Unacked):
        await b.acquire(node, await scene.set_group(a, b))
    again = await a.acquire(node, await scene.set_group(b, a), resume=[(2, 5)])
    assert again.token == 2
    flagged = [(r.first_offset, r.next_offset) for r in again.maybe_seen]
    assert flagged == [(0, 2), (5, 10)]


async def test_story_08_late_request_of_the_owner_is_denied_without_a_fence(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation, seq=2)
    with pytest.raises(OldRequest):
        await a.acquire(node, generation, seq=1)
    assert await a.state(node, 1) == "OK"
    assert ((await scene.progress()).token, await fence_count(scene)) == (1, 1)


async def test_repeated_request_after_close_is_denied(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation)
    await scene.close(1)
    with pytest.raises(Fenced):
        await a.acquire(node, generation, seq=1)


# Keep-alives and releases


async def test_grant_whose_answer_was_lost_is_reported_and_can_be_released(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    await a.acquire(node, await scene.set_group(a))
    (report,) = await a.keep_alive(node)
    assert (report.state, report.token) == (pb.HOLD_STATE_ORPHAN, 1)
    assert await a.keep_alive(node, seq=0) == [], "its answer may still be in flight"
    assert await a.release(node, report.token) == 1
    assert await a.keep_alive(node) == []


async def test_release_by_another_client_has_no_effect(scene: Scene) -> None:
    node, a, b = await scene.leader(), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(b, a))
    assert await b.release(node, 1) == 0
    assert await a.release(node, 2) == 0
    assert await a.release(node, 1, queue_id=5) == 0
    assert await a.state(node, 1) == "OK"
    assert await scene.stored_count() == 1


async def test_freed_entry_keeps_its_token(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation)
    await scene.close(1)
    assert await a.release(node, 1) == 1
    assert await a.release(node, 1) == 0
    stored = await scene.stored()
    assert stored is not None
    assert (stored.HasField("owner"), stored.token) == (False, 1)
    assert (await a.acquire(node, generation)).token == 2


async def test_released_but_not_closed_queue_waits_for_messages_in_flight(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    generation = await scene.set_group(a, b)
    await scene.deliver(1, 0, 3)
    await a.release(node, 1)
    with pytest.raises(Unacked) as refusal:
        await b.acquire(node, generation, hold_ms=100)
    assert refusal.value.facts["unacked"] == "3"
    scene.offsets_clock.ahead_ms = LEASE_MS + 1_000
    grant = await b.acquire(node, generation)
    assert [(r.first_offset, r.next_offset) for r in grant.maybe_seen] == [(0, 3)]


async def test_owner_evicted_from_the_group_is_notified_to_release(scene: Scene) -> None:
    node, a, b = await scene.leader(), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    assert await a.state(node, 1) == "OK"
    await scene.set_group(b)

    async def notified() -> bool:
        return await a.state(node, 1) == "WANTED"

    await until(notified)
    node.clock.ahead_ms = 61_000
    assert await a.state(node, 1) == "NOT_OWNER"


# Failures of offsets


async def test_unreachable_offsets_is_reported_and_nothing_is_written(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    scene.rules.rules["Query"] = lost
    with pytest.raises(OffsetsUnreachable) as refusal:
        await a.acquire(node, generation)
    assert refusal.value.retry_after_ms > 0
    assert (await scene.stored_count(), await fence_count(scene)) == (0, 0)
    del scene.rules.rules["Query"]
    assert (await a.acquire(node, generation)).token == 1


async def test_queue_fenced_by_another_caller_is_observed_again(scene: Scene) -> None:
    """Another caller fenced the free queue, so the observation is out of date."""
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation)
    await scene.close(1)
    await a.release(node, 1)

    async def stale_once(request: Any, proceed: Any) -> Any:
        answer = await proceed()
        answer.outcomes[0].progress.token = 0
        del scene.rules.rules["Query"]
        return answer

    scene.rules.rules["Query"] = stale_once
    assert (await a.acquire(node, generation)).token == 2
    assert [item.expected_token for item in scene.rules.fences()][-1] == 1


def _observation_count(s: Scene) -> int:
    """Return how often the queue was observed at offsets."""
    return sum(len(r.queues) for method, r in s.rules.seen if method == "Query")


def _open_acquires(node: Node) -> bool:
    labels = {"method": "Acquire", "service": "LockmgrService"}
    return bool(node.runtime.registry.get_sample_value("baton_rpc_open", labels))


# A recreated topic


@pytest.mark.parametrize("released", [True, False], ids=["released", "held"])
async def test_queue_of_a_recreated_topic_starts_anew_with_a_newer_token(
    scene: Scene, released: bool
) -> None:
    node, a = await scene.leader(slot_ms=20), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(node, generation)
    await scene.deliver(1, 0, 10)
    await scene.commit(1, 10)
    if released:
        await scene.close(1, 10)
        await a.release(node, 1)
    await scene.recreate_topic()
    grant = await a.acquire(node, generation, resume=[(3, 8)])
    assert (grant.token, grant.committed_offset, grant.reset_epoch) == (3, 0, 1)
    assert list(grant.maybe_seen) == []
    assert await a.state(node, 3) == "OK"


async def test_owner_from_a_deleted_topic_keeps_no_queue_of_the_new_topic(scene: Scene) -> None:
    node, a, b = await scene.leader(slot_ms=20), Member("a"), Member("b")
    await a.acquire(node, await scene.set_group(a))
    await scene.deliver(1, 0, 10)
    await scene.recreate_topic()
    grant = await b.acquire(node, await scene.set_group(b))
    assert (grant.token, grant.committed_offset, list(grant.maybe_seen)) == (3, 0, [])
    assert await a.state(node, 1) == "NOT_OWNER"
    with pytest.raises(Fenced):
        await scene.commit(1, 10)


async def test_new_leader_does_not_renew_an_entry_of_a_deleted_topic(scene: Scene) -> None:
    old, a = await scene.leader(slot_ms=20), Member("a")
    generation = await scene.set_group(a)
    await a.acquire(old, generation)
    await scene.recreate_topic()
    await old.crash()
    new = await scene.leader(slot_ms=20)
    (entry,) = await entries(new)
    assert (entry.state, entry.token) == (pb.LOCK_STATE_PHANTOM, 1)
    assert await a.state(new, 1) == "NOT_OWNER"
    assert isinstance(await a.refusal(new, generation, seq=1), Fenced)
    assert (await a.acquire(new, generation)).token == 3
