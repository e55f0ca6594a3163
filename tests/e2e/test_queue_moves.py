"""Goal: queues move to a broker that was added, all queues of a topic leave a broker, and a broker
is removed for good, under load: no message is lost or handled twice.

Method: a real cluster of three brokers, of which the third one starts later; the operator's
commands as processes, while a producer and two consumers run. The broker that is removed also has
messages that are delivered later, and an open transaction.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batonmq._common.clock import Clock
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.cluster import LocalCluster
from tests.e2e.numbered_traffic import QUEUES, TOPIC, NumberedTraffic
from tests.e2e.test_drain import STEP, baton
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

LATER, DELAY_MS, DELAYED = "later", 15_000, 5
CLOCK = Clock()


async def brokers(admin: Admin) -> list[str]:
    nodes = (await admin.cluster()).nodes
    return sorted(node.replica_set for node in nodes if node.service == "storage")


async def spread(admin: Admin, topic: str) -> dict[str, int]:
    """Return the number of queues of a topic by broker, if none is retiring; else nothing."""
    found = (await admin.describe_topic(topic)).topic
    return dict(found.queue_counts) if found.queue_counts == found.writable_counts else {}


async def settled(admin: Admin, topic: str, expected: dict[str, int]) -> None:
    async def look() -> bool:
        return await spread(admin, topic) == expected

    await until(look, timeout_s=60)


async def collect(nameserver: str, handled: Counter[str]) -> None:
    settings = ConsumerSettings(consume_from="first", commit_interval_ms=200)
    async with Consumer(nameserver, "late-readers", {LATER: "*"}, settings) as consumer:
        async for message in consumer:
            handled[message.body.decode()] += 1


async def move_to_new_broker(
    admin: Admin, cluster: LocalCluster, traffic: NumberedTraffic, new: str
) -> None:
    """Spread the topic over the new broker; a dry run first."""
    before = await spread(admin, TOPIC)
    planned = await baton(cluster, "topic", "move", TOPIC, "--spread", "--dry-run")
    assert {one["broker"]: one["queue_count"] for one in planned.json}[new] == 2
    assert await spread(admin, TOPIC) == before, "a dry run changes nothing"
    moved = await baton(cluster, "topic", "move", TOPIC, "--spread")
    after = {one["broker"]: one["queue_count"] for one in moved.json}
    assert sorted(after.values()) == [2, 3, 3]
    await settled(admin, TOPIC, after)
    await traffic.proceed(STEP)
    assert new in {receipt.queue.broker for receipt in traffic.receipts.values()}


async def leave_broker(
    admin: Admin, cluster: LocalCluster, traffic: NumberedTraffic, source: str, target: str
) -> None:
    """Move all queues of the topic from one broker to another."""
    await baton(cluster, "topic", "move", TOPIC, "--from", source, "--to", target)

    async def has_left() -> bool:
        return source not in (await admin.describe_topic(TOPIC)).topic.queue_counts

    await until(has_left, timeout_s=60)
    sent = len(traffic.receipts)
    await traffic.proceed(STEP)
    assert source not in {
        traffic.receipts[number].queue.broker for number in range(sent, sent + 50)
    }


async def hold_messages(producer: Producer, broker: str) -> Any:
    """Schedule messages at a broker, and begin a transaction there; return the transaction."""
    queue = QueueRef(LATER, broker, 0)
    for number in range(DELAYED):
        await producer.send(LATER, f"delayed {number}".encode(), queue=queue, delay_ms=DELAY_MS)
    return await producer.begin_transaction(LATER, Message(b"in a transaction"), queue=queue)


async def remove(
    admin: Admin, cluster: LocalCluster, traffic: NumberedTraffic, broker: str, process: str
) -> None:
    """Remove a broker which holds messages for later, until it is forgotten."""
    planned = (await baton(cluster, "cluster", "remove-broker", broker, "--dry-run")).json
    assert planned["state"] == "would be removed"
    assert {one["topic"] for one in planned["moves"]} >= {TOPIC, LATER}
    assert (await spread(admin, LATER))[broker], "a dry run changes nothing"
    async with Producer(cluster.nameserver, group="shop") as producer:
        transaction = await hold_messages(producer, broker)
        begin_ms, now_ms = CLOCK.monotonic_ms(), CLOCK.unix_ms()
        held = await baton(cluster, "cluster", "remove-broker", broker, "--wait", "1s")
        kinds = {one["kind"]: one for one in held.json["obstacles"]}
        assert (held.code, held.json["state"]) == (1, "being removed")
        assert kinds["scheduled"]["count"] == DELAYED
        assert kinds["scheduled"]["last_unix_ms"] > now_ms
        assert kinds["transactions"]["count"] == 1
        described = (await baton(cluster, "topic", "describe", LATER)).json
        assert "transactions" in {one["kind"] for one in described["obstacles"]}
        assert broker not in (await admin.create_topic("new", 4)).topic.queue_counts
        await traffic.proceed(STEP)
        await transaction.commit()
    empty = await baton(cluster, "cluster", "remove-broker", broker, "--wait", "60s")
    assert (empty.code, empty.json["state"], empty.json["obstacles"]) == (0, "empty", [])
    took_s = (CLOCK.monotonic_ms() - begin_ms) / 1_000
    print(f"{broker} holds nothing {took_s:.1f} s after the first command")
    for topic in await admin.list_topics():
        assert broker not in topic.queue_counts
    await cluster.stop(process)
    done = await baton(cluster, "cluster", "remove-broker", broker)
    assert done.json["state"] == "removed"
    assert (await admin.cluster()).removals[0].forgotten_unix_ms
    await traffic.proceed(STEP)


@pytest.mark.long
async def test_queues_move_and_a_broker_is_removed_under_load(tmp_path: Path) -> None:
    async with (
        local_cluster(
            tmp_path / "cluster",
            brokers=3,
            auto_restart=False,
            nameserver={"shrink_interval_ms": 300},
        ) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        first, second, new = await brokers(admin)
        await cluster.stop("storage-2")

        async def two_brokers() -> bool:
            return await brokers(admin) == [first, second]

        async def three_brokers() -> bool:
            return len(await brokers(admin)) == 3

        await until(two_brokers)
        await admin.create_topic(TOPIC, QUEUES)
        await admin.create_topic(LATER, 2)
        handled: Counter[str] = Counter()
        traffic = NumberedTraffic(cluster.nameserver, queues_move=True)
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(collect(cluster.nameserver, handled))
            async with traffic.running("first", "second"):
                await traffic.proceed(STEP)
                await cluster.start("storage-2")
                await until(three_brokers, timeout_s=60)
                await move_to_new_broker(admin, cluster, traffic, new)
                await leave_broker(admin, cluster, traffic, first, new)
                await remove(admin, cluster, traffic, second, "storage-1")
            await until(lambda: sum(handled.values()) > DELAYED, timeout_s=60)
            collecting.cancel()
            assert handled == Counter(
                ["in a transaction", *(f"delayed {number}" for number in range(DELAYED))]
            ), "a message for later was lost, or handled twice"
        refused = await baton(cluster, "cluster", "remove-broker", second, "--cancel")
        assert (refused.code, "removed for good" in refused.err) == (1, True)
