"""Caches that drop what has changed: every one of them hears of every change.

    baton up                                   # in another terminal
    python examples/cache.py [NAMESERVER]

NAMESERVER is 127.0.0.1:9876 by default. A broadcasting consumer keeps its progress in a file of its
own; one that was away hears what it has missed when it is back.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from batonmq import Admin, Consumer, ConsumerSettings, Producer, ReceivedMessage

TOPIC, GROUP = "price-changes", "caches"


class Cache:
    """Prices as one server of the shop knows them.

    Args:
        prices: The database.
        offsets_file: Where the server keeps how far it has listened.
    """

    def __init__(self, name: str, prices: Mapping[str, int], offsets_file: Path) -> None:
        self.name, self._prices = name, prices
        self._known: dict[str, int] = {}
        self._settings = ConsumerSettings(
            model="broadcasting", offsets_file=offsets_file, consume_from="first"
        )
        self.dropped = 0
        self._heard = asyncio.Event()

    def price(self, product: str) -> int:
        """From memory, or else from the database."""
        if product not in self._known:
            self._known[product] = self._prices[product]
        return self._known[product]

    @asynccontextmanager
    async def listening(self, nameserver: str) -> AsyncIterator[None]:
        """Drop what changes, until the block ends."""
        async with (
            Consumer(nameserver, GROUP, {TOPIC: "*"}, self._settings) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            running = tasks.create_task(consumer.run(self._drop))
            yield
            consumer.stop()
            await running

    async def has_dropped(self, count: int) -> None:
        """Wait until it was told of so many changes of prices it had."""
        while self.dropped < count:
            self._heard.clear()
            await self._heard.wait()

    async def _drop(self, message: ReceivedMessage) -> None:
        if self._known.pop(message.keys[0], None) is not None:
            self.dropped += 1
            self._heard.set()


async def raise_prices(producer: Producer, prices: dict[str, int], products: list[str]) -> None:
    """Change the database, then tell everybody."""
    for product in products:
        prices[product] += 1
        await producer.send(TOPIC, b"changed", keys=[product])


async def main(nameserver: str = "127.0.0.1:9876") -> None:
    """Change prices while three servers listen, then while one of them is away."""
    prices = {f"product-{number}": 100 for number in range(1, 11)}
    products = list(prices)
    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, 4)
    with tempfile.TemporaryDirectory() as folder:
        caches = [Cache(f"web-{n}", prices, Path(folder, f"web-{n}.json")) for n in (1, 2, 3)]
        one, two, three = caches
        for cache in caches:
            print(f"{cache.name} knows {sum(map(cache.price, products))} EUR")
        async with (
            asyncio.timeout(60),
            Producer(nameserver) as producer,
            one.listening(nameserver),
            two.listening(nameserver),
        ):
            async with three.listening(nameserver):
                await raise_prices(producer, prices, products[:5])
                for cache in caches:
                    await cache.has_dropped(5)
            await raise_prices(producer, prices, products[5:])
            for cache in (one, two):
                await cache.has_dropped(10)
            print(f"web-3 is away, and has dropped {three.dropped} prices; the others all 10")
            stale = sum(map(three.price, products))
            async with three.listening(nameserver):
                await three.has_dropped(10)
    known = [sum(map(cache.price, products)) for cache in caches]
    if stale != 1_005 or known != [1_010] * 3:
        sys.exit(f"the caches know {known}, and web-3 knew {stale} while it was away")
    print("3 caches dropped 10 prices each, as they changed or once they were back")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
