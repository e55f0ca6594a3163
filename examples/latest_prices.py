"""A table of the latest prices, rebuilt from a compacted topic.

    baton up                                   # in another terminal
    python examples/latest_prices.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. Every change of a price is a
message with the product as its ordering key; an empty body deletes the product. The topic keeps the
newest message of each product, so a program that starts later reads few messages and has the table.
"""

from __future__ import annotations

import asyncio
import os
import sys

from batonmq import Producer, Puller, PullerSettings
from batonmq.admin import Admin, Compaction

TOPIC, PRODUCTS, ROUNDS = "latest-prices", 20, 50
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")


async def change_prices(producer: Producer) -> dict[str, bytes]:
    """Change every price many times, delete one product; return the table as it is then."""
    table: dict[str, bytes] = {}
    for number in range(ROUNDS):
        prices = {f"product-{n}": b"%d" % (100 * n + number) for n in range(PRODUCTS)}
        async with asyncio.TaskGroup() as tasks:
            for product, price in prices.items():
                tasks.create_task(producer.send(TOPIC, price, ordering_key=product))
        table |= prices
    await producer.send(TOPIC, b"", ordering_key="product-0")
    del table["product-0"]
    return table


async def rebuilt(admin: Admin, nameserver: str) -> tuple[dict[str, bytes], int]:
    """Read the topic from its begin; return the table, and how many messages it took."""
    table: dict[str, bytes] = {}
    count = 0
    ends = {
        held.queue: held.next_offset or 0 for held in (await admin.describe_topic(TOPIC)).queues
    }
    async with Puller(nameserver, settings=PullerSettings(consume_from="first")) as puller:
        await puller.assign(ends)
        while [queue for queue, end in ends.items() if await puller.position(queue) < end]:
            for messages in (await puller.poll()).values():
                for message in messages:
                    count += 1
                    if message.body:
                        table[str(message.ordering_key)] = message.body
                    else:
                        table.pop(str(message.ordering_key), None)
    return table, count


async def main(nameserver: str = NAMESERVER) -> None:
    """Change prices, wait for the compaction, and rebuild the table."""
    async with Admin(nameserver) as admin, Producer(nameserver) as producer, asyncio.timeout(60):
        topic = (await admin.create_topic(TOPIC, 2, compaction=Compaction(dirty_percent=10))).topic
        table = await change_prices(producer)
        first, read_count = await rebuilt(admin, nameserver)
        print(f"at once: {read_count} messages for {len(first)} prices")
        begins = dict.fromkeys(topic.queues, 0)
        while sum((await admin.message_counts(begins)).values()) > PRODUCTS:  # noqa: ASYNC110  polls
            await asyncio.sleep(0.5)
        second, read_count = await rebuilt(admin, nameserver)
        print(f"after the compaction: {read_count} messages for {len(second)} prices")
        if not first == second == table or read_count > PRODUCTS:
            sys.exit(f"{read_count} messages gave {second}, the prices are {table}")
    print(f"the table of {len(table)} prices was rebuilt from {read_count} messages")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
