"""Goal: each output of a transformer is stored once for its input, whatever happens in between.

Method: transformers on `MemoryBroker` in virtual time; members are cut off, killed and fenced, the
group is reset, handlers fail and change their minds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from baton.storage.v1 import output_service_pb2 as pb
from batonmq._common.rpc import error_from_pb
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings, MessageOrder
from batonmq._consumer.handler_results import MessageFailed
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.transform_adapter import TransformHandler
from batonmq._core.outputs import Output
from batonmq._core.reset_targets import ToEarliest
from batonmq._core.retries import dead_letter_topic
from batonmq._telemetry.client_metrics import ClientMetrics
from batonmq.admin.admin import Admin
from batonmq.admin.operation import Operation
from batonmq.admin.outputs import remembered_outputs
from batonmq.admin.resets import Resets, ResetScope
from batonmq.errors import InvalidArgument, TopicNotFound
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.support.conditions import until

IN, OUT, GROUP = "orders", "items", "doubler"
SOURCE = pb.OutputSource(group="g", topic_id=1, broker="broker-0", queue_id=0)
IN_PLACE = ConsumerSettings(consume_from="first", send_back=False)


async def double(message: ReceivedMessage) -> list[Output]:
    """Return two outputs."""
    return [Output(message.body + part, ordering_key="k") for part in (b"/0", b"/1")]


@asynccontextmanager
async def orders(count: int) -> AsyncIterator[MemoryBroker]:
    """Yield a broker with `count` orders."""
    async with MemoryBroker(broker_count=2) as broker:
        await broker.create_topic(IN, 4)
        await broker.create_topic(OUT, 4)
        async with broker.producer() as producer:
            for number in range(count):
                await producer.send(IN, b"%d" % number)
        yield broker


@asynccontextmanager
async def transforming(
    broker: MemoryBroker, handler: TransformHandler, settings: ConsumerSettings = IN_PLACE
) -> AsyncIterator[Consumer]:
    """Run a transformer until the end of the block."""
    async with (
        broker.consumer(GROUP, {IN: "*"}, settings) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.transform(handler, to=OUT))
        try:
            yield consumer
        finally:
            consumer.stop()


async def found(broker: MemoryBroker, topic: str = OUT) -> Counter[bytes]:
    """Return how often each output is stored."""
    return Counter(one.body for one in await broker.messages(topic))


def once(count: int) -> Counter[bytes]:
    """Return the outputs of `double`, once each."""
    return Counter(b"%d/%d" % (number, part) for number in range(count) for part in range(2))


@pytest.mark.parametrize("form", ["list", "generator", "async generator", "bytes"])
def test_every_form_of_outputs_is_stored(form: str) -> None:
    def generate(message: ReceivedMessage) -> Iterator[bytes]:
        yield message.body

    async def generate_async(message: ReceivedMessage) -> AsyncIterator[Output]:
        yield Output(message.body)

    async def return_bytes(message: ReceivedMessage) -> bytes:
        return message.body

    async def return_list(message: ReceivedMessage) -> list[bytes]:
        return list(generate(message))

    forms: dict[str, TransformHandler] = {
        "list": return_list,
        "async generator": generate_async,
        "bytes": return_bytes,
    }

    async def main() -> None:
        async with orders(3) as broker, transforming(broker, forms.get(form, return_list)):
            await broker.settled(GROUP)
            assert await found(broker) == Counter([b"0", b"1", b"2"])

    run_virtual(main())


def test_member_that_is_cut_off_after_its_outputs_were_stored_leaves_no_duplicate() -> None:
    async def main() -> None:
        async with orders(40) as broker:
            settings = ConsumerSettings(
                consume_from="first", send_back=False, commit_interval_ms=60_000,
                commit_on_pull=False,
            )  # fmt: skip
            async with transforming(broker, double, settings) as first:
                await until(lambda: _stored(broker, 80))
                with broker.cut_off(first):
                    async with transforming(broker, double):
                        await broker.settled(GROUP)
            assert await found(broker) == once(40)

    run_virtual(main())


@pytest.mark.parametrize("ends", ["while it is cut off", "when it is back"])
def test_handler_of_a_member_that_was_cut_off_stores_nothing_that_is_stored(ends: str) -> None:
    """Another member has handled its input, which is below the committed offset then."""

    async def main() -> None:
        begun, end = asyncio.Event(), asyncio.Event()

        async def handle(message: ReceivedMessage) -> list[Output]:
            begun.set()
            await end.wait()
            return await double(message)

        async with orders(1) as broker, broker.producer() as producer:
            async with transforming(broker, handle) as first:
                await begun.wait()
                with broker.cut_off(first):
                    if ends == "while it is cut off":
                        end.set()
                    async with transforming(broker, double):
                        await broker.settled(GROUP)
                await until(lambda: len(first.assignment) == 4)
                end.set()
                await producer.send(IN, b"1")
                await broker.settled(GROUP)
            assert await found(broker) == once(2)

    run_virtual(main())


def test_member_that_acquires_its_queue_again_compares_what_it_has_sent() -> None:
    """The first outputs are stored, and their receipt is lost; the others join the next batch."""

    async def main() -> None:
        first, all_of_them, called = asyncio.Event(), asyncio.Event(), list[ReceivedMessage]()

        async def handle(message: ReceivedMessage) -> list[Output]:
            called.append(message)
            await (first if int(message.body) < 2 else all_of_them).wait()
            return await double(message)

        async with MemoryBroker(seed="again") as broker:
            await broker.create_topic(IN, 1)
            await broker.create_topic(OUT, 1)
            async with broker.producer() as producer:
                for number in range(6):
                    await producer.send(IN, b"%d" % number)
            settings = ConsumerSettings(
                consume_from="first", send_back=False, queue_concurrency=6, keep_alive_ms=2_000
            )
            async with transforming(broker, handle, settings) as consumer:
                await until(lambda: len(called) == 6)
                client, cut = broker._clients[consumer].name, broker._environment.network.cut
                cut |= (lost := {(server, client) for server in broker._running})
                first.set()
                await until(lambda: _stored(broker, 4))
                all_of_them.set()
                await asyncio.sleep(60)
                cut -= lost
                await broker.settled(GROUP, timeout_s=120)
            assert await found(broker) == once(6)

    run_virtual(main())


async def _stored(broker: MemoryBroker, count: int) -> bool:
    return (await found(broker)).total() >= count


def test_reset_produces_the_outputs_again() -> None:
    async def main() -> None:
        async with orders(5) as broker, transforming(broker, double):
            await broker.settled(GROUP)
            async with broker.admin() as admin:
                resets = Resets(admin)
                plan = await resets.plan(GROUP, ToEarliest(), ResetScope())
                await resets.reset(plan, Operation("operator", "again"))
            await until(lambda: _stored(broker, 20))
            await broker.settled(GROUP)
            assert await found(broker) == Counter(dict.fromkeys(once(5), 2))

    run_virtual(main())


def test_different_output_of_a_repeated_input_is_reported_and_not_stored() -> None:
    registry = CollectorRegistry()

    async def main() -> None:
        async with orders(6) as broker:
            slow_commits = ConsumerSettings(
                consume_from="first", send_back=False, commit_interval_ms=60_000,
                commit_on_pull=False,
            )  # fmt: skip
            async with transforming(broker, double, slow_commits) as first:
                await until(lambda: _stored(broker, 12))
                with broker.cut_off(first):
                    await run_other(broker)
            assert await found(broker) == once(6)

    async def run_other(broker: MemoryBroker) -> None:
        async def other(message: ReceivedMessage) -> Output:
            return Output(message.body + b"/other")

        stops = ConsumerSettings(
            consume_from="first", send_back=False, retries_max=1, exhausted="stop"
        )
        consumer = Consumer(
            broker.nameserver, GROUP, {IN: "*"}, stops, metrics=ClientMetrics(registry),
            environment=broker.environment,
        )  # fmt: skip
        with pytest.raises(MessageFailed, match="OutputMismatch"):
            async with consumer:
                await consumer.transform(other, to=OUT)

    run_virtual(main())
    labels = {"group": GROUP, "topic": IN, "reason": "OUTPUT_MISMATCH"}
    assert registry.get_sample_value("baton_consumer_refused_outputs_total", labels)


@pytest.mark.parametrize("order", ["none", "queue", "key"])
def test_why_stuck_names_the_input_whose_outputs_differ(order: MessageOrder) -> None:
    async def other(message: ReceivedMessage) -> list[Output]:
        return [Output(b"other"), *await double(message)]

    async def is_reported(admin: Admin) -> bool:
        found = {one.reason for one in await admin.why_stuck(GROUP)}
        return "OUTPUTS_REFUSED" in found

    async def main() -> None:
        slow_commits = ConsumerSettings(
            consume_from="first", order=order, send_back=False, commit_interval_ms=60_000,
            commit_on_pull=False,
        )  # fmt: skip
        async with orders(6) as broker, broker.admin() as admin:
            async with transforming(broker, double, slow_commits) as first:
                await until(lambda: _stored(broker, 12))
                with broker.cut_off(first):
                    settings = ConsumerSettings(consume_from="first", order=order, send_back=False)
                    async with transforming(broker, other, settings):
                        await until(lambda: is_reported(admin))
                        (stuck, *_) = [
                            one
                            for one in await admin.why_stuck(GROUP)
                            if one.reason == "OUTPUTS_REFUSED"
                        ]
                    assert stuck.evidence["failed_reason"] == "OUTPUT_MISMATCH"
                    assert stuck.evidence["offset"] == stuck.evidence["running_offset"] == "0"
                    assert "than those that are stored" in stuck.message
            assert await found(broker) == once(6)

    run_virtual(main())


def test_input_that_fails_too_often_has_one_dead_letter_and_no_output() -> None:
    async def fail(message: ReceivedMessage) -> bytes:
        if message.body == b"1":
            raise ValueError("no")
        return message.body

    async def main() -> None:
        settings = ConsumerSettings(
            consume_from="first", send_back=False, retries_max=2, retry_first_ms=10
        )
        async with orders(3) as broker, transforming(broker, fail, settings):
            await broker.settled(GROUP)
            assert await found(broker) == Counter([b"0", b"2"])
            (letter,) = await broker.messages(dead_letter_topic(GROUP))
            assert letter.body == b"1"
            assert letter.properties["baton.attempts"] == "3"

    run_virtual(main())


def test_handler_that_names_another_topic_fails() -> None:
    async def elsewhere(message: ReceivedMessage) -> Output:
        return Output(message.body, topic="elsewhere")

    async def main() -> None:
        settings = ConsumerSettings(
            consume_from="first", send_back=False, retries_max=0, exhausted="stop"
        )
        async with orders(1) as broker, broker.consumer(GROUP, {IN: "*"}, settings) as consumer:
            with pytest.raises(MessageFailed, match="names items"):
                await consumer.transform(elsewhere, to=OUT)

    run_virtual(main())


def test_transform_is_refused_where_it_can_not_be_exact() -> None:
    async def main() -> None:
        async with orders(0) as broker:
            async with broker.consumer(GROUP, {IN: "*"}) as consumer:
                with pytest.raises(InvalidArgument, match="send_back"):
                    await consumer.transform(double, to=OUT)
            async with broker.consumer(GROUP + "-2", {IN: "*"}, IN_PLACE) as consumer:
                with pytest.raises(TopicNotFound):
                    await consumer.transform(double, to="missing")
                with pytest.raises(InvalidArgument, match="output topic"):
                    await consumer.transform(double, to=())

    run_virtual(main())


def test_brokers_list_what_they_remember_of_a_group() -> None:
    async def main() -> None:
        async with orders(8) as broker, transforming(broker, double):
            await broker.settled(GROUP)
            async with broker.admin() as admin:
                found, problems = await remembered_outputs(admin, GROUP)
                others, _ = await remembered_outputs(admin, "another")
        assert not problems and not others
        assert found and {one.group for one in found} == {GROUP}
        assert all(one.token == 1 and one.forgotten_unix_ms == 0 for one in found)

    run_virtual(main())


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        (pb.OutputOwner(token=1), "INVALID_NAME"),
        (pb.OutputOwner(source=SOURCE), "INVALID_ARGUMENT"),
        (pb.OutputOwner(source=SOURCE, token=1, floor=-1), "INVALID_ARGUMENT"),
        (pb.OutputOwner(source=SOURCE, token=1, floor=1 << 48), "LIMIT_EXCEEDED"),
        (pb.OutputOwner(source=SOURCE, token=2), ""),
    ],
)
def test_each_owner_that_opens_outputs_has_its_own_outcome(
    owner: pb.OutputOwner, reason: str
) -> None:
    async def main() -> None:
        async with orders(0) as broker, broker.admin() as admin:
            stub = await admin.directory.outputs("broker-0")
            request = pb.OpenOutputsRequest(owners=[owner])
            (outcome,) = (await stub.OpenOutputs(request, timeout=5)).outcomes
            if reason:
                assert error_from_pb(outcome.error).reason == reason
                return
            owner.token = 1
            again = pb.OpenOutputsRequest(owners=[owner])
            (outcome,) = (await stub.OpenOutputs(again, timeout=5)).outcomes
            assert error_from_pb(outcome.error).reason == "PRODUCER_FENCED"

    run_virtual(main())
