"""Goal: a crash between any two steps loses no message and repeats none unflagged, and the queue
can be acquired again: every row of the protocol's table of crash points (section 16).

Method: a lock manager with real etcd and offsets. The test acts as owner, as another client and as
storage, and loses calls and answers or stops leaders exactly between the two steps of the row. The
row in which offsets crashes is tested there: tests/offsets/test_protocol_rules.py,
`test_s12_restart_...`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq.errors import BatonError, Fenced, SubscriptionDraining, Unacked, Unreachable
from tests.lockmgr.scene import TIMEOUT_S, Member, Node, Scene, entries, queue
from tests.support.conditions import until

LEASE_MS = 30_000
SHORT = {"slot_ms": 20}


class Between:
    """A rule that blocks one call, before or after it is carried out."""

    def __init__(self, s: Scene, method: str, *, after: bool) -> None:
        self._after = after
        self.request: Any = None
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        s.rules.rules[method] = self._stop
        self._rules, self._method = s.rules.rules, method

    async def _stop(self, request: Any, proceed: Any) -> Any:
        self._rules.pop(self._method, None)
        self.request = request
        answer = await proceed() if self._after else None
        self.reached.set()
        await self.go_on.wait()
        return answer or await proceed()


def lose(s: Scene, method: str, *, answer: bool) -> None:
    """Lose the next call of a method, or its answer."""

    async def rule(request: Any, proceed: Any) -> Any:
        del s.rules.rules[method]
        if answer:
            await proceed()
        raise Unreachable("lost")

    s.rules.rules[method] = rule


async def held_by_a(s: Scene) -> tuple[Node, Member, Member, int]:
    """Return a leader, the owner with token 1, another client, and its generation."""
    node, a, b = await s.leader(**SHORT), Member("a"), Member("b")
    await a.acquire(node, await s.set_group(a))
    return node, a, b, await s.set_group(a, b)


def expire_leases(s: Scene, node: Node) -> None:
    """Expire the lease of every owner, at the lock manager and at offsets."""
    node.clock.ahead_ms += LEASE_MS + 1_000
    s.offsets_clock.ahead_ms += LEASE_MS + 1_000


async def outcome_of(
    member: Member, node: Node, generation: int, **options: Any
) -> pb.Grant | BatonError:
    """Return the outcome of an Acquire, or the error of the whole call."""
    try:
        return (await member.acquire_each(node, generation, **options))[0]
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)


def flagged(grant: pb.Grant) -> Sequence[tuple[int, int]]:
    """Return the ranges that are flagged as redelivered."""
    return [(part.first_offset, part.next_offset) for part in grant.maybe_seen]


# The lock manager crashes


async def test_between_acquire_sent_and_fence_sent_nothing_has_changed(scene: Scene) -> None:
    old, a = await scene.leader(**SHORT), Member("a")
    generation = await scene.set_group(a)
    stopped = Between(scene, "Query", after=False)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(outcome_of(a, old, generation))
        await stopped.reached.wait()
        await old.cut_until_leases_expire()
    assert isinstance(acquiring.result(), BatonError)
    assert (await scene.stored_count(), scene.rules.fences()) == (0, [])
    new = await scene.leader(**SHORT)
    assert (await a.acquire(new, generation, seq=1)).token == 1


async def test_between_fence_sent_and_applied_the_announcement_rejects_the_late_fence(
    scene: Scene,
) -> None:
    old, a, b, generation = await held_by_a(scene)
    expire_leases(scene, old)
    stopped = Between(scene, "Fence", after=False)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(outcome_of(b, old, generation))
        await stopped.reached.wait()
        await old.cut_until_leases_expire()
    assert isinstance(acquiring.result(), BatonError)
    new = await scene.leader(**SHORT)
    error = (await scene.offsets.Fence(stopped.request, timeout=TIMEOUT_S)).outcomes[0].error
    assert error_from_pb(error).reason == "OLD_EPOCH"
    assert (await scene.progress()).token == 1
    assert await a.state(new, 1) == "OK"


async def test_between_fence_applied_and_persisted_the_owner_acquires_again(scene: Scene) -> None:
    old, a, b, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    expire_leases(scene, old)
    stopped = Between(scene, "Fence", after=True)
    async with asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(outcome_of(b, old, generation))
        await stopped.reached.wait()
        old.session.cut = True
        stopped.go_on.set()
        await old.cut_until_leases_expire()
    assert isinstance(acquiring.result(), BatonError)
    new = await scene.leader(**SHORT)
    with pytest.raises(Fenced):
        await scene.commit(1, 5)
    assert await a.state(new, 1) == "NOT_OWNER"
    grant = await a.acquire(new, generation, resume=[(0, 5)])
    assert (grant.token, flagged(grant)) == (3, [(0, 5)])


@pytest.mark.parametrize("leader", ["same leader", "next leader"])
async def test_between_persisted_and_answered_the_same_request_is_granted_again(
    scene: Scene, leader: str
) -> None:
    node, a = await scene.leader(**SHORT), Member("a")
    generation = await scene.set_group(a)
    lost = await a.acquire(node, generation)
    if leader == "next leader":
        await node.crash()
        node = await scene.leader(**SHORT)
    (report,) = await a.keep_alive(node)
    assert (report.state, report.token) == (pb.HOLD_STATE_ORPHAN, 1)
    again = await a.acquire(node, generation, seq=1)
    assert (again.token, again.committed_offset) == (lost.token, lost.committed_offset)
    assert (await scene.progress()).token == 1


async def test_between_answered_and_first_pull_the_next_owner_gets_all_messages_unflagged(
    scene: Scene,
) -> None:
    node, _, b, generation = await held_by_a(scene)
    grant = await b.acquire(node, generation, hold_ms=15_000)
    assert (grant.token, grant.committed_offset, flagged(grant)) == (2, 0, [])


async def test_between_leader_elected_and_announced_the_old_leader_can_still_fence(
    scene: Scene,
) -> None:
    old, a, b, generation = await held_by_a(scene)
    expire_leases(scene, old)
    fence = Between(scene, "Fence", after=False)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outcome_of(b, old, generation))
        await fence.reached.wait()
        await old.cut_until_leases_expire()
    announce = Between(scene, "Announce", after=False)
    new = await scene.lockmgr(**SHORT)
    await announce.reached.wait()
    passed = (await scene.offsets.Fence(fence.request, timeout=TIMEOUT_S)).outcomes[0]
    assert passed.fenced.token == 2
    assert not await new.leads(), "it has not confirmed a lock yet"
    announce.go_on.set()
    await until(new.leads)
    assert await a.state(new, 1) == "NOT_OWNER"
    assert (await a.acquire(new, generation)).token == 3


# Storage and deliveries


async def test_between_read_and_record_no_message_is_delivered(scene: Scene) -> None:
    await held_by_a(scene)
    lose(scene, "RecordDelivered", answer=False)
    with pytest.raises(grpc.aio.AioRpcError):
        await scene.deliver(1, 0, 5)
    assert (await scene.progress()).delivered_offset == 0
    await scene.deliver(1, 0, 5)


@pytest.mark.parametrize("lost", ["ok lost", "bytes lost"])
async def test_between_record_and_bytes_close_returns_messages_that_were_not_started(
    scene: Scene, lost: str
) -> None:
    """Two rows: record applied - ok lost, and record ok - bytes lost."""
    node, a, b, generation = await held_by_a(scene)
    if lost == "ok lost":
        lose(scene, "RecordDelivered", answer=True)
        with pytest.raises(grpc.aio.AioRpcError):
            await scene.deliver(1, 0, 5)
    else:
        await scene.deliver(1, 0, 5)
    assert (await scene.progress()).delivered_offset == 5
    with pytest.raises(Unacked):
        await b.acquire(node, generation)
    await scene.deliver(1, 0, 5)
    await scene.close(1)
    await a.release(node, 1)
    grant = await b.acquire(node, generation)
    assert (grant.committed_offset, flagged(grant)) == (0, [])


# The consumer crashes


@pytest.mark.parametrize("acked", [0, 2])
async def test_between_bytes_and_ack_durable_the_message_is_redelivered_flagged(
    scene: Scene, acked: int
) -> None:
    """Two rows: bytes - handler end, and handler end - ack durable."""
    node, _, b, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    await scene.commit(1, acked)
    expire_leases(scene, node)
    grant = await b.acquire(node, generation)
    assert (grant.committed_offset, flagged(grant)) == (acked, [(acked, 5)])


async def test_between_ack_durable_and_answered_the_repetition_changes_nothing(
    scene: Scene,
) -> None:
    await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    lose(scene, "Commit", answer=True)
    with pytest.raises(grpc.aio.AioRpcError):
        await scene.commit(1, 5)
    item = offsets_pb.CommitItem(queue=queue(), token=1, committed_offset=5)
    answer = await scene.offsets.Commit(offsets_pb.CommitRequest(items=[item]), timeout=TIMEOUT_S)
    assert answer.outcomes[0].committed.noop
    assert answer.outcomes[0].committed.committed_offset == 5


async def test_between_drained_and_close_applied_the_queue_is_granted_when_it_is_quiet(
    scene: Scene,
) -> None:
    node, _, b, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    await scene.commit(1, 5)
    lose(scene, "Close", answer=False)
    with pytest.raises(grpc.aio.AioRpcError):
        await scene.close(1, 5)
    grant = await b.acquire(node, generation, hold_ms=15_000)
    assert (grant.committed_offset, flagged(grant)) == (5, [])


async def test_between_close_applied_and_release_the_next_request_is_granted(scene: Scene) -> None:
    node, a, b, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    await scene.close(1, 2)
    (entry,) = await entries(node)
    assert entry.owner == a.incarnation
    with pytest.raises(Fenced):
        await scene.deliver(1, 5, 6)
    grant = await b.acquire(node, generation)
    assert (grant.committed_offset, flagged(grant)) == (2, [])


async def test_between_release_and_next_fence_the_condition_is_still_tested(scene: Scene) -> None:
    node, a, b, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    await a.release(node, 1)
    await node.crash()
    new = await scene.leader(**SHORT)
    with pytest.raises(Unacked):
        await b.acquire(new, generation)
    expire_leases(scene, new)
    assert flagged(await b.acquire(new, generation)) == [(0, 5)]


# Operators


async def test_between_reset_applied_and_owner_notified_every_old_call_is_rejected(
    scene: Scene,
) -> None:
    node, a, _, generation = await held_by_a(scene)
    await scene.deliver(1, 0, 5)
    await scene.commit(1, 5)
    await scene.reset(to=1)
    for call in (scene.deliver(1, 5, 6), scene.commit(1, 5), scene.close(1, 5)):
        with pytest.raises(Fenced) as refusal:
            await call
        assert refusal.value.facts["why"] == "RESET"
    grant = await a.acquire(node, generation, resume=[(3, 5)])
    assert (grant.token, grant.committed_offset, grant.reset_epoch) == (3, 1, 1)
    assert await a.state(node, 3) in ("OK", "WANTED")


async def test_between_last_old_grant_closed_and_new_subscription_no_owner_filters(
    scene: Scene,
) -> None:
    old, a, b, _ = await held_by_a(scene)
    generation = await scene.set_group(a, b, draining=True)
    await scene.close(1)
    await a.release(old, 1)
    await old.crash()
    new = await scene.leader(**SHORT)
    for member in (a, b):
        with pytest.raises(SubscriptionDraining):
            await member.acquire(new, generation)
    with pytest.raises(Fenced):
        await scene.deliver(1, 0, 5)
    generation = await scene.set_group(a, b, subscription_generation=2)
    grant = await b.acquire(new, generation, hold_ms=15_000)
    assert grant.subscription_generation == 2
    with pytest.raises(Fenced):
        await scene.deliver(grant.token, 0, 5, generation=1)
    await scene.deliver(grant.token, 0, 5, generation=2)
