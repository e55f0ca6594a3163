"""Caches that are invalidated by broadcast messages: every cache gets every change.

    baton up                                   # in another terminal
    python examples/cache.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. A broadcasting consumer keeps
its progress in a local file, so a cache that was offline gets the changes that it missed when it
is back.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from batonmq import Admin, Consumer, ConsumerSettings, Producer, ReceivedMessage

TOPIC, GROUP = "price-changes", "caches"


NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")


class Cache:
    """The cached prices of one web server.

    Args:
        name: Name of the web server.
        prices: The database.
        offsets_file: File of the consumer's progress.
    """

    def __init__(self, name: str, prices: Mapping[str, int], offsets_file: Path) -> None:
        self.name, self._prices = name, prices
        self._known: dict[str, int] = {}
        self._settings = ConsumerSettings(
            model="broadcasting", offsets_file=offsets_file, consume_from="first"
        )
        self.dropped = 0
        self._changed = asyncio.Event()

    def price(self, product: str) -> int:
        """Return a price from the cache, or else from the database."""
        if product not in self._known:
            self._known[product] = self._prices[product]
        return self._known[product]

    @asynccontextmanager
    async def listening(self, nameserver: str) -> AsyncIterator[None]:
        """Drop changed prices from the cache until the end of the block."""
        async with (
            Consumer(nameserver, GROUP, {TOPIC: "*"}, self._settings) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            running = tasks.create_task(consumer.run(self._drop))
            yield
            consumer.stop()
            await running

    async def has_dropped(self, count: int) -> None:
        """Wait until this number of cached prices was dropped."""
        while self.dropped < count:
            self._changed.clear()
            await self._changed.wait()

    async def _drop(self, message: ReceivedMessage) -> None:
        if self._known.pop(message.keys[0], None) is not None:
            self.dropped += 1
            self._changed.set()


async def raise_prices(producer: Producer, prices: dict[str, int], products: list[str]) -> None:
    """Change the database, then send a message for each change."""
    for product in products:
        prices[product] += 1
        await producer.send(TOPIC, b"changed", keys=[product])


async def main(nameserver: str = NAMESERVER) -> None:
    """Change prices while three caches are online, then while one of them is offline."""
    run = secrets.token_hex(3)
    prices = {f"product-{run}-{number}": 100 for number in range(1, 11)}
    products = list(prices)
    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, 4)
    with tempfile.TemporaryDirectory() as folder:
        caches = [Cache(f"web-{n}", prices, Path(folder, f"web-{n}.json")) for n in (1, 2, 3)]
        one, two, three = caches
        for cache in caches:
            print(f"{cache.name} has cached {sum(map(cache.price, products))} EUR")
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
            print(f"web-3 is offline and has dropped {three.dropped} prices; the others all 10")
            stale = sum(map(three.price, products))
            async with three.listening(nameserver):
                await three.has_dropped(10)
    known = [sum(map(cache.price, products)) for cache in caches]
    if stale != 1_005 or known != [1_010] * 3:
        sys.exit(f"the caches have {known}, and web-3 had {stale} while it was offline")
    print("3 caches dropped 10 prices each, at the change or when they were back online")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
