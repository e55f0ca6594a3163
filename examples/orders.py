"""Orders that are retried until they are shipped; one never is, and becomes a dead letter.

    baton up                                   # in another terminal
    python examples/orders.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys

from batonmq import Admin, Consumer, ConsumerSettings, Producer, ReceivedMessage, RetryLater
from batonmq.admin import Criteria, DeadLetter, DeadLetters

TOPIC, GROUP = "shop-orders", "shipping"
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
RETRIES_MAX = 3
SETTINGS = ConsumerSettings(consume_from="first", retries_max=RETRIES_MAX)


class Warehouse:
    """Ships orders. Every fifth order is out of stock at first, and the last one has no address.

    Attributes:
        shipped: Number of attempts by shipped order.
        settled: Set when every order is shipped or dead.
    """

    def __init__(self, orders: list[str]) -> None:
        self._delayed, self.lost = set(orders[::5]), orders[-1]
        self._count = len(orders)
        self._is_dead = False
        self.shipped: dict[str, int] = {}
        self.settled = asyncio.Event()

    async def ship(self, message: ReceivedMessage) -> RetryLater | None:
        """Ship an order, or ask for a retry with a reason."""
        order = message.keys[0]
        if order == self.lost:
            self._is_dead = message.attempts > RETRIES_MAX
            self._check_settled()
            return RetryLater(delay_ms=200, reason="no such address")
        if order in self._delayed and message.attempts < 3:
            return RetryLater(delay_ms=500, reason="not in stock")
        self.shipped[order] = message.attempts
        self._check_settled()
        return None

    def _check_settled(self) -> None:
        if self._is_dead and len(self.shipped) == self._count - 1:
            self.settled.set()


async def send(nameserver: str, orders: list[str]) -> None:
    """Send all orders."""
    async with Admin(nameserver) as admin, Producer(nameserver) as producer:
        await admin.create_topic(TOPIC, 4)
        for order in orders:
            await producer.send(TOPIC, b"1 bicycle", tag="paid", keys=[order])


async def ship(nameserver: str, warehouse: Warehouse) -> None:
    """Consume until every order is settled. Retries do not delay other orders."""
    async with (
        Consumer(nameserver, GROUP, {TOPIC: "paid"}, SETTINGS) as consumer,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(warehouse.ship))
        await warehouse.settled.wait()
        consumer.stop()


async def dead_letter(nameserver: str, order: str) -> DeadLetter:
    """Return the dead letter of an order; this does not consume it."""
    async with Admin(nameserver) as admin:
        found = DeadLetters(admin).read(GROUP, Criteria(key=order))
        (letter,) = [letter async for letter in found]
    return letter


async def main(nameserver: str = NAMESERVER) -> None:
    """Send orders, ship them, and check the result."""
    run = secrets.token_hex(3)
    orders = [f"order-{run}-{number:02}" for number in range(1, 22)]
    warehouse = Warehouse(orders)
    await send(nameserver, orders)
    await ship(nameserver, warehouse)
    dead = await dead_letter(nameserver, warehouse.lost)
    for order, attempts in sorted(warehouse.shipped.items()):
        print(f"{order} shipped at attempt {attempts}")
    print(f"{warehouse.lost} is dead after {dead.attempts} attempts: {dead.error}")
    tries = [warehouse.shipped[order] for order in orders[:-1]]
    if tries != [3 if number % 5 == 0 else 1 for number in range(20)]:
        sys.exit("some orders were not shipped at the expected attempt")
    print("20 orders shipped, 4 of them at the third attempt; 1 dead letter with its reason")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
