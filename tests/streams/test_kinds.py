"""Goal: services and clients publish every kind of event, with correct values, and no other events.

Method: the real services in memory, in virtual time; the test reads the metrics topic.
"""

from __future__ import annotations

import asyncio

import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.log_buckets import LogBuckets
from batonmq._core.names import ALERTS_TOPIC, METRICS_TOPIC
from batonmq._core.queues import QueueRef
from batonmq._core.reset_targets import ToEarliest
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.locks import Locks
from batonmq.admin.operation import Operation
from batonmq.admin.resets import Resets
from batonmq.errors import BatonError, InvalidName, SubscriptionConflict
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.streams.reading import SERVICES, batches, by_kind, streaming

PUBLISHED_S = 8
"""Virtual time until all events are in the topic, even if the topic was only just created."""
FIRST = ConsumerSettings(consume_from="first", metrics_stream=True)
Events = dict[str, list[pb.MetricEvent]]


async def published_events(broker: MemoryBroker) -> Events:
    """Wait until all events are published; return them by kind."""
    await asyncio.sleep(PUBLISHED_S)
    return by_kind(await batches(broker))


def of_topic(events: list[pb.MetricEvent], topic: str) -> list[pb.MetricEvent]:
    return [event for event in events if event.queue.queue.topic == topic]


def test_append_events_have_queues_counts_and_latencies() -> None:
    async def scene() -> Events:
        async with streaming() as broker:
            await broker.create_topic("t", queues=2)
            async with broker.producer(ProducerSettings(metrics_stream=True)) as producer:
                for number in range(10):
                    await producer.send("t", b"%d" % number)
            return await published_events(broker)

    events = run_virtual(scene())
    appended = [event.appended for event in of_topic(events["appended"], "t")]
    assert sum(one.message_count for one in appended) == 10
    ends = [(e.queue.queue.queue_id, e.appended.next_offset) for e in events["appended"]]
    assert dict(ends) == {0: 5, 1: 5}
    sent = [event.sent for event in of_topic(events["sent"], "t")]
    assert sum(one.message_count for one in sent) == 10
    assert sum(one.failed_count for one in sent) == 0
    assert all(one.client_id and one.byte_count for one in sent)
    times = {event.latency.operation: event.latency.us for event in events["latency"]}
    for operation in (pb.Latency.OPERATION_APPEND, pb.Latency.OPERATION_FSYNC):
        assert sum(times[operation].counts) > 0
    of_send = [e.latency.us for e in of_topic(events["latency"], "t")]
    assert sum(len(LogBuckets.of(us.first_bucket, us.counts, us.sum)) for us in of_send) == 10


def test_delivery_events_have_offsets_and_member_with_a_filter_too() -> None:
    async def scene() -> tuple[Events, dict[int, set[int]]]:
        handled: dict[int, set[int]] = {0: set(), 1: set()}
        async with streaming() as broker:
            await broker.create_topic("t", queues=2)
            async with broker.producer() as producer:
                for number in range(40):
                    tag = "a" if number % 5 else "b"
                    await producer.send("t", b"", tag=tag, properties={"n": str(number)})

            async def handle(message: ReceivedMessage) -> None:
                if message.queue.topic == "t":
                    handled[message.queue.queue_id].add(message.offset)

            consumer = broker.consumer(
                "g", {"t": "sql: n > 7 AND TAGS = 'a'"}, FIRST, client_id="c"
            )
            async with consumer, asyncio.TaskGroup() as tasks:
                tasks.create_task(consumer.run(handle))
                await broker.settled("g")
                consumer.stop()
            return await published_events(broker), handled

    events, handled = run_virtual(scene())
    delivered_offsets: dict[int, list[int]] = {0: [], 1: []}
    for event in of_topic(events["delivered"], "t"):
        delivered, offset = event.delivered, event.delivered.range.first_offset
        assert (event.queue.group, delivered.client_id, delivered.token) == ("g", "c", 1)
        runs = delivered.runs or [0, delivered.range.next_offset - offset]
        for index, length in enumerate(runs):
            if index % 2:
                delivered_offsets[event.queue.queue.queue_id] += range(offset, offset + length)
            offset += length
    assert delivered_offsets == {queue: sorted(offsets) for queue, offsets in handled.items()}
    assert sum(e.delivered.filtered_count for e in of_topic(events["delivered"], "t")) == 40 - sum(
        map(len, delivered_offsets.values())
    )
    assert sum(e.handled.message_count for e in of_topic(events["handled"], "t")) == sum(
        map(len, delivered_offsets.values())
    )
    committed = {e.queue.queue.queue_id: e.committed for e in of_topic(events["committed"], "t")}
    assert {one.committed_offset for one in committed.values()} == {20}
    assert {(one.client_id, one.closed) for one in committed.values()} == {("c", True)}
    operations = {event.latency.operation for event in events["latency"]}
    assert operations >= {
        pb.Latency.OPERATION_PULL,
        pb.Latency.OPERATION_COMMIT,
        pb.Latency.OPERATION_HANDLE,
        pb.Latency.OPERATION_END_TO_END,
    }
    changes = [e.subscription_changed for e in events["subscription_changed"]]
    assert [(one.group, one.subscription_generation) for one in changes] == [("g", 1)]


def test_hand_over_event_has_both_owners_and_its_rebalance() -> None:
    async def scene() -> Events:
        async with streaming() as broker:
            await broker.create_topic("t", queues=4)
            async with broker.producer() as producer, asyncio.TaskGroup() as tasks:

                async def member(name: str, until_s: float) -> None:
                    async def handle(_: ReceivedMessage) -> None:
                        await asyncio.sleep(0.1)

                    async with broker.consumer("g", {"t": "*"}, FIRST, client_id=name) as consumer:
                        running = tasks.create_task(consumer.run(handle))
                        await asyncio.sleep(until_s)
                        consumer.stop()
                        await running

                tasks.create_task(member("a", 30))
                for _ in range(20):
                    await producer.send("t", b"")
                await asyncio.sleep(0.5)
                await member("b", 10)
            return await published_events(broker)

    events = run_virtual(scene())
    to_b, *_ = (e for e in of_topic(events["handed_over"], "t") if e.handed_over.client_id == "b")
    hand_over = to_b.handed_over
    assert (hand_over.previous_client_id, hand_over.previous_token, hand_over.token) == ("a", 1, 2)
    assert hand_over.manner == pb.HandedOver.MANNER_GRACEFUL
    moves = [
        (move.queue.queue.queue_id, move.from_client_id, move.to_client_id)
        for event in events["rebalanced"]
        for move in event.rebalanced.moves
        if move.queue.queue.topic == "t"
    ]
    assert (to_b.queue.queue.queue_id, "a", "b") in moves
    denied = [e.lock_denied for e in of_topic(events["lock_denied"], "t")]
    assert {one.client_id for one in denied} <= {"a", "b"}
    assert all(one.count >= 1 for one in denied)
    assert {e.lock_released.client_id for e in events["lock_released"]} == {"a", "b"}
    assert {e.member_seen.client_id for e in events["member_seen"]} == {"a", "b"}
    assert {e.group_changed.member_count for e in events["group_changed"]} == {0, 1, 2}


def test_disconnected_member_is_reported_as_expired_taken_over_and_fenced() -> None:
    async def scene() -> Events:
        async with streaming() as broker:
            await broker.create_topic("t", queues=1)
            async with broker.producer() as producer:
                for _ in range(10):
                    await producer.send("t", b"")
            reconnected = asyncio.Event()

            async def hang(_: ReceivedMessage) -> None:
                await reconnected.wait()

            async def handle(_: ReceivedMessage) -> None:
                return

            silent = broker.consumer("g", {"t": "*"}, FIRST, client_id="silent")
            async with silent, asyncio.TaskGroup() as tasks:
                tasks.create_task(silent.run(hang))
                await asyncio.sleep(2)
                other = broker.consumer("g", {"t": "*"}, FIRST, client_id="other")
                with broker.cut_off(silent):
                    async with other:
                        running = tasks.create_task(other.run(handle))
                        await broker.settled("g")
                        other.stop()
                        await running
                reconnected.set()
                await asyncio.sleep(20)
                silent.stop()
            return await published_events(broker)

    events = run_virtual(scene())
    assert any(e.member_expired.client_id == "silent" for e in events["member_expired"])
    assert all(e.member_expired.silent_ms > 0 for e in events["member_expired"])
    takeovers = [
        e.lock_granted for e in of_topic(events["lock_granted"], "t") if e.lock_granted.stolen
    ]
    assert [(one.client_id, one.previous_client_id) for one in takeovers] == [("other", "silent")]
    hand_overs = [e.handed_over for e in of_topic(events["handed_over"], "t")]
    assert (hand_overs[0].manner, hand_overs[0].client_id) == (
        pb.HandedOver.MANNER_LEASE_EXPIRED,
        "other",
    )
    redeliveries = [
        e.delivered for e in of_topic(events["delivered"], "t") if e.delivered.client_id == "other"
    ]
    assert sum(one.redelivered_count for one in redeliveries) == 10
    assert {e.fenced.current_token for e in events["fenced"]} <= {2, 3}


def test_conflict_reset_and_forced_release_are_events() -> None:
    async def scene() -> Events:
        async with streaming() as broker, broker.admin() as admin:
            await broker.create_topic("t", queues=1)
            async with broker.producer() as producer:
                await producer.send("t", b"")
            async with broker.consumer("g", {"t": "*"}, FIRST, client_id="c") as consumer:
                try:
                    async with broker.consumer("g", {"t": "x"}, FIRST, client_id="d"):
                        pass
                except SubscriptionConflict:
                    pass
                else:
                    raise AssertionError("the conflicting member was admitted")
                async for _ in consumer:
                    consumer.stop()
            await broker.settled("g")
            resets = Resets(admin)
            operation = Operation("me", "again")
            await resets.reset(await resets.plan("g", ToEarliest()), operation)
            async with broker.consumer("g", {"t": "*"}, FIRST, client_id="c") as consumer:
                async for _ in consumer:
                    queue = QueueRef("t", "broker-0", 0)
                    await Locks(admin).force_release("g", queue, operation)
                    consumer.stop()
            return await published_events(broker)

    events = run_virtual(scene())
    refused, *_ = events["subscription_refused"]
    assert refused.subscription_refused.client_id == "d"
    assert refused.subscription_refused.differences[0].member_client_id == "c"
    (reset,) = events["progress_reset"]
    assert (reset.progress_reset.from_offset, reset.progress_reset.to_offset) == (1, 0)
    assert (reset.progress_reset.by, reset.progress_reset.reason) == ("me", "again")
    (forced,) = events["lock_forced"]
    assert (forced.lock_forced.previous_client_id, forced.lock_forced.by) == ("c", "me")


def test_consumer_publishes_failures_retries_and_dead_letters() -> None:
    async def scene() -> Events:
        settings = ConsumerSettings(consume_from="first", retries_max=1, metrics_stream=True)
        async with streaming() as broker:
            await broker.create_topic("t", queues=1)
            async with broker.producer() as producer:
                for _ in range(3):
                    await producer.send("t", b"")

            async def fail(_: ReceivedMessage) -> None:
                raise ValueError

            async with (
                broker.consumer("g", {"t": "*"}, settings, client_id="c") as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(consumer.run(fail))
                await broker.settled("g")
                await asyncio.sleep(1)
                await broker.settled("g")
                consumer.stop()
            return await published_events(broker)

    events = run_virtual(scene())
    assert sum(e.handled.failed_count for e in events["handled"]) == 6
    assert sum(e.handled.message_count for e in events["handled"]) == 0
    assert sum(e.retried.message_count for e in events["retried"]) == 3
    assert sum(e.dead_lettered.message_count for e in events["dead_lettered"]) == 3
    assert {e.dead_lettered.client_id for e in events["dead_lettered"]} == {"c"}


def test_each_inspection_publishes_lag_and_stuck_reason() -> None:
    async def scene() -> Events:
        settings: dict[str, object] = {"inspect_interval_ms": 5_000}
        async with streaming(nameserver=settings) as broker:
            await broker.create_topic("t", queues=1)
            consumer = broker.consumer("g", {"t": "*"}, FIRST, client_id="c")
            async with consumer, broker.producer() as producer, asyncio.TaskGroup() as tasks:

                async def hang(_: ReceivedMessage) -> None:
                    await asyncio.sleep(100)

                tasks.create_task(consumer.run(hang))
                for _ in range(5):
                    await producer.send("t", b"")
                await asyncio.sleep(90)
                events = await published_events(broker)
                consumer.stop()
                await consumer.close(drain_ms=0)
            return events

    events = run_virtual(scene())
    lags = [e.queue_lag for e in of_topic(events["queue_lag"], "t")]
    assert len(lags) >= 10
    assert (lags[-1].committed_offset, lags[-1].next_offset, lags[-1].client_id) == (0, 5, "c")
    assert lags[-1].delivered_offset == 5
    assert lags[-1].oldest_unacked_ms > 60_000
    assert {e.stuck_changed.reason for e in of_topic(events["stuck_changed"], "t")} == {
        "HEAD_OF_LINE"
    }


def test_client_without_metrics_stream_publishes_nothing() -> None:
    async def scene() -> set[str]:
        async with streaming() as broker:
            await broker.create_topic("t", queues=1)
            async with broker.producer() as producer:
                await producer.send("t", b"")
            async with broker.consumer("g", {"t": "*"}) as consumer:
                async for _ in consumer:
                    consumer.stop()
            await asyncio.sleep(PUBLISHED_S)
            return {batch.source.partition("/")[0] for batch in await batches(broker)}

    assert run_virtual(scene()) == {"storage", "offsets", "lockmgr", "nameserver"}


def test_system_topics_are_created_on_every_broker_and_can_not_be_deleted() -> None:
    async def scene() -> tuple[dict[str, int], BatonError]:
        settings: dict[str, dict[str, object]] = {
            name: {"metrics_stream": True} for name in SERVICES
        }
        settings["nameserver"] |= {"metrics_queue_count": 2}
        async with MemoryBroker(broker_count=3, settings=settings) as broker:
            await asyncio.sleep(10)
            async with broker.admin() as admin:
                counts = {topic.name: len(topic.queues) for topic in await admin.list_topics()}
                detail = await admin.describe_topic(METRICS_TOPIC)
                brokers = {queue.broker for queue in detail.topic.queues}
                assert brokers == {"broker-0", "broker-1", "broker-2"}
                with pytest.raises(InvalidName) as refused:
                    await admin.delete_topic(METRICS_TOPIC)
            return counts, refused.value

    counts, _ = run_virtual(scene())
    # Two queues at the creation; a broker that is registered later, and has none, gets one.
    assert counts in ({METRICS_TOPIC: 3, ALERTS_TOPIC: 1}, {METRICS_TOPIC: 4, ALERTS_TOPIC: 1})


def test_clients_without_the_metrics_topic_work_and_close_within_seconds() -> None:
    async def scene() -> float:
        async with MemoryBroker() as broker:
            await broker.create_topic("t", queues=1)
            now = asyncio.get_running_loop().time
            async with broker.producer(ProducerSettings(metrics_stream=True)) as producer:
                await producer.send("t", b"")
            async with broker.consumer("g", {"t": "*"}, FIRST) as consumer:
                async for _ in consumer:
                    consumer.stop()
                    begin = now()
            return now() - begin

    assert run_virtual(scene()) < 5


def test_client_cancelled_twice_ends_with_its_stream() -> None:
    async def scene() -> str:
        async with streaming() as broker:
            await broker.create_topic("t", queues=1)

            async def consume() -> None:
                async with broker.consumer("g", {"t": "*"}, FIRST, client_id="c") as consumer:
                    async for _ in consumer:
                        pass

            async with asyncio.TaskGroup() as tasks:
                consuming = tasks.create_task(consume())
                await asyncio.sleep(5)
                consuming.cancel()
                await asyncio.sleep(0.01)
                consuming.cancel()
            return "ended"

    assert run_virtual(scene()) == "ended"


def test_no_event_and_no_topic_exists_by_default() -> None:
    async def scene() -> list[str]:
        async with MemoryBroker() as broker, broker.admin() as admin:
            await asyncio.sleep(30)
            return [topic.name for topic in await admin.list_topics()]

    assert run_virtual(scene()) == []


def test_consumer_of_the_metrics_topic_causes_no_events() -> None:
    async def scene() -> Events:
        async with streaming() as broker:
            await asyncio.sleep(30)
            async with broker.consumer("watching", {METRICS_TOPIC: "*"}) as consumer:

                async def read() -> None:
                    async for _ in consumer:
                        pass

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(read())
                    await asyncio.sleep(60)
                    consumer.stop()
            return await published_events(broker)

    events = run_virtual(scene())
    assert not of_topic(events["appended"], METRICS_TOPIC) and not events["latency"]
    assert not events["delivered"] and not of_topic(events["committed"], METRICS_TOPIC)


def test_idle_cluster_publishes_only_the_periodic_volume_state() -> None:
    async def idle() -> tuple[int, set[str]]:
        async with streaming() as broker:
            await asyncio.sleep(60)
            before = len(await broker.messages(METRICS_TOPIC))
            await asyncio.sleep(600)
            batch_list = (await batches(broker))[before:]
            return len(batch_list), set(by_kind(batch_list))

    count, kinds = run_virtual(idle())
    assert kinds == {"volume_state"}
    assert 0 < count <= 61, "at most one batch in ten seconds"


def test_events_during_a_storage_outage_are_published_after_it() -> None:
    async def outage() -> list[pb.MetricBatch]:
        async with streaming() as broker:
            await broker.create_topic("t", queues=1)
            consumer = broker.consumer("g", {"t": "*"}, client_id="c")
            async with consumer:
                await asyncio.sleep(5)
                await broker.kill("storage")
                await asyncio.sleep(30)
            await asyncio.sleep(30)
            return await batches(broker)

    batch_list = run_virtual(outage())
    incarnations = {(one.source, one.incarnation_id) for one in batch_list}
    assert len([source for source, _ in incarnations if source.startswith("storage/")]) == 2
    for incarnation in incarnations:
        numbers = [one.seq for one in batch_list if (one.source, one.incarnation_id) == incarnation]
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1)), incarnation
    assert any(e.lock_granted.client_id == "c" for e in by_kind(batch_list)["lock_granted"])
