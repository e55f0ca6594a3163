"""Exactly once from topic to topic: orders become order lines, though transformers keep dying.

    baton up                                   # in another terminal
    python examples/order_lines.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. Eight transformers in turn are
stopped in the middle of their work, without time to finish it: what they have handled is handled
again by the next one. Every line of every order is stored once all the same.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator

from batonmq import (
    Admin,
    Consumer,
    ConsumerSettings,
    Output,
    Producer,
    Puller,
    ReceivedMessage,
)

ORDERS, LINES, GROUP = "orders-with-lines", "order-lines", "line-maker"
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
ORDER_COUNT, STOPS = 300, 8
SETTINGS = ConsumerSettings(consume_from="first", order="key", queue_concurrency=4)


def line(order: int, number: int) -> bytes:
    """Return the line of an order; it depends on nothing but the order."""
    return b"order %d line %d" % (order, number)


def lines_of(message: ReceivedMessage) -> Iterator[Output]:
    """Yield one to three lines of an order."""
    order = int(message.body)
    for number in range(1 + order % 3):
        yield Output(line(order, number), ordering_key=message.ordering_key)


async def transform(nameserver: str, seconds: float | None = None) -> None:
    """Make lines for a while, and then stop at once; without a time until all orders are done."""
    async with (
        Consumer(nameserver, GROUP, {ORDERS: "*"}, SETTINGS) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.transform(lines_of, to=LINES))
        if seconds is None:
            await wait_until_done(nameserver)
        else:
            await asyncio.sleep(seconds)
            await consumer.close(drain_ms=0)
        consumer.stop()


async def wait_until_done(nameserver: str) -> None:
    """Wait until the group has acknowledged every order."""
    async with Admin(nameserver) as admin:
        while True:
            queues = (await admin.group_progress(GROUP)).queues
            if queues and all(queue.committed_offset and not queue.lag for queue in queues):
                return
            await asyncio.sleep(0.1)


async def stored(nameserver: str) -> Counter[bytes]:
    """Return how often each line is stored."""
    found: Counter[bytes] = Counter()
    async with Admin(nameserver) as admin, Puller(nameserver) as puller:
        queues = await puller.queues(LINES)
        extents, _ = await admin.extents(queues)
        await puller.assign(queue for queue, (_, end) in extents.items() if end)
        for queue in puller.assignment:
            await puller.seek(queue, "begin")
        while found.total() < sum(end for _, end in extents.values()):
            for messages in (await puller.poll()).values():
                found.update(message.body for message in messages)
    return found


async def main(nameserver: str = NAMESERVER) -> None:
    """Send orders, transform them, and count the lines."""
    first = secrets.randbelow(10**9) * ORDER_COUNT
    orders = range(first, first + ORDER_COUNT)
    async with asyncio.timeout(60):
        async with Admin(nameserver) as admin:
            await admin.create_topic(ORDERS, 4)
            await admin.create_topic(LINES, 4)
        async with Producer(nameserver) as producer, asyncio.TaskGroup() as tasks:
            for order in orders:
                key = f"customer-{order % 40}"
                tasks.create_task(producer.send(ORDERS, b"%d" % order, ordering_key=key))
        for number in range(STOPS):
            await transform(nameserver, seconds=0.05 * number)
        await transform(nameserver)
        found = await stored(nameserver)
    lines = {line(order, number) for order in orders for number in range(1 + order % 3)}
    if twice := [body for body in lines if found[body] > 1]:
        sys.exit(f"{len(twice)} lines are stored twice, such as {twice[0]!r}")
    if missing := lines - found.keys():
        sys.exit(f"{len(missing)} lines are missing")
    print(f"{ORDER_COUNT} orders, {STOPS} transformers stopped at once: {len(lines)} lines, once")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
