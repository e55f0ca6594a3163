"""Goal: one trace runs through producer, broker and consumer, by the messaging conventions.

Method: clients on `MemoryBroker` in virtual time, with the SDK's exporters to memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from batonmq import (
    Consumer,
    ConsumerSettings,
    Message,
    MessageBatch,
    OpenTelemetry,
    Output,
    Producer,
    ReceivedMessage,
    RetryLater,
)
from batonmq.errors import TopicNotFound
from batonmq_server.testing import MemoryBroker, run_virtual

TOPIC, GROUP = "orders", "billing"
OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
RETRIES = ConsumerSettings(consume_from="first", send_back=True, retries_max=3)
IN_PLACE = ConsumerSettings(consume_from="first", send_back=False)


class Traced:
    """A broker with one topic, and clients whose spans are kept in memory."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker, self.exporter = broker, InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.telemetry = OpenTelemetry(provider, MeterProvider([self.reader]))
        self.seen: list[ReceivedMessage] = []

    def producer(self) -> Producer:
        return Producer(
            self.broker.nameserver, telemetry=self.telemetry, environment=self.broker.environment
        )

    def consumer(self, settings: ConsumerSettings | None = None) -> Consumer:
        return Consumer(
            self.broker.nameserver,
            GROUP,
            {TOPIC: "*"},
            settings or ConsumerSettings(consume_from="first"),
            telemetry=self.telemetry,
            environment=self.broker.environment,
        )

    async def consume(
        self, run: Callable[[Consumer], Coroutine[Any, Any, None]], settings: Any = None
    ) -> None:
        """Run a consumer until all messages are handled."""
        async with self.consumer(settings) as consumer, asyncio.TaskGroup() as tasks:
            tasks.create_task(run(consumer))
            await self.broker.settled(GROUP)
            consumer.stop()

    def spans(self, operation: str) -> list[ReadableSpan]:
        """Return the finished spans of an operation, in the order of their ends."""
        return [
            span
            for span in self.exporter.get_finished_spans()
            if (span.attributes or {}).get("messaging.operation.name") == operation
        ]

    async def keep(self, message: ReceivedMessage) -> None:
        self.seen.append(message)


def traced(scene: Callable[[Traced], Coroutine[Any, Any, None]]) -> Traced:
    """Run a scene in virtual time."""

    async def run() -> Traced:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC)
            stage = Traced(broker)
            await scene(stage)
            return stage

    return run_virtual(run())


def ids(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def parent_ids(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def link_ids(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


@pytest.mark.parametrize("way", ["coroutine", "inline", "thread", "lambda"])
def test_handler_of_any_form_runs_in_the_trace_of_its_message(way: str) -> None:
    current: list[int] = []

    def note(_: object) -> None:
        current.append(get_current_span().get_span_context().span_id)

    async def handle(message: ReceivedMessage) -> None:
        await asyncio.sleep(0.01)
        note(message)

    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            await producer.send(TOPIC, b"one")
        await stage.consume(
            {
                "coroutine": lambda consumer: consumer.run(handle),
                "inline": lambda consumer: consumer.run(note, inline=True),
                "thread": lambda consumer: consumer.run(note),
                "lambda": lambda consumer: consumer.run(partial(lambda _, one: handle(one), 0)),
            }[way]
        )

    stage = traced(scene)
    (sent,), (processed,) = stage.spans("send"), stage.spans("process")
    assert parent_ids(processed) == ids(sent)
    assert link_ids(processed) == [ids(sent)]
    assert current == [processed.context.span_id]
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert (sent.name, processed.name) == (f"send {TOPIC}", f"process {TOPIC}")


def test_spans_have_the_attributes_of_the_conventions() -> None:
    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            await producer.send(TOPIC, b"one")
        await stage.consume(lambda consumer: consumer.run(stage.keep))

    stage = traced(scene)
    (message,) = stage.seen
    (sent,), (processed,) = stage.spans("send"), stage.spans("process")
    common = {
        "messaging.system": "batonmq",
        "messaging.destination.name": TOPIC,
        "messaging.destination.partition.id": f"{message.broker}/{message.queue_id}",
        "messaging.message.id": message.message_id,
        "messaging.message.body.size": 3,
    }
    named = {"messaging.operation.name": "send", "messaging.operation.type": "send"}
    assert dict(sent.attributes or {}) == common | named
    found = dict(processed.attributes or {})
    assert found.pop("messaging.client.id")
    assert found == common | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": GROUP,
        "messaging.batonmq.message.offset": message.offset,
        "messaging.batonmq.message.attempt": 1,
    }


@pytest.mark.parametrize("settings", [RETRIES, IN_PLACE], ids=["sent back", "in place"])
def test_each_attempt_has_a_span_in_the_same_trace(settings: ConsumerSettings) -> None:
    async def fail_twice(message: ReceivedMessage) -> RetryLater | None:
        if message.attempts == 1:
            raise ValueError("no")
        return RetryLater(1) if message.attempts == 2 else None

    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            await producer.send(TOPIC, b"one")
        await stage.consume(lambda consumer: consumer.run(fail_twice), settings)

    stage = traced(scene)
    (sent,), processed = stage.spans("send"), stage.spans("process")
    assert [parent_ids(span) for span in processed] == [ids(sent)] * 3
    found = [
        (
            span.status.status_code,
            (span.attributes or {})["messaging.batonmq.message.attempt"],
            (span.attributes or {}).get("error.type"),
        )
        for span in processed
    ]
    assert found == [
        (StatusCode.ERROR, 1, "ValueError"),
        (StatusCode.ERROR, 2, "RetryLater"),
        (StatusCode.UNSET, 3, None),
    ]


def test_batch_links_to_the_context_of_each_message() -> None:
    async def handle(_: MessageBatch) -> None:
        return

    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            for pending in [await producer.submit(TOPIC, Message(b"%d" % n)) for n in range(3)]:
                await pending
            await producer.send_many(TOPIC, [b"3", b"4"])
        await stage.consume(lambda consumer: consumer.run_batches(handle))

    stage = traced(scene)
    sent, processed = stage.spans("send"), stage.spans("process")
    many = [span for span in sent if "messaging.batch.message_count" in (span.attributes or {})]
    assert [(span.attributes or {})["messaging.batch.message_count"] for span in many] == [2]
    links = [link for span in processed for link in link_ids(span)]
    assert sorted(links) == sorted([*(ids(span) for span in sent), ids(many[0])])
    assert {span.parent for span in processed} == {None}
    counts = [(span.attributes or {})["messaging.batch.message_count"] for span in processed]
    assert sum(int(str(count)) for count in counts) == 5


def test_context_that_the_application_has_set_is_kept() -> None:
    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            await producer.send(TOPIC, b"one", properties={"traceparent": OTHER})
        await stage.consume(lambda consumer: consumer.run(stage.keep))

    stage = traced(scene)
    other = (0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
    (sent,), (processed,) = stage.spans("send"), stage.spans("process")
    assert stage.seen[0].properties["traceparent"] == OTHER
    assert link_ids(sent) == [other]
    assert parent_ids(processed) == other


@pytest.mark.parametrize("bad", ["", "00-xyz", f"{OTHER}-00", "00-" + "0" * 32 + "-" + "0" * 16])
def test_malformed_context_is_ignored(bad: str) -> None:
    async def scene(stage: Traced) -> None:
        async with stage.broker.producer() as producer:
            await producer.send(TOPIC, b"one", properties={"traceparent": bad})
        await stage.consume(lambda consumer: consumer.run(stage.keep))

    (processed,) = traced(scene).spans("process")
    assert processed.parent is None
    assert not processed.links
    assert processed.status.status_code is StatusCode.UNSET


def test_outputs_carry_the_context_of_their_input_through_every_attempt() -> None:
    fails = [True]

    def outputs(message: ReceivedMessage) -> list[bytes | Output]:
        if fails.pop() if fails else False:
            raise ValueError("no")
        return [message.body, Output(b"two", properties={"traceparent": OTHER})]

    async def scene(stage: Traced) -> None:
        await stage.broker.create_topic("lines")
        async with stage.producer() as producer:
            await producer.send(TOPIC, b"one")
        await stage.consume(lambda consumer: consumer.transform(outputs, to="lines"), IN_PLACE)
        async with stage.broker.consumer("reader", {"lines": "*"}) as reader:
            async for message in reader:
                stage.seen.append(message)
                if len(stage.seen) == 2:
                    reader.stop()

    stage = traced(scene)
    (sent,) = stage.spans("send")
    assert len(stage.spans("process")) == 2
    trace_id, span_id = ids(sent)
    found = {message.body: message.properties["traceparent"] for message in stage.seen}
    assert found[b"one"].startswith(f"00-{trace_id:032x}-{span_id:016x}-")
    assert found[b"two"] == OTHER


def test_iteration_makes_a_receive_span_that_links_to_the_message() -> None:
    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            await producer.send(TOPIC, b"one")
        async with stage.consumer() as consumer:
            async for _ in consumer:
                consumer.stop()

    stage = traced(scene)
    (sent,), (received,) = stage.spans("send"), stage.spans("receive")
    assert link_ids(received) == [ids(sent)]
    assert (received.kind, received.parent) == (SpanKind.CLIENT, None)


def test_request_submit_one_way_scheduled_and_half_messages_have_send_spans() -> None:
    bodies, all_answered = set[bytes](), asyncio.Event()

    async def answer(message: ReceivedMessage) -> bytes:
        bodies.add(message.body)
        if len(bodies) == 5:
            all_answered.set()
        return b"yes"

    async def scene(stage: Traced) -> None:
        broker = stage.broker
        async with Producer(
            broker.nameserver, group="shop", telemetry=stage.telemetry,
            environment=broker.environment,
        ) as producer:  # fmt: skip
            await (await producer.submit(TOPIC, Message(b"submit")))
            await producer.send_one_way(TOPIC, b"one way")
            await producer.send(TOPIC, b"scheduled", delay_ms=10)
            async with producer.transaction(TOPIC, b"half"):
                pass
            async with stage.consumer() as consumer, asyncio.TaskGroup() as tasks:
                tasks.create_task(consumer.run(answer))
                assert (await producer.request(TOPIC, b"request")).body == b"yes"
                await all_answered.wait()
                consumer.stop()

    stage = traced(scene)
    sent, processed = stage.spans("send"), stage.spans("process")
    assert len(sent) == 5
    assert {span.status.status_code for span in sent} == {StatusCode.UNSET}
    assert {parent_ids(span) for span in processed} == {ids(span) for span in sent}


def test_failed_send_sets_the_status_of_its_span() -> None:
    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            with pytest.raises(TopicNotFound):
                await producer.send("nothing", b"one")
            with pytest.raises(TopicNotFound):
                await producer.send_many("nothing", [b"one"])

    for span in traced(scene).spans("send"):
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "TopicNotFound"


def test_metrics_count_sent_and_consumed_messages_and_durations() -> None:
    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            await producer.send_many(TOPIC, [b"one", b"two"])
        await stage.consume(lambda consumer: consumer.run(stage.keep))

    data: Any = traced(scene).reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    counts = {
        metric.name: sum(
            point.value if hasattr(point, "value") else point.count
            for point in metric.data.data_points
        )
        for metric in metrics
    }
    assert counts == {
        "messaging.client.sent.messages": 2,
        "messaging.client.operation.duration": 1,
        "messaging.client.consumed.messages": 2,
        "messaging.process.duration": 2,
    }


def test_traces_leave_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Traced) -> None:
        async with stage.producer() as producer:
            for pending in [await producer.submit(TOPIC, Message(b"%d" % n)) for n in range(50)]:
                await pending
        await stage.consume(lambda consumer: consumer.run(stage.keep))

    with caplog.at_level(logging.WARNING, "opentelemetry"):
        assert len(traced(scene).spans("process")) == 50
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
