"""Orders that are shipped: some at the third try, and one never. That one ends in the dead letters.

    baton up                                   # in another terminal
    python examples/orders.py [NAMESERVER]

NAMESERVER is 127.0.0.1:9876 by default.
"""

from __future__ import annotations

import asyncio
import secrets
import sys

from batonmq import Admin, Consumer, ConsumerSettings, Producer, ReceivedMessage, RetryLater
from batonmq.admin import Criteria, DeadLetter, DeadLetters

TOPIC, GROUP = "shop-orders", "shipping"
RETRIES_MAX = 3
SETTINGS = ConsumerSettings(consume_from="first", retries_max=RETRIES_MAX)


class Warehouse:
    """Ships orders. Every fifth waits for its goods, and the last one has no address.

    Attributes:
        shipped: Order, and how many attempts it took.
        settled: Set when no order of this run will come again.
    """

    def __init__(self, orders: list[str]) -> None:
        self._late, self.lost = set(orders[::5]), orders[-1]
        self._count = len(orders)
        self._given_up = False
        self.shipped: dict[str, int] = {}
        self.settled = asyncio.Event()

    async def ship(self, message: ReceivedMessage) -> RetryLater | None:
        """Handle one order: done, or later, with the reason."""
        order = message.keys[0]
        if order == self.lost:
            self._given_up = message.attempts > RETRIES_MAX
            self._look()
            return RetryLater(delay_ms=200, reason="no such address")
        if order in self._late and message.attempts < 3:
            return RetryLater(delay_ms=500, reason="not in stock")
        self.shipped[order] = message.attempts
        self._look()
        return None

    def _look(self) -> None:
        if self._given_up and len(self.shipped) == self._count - 1:
            self.settled.set()


async def send(nameserver: str, orders: list[str]) -> None:
    """Send each order."""
    async with Admin(nameserver) as admin, Producer(nameserver) as producer:
        await admin.create_topic(TOPIC, 4)
        for order in orders:
            await producer.send(TOPIC, b"1 bicycle", tag="paid", keys=[order])


async def ship(nameserver: str, warehouse: Warehouse) -> None:
    """Ship until every order is settled. Orders that wait hold nobody up."""
    async with (
        Consumer(nameserver, GROUP, {TOPIC: "paid"}, SETTINGS) as consumer,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(warehouse.ship))
        await warehouse.settled.wait()
        consumer.stop()


async def dead_letter(nameserver: str, order: str) -> DeadLetter:
    """The dead letter of an order. Reading it moves nobody's progress."""
    async with Admin(nameserver) as admin:
        found = DeadLetters(admin).read(GROUP, Criteria(key=order))
        (letter,) = [letter async for letter in found]
    return letter


async def main(nameserver: str = "127.0.0.1:9876") -> None:
    """Send, ship, and look where every order is."""
    run = secrets.token_hex(3)
    orders = [f"order-{run}-{number:02}" for number in range(1, 22)]
    warehouse = Warehouse(orders)
    await send(nameserver, orders)
    await ship(nameserver, warehouse)
    dead = await dead_letter(nameserver, warehouse.lost)
    for order, attempts in sorted(warehouse.shipped.items()):
        print(f"{order} shipped at attempt {attempts}")
    print(f"{warehouse.lost} given up after {dead.attempts} attempts: {dead.error}")
    tries = [warehouse.shipped[order] for order in orders[:-1]]
    if tries != [3 if number % 5 == 0 else 1 for number in range(20)]:
        sys.exit("some orders were not shipped at the attempt at which they could be")
    print("20 orders shipped, 4 of them at the third attempt; 1 among the dead letters, with why")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
