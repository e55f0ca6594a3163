"""Pausing queues, closing early, and what a consumer counts.

Goal: a paused queue stays owned and delivers nothing while other queues continue; `close` keeps its
drain time; the metrics count the events, and a closed consumer has no gauge.
Method: a real cluster, and handlers that wait for the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.ordering_key import ORDERING_KEY
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, encode_record
from batonmq._producer.producer import Producer
from batonmq._telemetry.client_metrics import ClientMetrics
from tests.client.group import QUICK, scene
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


async def test_paused_queue_stays_owned_and_delivers_nothing(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=2) as at:
        held, free = (QueueRef(at.topic, "broker-0", number) for number in range(2))
        async with at.consumer("a") as consumer, asyncio.TaskGroup() as tasks:

            async def handle(message: ReceivedMessage) -> None:
                at.note(consumer, message)

            consumer.pause(held)
            tasks.create_task(consumer.run(handle))
            await until(lambda: consumer.assignment == (held, free))
            await until(lambda: consumer.flow == {held: "paused"})
            await at.send(["held"], queue_id=0)
            await at.send(["free"], queue_id=1)
            await until(lambda: at.by("a") == ["free"])
            consumer.resume(held)
            await until(lambda: at.by("a") == ["free", "held"])
            assert consumer.flow == {}
            consumer.stop()
        assert [event.kind for _, event in at.events].count("granted") == 2


async def test_buffered_messages_of_a_paused_queue_are_handled_in_order_after_resume(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send([str(number) for number in range(20)])
        queue = QueueRef(at.topic, "broker-0", 0)
        async with at.consumer("a") as consumer:
            bodies: list[bytes] = []
            async for message in consumer:
                bodies.append(message.body)
                if len(bodies) == 5:
                    break
            consumer.pause(queue)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await anext(consumer)
            assert consumer.assignment == (queue,)
            consumer.resume(queue)
            async for message in consumer:
                bodies.append(message.body)
                if len(bodies) == 20:
                    consumer.stop()
        assert bodies == [b"%d" % number for number in range(20)]


async def test_failed_message_of_a_paused_queue_is_not_retried_before_resume(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["bad"])
        queue, attempts = QueueRef(at.topic, "broker-0", 0), list[int]()
        async with at.consumer("a") as consumer, asyncio.TaskGroup() as tasks:

            async def handle(message: ReceivedMessage) -> object:
                attempts.append(message.attempts)
                if message.attempts == 1:
                    consumer.pause(queue)
                    return RetryLater(0)
                return None

            tasks.create_task(consumer.run(handle))
            await until(lambda: consumer.flow == {queue: "paused"})
            await asyncio.sleep(0)
            assert attempts == [1]
            consumer.resume(queue)
            await until(lambda: attempts == [1, 2])
            consumer.stop()


@pytest.mark.parametrize("drain_ms", [0, 300])
async def test_close_waits_for_its_drain_time_and_leaves_the_rest_to_other_members(
    nameserver: str, drain_ms: int
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["hangs"])
        clock, begun = Clock(), asyncio.Event()

        async def hang(_: ReceivedMessage) -> None:
            begun.set()
            await asyncio.Event().wait()

        settings = replace(QUICK, drain_timeout_ms=None)
        async with at.consumer("a", settings=settings) as consumer, asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.run(hang))
            await begun.wait()
            begin_ms = clock.monotonic_ms()
            await consumer.close(drain_ms=drain_ms)
            took_ms = clock.monotonic_ms() - begin_ms
            assert consumer.assignment == ()
        assert drain_ms <= took_ms < drain_ms + 15_000, (
            "without a drain timeout it waits until the handler ends"
        )
        async with at.consumer("b") as other:
            message = await anext(other)
        assert (message.body, message.redelivered) == (b"hangs", True)


async def test_second_close_shortens_the_drain_of_the_first(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["hangs"])
        begun = asyncio.Event()

        async def hang(_: ReceivedMessage) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with at.consumer("a") as consumer, asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.run(hang))
            await begun.wait()
            first = tasks.create_task(consumer.close(drain_ms=None))
            await until(lambda: "draining" in [event.kind for _, event in at.events])
            async with asyncio.timeout(15):
                await consumer.close(drain_ms=0)
                await first


async def test_two_concurrent_closes_act_as_one(nameserver: str) -> None:
    async with scene(nameserver, queue_count=2) as at, at.consumer("a") as consumer:
        await until(lambda: len(consumer.assignment) == 2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.close(drain_ms=None))
            tasks.create_task(consumer.close(drain_ms=0))
        assert [event.kind for _, event in at.events].count("released") == 2


# ---- metrics


def sample(registry: CollectorRegistry, name: str, labels: Mapping[str, str]) -> float | None:
    return registry.get_sample_value(f"baton_consumer_{name}", dict(labels))


async def test_metrics_count_events_and_show_gauges_of_a_running_consumer(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["asks", "fails", "dies", "waits", "waits too"])
        registry, gate, waiting = CollectorRegistry(), asyncio.Event(), asyncio.Event()
        settings = replace(QUICK, send_back=None, retries_max=1)
        client = {"group": at.group, "client_id": "a"}
        topic = {"group": at.group, "topic": at.topic}

        async def handle(message: ReceivedMessage) -> object:
            if message.body == b"dies" or (message.body == b"fails" and message.attempts == 1):
                raise ValueError("on purpose")
            if message.body == b"asks" and message.attempts == 1:
                return RetryLater(0)
            if message.body == b"waits":
                waiting.set()
                await gate.wait()
            return RetryLater(0) if message.body == b"waits" and message.attempts == 1 else None

        async with Consumer(
            nameserver, at.group, {at.topic: "*"}, settings, client_id="a",
            metrics=ClientMetrics(registry),
        ) as consumer, asyncio.TaskGroup() as tasks:  # fmt: skip
            tasks.create_task(consumer.run(handle))
            await waiting.wait()
            # A retried message may be handled at the same time.
            held = {
                "handling_messages": 1,
                "buffered_messages": 1,
                "buffered_bytes": len("waits too" + f"{ORDERING_KEY}\x014\x02"),
            }
            await until(lambda: held == {name: sample(registry, name, client) for name in held})
            consumer.pause(QueueRef(at.topic, "broker-0", 0))
            paused = client | {"reason": "paused"}
            await until(lambda: sample(registry, "held_queues", paused) == 1)
            consumer.resume(QueueRef(at.topic, "broker-0", 0))
            gate.set()
            await until(lambda: sample(registry, "handled_messages_total", topic) == 3)
            consumer.stop()
        failed = {
            reason: sample(registry, "failed_messages_total", topic | {"reason": reason})
            for reason in ("asked", "failed")
        }
        assert failed == {"asked": 2, "failed": 2}
        assert sample(registry, "retried_messages_total", topic) == 4
        assert sample(registry, "handler_seconds_count", topic) == 7
        granted = {"group": at.group, "kind": "granted"}
        assert sample(registry, "queue_changes_total", granted) == 2
        assert sample(registry, "handling_messages", client) is None, "the gauge is removed"


async def test_producer_metrics_count_batches_by_outcome_and_in_flight(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        registry = CollectorRegistry()
        metrics = ClientMetrics(registry)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"baton_producer_{name}", labels)

        async with Producer(nameserver, metrics=metrics) as first:
            async with Producer(nameserver, metrics=metrics) as second:
                for one in (first, second):
                    await one.send(at.topic, b"opens the topic")
                pending = [await one.submit(at.topic, Message(b"x")) for one in (first, second)]
                assert value("in_flight_bytes") == 2 * len(encode_record(Message(b"x")))
                for each in pending:
                    await each
            assert value("in_flight_bytes") == 0
        with pytest.raises(ValueError, match="on purpose"):
            async with Producer(nameserver, metrics=metrics) as third:
                await third.send(at.topic, b"opens the topic")
                await third.submit(at.topic, Message(b"never sent"))
                raise ValueError("on purpose")
        assert value("sent_messages_total", topic=at.topic) == 5
        assert value("failed_messages_total", topic=at.topic, reason="UNREACHABLE") == 1
        assert value("batch_messages_count", topic=at.topic) == 6
        assert value("send_seconds_count", topic=at.topic) == 6
