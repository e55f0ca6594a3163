"""Goal: producers and consumers lose no message and see no error when a topic changes.

Method: a real cluster; topics grow, shrink and change their permission while messages flow, and
retention removes messages that a group has not read. All sent messages are compared with all
handled ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import Receipt
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import QueueProgress
from batonmq.errors import NotWritable, QueueNotFound, TopicNotFound
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TOPIC = "moving"
FROM_FIRST = ConsumerSettings(consume_from="first", commit_interval_ms=100)


@asynccontextmanager
async def reading(nameserver: str) -> AsyncIterator[list[bytes]]:
    """Run a consumer of group `g` until the block ends; yield what it has handled."""
    bodies: list[bytes] = []
    async with (
        Consumer(nameserver, "g", {TOPIC: "*"}, FROM_FIRST) as consumer,
        asyncio.TaskGroup() as tasks,
    ):

        async def read() -> None:
            async for message in consumer:
                bodies.append(message.body)  # noqa: PERF401  one by one, to be seen at once

        task = tasks.create_task(read())
        yield bodies
        consumer.stop()
        await task


@pytest.mark.long
async def test_queues_are_added_and_removed_while_messages_flow(tmp_path: Path) -> None:
    settings = {"shrink_interval_ms": 50}
    async with (
        local_cluster(tmp_path, nameserver=settings) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, 8)
        sent: list[Receipt] = []
        stop = asyncio.Event()

        async def send(producer: Producer) -> None:
            number = 0
            while not stop.is_set():
                pending = [
                    await producer.submit(
                        TOPIC,
                        Message(
                            b"%d" % n, tag="t", keys=(f"k{n}", "all"), properties={"n": str(n)}
                        ),
                        ordering_key=str(n % 50) if n % 2 else None,
                    )
                    for n in range(number, number + 100)
                ]
                sent.extend([await one for one in pending])
                number += 100

        async with reading(cluster.nameserver) as bodies, asyncio.TaskGroup() as tasks:
            async with Producer(cluster.nameserver) as producer:
                sending = tasks.create_task(send(producer))
                await until(lambda: len(sent) > 1_000, timeout_s=60)
                for wanted in (2, 12, 1, 3):
                    await admin.update_topic(TOPIC, queue_count=wanted)
                    await _wait_for_queue_count(admin, wanted)
                    await _grown(sent, 1_000)
                    assert {r.queue.queue_id for r in sent[-500:]} <= set(range(wanted))
                stop.set()
                await sending
            await until(lambda: len(bodies) >= len(sent), timeout_s=60)
        counts = Counter(bodies)
        assert counts.keys() == {b"%d" % n for n in range(len(sent))}
        assert set(counts.values()) == {1}
        assert len({(r.queue, r.offset) for r in sent}) == len(sent)


async def _wait_for_queue_count(admin: Admin, queue_count: int) -> None:
    """Wait until the topic has so many queues."""

    async def seen() -> bool:
        return len((await admin.describe_topic(TOPIC)).topic.queues) == queue_count

    await until(seen)


async def _grown(sent: list[Receipt], count: int) -> None:
    wanted = len(sent) + count
    await until(lambda: len(sent) >= wanted, timeout_s=60)


@pytest.mark.long
async def test_batch_for_a_removed_queue_is_sent_to_another_queue(tmp_path: Path) -> None:
    """The topic shrinks while a batch lingers, so that storage refuses the batch."""
    shrinks_later = {"shrink_interval_ms": 60_000}
    async with (
        local_cluster(tmp_path, nameserver=shrinks_later) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, 4)
        settings = ProducerSettings(linger_ms=5_000)
        async with Producer(cluster.nameserver, settings) as producer:
            pinned = QueueRef(TOPIC, "broker-0", 3)
            message = Message(b"x", tag="t", keys=("a", "b"), properties={"p": "v"})
            await producer.send(TOPIC, b"open")
            pending = [await producer.submit(TOPIC, message) for _ in range(8)]
            pending += [
                await producer.submit(TOPIC, message, ordering_key=str(n)) for n in range(8)
            ]
            pinned_receipt = await producer.submit(TOPIC, message, queue=pinned)
            await admin.update_topic(TOPIC, queue_count=1)
            receipts = [await one for one in pending]
            assert {r.queue.queue_id for r in receipts} == {0}
            with pytest.raises(NotWritable):
                await pinned_receipt
            with pytest.raises(NotWritable):
                await producer.send(TOPIC, b"y", queue=pinned)
            with pytest.raises(QueueNotFound):
                await producer.send(TOPIC, b"y", queue=QueueRef(TOPIC, "broker-0", 4))
        async with Consumer(cluster.nameserver, "g", {TOPIC: "*"}, FROM_FIRST) as consumer:
            messages = [await anext(consumer) for _ in range(17)]
        moved = [m for m in messages if m.body == b"x"]
        assert {(m.tag, tuple(m.keys), m.properties["p"]) for m in moved} == {
            ("t", ("a", "b"), "v")
        }
        assert len(moved) == 16


async def test_progress_on_a_removed_queue_is_not_shown_and_is_used_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with (
        local_cluster(tmp_path, nameserver={"shrink_interval_ms": 50}) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, 2)
        removed = QueueRef(TOPIC, "broker-0", 1)
        async with Producer(cluster.nameserver) as producer:
            await producer.send(TOPIC, b"first", queue=removed)
            async with reading(cluster.nameserver) as bodies:
                await until(lambda: bodies == [b"first"])
            await admin.update_topic(TOPIC, queue_count=1)

            async def is_removed() -> bool:
                return len((await admin.describe_topic(TOPIC)).queues) == 1

            await until(is_removed)
            assert [row.queue_id for row in await progress_of_topic(admin)] == [0]
            await admin.update_topic(TOPIC, queue_count=2)
            await _send_when_known(producer, b"second", removed)
            async with reading(cluster.nameserver) as bodies:
                await until(lambda: bodies)
            assert bodies == [b"second"], "the first message is not handled twice"
        rows = await progress_of_topic(admin)
        assert [row.committed_offset for row in rows if row.queue_id == 1] == [2]


@pytest.mark.long
async def test_unwritable_topic_refuses_and_unreadable_topic_delays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "batonmq")
    async with local_cluster(tmp_path) as cluster, Admin(cluster.nameserver) as admin:
        await admin.create_topic(TOPIC, 1)
        async with Producer(cluster.nameserver) as producer, reading(cluster.nameserver) as bodies:
            await producer.send(TOPIC, b"1")
            await until(lambda: bodies == [b"1"])
            topic = await admin.update_topic(TOPIC, permission="read")
            assert topic.permission == "read"
            early = await _send_until_refused(producer)
            await until(lambda: bodies == [b"1", *early])
            await admin.update_topic(TOPIC, permission="write")
            await until(lambda: "its topic is not readable" in caplog.text)
            await _send_when_known(producer, b"2")
            await _send_when_known(producer, b"3")
            assert bodies == [b"1", *early]
            await admin.update_topic(TOPIC, permission="read_write")
            await until(lambda: bodies == [b"1", *early, b"2", b"3"])
            await until(lambda: "its topic is readable again" in caplog.text)


async def _send_until_refused(producer: Producer) -> list[bytes]:
    """Send until refused; return what was stored before the producer knew the change."""
    stored: list[bytes] = []

    async def refused() -> bool:
        try:
            await producer.send(TOPIC, b"early")
        except NotWritable:
            return True
        stored.append(b"early")
        return False

    await until(refused)
    return stored


async def _send_when_known(producer: Producer, body: bytes, queue: QueueRef | None = None) -> None:
    """Send as soon as the producer knows the topic's change."""

    async def tried() -> bool:
        try:
            await producer.send(TOPIC, body, queue=queue)
        except (NotWritable, QueueNotFound):
            return False
        return True

    await until(tried)


@pytest.mark.long
async def test_group_behind_retention_continues_and_logs_the_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = {"segment_bytes": 16_384, "retention_bytes": 65_536, "disk_interval_ms": 20}
    async with (
        local_cluster(tmp_path, storage=storage) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, 1)
        async with Producer(cluster.nameserver) as producer:
            for n in range(10):
                await producer.send(TOPIC, b"%d" % n)
            async with reading(cluster.nameserver) as bodies:
                await until(lambda: len(bodies) == 10)
            (row,) = await progress_of_topic(admin)
            assert row.committed_offset == 10
            for n in range(10, 110):
                await producer.send(TOPIC, (b"%d" % n).ljust(2_000))
            settled = await _first_offset(admin)
            async with reading(cluster.nameserver) as bodies:
                await until(lambda: bodies[-1:] == [b"109".ljust(2_000)])
        first = int(bodies[0])
        assert settled <= first < 110
        assert [int(body) for body in bodies] == list(range(first, 110))
        assert f"first_offset=10 count={first - 10}" in caplog.text
        (row,) = await progress_of_topic(admin)
        assert (row.committed_offset, row.lag) == (110, 0)


async def progress_of_topic(admin: Admin) -> list[QueueProgress]:
    """Return the group's progress, without its retry topic."""
    rows = (await admin.group_progress("g")).queues
    return [row for row in rows if row.topic == TOPIC]


async def _first_offset(admin: Admin) -> int:
    """Return the first offset of the queue after retention has removed all it can."""
    first_offsets: list[int | None] = []

    async def is_constant() -> bool:
        (extent,) = (await admin.describe_topic(TOPIC)).queues
        first_offsets.append(extent.first_offset)
        return len(first_offsets) > 50 and len(set(first_offsets[-50:])) == 1

    await until(is_constant)
    first = first_offsets[-1]
    assert first is not None
    assert first > 60, "four segments hold 32 messages"
    return first


@pytest.mark.long
async def test_topic_created_again_shares_nothing_with_the_deleted_one(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster, Admin(cluster.nameserver) as admin:
        await admin.create_topic(TOPIC, 2)
        async with Producer(cluster.nameserver) as producer:
            for n in range(10):
                await producer.send(TOPIC, b"old-%d" % n)
        async with reading(cluster.nameserver) as bodies:
            await until(lambda: len(bodies) == 10)
        await admin.delete_topic(TOPIC)
        await admin.create_topic(TOPIC, 2)
        rows = await progress_of_topic(admin)
        assert {row.committed_offset for row in rows} <= {None}
        sent = [b"new-%d" % n for n in range(5)]
        async with Producer(cluster.nameserver) as producer:
            for body in sent:
                await producer.send(TOPIC, body)
        async with reading(cluster.nameserver) as bodies:
            await until(lambda: len(bodies) >= 5)
        assert sorted(bodies) == sent
        rows = await progress_of_topic(admin)
        assert [(row.committed_offset, row.lag) for row in rows] == [
            (row.log_end_offset, 0) for row in rows
        ]
        assert sum(row.committed_offset or 0 for row in rows) == 5
        assert min(row.token or 0 for row in rows) >= 3, "tokens continue after a deletion"


@pytest.mark.long
async def test_running_consumer_ends_when_its_topic_is_deleted(
    tmp_path: Path,
) -> None:
    async with local_cluster(tmp_path) as cluster, Admin(cluster.nameserver) as admin:
        await admin.create_topic(TOPIC, 2)
        async with Producer(cluster.nameserver) as producer:
            await producer.send(TOPIC, b"old")
        handled: list[bytes] = []

        async def read() -> None:
            with pytest.raises(TopicNotFound):
                async with Consumer(cluster.nameserver, "g", {TOPIC: "*"}, FROM_FIRST) as consumer:
                    async for message in consumer:
                        handled.append(message.body)  # noqa: PERF401  one by one, as above

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await until(lambda: handled == [b"old"])
            await admin.delete_topic(TOPIC)
            await admin.create_topic(TOPIC, 2)
        async with Producer(cluster.nameserver) as producer:
            await producer.send(TOPIC, b"new")
        async with reading(cluster.nameserver) as bodies:
            await until(lambda: bodies == [b"new"])
