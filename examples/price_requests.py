"""Requests and replies: a service answers prices, a client asks for them.

    baton up                                   # in another terminal
    python examples/price_requests.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. A request is an ordinary
message; the reply comes back to the producer that asked, without a topic of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys

from batonmq import (
    Admin,
    Consumer,
    ConsumerSettings,
    Producer,
    ReceivedMessage,
    Reply,
    RequestFailed,
)

TOPIC, GROUP = "price-requests", "price-service"
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
PRICES = {f"S{number}": 100 + number for number in range(200)}
SETTINGS = ConsumerSettings(consume_from="first")


async def quote(message: ReceivedMessage) -> Reply | bytes:
    """Reply with the price of a symbol, or with an error."""
    price = PRICES.get(message.body.decode())
    return Reply(error="unknown symbol") if price is None else b"%d" % price


async def ask(nameserver: str) -> None:
    """Ask for all prices at once, and for one that does not exist."""
    async with Producer(nameserver) as producer, asyncio.TaskGroup() as tasks:
        asked = {
            symbol: tasks.create_task(producer.request(TOPIC, symbol.encode(), timeout_ms=30_000))
            for symbol in PRICES
        }
        try:
            await producer.request(TOPIC, b"NONE", timeout_ms=30_000)
        except RequestFailed as error:
            print(f"NONE: {error}")
        else:
            sys.exit("a request for an unknown symbol did not fail")
    wrong = [symbol for symbol, task in asked.items() if int(task.result().body) != PRICES[symbol]]
    if wrong:
        sys.exit(f"wrong replies for {wrong}")


async def main(nameserver: str = NAMESERVER) -> None:
    """Serve prices, and ask for them."""
    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, 4)
    async with (
        asyncio.timeout(60),
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(quote))
        await ask(nameserver)
        consumer.stop()
    print(f"{len(PRICES)} requests got their own replies; an unknown symbol got an error")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
