"""Conditions on properties, from the consumer to the log and back, on a real cluster.

Goal: a member gets exactly the messages that match its condition, though whole batches arrive; a
failed message is delivered again whatever the condition is; a member with another filter is refused
with the difference, and an invalid condition before any call.
Method: real services, and once those of `batonmq_server.testing`; messages of one batch differ in
their properties.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace

import pytest

from batonmq._consumer import group_view
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.puller import Puller, PullerSettings
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._core.subscription import Filter, parse_filter
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.errors import BadExpression, BatonError, SubscriptionConflict
from batonmq_server.testing import MemoryBroker
from tests.client.group import QUICK, Scene, handle_all, scene
from tests.support.conditions import until

NO_SERVER = "127.0.0.1:1"


async def send(at: Scene, *prices: int | None) -> None:
    """Send messages with these prices to one queue, in as few batches as possible."""
    queue = QueueRef(at.topic, "broker-0", 0)
    async with Producer(at.nameserver) as producer:
        for number, price in enumerate(prices):
            properties = {} if price is None else {"price": str(price), "region": "eu"}
            message = Message(
                str(price).encode(), "even" if number % 2 == 0 else "odd", (), properties
            )
            await producer.submit(at.topic, message, queue=queue)


@pytest.mark.e2e
async def test_consumer_gets_only_messages_that_match_its_condition(
    nameserver: str,
) -> None:
    async with scene(nameserver, 1) as at:
        await send(at, 1, 20, None, 3, 40, None)
        async with handle_all(at, "a", "sql: price > 10 AND region = 'eu'"):
            await until(lambda: len(at.handled) == 2)
            await send(at, 5, 60)
            await until(lambda: len(at.handled) == 3)

            async def done() -> bool:
                return await at.lag() == 0

            await until(done)
        assert at.by("a") == ["20", "40", "60"]


@pytest.mark.e2e
async def test_condition_may_test_the_tag_and_missing_properties(nameserver: str) -> None:
    async with scene(nameserver, 1) as at:
        await send(at, 1, 20, None, 3, None, None)
        async with handle_all(at, "a", "sql: TAGS = 'odd' AND (price IS NULL OR price > 10)"):
            await until(lambda: len(at.handled) == 2)
        assert at.by("a") == ["20", "None"]


@pytest.mark.e2e
@pytest.mark.parametrize("group", [True, False])
async def test_puller_filters_alike_with_and_without_a_group(nameserver: str, group: bool) -> None:
    async with scene(nameserver, 1) as at:
        await send(at, 1, 20, None, 3, 40)
        filters = {at.topic: "sql: price BETWEEN 2 AND 30"}
        settings = PullerSettings(consume_from="first")
        name = at.group if group else ""
        if group:
            await _create_unowned(at)
        async with Puller(nameserver, name, settings, filters=filters) as pulling:
            (queue,) = await pulling.queues(at.topic)
            await pulling.assign([queue])
            bodies: list[str] = []
            async with asyncio.timeout(40):
                while len(bodies) < 2:
                    for messages in (await pulling.poll(5_000, 100)).values():
                        bodies += [message.body.decode() for message in messages]
            assert bodies == ["20", "3"]

            async def has_passed_the_rest() -> bool:
                assert not await pulling.poll(0, 100)
                return await pulling.position(queue) == 5

            await until(has_passed_the_rest)


@pytest.mark.e2e
async def test_failed_message_is_delivered_again_with_its_properties(nameserver: str) -> None:
    async with scene(nameserver, 1) as at:
        await send(at, 1, 20)
        settings = replace(QUICK, send_back=True)
        seen: list[tuple[str, int, str]] = []

        async def handle(message: ReceivedMessage) -> object:
            seen.append((message.body.decode(), message.attempts, message.properties["price"]))
            return RetryLater(1_000) if message.attempts == 1 else None

        async with (
            at.consumer("a", "sql: price > 10", settings) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(consumer.run(handle))
            await until(lambda: len(seen) == 2)
            consumer.stop()
        assert seen == [("20", 1, "20"), ("20", 2, "20")]


@pytest.mark.e2e
async def test_members_with_a_condition_and_with_tags_conflict_with_the_difference(
    nameserver: str,
) -> None:
    async with scene(nameserver, 1) as at, at.consumer("a", "sql: price>10"):
        async with at.consumer("b", "sql:  price > 10"):
            pass
        with pytest.raises(SubscriptionConflict) as refused:
            async with at.consumer("c", "even"):
                pass
        (difference,) = refused.value.differences
        assert (difference.newcomer_value, difference.member_value) == ("even", "sql: price > 10")


async def test_invalid_condition_is_refused_before_any_call() -> None:
    with pytest.raises(BadExpression, match="column 11: 'x' where"):
        Consumer(NO_SERVER, "g", {"orders": "sql: a > 5x"})
    with pytest.raises(BadExpression, match="the end where"):
        Puller(NO_SERVER, filters={"orders": "sql: a >"})


def read_like_an_earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members fail to read conditions with IN, in the record of their group."""

    def parse(expression: str) -> Filter:
        if " IN " in expression:
            raise BadExpression("IN is not part of the grammar")
        return parse_filter(expression)

    monkeypatch.setattr(group_view, "parse_filter", parse)


async def outcome_of(work: Coroutine[object, object, None]) -> BatonError | None:
    """Return the error of `work`, if it has one."""
    try:
        await work
    except BatonError as error:
        return error
    return None


@pytest.mark.e2e
async def test_member_that_can_not_read_the_new_subscription_ends_with_the_reason(
    nameserver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of a later version brings a condition that the library of this one can't read."""
    async with scene(nameserver, 1) as at:
        async with Admin(nameserver) as admin:
            await admin.update_group(at.group, policy="warn")
        read_like_an_earlier_version(monkeypatch)
        owns = asyncio.Event()

        async def stay() -> None:
            async with at.consumer("old", "sql: price > 1") as old:
                await until(lambda: bool(old.assignment))
                owns.set()
                await old.run(lambda _: None)

        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(outcome_of(stay()))
            await owns.wait()
            with pytest.raises(BadExpression, match="this member ends"):
                async with at.consumer("new", "sql: region IN ('eu', 'us')"):
                    raise AssertionError("joined")
        ended = staying.result()
        assert isinstance(ended, BadExpression)
        assert "this version of the library can't read" in ended.message
        assert ended.facts["group"] == at.group
        assert ended.facts["topic"] == at.topic
        assert "Update the library" in ended.remedy
        async with Admin(nameserver) as admin:
            described = await admin.describe_group(at.group)
        assert not described.members, "both have left at once"


async def _create_unowned(at: Scene) -> None:
    async with Admin(at.nameserver) as admin:
        await admin.update_group(at.group, ownership="off")


async def test_condition_filters_in_the_in_memory_broker() -> None:
    async with MemoryBroker() as broker:
        await broker.create_topic("orders", 1)
        async with broker.producer() as producer:
            for price in range(20):
                await producer.send("orders", b"%d" % price, properties={"price": str(price)})
        async with broker.consumer("billing", {"orders": "sql: price >= 17"}) as consumer:
            bodies: list[bytes] = []
            async for message in consumer:
                bodies.append(message.body)
                if len(bodies) == 3:
                    consumer.stop()
        assert bodies == [b"17", b"18", b"19"]
