"""Orders as values: two versions of a schema of Avro, and a body that is none.

    baton up                                   # in another terminal
    python examples/typed_orders.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. The producer has a newer version
of the schema than the consumer. The consumer finds it in the registry, a compacted topic, and reads
what both versions have. The bad body becomes a dead letter without any retry.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from batonmq import Admin, Consumer, ConsumerSettings, Producer, ReceivedMessage
from batonmq.errors import TopicNotFound
from batonmq.schemas import SchemaRegistry, decoding

TOPIC, GROUP, COUNT = "typed-orders", "typed-billing", 100
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
NUMBER = {"name": "number", "type": "long"}
STATE = {"name": "state", "type": "string", "default": "open"}
OLD = {"type": "record", "name": "Order", "fields": [NUMBER]}
NEW = {"type": "record", "name": "Order", "fields": [NUMBER, STATE]}
SETTINGS = ConsumerSettings(consume_from="first")


async def produce(nameserver: str) -> None:
    """Send one body that is no order, and orders by the new version."""
    async with SchemaRegistry(nameserver) as registry, Producer(nameserver) as producer:
        orders = await registry.avro(NEW)
        await producer.send(TOPIC, b"no order")
        async with asyncio.TaskGroup() as tasks:
            for number in range(COUNT):
                body = orders.encode({"number": number, "state": "paid"})
                tasks.create_task(producer.send(TOPIC, body))


async def consume(nameserver: str) -> list[int]:
    """Handle the orders by the old version; return their numbers."""
    numbers: list[int] = []
    async with (
        SchemaRegistry(nameserver) as registry,
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as consumer,
        asyncio.timeout(60),
    ):

        async def bill(order: dict[str, Any], _: ReceivedMessage) -> None:
            numbers.append(order["number"])
            if len(numbers) == COUNT:
                consumer.stop()

        await consumer.run(decoding(await registry.avro(OLD), bill))
    return numbers


async def dead_count(admin: Admin) -> int:
    """Return the number of dead letters of the group."""
    try:
        dead = await admin.describe_topic(f"%DLQ%{GROUP}")
    except TopicNotFound:
        return 0
    return sum(queue.count or 0 for queue in dead.queues)


async def main(nameserver: str = NAMESERVER) -> None:
    """Consume while another task produces; check what was handled and what was not."""
    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, 1)
        before = await dead_count(admin)
        async with asyncio.TaskGroup() as tasks:
            numbers = tasks.create_task(consume(nameserver))
            tasks.create_task(produce(nameserver))
        if sorted(numbers.result()) != list(range(COUNT)):
            sys.exit(f"handled {sorted(numbers.result())}")
        if (dead := await dead_count(admin) - before) != 1:
            sys.exit(f"there are {dead} dead letters")
    print(f"{COUNT} orders were read by an older version of their schema; 1 dead letter")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
