"""Membership, through a real server on a real etcd.

Goal: every replica returns the same state of a group at once, and a refused client does not affect
the members.
Method: in-process replicas, with short member leases where one has to expire; tests wait for
events, never for a time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import Difference
from batonmq_server.runtime.etcd.session import EtcdSession, Put
from tests.nameserver.replica import (
    CALL_TIMEOUT_S,
    Direct,
    Replica,
    group_with,
    heartbeat,
    ids,
    incarnation,
    next_group,
    refusal,
    replica,
)
from tests.support.conditions import until

SHORT_MS = 6_000
SHORT: dict[str, Any] = {"member_lease_ms": SHORT_MS, "heartbeat_interval_ms": 500}


async def keys(etcd: EtcdSession) -> dict[str, int]:
    """Revision of every key of the cluster: equal means that nothing was written."""
    return {stored.key: stored.mod_revision for stored in (await etcd.get_prefix(""))[0]}


async def test_heartbeat_answers_with_the_group_and_the_interval(nameserver: Replica) -> None:
    answer = await nameserver.stub.Heartbeat(
        heartbeat("g", "c1", "DL || AA"), timeout=CALL_TIMEOUT_S
    )
    assert answer.interval_ms == 10_000
    assert answer.group.subscriptions == [pb.Subscription(topic="flights", expression="AA||DL")]
    assert answer.group.model == pb.MESSAGE_MODEL_CLUSTERING
    assert answer.group.consume_from == pb.CONSUME_FROM_LAST
    assert answer.group.subscription_generation == 1
    assert answer.verdict == pb.SUBSCRIPTION_VERDICT_ACCEPTED
    (member,) = answer.group.members
    assert member.incarnation == incarnation("c1")
    assert member.host == "host-of-c1"
    assert member.join_unix_ms > 0
    assert await nameserver.group("g") == answer.group
    listed = await nameserver.stub.ListGroups(pb.ListGroupsRequest(), timeout=CALL_TIMEOUT_S)
    assert list(listed.groups) == [answer.group]


async def test_joins_and_leaves_are_pushed(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    with nameserver.watch_group("g") as call:
        seen = [await next_group(call)]
        await nameserver.join("g", "c2")
        seen.append(await next_group(call))
        assert await nameserver.leave("g", "c1")
        seen.append(await next_group(call))
        await nameserver.leave("g", "c2")
        seen.append(await next_group(call))
    assert [ids(group) for group in seen] == [["c1"], ["c1", "c2"], ["c2"], []]
    first = seen[0].generation
    assert [group.generation for group in seen] == [first, first + 1, first + 2, first + 3]


async def test_repeated_heartbeats_write_nothing(nameserver: Replica, etcd: EtcdSession) -> None:
    generation = (await nameserver.join("g", "c1")).generation
    before = await keys(etcd)
    for _ in range(3):
        assert (await nameserver.join("g", "c1")).generation == generation
    assert await keys(etcd) == before
    assert nameserver.metric("heartbeats_total") == 4


async def test_member_with_other_tags_is_refused_and_the_others_continue(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    generation = (await nameserver.join("g", "c1", "tag1")).generation
    before = await keys(etcd)
    with nameserver.watch_group("g") as call:
        await next_group(call)
        error = await refusal(nameserver.join("g", "c2", "tag2"))
        assert error.reason == "SUBSCRIPTION_CONFLICT"
        assert error.differences == (
            Difference("flights", "expression", "c2", "tag2", "c1", "tag1"),
        )
        after = await keys(etcd)
        assert after.pop("refused/g/c2")
        assert after == before
        assert (await nameserver.join("g", "c1", "tag1")).generation == generation
        await nameserver.join("g", "c3", "tag1")
        assert ids(await next_group(call)) == ["c1", "c3"]
    assert nameserver.metric("rejections_total", reason="SUBSCRIPTION_CONFLICT") == 1


async def test_expressions_that_mean_the_same_agree(nameserver: Replica) -> None:
    await nameserver.join("g", "c1", "DL||AA")
    assert ids(await nameserver.join("g", "c2", " AA || DL ")) == ["c1", "c2"]


async def test_equal_conditions_in_different_spelling_agree(nameserver: Replica) -> None:
    await nameserver.join("g", "c1", "sql: a > 5 AND b IN ('x', 'y')")
    answer = await nameserver.join("g", "c2", "SQL:  a>5 and b in('y','x')")
    assert ids(answer) == ["c1", "c2"]
    assert answer.subscriptions[0].expression == "sql: a > 5 AND b IN ('x', 'y')"


async def test_condition_and_tags_disagree_and_both_are_shown(nameserver: Replica) -> None:
    await nameserver.join("g", "c1", "sql: a>5")
    for other, canonical in (("tag1", "tag1"), ("sql: a>6", "sql: a > 6")):
        error = await refusal(nameserver.join("g", "c2", other))
        assert error.reason == "SUBSCRIPTION_CONFLICT"
        assert error.differences == (
            Difference("flights", "expression", "c2", canonical, "c1", "sql: a > 5"),
        )


async def test_model_order_and_start_must_agree(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    request = heartbeat("g", "c2")
    request.order, request.consume_from = pb.MESSAGE_ORDER_KEY, pb.CONSUME_FROM_FIRST
    error = await refusal(nameserver.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S))
    assert [(d.setting, d.newcomer_value, d.member_value) for d in error.differences] == [
        ("order", "KEY", "NONE"),
        ("consume_from", "FIRST", "LAST"),
    ]


async def test_single_member_may_change_its_subscription(nameserver: Replica) -> None:
    await nameserver.join("g", "c1", "tag1")
    group = await nameserver.join("g", "c1", "tag2")
    assert group.subscriptions[0].expression == "tag2"
    assert group.subscription_generation == 2
    await nameserver.join("g", "c2", "tag2")
    error = await refusal(nameserver.join("g", "c1", "tag3"))
    assert error.reason == "SUBSCRIPTION_CONFLICT"
    assert ids(await nameserver.group("g")) == ["c1", "c2"]


@pytest.mark.long
async def test_expiry_of_a_silent_member_is_pushed(
    etcd_endpoint: str, cluster: str, nameserver: Replica, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster, **SHORT) as short:
        await short.join("g", "silent")
        await short.join("g", "alive")

        async def beating() -> bool:
            return ids(await short.join("g", "alive")) == ["alive"]

        with nameserver.watch_group("g") as call:
            before = await group_with(call, "alive", "silent")
            await until(beating)
            after = await next_group(call)
            assert (ids(after), after.generation) == (["alive"], before.generation + 1)
        expiries = [at.metric("expiries_total") for at in (short, nameserver)]
        assert sum(expiries) == 1, "one replica expires the member"
        assert short.metric("members") == 1
        assert [stored.key for stored in (await etcd.get_prefix("live/"))[0]] == ["live/g/alive"]


@pytest.mark.long
async def test_any_replica_renews_a_lease_that_another_granted(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, nameserver: Replica
) -> None:
    async with replica(etcd_endpoint, cluster, **SHORT) as granting:
        await granting.join("g", "kept")
        await granting.join("g", "marker")

    async def marker_is_gone() -> bool:
        return ids(await nameserver.join("g", "kept")) == ["kept"]

    await until(marker_is_gone)
    live, _ = await etcd.get_prefix("live/")
    assert [stored.key for stored in live] == ["live/g/kept"]


async def test_restart_keeps_members_and_generation(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster) as before:
        await before.create("flights")
        await before.join("g", "c1")
        group = await before.join("g", "c2")
    written = await keys(etcd)
    async with replica(etcd_endpoint, cluster) as after:
        with after.watch_group("g") as call:
            assert await next_group(call) == group
        assert await after.join("g", "c1") == group
        assert await after.join("g", "c2") == group
    assert await keys(etcd) == written


async def test_members_that_crashed_while_no_nameserver_ran_are_expired_at_start(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster) as before:
        await before.create("flights")
        await before.join("g", "c1")
        generation = (await before.join("g", "c2")).generation
    live_key = await etcd.get(etcd.key("live", "g", "c1"))
    assert live_key is not None
    await etcd.revoke(live_key.lease_id)
    async with replica(etcd_endpoint, cluster) as after:

        async def expired() -> bool:
            return ids(await after.group("g")) == ["c2"]

        await until(expired)
        assert (await after.group("g")).generation == generation + 1
        assert after.metric("expiries_total") == 1


async def test_concurrent_joins_at_two_replicas_all_succeed(
    nameserver: Replica, etcd_endpoint: str, cluster: str
) -> None:
    async with replica(etcd_endpoint, cluster) as other:
        async with asyncio.TaskGroup() as tasks:
            for number in range(10):
                target = (nameserver, other)[number % 2]
                tasks.create_task(target.join("g", f"c{number}"))

        async def both_have_all_members() -> bool:
            """Each replica may receive the last member of the other replica late."""
            group, other_group = await nameserver.join("g", "c0"), await other.join("g", "c1")
            return group == other_group and ids(group) == [f"c{number}" for number in range(10)]

        await until(both_have_all_members)


@pytest.mark.long
async def test_client_id_of_a_live_process_is_refused_until_it_expires(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, nameserver: Replica
) -> None:
    async with replica(etcd_endpoint, cluster, **SHORT) as short:
        await short.join("g", "c1")
        restarted = heartbeat("g", "c1", incarnation_id=2)
        error = await refusal(short.stub.Heartbeat(restarted, timeout=CALL_TIMEOUT_S))
        assert error.reason == "CLIENT_ID_IN_USE"
        assert error.facts == {"client_id": "c1", "host": "host-of-c1"}
        assert 0 < error.retry_after_ms <= SHORT_MS
        with short.watch_group("g") as call:
            generation = (await next_group(call)).generation
            assert ids(await next_group(call)) == []
        answer = await short.stub.Heartbeat(restarted, timeout=CALL_TIMEOUT_S)
        assert [m.incarnation.incarnation_id for m in answer.group.members] == [2]
        assert answer.group.generation == generation + 2


async def test_client_id_is_free_at_once_after_a_leave(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    await nameserver.leave("g", "c1")
    answer = await nameserver.stub.Heartbeat(
        heartbeat("g", "c1", incarnation_id=2), timeout=CALL_TIMEOUT_S
    )
    assert answer.group.members[0].incarnation == incarnation("c1", 2)


async def test_repeated_leave_and_leave_of_another_incarnation_have_no_effect(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("g", "c1")
    await nameserver.join("g", "c2")
    assert await nameserver.leave("g", "c2")
    before = await keys(etcd)
    assert not await nameserver.leave("g", "c2")
    assert not await nameserver.leave("g", "unknown")
    assert not await nameserver.leave("no-such-group", "c1")
    other_life = pb.LeaveRequest(group="g", incarnation=incarnation("c1", 2))
    assert not (await nameserver.stub.Leave(other_life, timeout=CALL_TIMEOUT_S)).left
    assert await keys(etcd) == before
    assert ids(await nameserver.group("g")) == ["c1"]


async def test_leave_revokes_the_lease(nameserver: Replica, etcd: EtcdSession) -> None:
    await nameserver.join("g", "c1")
    live = await etcd.get(etcd.key("live", "g", "c1"))
    assert live is not None
    assert live.value == b"1"
    await nameserver.leave("g", "c1")
    assert not await etcd.attach(live.lease_id).refresh()
    assert (await etcd.get_prefix("live/"))[0] == []


async def test_answer_waits_until_this_replica_shows_the_change(
    direct: Direct, etcd: EtcdSession
) -> None:
    direct.stop_following()
    async with asyncio.TaskGroup() as tasks:
        joining = tasks.create_task(direct.groups.heartbeat(heartbeat("g", "c1")))
        await until(lambda: etcd.get(etcd.key("groups", "g")))
        assert "g" not in direct.catalog.groups
        assert not joining.done()
        direct.follow()
    assert direct.catalog.groups["g"].member("c1")
    assert "g/c1" in direct.catalog.live.values


async def test_group_that_was_never_joined_is_not_found(nameserver: Replica) -> None:
    with nameserver.watch_group("g") as call:
        error = await refusal(call.read())
    assert (error.reason, error.facts) == ("GROUP_NOT_FOUND", {"group": "g"})
    assert (await refusal(nameserver.group("g"))).reason == "GROUP_NOT_FOUND"


async def test_group_joined_at_another_replica_is_found_at_once(
    nameserver: Replica, etcd_endpoint: str, cluster: str
) -> None:
    async with replica(etcd_endpoint, cluster) as other:
        for number in range(5):
            await nameserver.join(f"g{number}", "c1")
            with other.watch_group(f"g{number}") as call:
                assert ids(await next_group(call)) == ["c1"]


async def test_topic_that_does_not_exist_can_not_be_subscribed(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    before = await keys(etcd)
    request = heartbeat("g", "c1")
    request.subscriptions.append(pb.Subscription(topic="no-such-topic"))
    error = await refusal(nameserver.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S))
    assert (error.reason, error.facts) == ("TOPIC_NOT_FOUND", {"topic": "no-such-topic"})
    assert await keys(etcd) == before


async def test_member_stays_when_its_topic_is_deleted(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    await nameserver.delete("flights")
    assert ids(await nameserver.join("g", "c1")) == ["c1"]


async def test_slow_watcher_gets_the_newest_only(nameserver: Replica, direct: Direct) -> None:
    generation = (await nameserver.join("g", "c0")).generation
    watch = direct.groups.watch(pb.WatchGroupRequest(group="g"))
    assert ids((await anext(watch)).group) == ["c0"]
    for number in range(1, 5):
        await nameserver.join("g", f"c{number}")

    await until(lambda: direct.catalog.groups["g"].generation == generation + 4)
    newest = (await anext(watch)).group
    assert newest.generation == generation + 4
    assert len(ids(newest)) == 5
    await watch.aclose()


async def test_pushed_generation_never_goes_back(nameserver: Replica, etcd: EtcdSession) -> None:
    await nameserver.join("g", "c1")
    old = await etcd.get_tree("groups/g")
    await nameserver.join("g", "c2")
    with nameserver.watch_group("g") as call:
        newest = (await next_group(call)).generation
        vanished = {one.key for one in await etcd.get_tree("groups/g")} - {one.key for one in old}
        await etcd.txn(
            compare=(), put=[Put(one.key, one.value) for one in old], delete=sorted(vanished)
        )
        assert (await nameserver.join("g", "c3")).generation == newest
        await nameserver.join("g", "c4")
        assert (await next_group(call)).generation == newest + 1


async def test_unreadable_record_is_not_served_until_it_is_whole_again(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("g", "c1")
    await nameserver.join("g", "c2")
    missing = await etcd.get("groups/g/members/2")
    assert missing is not None
    await etcd.delete(missing.key)

    async def reason() -> str:
        try:
            await nameserver.group("g")
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        return ""

    async def is_refused() -> bool:
        return await reason() == "INTERNAL"

    async def is_served() -> bool:
        return not await reason()

    await until(is_refused)
    error = await refusal(nameserver.join("g", "c1"))
    assert "unreadable record of group g" in error.message
    assert "delete groups/g and all keys below it" in error.remedy
    await etcd.put(missing.key, missing.value)
    await until(is_served)
    assert ids(await nameserver.group("g")) == ["c1", "c2"]


async def test_unreadable_record_is_deleted_with_its_group(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("g", "c1")
    await etcd.delete("groups/g/members/1")
    assert (await refusal(nameserver.delete_group("g"))).reason == "GROUP_IN_USE"
    live = await etcd.get(etcd.key("live", "g", "c1"))
    assert live is not None
    await etcd.revoke(live.lease_id)
    await nameserver.delete_group("g")
    assert not await etcd.get_tree("groups/g")
    assert await etcd.get("gates/g") is None
    joined = await nameserver.join("g", "c2")
    assert ids(joined) == ["c2"]


async def test_changes_and_refusals_are_published_as_events(nameserver: Replica) -> None:
    events: list[metrics_pb.MetricEvent] = []
    hub = nameserver.runtime.hub

    async def listen() -> None:
        async for batch in hub.watch():
            events.extend(batch.events)

    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        await until(lambda: hub.watched)
        await nameserver.join("g", "c1", "tag1")
        await refusal(nameserver.join("g", "c2", "tag2"))
        await nameserver.leave("g", "c1")
        await until(lambda: sum(one.WhichOneof("kind") == "group_changed" for one in events) == 2)
        listening.cancel()
    assert {event.queue.group for event in events} == {"g"}
    joined, left = (one for one in events if one.WhichOneof("kind") == "group_changed")
    first = {one.WhichOneof("kind"): one for one in reversed(events)}
    subscribed, seen = first["subscription_changed"], first["member_seen"]
    refusal_event = first["subscription_refused"]
    assert seen.member_seen.client_id == "c1"
    generation = joined.group_changed.generation
    assert joined.group_changed.member_count == 1
    assert subscribed.subscription_changed == metrics_pb.SubscriptionChanged(
        group="g", subscription_generation=1, client_id="c1"
    )
    assert refusal_event.subscription_refused.client_id == "c2"
    assert refusal_event.subscription_refused.differences[0].member_client_id == "c1"
    assert left.group_changed == metrics_pb.GroupChanged(
        group="g", generation=generation + 1, member_count=0
    )


async def test_gauges_count_topics_groups_members_and_watchers(nameserver: Replica) -> None:
    await nameserver.join("g1", "c1")
    await nameserver.join("g1", "c2")
    await nameserver.join("g2", "c1")
    gauges = {name: nameserver.metric(name) for name in ("topics", "groups", "members", "watchers")}
    assert gauges == {"topics": 1, "groups": 2, "members": 3, "watchers": 0}


async def test_unreadable_group_record_is_skipped(nameserver: Replica, etcd: EtcdSession) -> None:
    """The record is of a later version: its policy is unknown."""
    group = await nameserver.join("g", "c1")
    group.policy = 99  # type: ignore[assignment]
    await etcd.put(etcd.key("groups", "g"), group.SerializeToString())
    await nameserver.join("other", "c1")
    listed = await nameserver.stub.ListGroups(pb.ListGroupsRequest(), timeout=CALL_TIMEOUT_S)
    assert [entry.name for entry in listed.groups] == ["other"]
