"""Goal: values go through a topic unchanged; a body that can't be one is refused at once, with why.

Method: each schema alone with good and bad bodies; then producers, consumers and registries on
`MemoryBroker` in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import pydantic
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import given
from hypothesis import strategies as st

from batonmq import (
    BadBody,
    Consumer,
    ConsumerSettings,
    MessageBatch,
    MessageFailed,
    Puller,
    ReceivedMessage,
)
from batonmq._core.retries import dead_letter_topic
from batonmq.errors import InvalidArgument, Unreachable
from batonmq.schemas import (
    AvroSchema,
    ProtobufSchema,
    PydanticSchema,
    Schema,
    SchemaRegistry,
    decoding,
)
from batonmq.schemas.avro_schema import HEADER_BYTES, MARKER, ParsedSchema
from batonmq_server.testing import MemoryBroker, run_virtual

TOPIC, GROUP = "orders", "billing"
FIRST = {"type": "record", "name": "Order", "fields": [{"name": "number", "type": "long"}]}
SECOND = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "number", "type": "long"},
        {"name": "state", "type": "string", "default": "open"},
    ],
}
OTHER = {"type": "record", "name": "Order", "fields": [{"name": "number", "type": "string"}]}


class Order(pydantic.BaseModel):
    """A body in JSON."""

    number: int
    lines: list[str] = []


def registry_of(broker: MemoryBroker, topic: str = "schemas") -> SchemaRegistry:
    return SchemaRegistry(broker.nameserver, topic, environment=broker.environment)


async def decoded(schema: Schema[Any], body: bytes) -> Any:
    return await schema.decode(body)


def refusal(schema: Schema[Any], body: bytes) -> str:
    """Return why a body is refused."""
    with pytest.raises(BadBody) as raised:
        asyncio.run(decoded(schema, body))
    return str(raised.value)


# ---- each schema


def test_pydantic_value_is_the_same_after_a_round_trip() -> None:
    orders = PydanticSchema(Order)
    order = Order(number=7, lines=["a", "b"])
    assert orders.encode(order) == b'{"number":7,"lines":["a","b"]}'
    assert asyncio.run(orders.decode(orders.encode(order))) == order


def test_type_that_is_no_model_can_be_a_pydantic_schema() -> None:
    numbers = PydanticSchema(dict[str, int])
    assert asyncio.run(numbers.decode(numbers.encode({"a": 1}))) == {"a": 1}


@pytest.mark.parametrize("body", [b"", b"no json", b"{}", b'{"number":"x"}', b"[1]", b"\xff"])
def test_bad_body_of_pydantic_says_where_and_not_what(body: bytes) -> None:
    assert refusal(PydanticSchema(Order), body).startswith("the body is no Order: ")


def test_reason_of_pydantic_contains_no_value() -> None:
    reason = refusal(PydanticSchema(Order), b'{"number":"a secret","lines":[1,2,3,4]}')
    assert "number: " in reason
    assert "a secret" not in reason
    assert reason.endswith("and 2 more")


def test_reason_of_a_union_contains_no_tag_of_the_body() -> None:
    class Card(pydantic.BaseModel):
        kind: Literal["card"]

    class Cash(pydantic.BaseModel):
        kind: Literal["cash"]

    kinds = Annotated[Card | Cash, pydantic.Field(discriminator="kind")]
    payments: PydanticSchema[Any] = PydanticSchema(list[kinds])
    reason = refusal(payments, b'[{"kind":"a secret"}]')
    assert reason.endswith("0: The tag is none of the expected ones: 'card', 'cash'")


def test_value_that_is_no_model_is_not_encoded() -> None:
    with pytest.raises(InvalidArgument, match="the value is no Order: number"):
        PydanticSchema(Order).encode({"lines": []})  # type: ignore[arg-type]


def test_protobuf_value_is_the_same_after_a_round_trip() -> None:
    times = ProtobufSchema(Timestamp)
    assert asyncio.run(times.decode(times.encode(Timestamp(seconds=5)))) == Timestamp(seconds=5)


def test_bad_body_of_protobuf_names_the_type() -> None:
    assert "no google.protobuf.Timestamp" in refusal(ProtobufSchema(Timestamp), b"\x08")


def test_message_of_another_type_is_not_encoded() -> None:
    with pytest.raises(InvalidArgument, match=r"a StringValue, and not a google\.protobuf"):
        ProtobufSchema(Timestamp).encode(StringValue())  # type: ignore[arg-type]


def test_fingerprint_is_that_of_the_specification() -> None:
    """Source: Avro 1.12, share/test/data/schema-tests.txt: 7195948357588979594 for null."""
    assert ParsedSchema("null").fingerprint == (7195948357588979594).to_bytes(8, "little")


@pytest.mark.parametrize("definition", [{"type": "nothing"}, {"fields": []}, [1], {}])
def test_bad_schema_is_refused(definition: Any) -> None:
    with pytest.raises(InvalidArgument, match="no schema of Avro"):
        ParsedSchema(definition)


class OneSchema(SchemaRegistry):
    """A registry without a topic."""

    def __init__(self) -> None:
        self.stored: dict[bytes, ParsedSchema] = {}

    async def _find(self, fingerprint: bytes) -> ParsedSchema | None:
        return self.stored.get(fingerprint)


def avro(definition: Any, *stored: Any) -> AvroSchema:
    """Return a schema whose registry has `stored`."""
    registry = OneSchema()
    for one in map(ParsedSchema, stored):
        registry.stored[one.fingerprint] = one
    return AvroSchema(ParsedSchema(definition), registry)


def test_avro_value_is_the_same_after_a_round_trip() -> None:
    orders = avro(FIRST)
    body = orders.encode({"number": 7})
    assert body == b"\xc3\x01" + orders.fingerprint + b"\x0e"
    assert asyncio.run(orders.decode(body)) == {"number": 7}


def test_reader_and_writer_may_have_different_versions() -> None:
    old, new = avro(FIRST, SECOND), avro(SECOND, FIRST)
    assert asyncio.run(new.decode(old.encode({"number": 7}))) == {"number": 7, "state": "open"}
    body = new.encode({"number": 8, "state": "paid"})
    assert asyncio.run(old.decode(body)) == {"number": 8}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"", "does not begin"),
        (lambda body: body[:HEADER_BYTES], "does not fit the schema: EOFError"),
        (lambda body: b"\xc3\x02" + body[2:], "does not begin"),
        (lambda body: MARKER + bytes(8) + body[HEADER_BYTES:], "has no schema 0000000000000000"),
        (lambda body: body + b"\x00", "has 1 more bytes"),
    ],
)
def test_bad_body_of_avro_says_what_is_wrong(change: Callable[[bytes], bytes], reason: str) -> None:
    orders = avro(FIRST)
    assert reason in refusal(orders, change(orders.encode({"number": 7})))


def test_version_that_does_not_fit_is_refused() -> None:
    body = avro(OTHER).encode({"number": "seven"})
    assert "does not fit the schema" in refusal(avro(FIRST, OTHER), body)


@given(st.binary(max_size=40))
def test_any_bytes_after_the_header_are_a_value_or_a_bad_body(data: bytes) -> None:
    orders = avro(SECOND)
    try:
        value = asyncio.run(orders.decode(MARKER + orders.fingerprint + data))
    except BadBody:
        return
    assert value.keys() == {"number", "state"}


@pytest.mark.parametrize("value", [{}, {"number": "x"}, {"number": 1, "more": 2}, None])
def test_value_that_does_not_fit_is_not_encoded(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="does not fit the schema"):
        avro(FIRST).encode(value)


# ---- with a broker


@asynccontextmanager
async def consuming(
    broker: MemoryBroker, handler: Any, settings: ConsumerSettings | None = None
) -> AsyncIterator[Consumer]:
    """Run a consumer until the end of the block."""
    async with (
        broker.consumer(GROUP, {TOPIC: "*"}, settings) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(handler))
        yield consumer
        consumer.stop()


async def send(broker: MemoryBroker, *bodies: bytes) -> None:
    async with broker.producer() as producer:
        for body in bodies:
            await producer.send(TOPIC, body)


def test_handler_gets_values_and_bad_bodies_become_dead_letters_at_once() -> None:
    async def run() -> tuple[list[int], list[ReceivedMessage], float]:
        numbers: list[int] = []
        orders = PydanticSchema(Order)

        async def bill(order: Order, message: ReceivedMessage) -> None:
            assert message.topic == TOPIC
            numbers.append(order.number)

        loop = asyncio.get_running_loop()
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, 1)
            bodies = orders.encode(Order(number=1)), b"spoiled", orders.encode(Order(number=2))
            await send(broker, *bodies)
            begin_s = loop.time()
            async with consuming(broker, decoding(orders, bill)):
                await broker.settled(GROUP)
            took_s = loop.time() - begin_s
            return numbers, await broker.messages(dead_letter_topic(GROUP)), took_s

    numbers, dead, took_s = run_virtual(run())
    assert numbers == [1, 2]
    assert [letter.body for letter in dead] == [b"spoiled"]
    assert dead[0].properties["baton.attempts"] == "1"
    assert dead[0].properties["baton.error"].startswith("BadBody: the body is no Order")
    assert took_s < 10, "the first retry would come after 10 s"


def test_plain_function_gets_values_too() -> None:
    async def run() -> list[int]:
        numbers: list[int] = []
        orders = PydanticSchema(Order)
        handle = decoding(orders, lambda order, _: numbers.append(order.number))
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, 1)
            await send(broker, orders.encode(Order(number=1)))
            async with consuming(broker, handle):
                await broker.settled(GROUP)
        return numbers

    assert asyncio.run(run()) == [1]


def test_bad_body_stops_a_consumer_that_stops_at_failures() -> None:
    async def run() -> None:
        settings = ConsumerSettings(consume_from="first", exhausted="stop")
        handle = decoding(PydanticSchema(Order), lambda *_: None)
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, 1)
            await send(broker, b"spoiled")
            async with broker.consumer(GROUP, {TOPIC: "*"}, settings) as consumer:
                await consumer.run(handle)

    with pytest.raises(MessageFailed, match="BadBody: the body is no Order"):
        asyncio.run(run())


def test_bad_body_in_a_batch_is_a_dead_letter_once_its_message_is_alone() -> None:
    """The error of a batch does not say which message it means, so both are retried."""

    async def run() -> tuple[list[int], list[ReceivedMessage]]:
        sizes: list[int] = []

        async def handle(batch: MessageBatch) -> None:
            sizes.append(len(batch))
            if b"bad" in batch.bodies():
                raise BadBody("one of them")

        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, 1)
            await send(broker, b"good", b"bad")
            async with (
                broker.consumer(GROUP, {TOPIC: "*"}) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(consumer.run_batches(handle))
                await broker.settled(GROUP)
                consumer.stop()
            return sizes, await broker.messages(dead_letter_topic(GROUP))

    sizes, dead = run_virtual(run())
    assert sizes[0] == 2
    assert [letter.body for letter in dead] == [b"bad"]
    assert int(dead[0].properties["baton.attempts"]) > 1


def test_reader_learns_a_schema_that_was_stored_after_it_began() -> None:
    async def run() -> list[Any]:
        async with MemoryBroker() as broker, registry_of(broker) as old, registry_of(broker) as new:
            reader = await old.avro(FIRST)
            writer = await new.avro(SECOND)
            body = writer.encode({"number": 7, "state": "paid"})
            return [await reader.decode(body), await reader.decode(body)]

    assert run_virtual(run()) == [{"number": 7}, {"number": 7}]


def test_reader_learns_the_schemas_of_a_topic_that_was_created_again() -> None:
    async def scene() -> object:
        async with MemoryBroker() as broker, broker.admin() as admin:
            async with registry_of(broker) as before:
                await before.avro(FIRST)
            async with registry_of(broker) as reading:
                reader = await reading.avro(FIRST)
                await admin.delete_topic("schemas")
                async with registry_of(broker) as writing:
                    body = (await writing.avro(SECOND)).encode({"number": 1, "state": "paid"})
                return await reader.decode(body)

    assert run_virtual(scene()) == {"number": 1}


def test_schema_is_stored_again_in_a_topic_that_was_created_again() -> None:
    async def scene() -> object:
        async with (
            MemoryBroker() as broker,
            broker.admin() as admin,
            registry_of(broker) as writing,
        ):
            await writing.avro(FIRST)
            await admin.delete_topic("schemas")
            async with registry_of(broker) as reading:
                reader = await reading.avro(SECOND)
                body = (await writing.avro(FIRST)).encode({"number": 1})
                return await reader.decode(body)

    assert run_virtual(scene()) == {"number": 1, "state": "open"}


def test_topic_that_was_created_again_with_two_queues_is_no_registry() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, broker.admin() as admin, registry_of(broker) as one:
            await admin.delete_topic("schemas")
            await broker.create_topic("schemas", 2)
            with pytest.raises(InvalidArgument, match="topic schemas is no registry"):
                await one.avro(FIRST)

    run_virtual(run())


def test_schema_is_stored_once_and_outlives_its_registry() -> None:
    async def run() -> int:
        async with MemoryBroker() as broker:
            for _ in range(3):
                async with registry_of(broker) as registry:
                    await registry.avro(FIRST)
                    await registry.avro(FIRST)
            return len(await broker.messages("schemas"))

    assert run_virtual(run()) == 1


def test_unknown_schema_is_a_bad_body_only_if_the_registry_can_be_read() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker, registry_of(broker) as registry:
            orders = await registry.avro(FIRST)
            body = MARKER + bytes(8) + b"\x00"
            with pytest.raises(BadBody):
                await orders.decode(body)
            with broker._disconnected("client"), pytest.raises(Unreachable):
                await orders.decode(body)

    run_virtual(run())


def test_registry_that_can_not_be_read_in_time_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stands_still(*_: object) -> int:
        return 0

    async def run() -> None:
        async with MemoryBroker() as broker:
            async with registry_of(broker) as registry:
                await registry.avro(FIRST)
            monkeypatch.setattr(Puller, "position", stands_still)
            with pytest.raises(Unreachable, match="not read within 30 s"):
                async with registry_of(broker):
                    pass

    run_virtual(run())


def test_messages_that_are_no_schemas_are_passed_over() -> None:
    async def run() -> Any:
        async with MemoryBroker() as broker, registry_of(broker) as registry:
            async with broker.producer() as producer:
                for body in (b"", b"no json", b'{"type":"nothing"}', b'"long"'):
                    await producer.send("schemas", body, ordering_key="not its fingerprint")
            orders = await registry.avro(FIRST)
            async with registry_of(broker) as second:
                assert await second._find(ParsedSchema("long").fingerprint) is None
                return await (await second.avro(SECOND)).decode(orders.encode({"number": 7}))

    assert run_virtual(run()) == {"number": 7, "state": "open"}


def test_topic_that_is_not_compacted_is_no_registry() -> None:
    async def run() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic(TOPIC, 1)
            with pytest.raises(InvalidArgument, match="topic orders is no registry"):
                async with registry_of(broker, TOPIC):
                    pass

    run_virtual(run())
