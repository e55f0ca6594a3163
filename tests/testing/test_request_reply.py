"""Goal: a request gets the reply of the handler that consumes it, or an error that says why not.

Method: requesters and responders on `MemoryBroker` in virtual time, with several brokers, faults,
handlers that fail, and consumers that stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_adapters import Handler
from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq._core.requests import Reply
from batonmq._core.retries import dead_letter_topic
from batonmq._producer.producer import Producer
from batonmq._producer.requester import RequestFailed, RequestTimedOut
from batonmq._producer.send_buffer import ProducerClosed
from batonmq._telemetry.client_metrics import ClientMetrics
from batonmq.errors import BatonError, InvalidArgument, LimitExceeded, TopicNotFound
from batonmq_server.testing import MemoryBroker, run_virtual

TOPIC = "prices"
ONE_RETRY = ConsumerSettings(consume_from="first", send_back=True, retries_max=1)


async def price_of(message: ReceivedMessage) -> bytes:
    """Reply with the body and a price."""
    return message.body + b"=1"


@asynccontextmanager
async def responding(
    broker: MemoryBroker, handler: Handler, settings: ConsumerSettings | None = None
) -> AsyncIterator[Consumer]:
    """Run a consumer with `handler` until the end of the block."""
    async with (
        broker.consumer("quotes", {TOPIC: "*"}, settings) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(handler))
        try:
            yield consumer
        finally:
            consumer.stop()


async def error_of(request: Coroutine[Any, Any, Reply]) -> BatonError:
    """Return the error of a request."""
    with pytest.raises(BatonError) as raised:
        await request
    return raised.value


def test_reply_of_the_handler_reaches_its_requester() -> None:
    async def scene() -> list[bytes]:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            async with broker.producer() as producer, responding(broker, price_of):
                return [(await producer.request(TOPIC, b"%d" % n)).body for n in range(5)]

    assert run_virtual(scene()) == [b"%d=1" % n for n in range(5)]


def test_replies_cross_brokers_and_reach_the_requester_that_asked() -> None:
    async def scene() -> None:
        async with MemoryBroker(broker_count=3) as broker:
            await broker.create_topic(TOPIC, queues=6)
            async with (
                broker.producer() as one,
                broker.producer() as other,
                responding(broker, price_of),
                asyncio.TaskGroup() as tasks,
            ):
                asked = {
                    b"%s-%d" % (name, n): tasks.create_task(
                        producer.request(TOPIC, b"%s-%d" % (name, n), timeout_ms=60_000)
                    )
                    for name, producer in ((b"one", one), (b"other", other))
                    for n in range(50)
                }
        for body, task in asked.items():
            assert task.result().body == body + b"=1"

    run_virtual(scene())


def test_reply_with_an_error_is_raised_as_request_failed() -> None:
    async def refuse(_: ReceivedMessage) -> Reply:
        return Reply(error="no such symbol")

    async def scene() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            async with broker.producer() as producer, responding(broker, refuse):
                with pytest.raises(RequestFailed, match="no such symbol"):
                    await producer.request(TOPIC, b"x")

    run_virtual(scene())


def test_request_without_a_responder_times_out_and_its_reply_is_late() -> None:
    async def scene() -> tuple[float | None, ...]:
        registry = CollectorRegistry()
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            async with Producer(
                broker.nameserver, metrics=ClientMetrics(registry), environment=broker.environment
            ) as producer:
                with pytest.raises(RequestTimedOut, match="within 500 ms"):
                    await producer.request(TOPIC, b"x", timeout_ms=500)
                async with responding(broker, price_of):
                    # the inbox gets replies in order, so the late one came before this one
                    assert (await producer.request(TOPIC, b"y", queue=None)).body == b"y=1"
                    await broker.settled("quotes")
        return (
            registry.get_sample_value("baton_producer_late_replies_total"),
            *(
                registry.get_sample_value(
                    "baton_producer_requests_total", {"topic": TOPIC, "outcome": outcome}
                )
                for outcome in ("timeout", "replied")
            ),
        )

    assert run_virtual(scene()) == (1, 1, 1)


def test_request_is_answered_by_the_attempt_that_succeeds() -> None:
    async def second_time(message: ReceivedMessage) -> bytes | RetryLater:
        return b"ok" if message.attempts == 2 else RetryLater(delay_ms=1_000)

    async def scene() -> bytes:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            async with broker.producer() as producer, responding(broker, second_time, ONE_RETRY):
                return (await producer.request(TOPIC, b"x", timeout_ms=60_000)).body

    assert run_virtual(scene()) == b"ok"


def test_request_that_becomes_a_dead_letter_fails_at_once_with_the_last_error() -> None:
    async def fail(_: ReceivedMessage) -> None:
        raise ValueError("no market data")

    async def scene() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            async with broker.producer() as producer, responding(broker, fail, ONE_RETRY):
                with pytest.raises(RequestFailed, match="no market data"):
                    await producer.request(TOPIC, b"x", timeout_ms=3_600_000)

    run_virtual(scene())


def test_error_with_a_lone_surrogate_and_a_body_of_a_wrong_type_do_not_end_the_consumer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Not captured: workers of pytest-xdist can't report a lone surrogate.
    caplog.set_level(logging.CRITICAL, "batonmq")

    async def handle(message: ReceivedMessage) -> Reply:
        if message.body == b"path":
            raise FileNotFoundError("no file caf\udce9")
        return Reply(body="1" if message.body == b"text" else b"1")  # type: ignore[arg-type]

    async def scene() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            async with broker.producer() as producer, responding(broker, handle, ONE_RETRY):
                with pytest.raises(RequestFailed, match=r"no file caf\?"):
                    await producer.request(TOPIC, b"path", timeout_ms=3_600_000)
                with pytest.raises(RequestFailed, match="body must be bytes, got str"):
                    await producer.request(TOPIC, b"text", timeout_ms=3_600_000)
                assert (await producer.request(TOPIC, b"next")).body == b"1"

    run_virtual(scene())


class TextlessError(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise AttributeError("code")


def test_error_without_text_and_reason_that_is_no_text_do_not_end_the_consumer() -> None:
    async def handle(message: ReceivedMessage) -> RetryLater | None:
        if message.body == b"error":
            raise TextlessError
        reason: Any = ValueError("not yet")
        return RetryLater(delay_ms=10, reason=reason) if message.body == b"reason" else None

    async def scene() -> list[str]:
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic(TOPIC, queues=1)
            async with responding(broker, handle, ONE_RETRY):
                for body in (b"error", b"reason", b"next"):
                    await producer.send(TOPIC, body)
                await broker.settled("quotes", timeout_s=3_600)
            letters = await broker.messages(dead_letter_topic("quotes"))
            return sorted(letter.properties["baton.error"] for letter in letters)

    errors = run_virtual(scene())
    assert errors == ["TextlessError: <its text raised AttributeError>", "not yet"]


def test_batch_handler_replies_to_each_request() -> None:
    async def prices(batch: MessageBatch) -> list[bytes]:
        return [message.body + b"=2" for message in batch]

    async def scene() -> list[bytes]:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            async with (
                broker.producer() as producer,
                broker.consumer("quotes", {TOPIC: "*"}) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(consumer.run_batches(prices))
                async with asyncio.TaskGroup() as requests:
                    asked = [
                        requests.create_task(producer.request(TOPIC, b"%d" % n)) for n in range(20)
                    ]
                consumer.stop()
        return [one.result().body for one in asked]

    assert run_virtual(scene()) == [b"%d=2" % n for n in range(20)]


def test_consumer_that_iterates_replies_and_refuses_a_message_that_is_no_request() -> None:
    async def scene() -> bytes:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, queues=1)
            async with (
                broker.producer() as producer,
                broker.consumer("quotes", {TOPIC: "*"}) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                await producer.send(TOPIC, b"news")
                request = tasks.create_task(producer.request(TOPIC, b"x"))
                async for message in consumer:
                    if not message.is_request:
                        with pytest.raises(InvalidArgument, match="is not a request"):
                            consumer.reply(message, b"")
                    else:
                        consumer.reply(message, b"")
                        break
                return (await request).body

    assert run_virtual(scene()) == b""


def test_requests_of_a_lost_inbox_fail_at_once_and_the_next_ones_are_answered() -> None:
    async def scene() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            started, proceed = asyncio.Event(), asyncio.Event()

            async def wait(message: ReceivedMessage) -> bytes:
                started.set()
                await proceed.wait()
                return message.body

            async with (
                broker.producer() as producer,
                responding(broker, wait),
                asyncio.TaskGroup() as tasks,
            ):
                lost = tasks.create_task(
                    error_of(producer.request(TOPIC, b"x", timeout_ms=3_600_000))
                )
                await started.wait()
                await broker.kill("storage")
                assert "inbox at broker-0 was lost" in (await lost).message
                proceed.set()
                assert (await producer.request(TOPIC, b"y", timeout_ms=60_000)).body == b"y"

    run_virtual(scene())


def test_requester_that_leaves_costs_the_responder_nothing() -> None:
    async def scene() -> list[bytes]:
        handled: list[bytes] = []
        started, proceed = asyncio.Event(), asyncio.Event()

        async def wait(message: ReceivedMessage) -> bytes:
            handled.append(message.body)
            started.set()
            await proceed.wait()
            return b""

        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, queues=1)
            async with responding(broker, wait), asyncio.TaskGroup() as tasks:
                async with broker.producer() as gone:
                    lost = tasks.create_task(error_of(gone.request(TOPIC, b"gone")))
                    await started.wait()
                assert isinstance(await lost, ProducerClosed)
                proceed.set()
                async with broker.producer() as producer:
                    await producer.request(TOPIC, b"next")
                await broker.settled("quotes")
        return handled

    assert run_virtual(scene()) == [b"gone", b"next"]


def test_bad_request_and_unknown_topic_are_refused() -> None:
    async def scene() -> None:
        async with MemoryBroker() as broker, broker.producer() as producer:
            with pytest.raises(InvalidArgument, match="timeout_ms must be from 1"):
                await producer.request(TOPIC, b"", timeout_ms=0)
            with pytest.raises(InvalidArgument, match="reserved"):
                await producer.request(TOPIC, b"", properties={"baton.reply_to": "me"})
            with pytest.raises(TopicNotFound):
                await producer.request(TOPIC, b"")

    run_virtual(scene())


def test_request_with_an_argument_of_a_wrong_type_fails_alone() -> None:
    async def scene() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, queues=1)
            async with (
                broker.producer() as producer,
                responding(broker, price_of),
                asyncio.TaskGroup() as tasks,
            ):
                other = tasks.create_task(producer.request(TOPIC, b"1"))
                with pytest.raises(InvalidArgument, match="body must be bytes"):
                    await producer.request(TOPIC, "text")  # type: ignore[arg-type]
                with pytest.raises(InvalidArgument, match="ordering_key must be str"):
                    await producer.request(TOPIC, b"2", ordering_key=5)  # type: ignore[arg-type]
                assert (await other).body == b"1=1"
                assert (await producer.send(TOPIC, b"3")).offset == 1

    run_virtual(scene())


def test_send_to_a_topic_that_is_no_name_fails_alone() -> None:
    async def scene() -> None:
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic(TOPIC, queues=1)
            for name in (5, "\udcff"):
                with pytest.raises(InvalidArgument, match="topic must be a name"):
                    await producer.send(name, b"1")  # type: ignore[arg-type]
            assert (await producer.send(TOPIC, b"2")).offset == 0

    run_virtual(scene())


def test_times_that_are_no_integers_fail_their_own_calls() -> None:
    """`1.5 * 1000` is a float."""

    async def scene() -> None:
        seconds: Any = 1.5
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic(TOPIC, queues=1)
            async with responding(broker, price_of):
                with pytest.raises(InvalidArgument, match="delay_ms must be an integer"):
                    await producer.send(TOPIC, b"1", delay_ms=seconds * 1000)
                with pytest.raises(InvalidArgument, match="timeout_ms must be an integer"):
                    await producer.request(TOPIC, b"2", timeout_ms=seconds * 1000)
                assert (await producer.request(TOPIC, b"3")).body == b"3=1"

    run_virtual(scene())


def test_reply_that_is_too_large_is_refused_in_the_handler() -> None:
    with pytest.raises(LimitExceeded, match="the limit is 1048576"):
        Reply(bytes(1024 * 1024 + 1))
