"""Topics and routes, through a real server on a real etcd.

Goal: a topic is created once, is found at once, and its route is pushed as it changes.
Method: in-process replicas; brokers are registered by writing their key, as storage does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import Retry, TopicNotFound
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.topic_calls import GROUP_TOPIC_QUEUES_SPARE
from batonmq_server.offsets.core.values import FenceAttempt, FenceCondition, Instant
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import (
    CALL_TIMEOUT_S,
    Direct,
    Replica,
    refusal,
    register_broker,
    register_offsets,
    replica,
)
from tests.support.conditions import until
from tests.support.grpc_server import serving_at


async def next_route(call: Any) -> pb.Route:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        route: pb.Route = (await call.read()).route
        return route


async def test_created_topic_is_visible_in_all_calls_at_once(nameserver: Replica) -> None:
    created = await nameserver.create("orders", 3)
    assert created.created
    assert created.topic.spread == [pb.QueueSpread(broker="broker-a", queue_count=3)]
    assert created.topic.topic_id > 0
    assert created.topic.create_unix_ms > 0
    description = await nameserver.stub.DescribeTopic(
        pb.DescribeTopicRequest(topic="orders"), timeout=CALL_TIMEOUT_S
    )
    assert description.topic == created.topic
    listed = await nameserver.stub.ListTopics(pb.ListTopicsRequest(), timeout=CALL_TIMEOUT_S)
    assert [topic.name for topic in listed.topics] == ["flights", "orders"]
    route = await nameserver.route("orders")
    assert route.topic == created.topic
    assert route.brokers == [pb.BrokerAddress(broker="broker-a", address="127.0.0.1:1")]


async def test_creating_a_topic_again_gives_the_same_topic(nameserver: Replica) -> None:
    first = await nameserver.create("orders", 3)
    again = await nameserver.create("orders", 3)
    assert (again.created, again.topic) == (False, first.topic)


async def test_topic_with_other_queue_count_is_refused(nameserver: Replica) -> None:
    await nameserver.create("orders", 3)
    error = await refusal(nameserver.create("orders", 4))
    assert (error.reason, error.facts) == ("TOPIC_EXISTS", {"topic": "orders"})
    assert [s.queue_count for s in (await nameserver.route("orders")).topic.spread] == [3]


@pytest.mark.parametrize("topic", ["%RETRY%readers", "%DLQ%readers"])
async def test_topic_of_a_group_gets_no_more_queues_than_its_consumers_need(
    nameserver: Replica, topic: str
) -> None:
    error = await refusal(nameserver.create(topic, 1_024))
    limit = 1 + GROUP_TOPIC_QUEUES_SPARE  # there is one broker
    assert (error.reason, error.facts["limit"]) == ("LIMIT_EXCEEDED", str(limit))
    assert (await nameserver.create(topic, limit)).created


async def test_topic_has_eight_queues_by_default(nameserver: Replica) -> None:
    created = await nameserver.create("orders")
    assert sum(part.queue_count for part in created.topic.spread) == 8
    assert not (await nameserver.create("orders", 8)).created


async def test_queues_are_spread_over_registered_brokers(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await register_broker(etcd, "broker-b")
    await until(lambda: len(nameserver.runtime.nodes.values) == 3)
    created = await nameserver.create("orders", 5)
    assert sorted(part.queue_count for part in created.topic.spread) == [2, 3]
    assert [part.broker for part in created.topic.spread] == ["broker-a", "broker-b"]


async def test_topic_is_not_created_without_a_broker(etcd_endpoint: str, cluster: str) -> None:
    async with replica(etcd_endpoint, cluster) as alone:
        error = await refusal(alone.create("orders", 3))
        assert error.reason == "NO_BROKER"
        assert (await alone.runtime.etcd.get_prefix(""))[0] == []


async def test_topic_created_anew_shares_nothing_with_the_deleted_one(nameserver: Replica) -> None:
    first = (await nameserver.create("orders", 3)).topic
    await nameserver.delete("orders")
    assert (await refusal(nameserver.route("orders"))).reason == "TOPIC_NOT_FOUND"
    assert (await refusal(nameserver.delete("orders"))).reason == "TOPIC_NOT_FOUND"
    second = (await nameserver.create("orders", 5)).topic
    assert second.topic_id > first.topic_id


async def test_progress_is_deleted_with_its_topic_and_again_before_the_next_one(
    nameserver: Replica, offsets: OffsetsEpoch
) -> None:
    await nameserver.create("orders", 3)
    keys = [GroupQueue("g", topic, "broker-a", 0) for topic in ("orders", "flights")]
    for key in keys:
        hold(offsets, key)
    assert not (await nameserver.create("orders", 3)).created
    assert (await refusal(nameserver.create("orders", 4))).reason == "TOPIC_EXISTS"
    await nameserver.delete("orders")
    assert offsets.table.queues_of("g") == [keys[1]]
    hold(offsets, keys[0], expected_token=2)  # a late member that knows nothing of the deletion
    created = (await nameserver.create("orders", 3)).topic
    assert offsets.table.queues_of("g") == [keys[1]]
    assert offsets.table.deleted_topic_id("orders") == created.topic_id


def hold(offsets: OffsetsEpoch, key: GroupQueue, expected_token: int = 0) -> None:
    """Grant the queue to a consumer; durability does not matter here."""
    fence_attempt = FenceAttempt(
        attempt=f"{expected_token}-{key}"[-64:],
        expected_token=expected_token,
        condition=FenceCondition.CLOSED_OR_DRAINED,
        holder=Incarnation("c1", 1),
    )
    offsets.table.fence(key, offsets.table.term, fence_attempt, Instant(0, 0))


async def test_topic_is_not_created_without_offsets(
    etcd_endpoint: str, cluster: str, session: EtcdSession
) -> None:
    await register_broker(session, "broker-a")
    async with replica(etcd_endpoint, cluster) as alone:
        unregistered = await refusal(alone.create("orders", 3))
        await alone.runtime.nodes.reached(await register_offsets(session, "127.0.0.1:1", 1))
        unreachable = await refusal(alone.create("orders", 3))
        for error in (unregistered, unreachable):
            assert (error.reason, error.retry) == ("OFFSETS_UNREACHABLE", Retry.SAME_CALL)
        assert (await session.get_prefix("topics/"))[0] == []
        assert (await session.get_prefix("counters/"))[0] == []


class OldOffsets(offsets_grpc.OffsetsServiceServicer):
    """Answers that the progress is deleted, with `epoch`."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    async def DeleteTopic(
        self, request: offsets_pb.DeleteTopicRequest, context: Any
    ) -> offsets_pb.DeleteTopicResponse:
        return offsets_pb.DeleteTopicResponse(offsets_epoch=self.epoch)


async def test_answer_of_a_deposed_offsets_leader_is_ignored(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    old = OldOffsets(5)  # type: ignore[abstract]
    async with serving_at(
        lambda server: offsets_grpc.add_OffsetsServiceServicer_to_server(old, server)
    ) as address:
        await nameserver.runtime.nodes.reached(await register_offsets(etcd, address, 5))
        await nameserver.create("orders")
        old.epoch = 4
        assert (await refusal(nameserver.create("seats"))).reason == "OFFSETS_UNREACHABLE"
        assert (await refusal(nameserver.route("seats"))).reason == "TOPIC_NOT_FOUND"


async def test_replicas_that_race_create_a_topic_once(
    nameserver: Replica, etcd_endpoint: str, cluster: str
) -> None:
    async with replica(etcd_endpoint, cluster) as other, asyncio.TaskGroup() as tasks:
        racing = [
            tasks.create_task(target.create(f"race-{number}", 4))
            for number in range(8)
            for target in (nameserver, other)
        ]
    answers = [task.result() for task in racing]
    assert sum(answer.created for answer in answers) == 8
    by_name: dict[str, set[int]] = {}
    for answer in answers:
        by_name.setdefault(answer.topic.name, set()).add(answer.topic.topic_id)
    assert all(len(topic_ids) == 1 for topic_ids in by_name.values())
    assert len(set.union(*by_name.values())) == 8


async def test_topic_created_at_another_replica_is_found_at_once(
    nameserver: Replica, etcd_endpoint: str, cluster: str
) -> None:
    async with replica(etcd_endpoint, cluster) as other:
        for number in range(5):
            await nameserver.create(f"t{number}", 1)
            assert (await other.route(f"t{number}")).topic.name == f"t{number}"


async def test_route_is_pushed_when_a_broker_registers_moves_and_expires(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    with nameserver.watch_route("flights") as call:
        seen = [await next_route(call)]
        await register_broker(etcd, "broker-a", "127.0.0.1:2")
        seen.append(await next_route(call))
        await etcd.delete(etcd.key("nodes", "storage", "broker-a"))
        seen.append(await next_route(call))
        await register_broker(etcd, "broker-a", "127.0.0.1:3")
        seen.append(await next_route(call))
    assert [[b.address for b in route.brokers] for route in seen] == [
        ["127.0.0.1:1"],
        ["127.0.0.1:2"],
        [],
        ["127.0.0.1:3"],
    ]
    generations = [route.generation for route in seen]
    assert generations == sorted(set(generations))


async def test_route_is_not_pushed_for_changes_of_other_topics(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    with nameserver.watch_route("flights") as call:
        await next_route(call)
        await nameserver.create("orders")
        await register_broker(etcd, "broker-z")
        await until(lambda: "storage/broker-z" in nameserver.runtime.nodes.values)
        await register_broker(etcd, "broker-a", "127.0.0.1:2")
        assert (await next_route(call)).brokers[0].address == "127.0.0.1:2"


async def test_route_generation_does_not_go_back_after_a_restart(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster) as before:
        await before.create("flights")
        generation = (await before.route("flights")).generation
    await register_broker(etcd, "broker-a", "127.0.0.1:2")
    async with replica(etcd_endpoint, cluster) as after:
        assert (await after.route("flights")).generation > generation


@pytest.mark.parametrize("create_again", [False, True])
async def test_deleted_topic_ends_its_watch(nameserver: Replica, create_again: bool) -> None:
    with nameserver.watch_route("flights") as call:
        await next_route(call)
        await nameserver.delete("flights")
        if create_again:
            await nameserver.create("flights")
        assert isinstance(await refusal(call.read()), TopicNotFound)


async def test_topic_recreated_behind_a_slow_watcher_ends_its_watch(
    nameserver: Replica, direct: Direct
) -> None:
    watch = direct.topics.watch_route(pb.WatchRouteRequest(topic="flights"))
    first = (await anext(watch)).route.topic.topic_id
    await nameserver.delete("flights")
    second = (await nameserver.create("flights")).topic.topic_id
    assert second > first
    await until(lambda: _topic_id(direct, "flights") == second)
    with pytest.raises(TopicNotFound):
        await anext(watch)


async def test_answers_wait_until_this_replica_shows_the_change(
    direct: Direct, etcd: EtcdSession
) -> None:
    direct.stop_following()
    create = pb.CreateTopicRequest(topic="orders")
    async with asyncio.TaskGroup() as tasks:
        creating = tasks.create_task(direct.topics.create(create))
        await until(lambda: etcd.get(etcd.key("topics", "orders")))
        assert "orders" not in direct.catalog.topics
        assert not creating.done()
        direct.follow()
    assert "orders" in direct.catalog.topics
    direct.stop_following()
    delete = pb.DeleteTopicRequest(topic="orders")
    async with asyncio.TaskGroup() as tasks:
        deleting = tasks.create_task(direct.topics.delete(delete))
        while await etcd.get(etcd.key("topics", "orders")) is not None:
            pass
        assert "orders" in direct.catalog.topics
        assert not deleting.done()
        direct.follow()
    assert "orders" not in direct.catalog.topics


def _topic_id(direct: Direct, name: str) -> int:
    topic = direct.catalog.topics.get(name)
    return topic.topic_id if topic else 0


async def test_watch_beyond_the_limit_is_refused(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster, watchers_max=1) as small:
        await small.create("flights")
        with small.watch_route("flights") as first:
            await next_route(first)
            assert small.metric("watchers") == 1
            with small.watch_route("flights") as second:
                error = await refusal(second.read())
                assert (error.reason, error.facts) == ("OVERLOADED", {"limit": "1"})
        await until(lambda: small.metric("watchers") == 0)
        with small.watch_route("flights") as third:
            await next_route(third)


async def test_cluster_lists_live_nodes_by_service(nameserver: Replica, etcd: EtcdSession) -> None:
    node = StoredNode(service=pb.SERVICE_KIND_LOCKMGR, node_id="lockmgr-0", address="127.0.0.1:9")
    await etcd.put(etcd.key("nodes", "lockmgr", "lockmgr-0"), node.SerializeToString())
    await until(lambda: len(nameserver.runtime.nodes.values) == 3)
    answer = await nameserver.stub.DescribeCluster(
        pb.DescribeClusterRequest(), timeout=CALL_TIMEOUT_S
    )
    assert [(n.service, n.node_id) for n in answer.nodes] == [
        (pb.SERVICE_KIND_STORAGE, "broker-a"),
        (pb.SERVICE_KIND_OFFSETS, "offsets-0"),
        (pb.SERVICE_KIND_LOCKMGR, "lockmgr-0"),
    ]
    assert answer.cluster == nameserver.runtime.settings.cluster
    assert answer.generation > 0


async def test_unreadable_topic_in_etcd_does_not_affect_other_topics(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await etcd.put(etcd.key("topics", "broken"), b"\xff\xff\xff")
    await nameserver.create("orders")
    listed = await nameserver.stub.ListTopics(pb.ListTopicsRequest(), timeout=CALL_TIMEOUT_S)
    assert [topic.name for topic in listed.topics] == ["flights", "orders"]


async def test_calls_are_refused_until_etcd_was_read(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster, follow_nodes=False) as early:
        calls: list[Awaitable[object]] = [
            early.stub.ListTopics(pb.ListTopicsRequest(), timeout=CALL_TIMEOUT_S),
            early.stub.ListGroups(pb.ListGroupsRequest(), timeout=CALL_TIMEOUT_S),
            early.stub.DescribeCluster(pb.DescribeClusterRequest(), timeout=CALL_TIMEOUT_S),
            early.create("orders"),
            early.delete("orders"),
            early.route("orders"),
            early.group("g"),
            early.join("g", "c1"),
            early.leave("g", "c1"),
        ]
        assert {(await refusal(call)).reason for call in calls} == {"NOT_SERVING"}
        for watch in (early.watch_group("g"), early.watch_route("orders")):
            with watch as call:
                assert (await refusal(call.read())).reason == "NOT_SERVING"


async def test_generation_rises_though_streams_arrive_out_of_order(etcd: EtcdSession) -> None:
    """A broker moves, then a topic changes; this replica receives the broker last."""
    nodes = EtcdMirror(etcd, "nodes/")
    catalog = Catalog(etcd, nodes, watchers_max=1)
    following = [nodes, *catalog.mirrors]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(mirror.run()) for mirror in following]
        await catalog.ready()
        for task in running:
            task.cancel()
    stale = dict(nodes.values)
    topic = pb.Topic(name="t", topic_id=1, spread=[pb.QueueSpread(broker="broker-a")])
    await register_broker(etcd, "broker-a", "127.0.0.1:2")
    await etcd.put(etcd.key("topics", "t"), topic.SerializeToString())
    topics, late = catalog.mirrors[0], nodes
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(topics.run())
        await until(lambda: "t" in catalog.topics)
        before = catalog.route(catalog.topics["t"])
        assert late.values == stale
        task.cancel()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(late.run())
        await until(lambda: late.values != stale)
        after = catalog.route(catalog.topics["t"])
        task.cancel()
    assert not after.same_targets(before)
    assert after.generation > before.generation
