"""Goal: a client that is used in a wrong way says so at once; it neither waits nor loses anything.

Method: a broker in memory, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from batonmq import (
    BlockingConsumer,
    BlockingProducer,
    BlockingPuller,
    Consumer,
    ConsumerSettings,
    Message,
    Output,
    Producer,
    ProducerClosed,
    Puller,
    QueueRef,
    ReceivedMessage,
)
from batonmq.errors import InvalidArgument, TopicNotFound, Unreachable
from batonmq.idempotence import MemoryStore, idempotent
from batonmq.schemas import PydanticSchema, decoding
from batonmq_server.testing import MemoryBroker, run_virtual

TOPIC = "t"
QUEUE = QueueRef(TOPIC, "broker-0", 0)


async def handle(_: ReceivedMessage) -> None: ...


def producer(broker: MemoryBroker) -> Producer:
    return Producer(broker.nameserver, group="p", environment=broker.environment)


def consumer(broker: MemoryBroker) -> Consumer:
    settings = ConsumerSettings(send_back=False, consume_from="first")
    return broker.consumer("g", {TOPIC: "*"}, settings)


def puller(broker: MemoryBroker) -> Puller:
    return Puller(broker.nameserver, environment=broker.environment)


CLIENTS: list[Callable[[MemoryBroker], Any]] = [producer, consumer, puller]
CALLS: dict[str, Callable[[MemoryBroker], Awaitable[object]]] = {
    "send": lambda broker: producer(broker).send(TOPIC, b""),
    "send later": lambda broker: producer(broker).send(TOPIC, b"", delay_ms=1),
    "send_many": lambda broker: producer(broker).send_many(TOPIC, [b""]),
    "send_one_way": lambda broker: producer(broker).send_one_way(TOPIC, b""),
    "submit": lambda broker: producer(broker).submit(TOPIC, Message(b"")),
    "request": lambda broker: producer(broker).request(TOPIC, b""),
    "transaction": lambda broker: producer(broker).transaction(TOPIC, b"").__aenter__(),
    "cancel": lambda broker: producer(broker).cancel("broker-0-1"),
    "run": lambda broker: consumer(broker).run(handle),
    "run_batches": lambda broker: consumer(broker).run_batches(lambda _: None),
    "transform": lambda broker: consumer(broker).transform(lambda _: None, to=TOPIC),
    "anext": lambda broker: anext(consumer(broker)),
    "assign": lambda broker: puller(broker).assign([QUEUE]),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_outside_of_the_block_is_refused_at_once(name: str) -> None:
    async def run() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, queues=1)
            begin_s = asyncio.get_running_loop().time()
            with pytest.raises(InvalidArgument, match="is not open"):
                await CALLS[name](broker)
            assert asyncio.get_running_loop().time() == begin_s

    run_virtual(run())


@pytest.mark.parametrize("make", CLIENTS)
def test_client_has_one_block(make: Callable[[MemoryBroker], Any]) -> None:
    async def run() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, queues=1)
            client = make(broker)
            async with client:
                pass
            with pytest.raises(InvalidArgument, match="in a block before"):
                async with client:
                    pass
            async with broker.consumer("g", {TOPIC: "*"}, ConsumerSettings(send_back=False)) as one:
                while not one.assignment:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert asyncio.get_running_loop().time() < 5, "a member was left behind"

    run_virtual(run())


def test_consumer_that_could_not_join_may_be_tried_again() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, producer(broker) as sender:
            one = consumer(broker)
            with pytest.raises(TopicNotFound):
                async with one:
                    pass
            await broker.create_topic(TOPIC, queues=1)
            await sender.send(TOPIC, b"x")
            async with one:
                assert (await anext(one)).body == b"x"

    run_virtual(run())


def test_closed_producer_cancels_nothing() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, producer(broker) as closed:
            await closed.close()
            with pytest.raises(ProducerClosed):
                await closed.cancel("broker-0-1")

    run_virtual(run())


def test_text_is_not_taken_for_a_list_of_keys() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, producer(broker) as sender:
            await broker.create_topic(TOPIC, queues=1)
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: sender.send(TOPIC, b"", keys="order-1"),
                lambda: sender.send_one_way(TOPIC, b"", keys="order-1"),
                lambda: sender.request(TOPIC, b"", keys="order-1"),
                lambda: sender.transaction(TOPIC, b"", keys="order-1").__aenter__(),
            ]
            for call in calls:
                with pytest.raises(InvalidArgument, match="sequence of texts, got 'order-1'"):
                    await call()
            await sender.flush()
            assert await broker.messages(TOPIC) == []

    run_virtual(run())


def test_text_is_not_taken_for_the_keys_of_an_output() -> None:
    async def run() -> None:
        settings = ConsumerSettings(send_back=False, consume_from="first", retries_max=0)
        async with MemoryBroker() as broker, producer(broker) as sender:
            await broker.create_topic(TOPIC, queues=1)
            await broker.create_topic("out", queues=1)
            await sender.send(TOPIC, b"x")
            async with broker.consumer("g", {TOPIC: "*"}, settings) as one:

                async def make(message: ReceivedMessage) -> Output:
                    return Output(message.body, keys="order-1")  # type: ignore[arg-type]

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(one.transform(make, to="out"))
                    await broker.settled("g")
                    one.stop()
            (letter,) = await broker.messages("%DLQ%g")
            assert "keys must be" in letter.properties["baton.error"]
            assert await broker.messages("out") == []

    run_virtual(run())


def test_handler_that_was_called_already_is_refused() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, producer(broker) as sender:
            await broker.create_topic(TOPIC, queues=1)
            await sender.send(TOPIC, b"x")
            async with consumer(broker) as one:
                for bad in (None, "handle", 5):
                    with pytest.raises(InvalidArgument, match="is not a function"):
                        await one.run(bad)  # type: ignore[arg-type]
                message = await anext(one)
            assert (message.body, message.redelivered) == (b"x", False)

    run_virtual(run())


def test_wrapper_of_a_handler_that_was_called_already_is_refused() -> None:
    bad: Any = None
    with pytest.raises(InvalidArgument, match="is not a function"):
        idempotent(bad, MemoryStore(), claim_ms=1, done_ms=1)
    with pytest.raises(InvalidArgument, match="is not a function"):
        decoding(PydanticSchema(int), bad)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"body": "text"}, "body must be bytes, got str"),
        ({"body": None}, "body must be bytes, got NoneType"),
        ({"body": "text", "tag": "t"}, "body must be bytes, got str"),
        ({"tag": b"t"}, "tag must be str, got bytes"),
        ({"keys": [7]}, "keys must be str, got int"),
        ({"properties": {"attempt": 7}}, "properties must be str, got int"),
        ({"properties": {7: "attempt"}}, "properties must be str, got int"),
        ({"properties": ["attempt"]}, "properties must be str, got list"),
        ({"ordering_key": 7}, "ordering_key must be str, got int"),
    ],
)
def test_part_of_a_wrong_type_is_named(options: dict[str, Any], problem: str) -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, producer(broker) as sender:
            await broker.create_topic(TOPIC, queues=1)
            body = options.pop("body", b"")
            for more in ({}, {"delay_ms": 1}):
                with pytest.raises(InvalidArgument, match=problem):
                    await sender.send(TOPIC, body, **(options | more))

    run_virtual(run())


def test_consumer_needs_a_subscription() -> None:
    with pytest.raises(InvalidArgument, match="subscriptions is empty"):
        Consumer("127.0.0.1:1", "g", {})


def test_second_task_that_iterates_is_refused_and_acknowledges_nothing() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, producer(broker) as sender:
            await broker.create_topic(TOPIC, queues=1)
            async with consumer(broker) as one, asyncio.TaskGroup() as tasks:
                first = tasks.create_task(_next_of(one))
                await asyncio.sleep(1)
                with pytest.raises(InvalidArgument, match="another task iterates"):
                    await anext(one)
                await sender.send(TOPIC, b"x")
                assert (await first).body == b"x"
                one.stop()
            async with consumer(broker) as other:
                assert (await anext(other)).redelivered

    run_virtual(run())


async def _next_of(one: Consumer) -> ReceivedMessage:
    return await anext(one)


@pytest.mark.parametrize("make", [BlockingProducer, BlockingConsumer, BlockingPuller])
def test_blocking_client_outside_of_its_block_says_so(make: Any) -> None:
    client = make("127.0.0.1:1", *(("g", {TOPIC: "*"}) if make is BlockingConsumer else ()))
    with pytest.raises(Unreachable, match="is not open"):
        if isinstance(client, BlockingProducer):
            client.send(TOPIC, b"")
        elif isinstance(client, BlockingConsumer):
            client.run(handle)
        else:
            client.poll()


def test_blocking_client_has_one_block() -> None:
    with BlockingPuller("127.0.0.1:1") as client:
        pass
    with pytest.raises(InvalidArgument, match="in a block before"), client:
        pass


def test_producer_of_another_event_loop_is_refused_at_once() -> None:
    calls: list[Callable[[Producer], Coroutine[Any, Any, object]]] = [
        lambda sender: sender.send(TOPIC, b"x"),
        lambda sender: sender.send_many(TOPIC, [b"x"]),
        lambda sender: sender.send_one_way(TOPIC, b"x"),
        lambda sender: sender.send(TOPIC, b"x", delay_ms=1),
        lambda sender: sender.flush(),
    ]

    async def run() -> None:
        async with MemoryBroker() as broker, producer(broker) as sender:
            await broker.create_topic(TOPIC, queues=1)
            await sender.send(TOPIC, b"first")
            for call in calls:
                error = await asyncio.to_thread(_error_in_own_loop, call(sender))
                assert "belongs to another event loop" in str(error)
            assert [one.body for one in await broker.messages(TOPIC)] == [b"first"]

    asyncio.run(run())


def _error_in_own_loop(call: Coroutine[Any, Any, object]) -> BaseException | None:
    try:
        asyncio.run(call)
    except InvalidArgument as error:
        return error
    return None


def test_handler_in_a_thread_may_stop_the_consumer_and_pause_queues() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, producer(broker) as sender:
            await broker.create_topic(TOPIC, queues=1)
            await sender.send(TOPIC, b"x")
            await sender.send(TOPIC, b"y")
            async with consumer(broker) as one:
                handled: list[tuple[bytes, int]] = []

                def handle(message: ReceivedMessage) -> None:
                    handled.append((message.body, message.attempts))
                    one.pause(message.queue)
                    one.resume(message.queue)
                    if message.body == b"y":
                        one.stop()

                await one.run(handle)
            assert handled == [(b"x", 1), (b"y", 1)]
            await broker.settled("g")

    asyncio.run(run(), debug=True)  # asyncio refuses calls in a wrong thread then
