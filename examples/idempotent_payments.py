"""Payments that are booked exactly once, although messages are delivered more than once.

    baton up                                   # in another terminal
    python examples/idempotent_payments.py [NAMESERVER [STORE]]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. STORE keeps the claims and the
booked payments: the URL of a Redis (redis://127.0.0.1), or of a database (sqlite:///claims.db,
the default).

Needs: pip install 'batonmq[redis,sql]'
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence

from batonmq import (
    Admin,
    Consumer,
    ConsumerSettings,
    Producer,
    QueueRef,
    ReceivedMessage,
    RetryLater,
)
from batonmq.idempotence import RedisStore, SqlStore, by_key, idempotent

TOPIC, GROUP = "payments", "booking"
CLAIM_MS, DONE_MS = 3_000, 7 * 86_400_000
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
SETTINGS = ConsumerSettings(
    consume_from="first", send_back=False, retry_first_ms=500, retry_ms_max=1_000
)


class Bank:
    """Books payments. The first attempt of every fourth payment fails."""

    def __init__(self, payments: Sequence[str]) -> None:
        self._failing = set(payments[3::4])
        self.booked: Counter[str] = Counter()
        self.failures = 0

    async def book(self, message: ReceivedMessage) -> None:
        """Book a payment, without checking whether it was booked before."""
        payment = message.keys[0]
        await asyncio.sleep(0.01)
        if payment in self._failing:
            self._failing.remove(payment)
            self.failures += 1
            raise ConnectionError("the connection to the bank failed")
        self.booked[payment] += 1


async def send(nameserver: str, payments: Sequence[str]) -> None:
    """Send every payment twice, like a shop that got no answer to its first attempt."""
    async with Admin(nameserver) as admin, Producer(nameserver) as producer:
        await admin.create_topic(TOPIC, 4)
        for payment in [*payments, *payments]:
            await producer.send(TOPIC, b"10 EUR", keys=[payment])


async def consume(nameserver: str, bank: Bank, store: RedisStore | SqlStore, count: int) -> int:
    """Book payments with two members of a group until `count` messages are handled.

    Returns:
        Number of deliveries that were postponed because the payment was claimed.
    """
    book = idempotent(bank.book, store, claim_ms=CLAIM_MS, done_ms=DONE_MS, key=by_key)
    handled: set[tuple[QueueRef, int]] = set()
    complete, later = asyncio.Event(), 0

    async def handle(message: ReceivedMessage) -> object:
        nonlocal later
        result = await book(message)
        if isinstance(result, RetryLater):
            later += 1
            return result
        handled.add((message.queue, message.offset))
        if len(handled) == count:
            complete.set()
        return result

    async with (
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as one,
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as other,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        for consumer in (one, other):
            tasks.create_task(consumer.run(handle))
        await complete.wait()
        one.stop()
        other.stop()
    return later


async def main(nameserver: str = NAMESERVER, where: str = "sqlite:///claims.db") -> None:
    """Send payments, book them, and check that each was booked once."""
    run = secrets.token_hex(3)
    payments = [f"payment-{run}-{number:02}" for number in range(1, 21)]
    bank = Bank(payments)
    kind = SqlStore if where.startswith(("sqlite", "postgresql")) else RedisStore
    async with kind(where, GROUP) as store:
        # As if a process had claimed this payment and crashed before it was booked.
        await store.put(payments[2], "crashed-process", "crashed-process", CLAIM_MS)
        await send(nameserver, payments)
        later = await consume(nameserver, bank, store, 2 * len(payments))
    print(f"{len(payments)} payments, each sent twice; the bank failed {bank.failures} times;")
    print(f"one payment was claimed by a process that crashed; {later} deliveries were postponed")
    for payment in payments:
        print(f"{payment} booked {bank.booked[payment]} time(s)")
    if bank.booked != Counter(payments):
        sys.exit("some payments were not booked exactly once")
    print("each payment was booked once")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
