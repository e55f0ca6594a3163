"""Goal: the progress of all groups on a topic is deleted with the topic, and its locks with it.

Method: a cluster in virtual time; the lock manager looks for locks of deleted progress all the
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from batonmq._consumer.message import ReceivedMessage
from batonmq.admin.admin import Admin
from batonmq.errors import TopicNotFound
from batonmq_server.lockmgr import lock_remover
from batonmq_server.offsets.codec import META, decode_key, decode_progress, unseal
from batonmq_server.offsets.core.values import Tombstone
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.support.conditions import until

GROUPS = "readers", "auditors"


async def handled_by(broker: MemoryBroker, group: str) -> list[bytes]:
    """Let a group handle all messages, and return their bodies."""
    bodies: list[bytes] = []

    async def handle(message: ReceivedMessage) -> None:
        bodies.append(message.body)

    async with (
        broker.consumer(group, {"news": "*", "orders": "*"}) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(handle))
        await until(lambda: bodies)
        await broker.settled(group)
        consumer.stop()
    return sorted(bodies)


def with_progress(broker: MemoryBroker) -> set[tuple[str, str]]:
    """Return the groups and topics of all progress at offsets, without retry topics."""
    (disk,) = broker._environment.offsets_disks.values()
    queues = {decode_key(key): (key, value) for key, value in disk.read() if key[:1] != META}
    return {
        (queue.group, queue.topic)
        for queue, stored in queues.items()
        if not isinstance(decode_progress(queue, unseal(*stored)), Tombstone)
        and not queue.topic.startswith("%")
    }


def play(scene: Callable[[MemoryBroker, Admin], Awaitable[None]]) -> None:
    async def main() -> None:
        async with MemoryBroker() as broker, broker.admin() as admin:
            for topic in ("news", "orders"):
                await broker.create_topic(topic, 1)
                async with broker.producer() as producer:
                    await producer.send(topic, topic.encode())
            for group in GROUPS:
                assert await handled_by(broker, group) == [b"news", b"orders"]
            await scene(broker, admin)

    run_virtual(main())


def locks(broker: MemoryBroker) -> set[str]:
    """Return the topics that have locks."""
    return {one.key.split("/")[2] for one in broker._environment.etcd.get_tree("locks")}


def test_progress_and_locks_are_deleted_with_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_remover, "INTERVAL_S", 1.0)

    async def scene(broker: MemoryBroker, admin: Admin) -> None:
        await admin.delete_topic("news")
        assert with_progress(broker) == {(group, "orders") for group in GROUPS}
        await until(lambda: "news" not in locks(broker))
        assert "orders" in locks(broker)
        await broker.create_topic("news", 1)
        async with broker.producer() as producer:
            await producer.send("news", b"again")
        assert await handled_by(broker, "readers") == [b"again"]

    play(scene)


def test_topic_is_deleted_while_offsets_does_not_answer() -> None:
    async def scene(broker: MemoryBroker, admin: Admin) -> None:
        with broker._disconnected("offsets-0"):
            await admin.delete_topic("news")
            with pytest.raises(TopicNotFound):
                await admin.describe_topic("news")
            assert ("readers", "news") in with_progress(broker)
        await broker.create_topic("news", 1)
        await asyncio.sleep(1)
        assert with_progress(broker) == {(group, "orders") for group in GROUPS}

    play(scene)
