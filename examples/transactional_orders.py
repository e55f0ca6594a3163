"""Orders that are in the database if, and only if, a message about them is delivered.

    baton up                                         # in another terminal
    python examples/transactional_orders.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. Each order is a transaction: a
half message, a row in a database (SQLite here), and the commit of the message. A shop process dies
in the middle of two of them, once before and once after the commit of its row. The broker asks
another process of the producer group, which looks into the database.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from batonmq import (
    Admin,
    Consumer,
    ConsumerSettings,
    PendingTransaction,
    Producer,
    ReceivedMessage,
    TransactionState,
)

TOPIC, GROUP, SHOP = "paid-orders", "shipping", "shop"
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
SETTINGS = ConsumerSettings(consume_from="first")
DIED = 9


class Orders:
    """The orders of a shop, in a database."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY)")

    def book(self, order: str) -> None:
        """Store an order; an order without an amount is refused."""
        if order.endswith("unpaid"):
            raise ValueError(f"{order} can't be booked")
        with closing(sqlite3.connect(self._path)) as database, database:
            database.execute("INSERT INTO orders VALUES (?)", (order,))

    def booked(self) -> set[str]:
        """Return all orders."""
        with closing(sqlite3.connect(self._path)) as database:
            return {order for (order,) in database.execute("SELECT id FROM orders")}

    def state(self, pending: PendingTransaction) -> TransactionState:
        """Say what became of an order: the row in the database is the answer.

        The shops book an order at once, so an order without a row was never booked.
        """
        known = pending.message.body.decode() in self.booked()
        return TransactionState.COMMIT if known else TransactionState.ROLLBACK


async def sell(nameserver: str, path: Path, run: str, *, die: str) -> None:
    """Book orders as one shop process, which dies before or after a row is committed."""
    orders = Orders(path)
    async with Producer(nameserver, group=SHOP) as producer:
        for name in (f"{run}-{die}-1", f"{run}-{die}-unpaid", f"{run}-{die}-2"):
            dies = name.endswith("2")
            try:
                async with producer.transaction(TOPIC, name.encode(), keys=[name]):
                    if dies and die == "before":
                        os._exit(DIED)
                    orders.book(name)
                    if dies:
                        os._exit(DIED)
            except ValueError as error:
                print(error)


async def main(nameserver: str = NAMESERVER) -> None:
    """Let two shop processes die, and consume until every booked order was delivered."""
    run = secrets.token_hex(3)
    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "orders"
        orders = Orders(path)
        for die in ("before", "after"):
            shop = await asyncio.create_subprocess_exec(
                sys.executable, __file__, nameserver, str(path), run, die
            )
            if await shop.wait() != DIED:
                sys.exit("the shop process did not die in its transaction")
        delivered = await delivered_orders(nameserver, orders, run)
        if delivered != sorted(orders.booked()):
            sys.exit(f"booked are {sorted(orders.booked())}, delivered were {delivered}")
    print(f"{len(delivered)} booked orders were delivered once each, and no other one")


async def delivered_orders(nameserver: str, orders: Orders, run: str) -> list[str]:
    """Answer the broker's questions, and return the delivered orders of this run, sorted."""
    delivered: list[str] = []
    asked: list[str] = []

    async def check(pending: PendingTransaction) -> TransactionState:
        state = orders.state(pending)
        order = pending.message.body.decode()
        print(f"{order}: {state.value}")
        if order.startswith(run):
            asked.append(order)
        return state

    async def ship(message: ReceivedMessage) -> None:
        if message.body.decode().startswith(run):
            delivered.append(message.body.decode())
        if len(asked) == 2 and orders.booked() <= set(delivered):
            consumer.stop()

    async with (
        asyncio.timeout(40),
        Producer(nameserver, group=SHOP, transaction_checker=check),
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as consumer,
    ):
        await consumer.run(ship)
    return sorted(delivered)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        _, address, database_path, this_run, when = sys.argv
        asyncio.run(sell(address, Path(database_path), this_run, die=when))
    else:
        asyncio.run(main(*sys.argv[1:]))
