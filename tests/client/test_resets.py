"""Goal: a reset moves the progress on the named queues while members run, and can be undone.

Method: the choice of queues as a pure function; many queues against offsets in this process; the
rest against a real cluster whose members read.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._core.reset_targets import ShiftBy, ToEarliest, ToLatest, ToOffset, ToTime
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import Group, group_from_pb
from batonmq.admin.message_queries import MessageQueries
from batonmq.admin.operation import Operation
from batonmq.admin.reports import Topic
from batonmq.admin.resets import QUEUES_PER_CALL, ResetPlan, Resets, ResetScope, queues_in
from batonmq.errors import (
    GroupNotFound,
    InvalidArgument,
    OperationExists,
    OperationNotFound,
    QueueNotFound,
    TopicNotFound,
)
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.client.group import Scene, handle_all, scene
from tests.nameserver.replica import offsets_service, replica
from tests.offsets.service_calls import store_topic
from tests.support.conditions import until

OPERATION = Operation("tester", "a test")


def topic(name: str, queue_count: int = 2) -> Topic:
    return Topic(name, 1, 0, {"a": queue_count}, "read_write", {"a": queue_count})


def group(*topics: str) -> Group:
    subscriptions = [pb.Subscription(topic=name, expression="*") for name in topics]
    return group_from_pb(pb.Group(name="g", subscriptions=subscriptions))


TOPICS = [topic("s"), topic("t"), topic("u", 1)]


def test_reset_selects_all_queues_with_a_subscription_or_progress() -> None:
    progress = [QueueRef("u", "a", 0), QueueRef("gone", "a", 0)]
    assert queues_in(ResetScope(), group("t"), progress, TOPICS) == (
        QueueRef("t", "a", 0),
        QueueRef("t", "a", 1),
        QueueRef("u", "a", 0),
    )


def test_reset_selects_the_retry_topic_only_if_it_is_named() -> None:
    topics, retries = [*TOPICS, topic("%RETRY%g")], topic("%RETRY%g").queues
    assert queues_in(ResetScope(), group("t", "%RETRY%g"), retries, topics) == topic("t").queues
    assert queues_in(ResetScope("%RETRY%g"), group("t"), retries, topics) == retries


def test_reset_selects_only_the_named_topic_or_queue() -> None:
    assert queues_in(ResetScope("s"), group("t"), [], TOPICS) == topic("s").queues
    chosen = queues_in(ResetScope("t", ("a", 1)), group("t"), [], TOPICS)
    assert chosen == (QueueRef("t", "a", 1),)


def test_reset_of_an_unknown_topic_or_queue_is_refused() -> None:
    with pytest.raises(TopicNotFound):
        queues_in(ResetScope("gone"), group("t"), [], TOPICS)
    for queue in (("a", 2), ("b", 0)):
        with pytest.raises(QueueNotFound) as refused:
            queues_in(ResetScope("t", queue), group("t"), [], TOPICS)
        assert "baton topic describe t" in refused.value.remedy
    with pytest.raises(InvalidArgument, match="no progress"):
        queues_in(ResetScope(), group(), [], TOPICS)


async def test_reset_of_many_queues_is_one_operation(etcd_endpoint: str, tmp_path: Path) -> None:
    cluster = f"test-{secrets.token_hex(8)}"
    async with (
        EtcdSession(etcd_endpoint, cluster, Clock()) as etcd,
        offsets_service(etcd, tmp_path),
        replica(etcd_endpoint, cluster) as running,
        Admin(running.address) as admin,
    ):
        queues = topic("t", QUEUES_PER_CALL + 100).queues
        await store_topic(etcd, len(queues), "t", (queues[0].broker,))
        plan = ResetPlan("g", tuple((queue, queue.queue_id) for queue in queues), ())
        resets = Resets(admin)
        done = await resets.reset(plan, OPERATION)
        assert [step.to_offset for step in done.steps] == list(range(len(queues)))
        (recorded,) = await resets.history("g")
        assert recorded.steps == done.steps
        assert await resets.reset(plan, OPERATION) == done
        undone = await resets.undo("g", OPERATION.op_id, Operation("tester", "back"))
        assert len(undone.steps) == len(queues)


# ---- with a cluster


@asynccontextmanager
async def handled(nameserver: str, count: int = 6) -> AsyncIterator[tuple[Scene, Resets]]:
    """Run a member until it has handled `count` messages of two queues."""
    async with scene(nameserver, 2) as at, Admin(nameserver) as admin:
        await at.send([str(number) for number in range(count)])
        async with handle_all(at, "first"):
            await until(lambda: sum(at.bodies.values()) == count)
        assert await at.lag() == 0
        yield at, Resets(admin)


async def committed(at: Scene) -> dict[QueueRef, int | None]:
    async with Admin(at.nameserver) as admin:
        rows = (await admin.group_progress(at.group)).queues
    return {QueueRef(r.topic, r.broker, r.queue_id): r.committed_offset for r in rows}


@pytest.mark.e2e
async def test_dry_run_counts_and_changes_nothing(nameserver: str) -> None:
    async with handled(nameserver) as (at, resets):
        before = await committed(at)
        plan = await resets.plan(at.group, ToEarliest())
        preview = await resets.reset(plan, OPERATION, dry_run=True)
        assert preview.problems == ()
        assert sum(step.replayed_count for step in preview.steps) == 6
        assert [(s.from_offset, s.to_offset) for s in preview.steps] == [
            (before[queue], 0) for queue in sorted(before)
        ]
        assert await committed(at) == before
        assert await resets.history(at.group) == ()


@pytest.mark.e2e
async def test_reset_to_an_earlier_offset_redelivers_to_a_running_member(nameserver: str) -> None:
    async with handled(nameserver) as (at, resets), handle_all(at, "second"):
        await at.send(["new"])

        async def handled_and_committed() -> bool:
            return at.bodies["new"] == 1 and await at.lag() == 0

        await until(handled_and_committed)
        done = await resets.reset(await resets.plan(at.group, ToEarliest()), OPERATION)
        assert sum(step.replayed_count for step in done.steps) == 7
        await until(lambda: sum(at.bodies.values()) == 14)
        again = at.handled[7:]
        assert Counter(one.body for one in again) == {str(n): 1 for n in range(6)} | {"new": 1}
        assert all(one.redelivered for one in again)

        async def caught_up() -> bool:
            return await at.lag() == 0

        await until(caught_up)


@pytest.mark.e2e
async def test_skipped_messages_are_not_delivered(nameserver: str) -> None:
    async with handled(nameserver) as (at, resets):
        await at.send(["skipped"] * 5)
        done = await resets.reset(await resets.plan(at.group, ToLatest()), OPERATION)
        assert sum(step.skipped_count for step in done.steps) == 5
        async with handle_all(at, "second"):
            await at.send(["later"])
            await until(lambda: at.bodies["later"] == 1)
        assert at.bodies["skipped"] == 0


@pytest.mark.e2e
async def test_undo_restores_the_progress_and_is_recorded(nameserver: str) -> None:
    async with handled(nameserver) as (at, resets):
        before = await committed(at)
        skipped = Operation("tester", "there")
        await resets.reset(await resets.plan(at.group, ToEarliest()), skipped)
        assert set((await committed(at)).values()) == {0}
        undo = Operation("tester", "back")
        preview = await resets.undo(at.group, skipped.op_id, undo, dry_run=True)
        done = await resets.undo(at.group, skipped.op_id, undo)
        assert [s.to_offset for s in preview.steps] == [s.to_offset for s in done.steps]
        assert await committed(at) == before
        newest, oldest = await resets.history(at.group)
        assert (oldest.op_id, oldest.reason, oldest.kind) == (skipped.op_id, "there", "reset")
        assert (newest.op_id, newest.undone_op_id) == (undo.op_id, skipped.op_id)
        assert newest.steps == done.steps
        with pytest.raises(OperationNotFound):
            await resets.undo(at.group, "no-such", OPERATION)


@pytest.mark.e2e
async def test_repeated_operation_changes_nothing_more(nameserver: str) -> None:
    async with handled(nameserver) as (at, resets):
        plan = await resets.plan(at.group, ToOffset(1))
        once = await resets.reset(plan, OPERATION)
        assert await resets.reset(plan, OPERATION) == once
        (recorded,) = await resets.history(at.group)
        assert recorded.steps == once.steps
        shift = await resets.plan(at.group, ShiftBy(-1), op_id=OPERATION.op_id)
        assert await resets.reset(shift, OPERATION) == once
        other = await resets.reset(await resets.plan(at.group, ToOffset(0)), OPERATION)
        assert other.steps == ()
        assert all("OPERATION_EXISTS" in problem for problem in other.problems)
        assert len(other.problems) == 2


@pytest.mark.e2e
async def test_reset_targets_are_resolved_in_the_log(nameserver: str) -> None:
    async with handled(nameserver) as (at, resets), Admin(nameserver) as admin:
        queue = QueueRef(at.topic, "broker-0", 0)
        await at.send(["a", "b"], queue_id=0)
        end = (await committed(at))[queue]
        assert end is not None
        scope = ResetScope(at.topic, ("broker-0", 0))
        second = await MessageQueries(admin).at_offset(queue, end + 1)
        for target, offset in (
            (ToTime(second.store_unix_ms + 60_000), end + 2),
            (ToTime(0), 0),
            (ShiftBy(-1), end - 1),
            (ShiftBy(2), end + 2),
        ):
            plan = await resets.plan(at.group, target, scope)
            assert plan.offsets == ((queue, offset),)
            assert plan.notes == ()
        beyond = await resets.plan(at.group, ShiftBy(-100), scope)
        assert beyond.offsets == ((queue, 0),)
        assert "is no longer kept" in beyond.notes[0]


@pytest.mark.e2e
async def test_clone_starts_at_the_progress_of_the_other_group(nameserver: str) -> None:
    async with handled(nameserver) as (at, resets):
        twin = Scene(nameserver, at.topic)
        preview = await resets.clone(at.group, twin.group, OPERATION, dry_run=True)
        assert await resets.history(twin.group) == ()
        done = await resets.clone(at.group, twin.group, OPERATION)
        assert sum(step.to_offset for step in done.steps) == 6
        assert [s.to_offset for s in preview.steps] == [s.to_offset for s in done.steps]
        await at.send(["later"])
        async with handle_all(twin, "twin"):
            await until(lambda: twin.bodies["later"] == 1)
        assert twin.bodies.total() == 1
        with pytest.raises(OperationExists):
            await resets.clone(at.group, twin.group, Operation("x", "y", OPERATION.op_id))
        with pytest.raises(GroupNotFound):
            await resets.clone("no-such-group", twin.group, OPERATION)


@pytest.mark.e2e
async def test_reset_of_a_group_or_topic_that_does_not_exist_is_refused(nameserver: str) -> None:
    async with handled(nameserver) as (at, resets):
        with pytest.raises(GroupNotFound):
            await resets.plan("no-such-group", ToEarliest())
        with pytest.raises(TopicNotFound):
            await resets.plan(at.group, ToEarliest(), ResetScope("no-such-topic"))
