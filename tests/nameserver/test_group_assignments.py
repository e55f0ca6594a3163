"""Assignments of groups, through real servers on a real etcd.

Goal: after every change of members or topics, every queue is soon assigned, at every replica.
Method: in-process replicas; many members join at once, topics grow, shrink and are deleted.
"""

from __future__ import annotations

import asyncio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq.errors import LimitExceeded
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import (
    CALL_TIMEOUT_S,
    Replica,
    heartbeat,
    ids,
    next_group,
    owners,
    refusal,
    register_broker,
    replica,
)
from tests.support.conditions import until

HOUR_MS = 3_600_000


async def update(nameserver: Replica, topic: str, queue_count: int) -> None:
    request = pb.UpdateTopicRequest(topic=topic, queue_count=queue_count)
    await nameserver.stub.UpdateTopic(request, timeout=CALL_TIMEOUT_S)


async def test_heartbeat_returns_the_assignment_and_a_join_moves_few_queues(
    nameserver: Replica,
) -> None:
    assert owners(await nameserver.join("g", "c1")) == {"c1": 8}
    before = await nameserver.join("g", "c2")
    after = await nameserver.join("g", "c3")
    assert sorted(owners(after).values()) == [2, 3, 3]
    (numbers_before,), (numbers_after,) = (
        [p.member_numbers for t in g.assignments for p in t.brokers] for g in (before, after)
    )
    unmoved_count = sum(a == b for a, b in zip(numbers_before, numbers_after, strict=True))
    assert unmoved_count == 6, "only the queues of c3 have moved"


async def test_many_concurrent_joins_make_few_generations(
    nameserver: Replica, etcd_endpoint: str, cluster: str
) -> None:
    await nameserver.create("orders", 64)

    async def join(target: Replica, number: int) -> pb.Group:
        request = heartbeat("g", f"c{number:02}")
        request.subscriptions[0].topic = "orders"
        return (await target.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)).group

    first = await join(nameserver, 0)
    async with replica(etcd_endpoint, cluster) as other, asyncio.TaskGroup() as tasks:
        for number in range(1, 20):
            tasks.create_task(join((nameserver, other)[number % 2], number))

    async def all_joined() -> bool:
        return len(ids(await nameserver.group("g"))) == 20

    await until(all_joined)
    after = await nameserver.group("g")
    assert sorted(owners(after).values()) == [3] * 16 + [4] * 4
    assert after.generation - first.generation <= 9, "far fewer generations than joins"


async def test_added_queues_and_deleted_topics_change_the_assignment(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.create("orders", 4)
    request = heartbeat("g", "c1")
    request.subscriptions.append(pb.Subscription(topic="orders"))
    first = (await nameserver.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)).group
    assert owners(first) == {"c1": 12}
    with nameserver.watch_group("g") as call:
        assert await next_group(call) == first
        await update(nameserver, "orders", 6)
        grown = await next_group(call)
        assert (owners(grown), grown.generation) == ({"c1": 14}, first.generation + 1)
        await nameserver.delete("orders")
        shrunk = await next_group(call)
        assert [topic.topic for topic in shrunk.assignments] == ["flights"]
        await nameserver.create("orders", 2)
        assert owners(await next_group(call)) == {"c1": 10}


async def test_queues_missed_by_one_replica_are_assigned_by_another(
    nameserver: Replica, etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster) as other:
        await nameserver.join("g", "c1")
        with other.watch_group("g") as other_watch, nameserver.watch_group("g") as watch:
            await next_group(other_watch)
            await next_group(watch)
            await update(nameserver, "flights", 9)
            assert await next_group(other_watch) == await next_group(watch)


async def test_group_without_members_has_no_assignments_to_keep(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    await nameserver.leave("g", "c1")
    empty_group = await nameserver.group("g")
    await update(nameserver, "flights", 9)
    await nameserver.join("marker", "c1")
    assert await nameserver.group("g") == empty_group
    assert not empty_group.assignments


async def test_changes_are_pushed_without_delay(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    """All intervals are an hour here, so changes can only arrive by a push."""
    async with replica(
        etcd_endpoint,
        cluster,
        member_lease_ms=HOUR_MS,
        heartbeat_interval_ms=HOUR_MS // 2,
        shrink_interval_ms=HOUR_MS,
        inspect_interval_ms=HOUR_MS,
    ) as running:
        await running.create("flights")
        await running.join("g", "c0")
        with running.watch_group("g") as call:
            await next_group(call)
            for number in range(1, 6):
                await running.join("g", f"c{number}")
                assert len(ids(await next_group(call))) == number + 1
            await running.leave("g", "c0")
            assert "c0" not in ids(await next_group(call))
            await update(running, "flights", 9)
            assert sum(owners(await next_group(call)).values()) == 9
            await running.set_group("g", strategy=pb.STRATEGY_AVERAGE)
            assert (await next_group(call)).strategy == pb.STRATEGY_AVERAGE


async def test_queues_are_assigned_within_the_machine_room(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await register_broker(etcd, "broker-a", room="north")
    await register_broker(etcd, "broker-b", room="south")
    await until(lambda: len(nameserver.runtime.nodes.values) == 3)
    created = (await nameserver.create("orders", 4)).topic
    assert [(part.broker, part.room) for part in created.spread] == [
        ("broker-a", "north"),
        ("broker-b", "south"),
    ]
    await nameserver.set_group("g", strategy=pb.STRATEGY_MACHINE_ROOM)
    for client_id, room in (("c1", "south"), ("c2", "north")):
        request = heartbeat("g", client_id)
        request.subscriptions[0].topic, request.room = "orders", room
        group = (await nameserver.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)).group
    (topic,) = group.assignments
    assert [(part.broker, set(part.member_numbers)) for part in topic.brokers] == [
        ("broker-a", {2}),
        ("broker-b", {1}),
    ]


async def test_changed_room_of_a_broker_is_recorded_by_a_topic_update(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.set_group("g", strategy=pb.STRATEGY_MACHINE_ROOM)
    await nameserver.beat("g", "c1", room="north")
    await nameserver.beat("g", "c2", room="south")
    assert owners(await nameserver.group("g")) == {"c1": 4, "c2": 4}
    await register_broker(etcd, "broker-a", room="north")

    async def noted() -> bool:
        await update(nameserver, "flights", 0)
        return owners(await nameserver.group("g")) == {"c1": 8}

    await until(noted)


async def test_join_that_makes_the_record_too_large_is_refused(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    subscriptions = [
        pb.Subscription(topic=f"{number:03}{'t' * 124}", expression="*") for number in range(64)
    ]
    brokers = [f"{number:03}{'b' * 60}" for number in range(330)]
    for subscription in subscriptions:
        topic = pb.Topic(
            name=subscription.topic,
            topic_id=1,
            spread=[pb.QueueSpread(broker=broker, queue_count=1) for broker in brokers],
        )
        await etcd.put(etcd.key("topics", topic.name), topic.SerializeToString())
    await nameserver.join("g", "c1")
    before = await nameserver.group("g")
    request = pb.HeartbeatRequest(
        group="h", incarnation=heartbeat("h", "c1").incarnation, subscriptions=subscriptions
    )
    error = await refusal(nameserver.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S))
    assert (error.reason, error.facts["field"]) == (LimitExceeded.reason, "group")
    assert await etcd.get(etcd.key("groups", "h")) is None
    assert await nameserver.join("g", "c1") == before
