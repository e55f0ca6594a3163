"""The admin client.

Goal: it reports the state of the services, names services that do not answer, and raises their
errors.
Method: topics, groups and retries against an in-process nameserver; progress on a real cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.nameserver.v1.nameserver_service_pb2 import UpdateGroupRequest
from batonmq._common.clock import Clock
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.dead_letters import DeadLetter, dead_letter
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._core.retries import (
    HandlingFailure,
    Origin,
    dead_letter_topic,
    properties_of,
    retry_topic,
)
from batonmq._producer.producer import Producer
from batonmq.admin import _group_mirror
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import Group, GroupProgress, Subscription
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.admin.message_tracer import MessageTracer
from batonmq.admin.operation import Operation
from batonmq.admin.redriver import RedriveOptions, Redriver
from batonmq.admin.reports import Node
from batonmq.errors import (
    GroupInUse,
    GroupNotFound,
    InvalidName,
    NoBroker,
    TopicExists,
    TopicNotFound,
    Unreachable,
)
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import Replica, offsets_service, refusal, register_broker, replica
from tests.support.cluster import local_cluster
from tests.support.conditions import until

FAILED = HandlingFailure("failed", "on purpose")


@pytest_asyncio.fixture
async def etcd(etcd_endpoint: str, cluster: str) -> AsyncIterator[EtcdSession]:
    """Return the keys of the cluster, with one broker registered."""
    async with EtcdSession(etcd_endpoint, cluster, Clock()) as session:
        await register_broker(session, "broker-a")
        yield session


@pytest_asyncio.fixture
async def nameserver_replica(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, tmp_path: Path
) -> AsyncIterator[Replica]:
    """Return a nameserver whose cluster has offsets and no storage."""
    async with offsets_service(etcd, tmp_path), replica(etcd_endpoint, cluster) as running:
        yield running


@pytest_asyncio.fixture
async def admin(nameserver_replica: Replica) -> AsyncIterator[Admin]:
    async with Admin(nameserver_replica.address) as opened:
        yield opened


async def test_query_and_redrive_raise_the_error_of_a_broker_without_a_group(
    admin: Admin, nameserver_replica: Replica
) -> None:
    await admin.create_topic("orders", 1)
    queue = QueueRef("orders", "broker-a", 0)
    letter = dead_letter(
        ("broker-a-0-0", QueueRef(dead_letter_topic("g"), "broker-a", 0), 0),
        (1, 2),
        Message(b"", properties=properties_of(Origin(queue, 0, "broker-a-1-0"), 1, FAILED, "c")),
        redriven=False,
    )

    async def letters() -> AsyncIterator[DeadLetter]:
        yield letter

    order = RedriveOptions(operation=Operation("a", "b"), to_topic=True)
    async with Admin(nameserver_replica.address, timeout_s=0.2) as impatient:
        with pytest.raises(Unreachable):
            await MessageQueries(impatient).with_key("orders", "key")
        with pytest.raises(Unreachable):
            _ = [one async for one in Redriver(impatient, "g", order).run(letters())]


async def test_copy_is_traced_while_the_broker_of_its_original_is_away(
    admin: Admin, nameserver_replica: Replica
) -> None:
    origin = Origin(QueueRef("orders", "broker-b", 0), 0, "broker-b-1-0")
    copy = StoredMessage(
        message_id="broker-a-0-0",
        queue=QueueRef(retry_topic("g"), "broker-a", 0),
        offset=0,
        born_unix_ms=1,
        store_unix_ms=2,
        tag="",
        keys=(origin.message_id,),
        properties=properties_of(origin, 1, FAILED, "c"),
        body=b"",
    )
    async with Admin(nameserver_replica.address, timeout_s=0.2) as impatient:
        report = await MessageTracer(impatient).trace(copy)
    assert (report.message, report.origin, report.kept) == (copy, origin, None)
    assert report.problems == (
        "original broker-b-1-0: UNREACHABLE: no storage node broker-b is registered",
    )


async def test_trace_raises_the_error_of_offsets_without_a_group(
    admin: Admin, nameserver_replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admin.create_topic("flights", 1)
    await nameserver_replica.join("g", "c1")
    message = StoredMessage(
        "broker-a-0-0", QueueRef("flights", "broker-a", 0), 0, 1, 2, "", (), {}, b""
    )
    answers: Iterator[dict[object, object]] = iter([{}])

    async def progress(*_: object) -> dict[object, object]:
        for answer in answers:
            return answer
        raise Unreachable("offsets does not answer any more")

    async def copies(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(MessageTracer, "_progress", progress)
    monkeypatch.setattr(MessageTracer, "_copies", copies)
    with pytest.raises(Unreachable, match="any more"):
        await MessageTracer(admin).trace(message)


async def test_topics_are_created_listed_described_and_deleted(admin: Admin) -> None:
    created = await admin.create_topic("orders", 3)
    assert created.created
    assert created.topic.queue_counts == {"broker-a": 3}
    assert not (await admin.create_topic("orders", 3)).created
    with pytest.raises(TopicExists):
        await admin.create_topic("orders", 4)
    with pytest.raises(InvalidName):
        await admin.create_topic("or/ders")
    assert await admin.list_topics() == (created.topic,)
    await admin.delete_topic("orders")
    assert await admin.list_topics() == ()
    for missing in (admin.delete_topic("orders"), admin.describe_topic("orders")):
        with pytest.raises(TopicNotFound):
            await missing


@pytest.mark.long
async def test_reports_name_the_services_that_do_not_answer(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, tmp_path: Path
) -> None:
    async with (
        offsets_service(etcd, tmp_path),
        replica(etcd_endpoint, cluster) as running,
        Admin(running.address) as admin,
    ):
        await admin.create_topic("flights", 2)
    async with (
        replica(etcd_endpoint, cluster) as running,
        Admin(running.address, timeout_s=2) as admin,
    ):
        await running.join("g", "c1", "AA")
        group = await admin.describe_group("g")
        assert group.subscriptions == (Subscription("flights", "AA"),)
        assert [(m.client_id, m.host) for m in group.members] == [("c1", "host-of-c1")]
        assert (group.model, group.consume_from) == ("clustering", "last")
        assert await admin.list_groups() == (group,)
        report = await admin.group_progress("g")
        assert [(r.broker, r.queue_id) for r in report.queues] == [("broker-a", 0), ("broker-a", 1)]
        assert {r.log_end_offset for r in report.queues} == {None}
        assert sorted(problem.partition(":")[0] for problem in report.problems) == [
            "broker-a",
            "lockmgr",
            "offsets",
        ]
        detail = await admin.describe_topic("flights")
        assert [extent.next_offset for extent in detail.queues] == [None, None]
        assert len(detail.problems) == 1
        with pytest.raises(GroupNotFound):
            await admin.group_progress("no-such-group")


async def test_group_is_created_with_settings_that_can_be_changed(
    admin: Admin, nameserver_replica: Replica
) -> None:
    created = await admin.update_group("g", policy="staged_latest", strategy="machine_room")
    assert (created.policy, created.strategy) == ("staged_latest", "machine_room")
    assert (created.ownership, created.members) == ("on", ())
    changed = await admin.update_group("g", ownership="off")
    assert (changed.policy, changed.ownership) == ("staged_latest", "off")
    assert await admin.describe_group("g") == changed
    await admin.create_topic("flights", 2)
    await nameserver_replica.join("g", "c1")
    with pytest.raises(GroupInUse):
        await admin.update_group("g", ownership="on")
    with pytest.raises(GroupInUse):
        await admin.delete_group("g")
    await nameserver_replica.leave("g", "c1")
    for topic in ("%RETRY%g", "%DLQ%g"):
        await admin.create_topic(topic, 1)
    assert await admin.delete_group("g") == 0
    assert [topic.name for topic in await admin.list_topics()] == ["%DLQ%g", "flights"]
    await admin.create_topic("%RETRY%g", 1)
    for missing in (admin.describe_group("g"), admin.delete_group("g")):
        with pytest.raises(GroupNotFound):
            await missing
    left = {topic.name for topic in await admin.list_topics()}
    assert "%RETRY%g" not in left, "a repeated deletion completes an unfinished one"


async def test_pause_names_operator_and_reason_and_creates_no_group(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster) as running, Admin(running.address) as admin:
        await admin.update_group("g", policy="reject")
        paused = await admin.pause_group("g", "me@host", "a flood")
        assert paused.pause is not None
        assert (paused.pause.by, paused.pause.reason) == ("me@host", "a flood")
        assert (await admin.resume_group("g", "me@host")).pause is None
        for refused in (admin.pause_group("x", "me", "y"), admin.resume_group("x", "me")):
            with pytest.raises(GroupNotFound):
                await refused
        assert [group.name for group in await admin.list_groups()] == ["g"]


async def test_group_whose_member_joins_meanwhile_keeps_its_pause_and_is_no_standby(
    nameserver_replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Admin(nameserver_replica.address, timeout_s=2) as admin:
        await admin.create_topic("flights", 2)
        await nameserver_replica.join("g", "c1", "AA")
        before = (await admin.pause_group("g", "ann", "a flood")).pause
        monkeypatch.setattr(_group_mirror, "_check_no_members", lambda _: None)
        with pytest.raises(GroupInUse):
            await _group_mirror.make_standby(admin, "g", "bob")
        group = await admin.describe_group("g")
        assert (group.pause, group.ownership) == (before, "on")


async def test_mirror_that_is_killed_while_it_makes_a_standby_leaves_a_standby_or_no_group(
    nameserver_replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Admin(nameserver_replica.address, timeout_s=2) as admin:
        update = admin._update_group

        async def killed_after(request: UpdateGroupRequest) -> Group:
            await update(request)
            raise asyncio.CancelledError

        monkeypatch.setattr(admin, "_update_group", killed_after)
        with pytest.raises(asyncio.CancelledError):
            await _group_mirror.make_standby(admin, "g", "bob")
        assert _group_mirror.is_standby(await admin.describe_group("g"))


async def test_refused_client_is_part_of_the_progress(nameserver_replica: Replica) -> None:
    async with Admin(nameserver_replica.address, timeout_s=2) as admin:
        await admin.create_topic("flights", 2)
        await nameserver_replica.join("g", "c1", "AA")
        assert (
            await refusal(nameserver_replica.join("g", "c2", "UA"))
        ).reason == "SUBSCRIPTION_CONFLICT"

        reported: list[GroupProgress] = []

        async def is_reported() -> bool:
            reported.append(await admin.group_progress("g"))
            return bool(reported[-1].refused)

        await until(is_reported)
        progress = reported[-1]
        (refused,) = progress.refused
        assert (refused.client_id, refused.host) == ("c2", "host-of-c2")
        (difference,) = refused.error.differences
        assert (difference.newcomer_value, difference.member_value) == ("UA", "AA")
        assert {row.assigned for row in progress.queues} == {"c1"}


async def test_cluster_lists_nodes(etcd_endpoint: str, cluster: str, etcd: EtcdSession) -> None:
    async with replica(etcd_endpoint, cluster) as running, Admin(running.address) as admin:
        report = await admin.cluster()
    assert report.name == cluster
    assert report.nodes == (Node("storage", "broker-a", "broker-a", "127.0.0.1:1", "", 0, 1, True),)


async def test_call_waits_for_a_broker_that_is_starting(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, tmp_path: Path
) -> None:
    key = etcd.key("nodes", "storage", "broker-a")
    await etcd.delete(key)
    async with offsets_service(etcd, tmp_path), replica(etcd_endpoint, cluster) as running:
        async with Admin(running.address, timeout_s=2) as short:
            with pytest.raises(NoBroker):
                await short.create_topic("orders")
        async with Admin(running.address, timeout_s=20) as long, asyncio.TaskGroup() as tasks:
            creating = tasks.create_task(long.create_topic("orders"))
            await register_broker(etcd, "broker-a")
        assert creating.result().created


async def test_second_nameserver_is_called_if_the_first_is_unavailable(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with (
        replica(etcd_endpoint, cluster) as running,
        Admin(f"127.0.0.1:1,{running.address}") as admin,
    ):
        assert await admin.list_topics() == ()


@pytest.mark.e2e
async def test_progress_of_a_real_cluster(tmp_path: Path) -> None:
    settings = ConsumerSettings(consume_from="first", commit_interval_ms=100)
    async with local_cluster(tmp_path) as running, Admin(running.nameserver) as admin:
        topic = (await admin.create_topic("flights", 2)).topic
        first, second = topic.queues
        retries = QueueRef("%RETRY%g", first.broker, 0)
        async with Producer(running.nameserver) as producer:
            for number in range(5):
                await producer.send("flights", str(number).encode(), queue=first)
        extents = (await admin.describe_topic("flights")).queues
        assert [(e.first_offset, e.next_offset) for e in extents] == [(0, 5), (0, 0)]
        async with Consumer(
            running.nameserver, "g", {"flights": "*"}, settings, client_id="c1"
        ) as consumer:
            handled = [await anext(consumer) for _ in range(3)]
            assert [message.offset for message in handled] == [0, 1, 2]

            async def is_reported() -> bool:
                progress = await admin.group_progress("g")
                at = {QueueRef(r.topic, r.broker, r.queue_id): r for r in progress.queues}
                return (
                    progress.problems == ()
                    and at.keys() == {first, second, retries}
                    and (at[first].committed_offset, at[first].lag) == (2, 3)
                    and at[first].log_end_offset == 5
                    and (at[first].unacked_count or 0) >= 1
                    and (at[second].committed_offset, at[second].lag) == (0, 0)
                    and (at[retries].committed_offset, at[retries].lag) == (0, 0)
                    and {r.client_id for r in progress.queues} == {"c1"}
                    and all(r.host and r.token for r in progress.queues)
                )

            await until(is_reported)
            locks = await admin.list_locks("g")
            assert [(lock.state, lock.client_id) for lock in locks] == [("held", "c1")] * 3
        after = await admin.group_progress("g")
        assert after.group.members == ()
        assert {row.client_id for row in after.queues} == {None}
        report = await admin.cluster()
        assert [node.service for node in report.nodes] == [
            "storage",
            "offsets",
            "lockmgr",
            "nameserver",
        ]
        assert all(node.leader for node in report.nodes)


async def test_missing_nameserver_is_unreachable_after_the_timeout() -> None:
    async with Admin("127.0.0.1:1", timeout_s=0.3) as admin, asyncio.timeout(20):
        with pytest.raises(Unreachable):
            await admin.list_topics()
