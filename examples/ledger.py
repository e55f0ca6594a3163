"""A ledger whose balances never become negative, because entries are booked in order.

    baton up                                   # in another terminal
    python examples/ledger.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. The account is the ordering
key, so all its entries are in one queue. The consumers handle the messages of a queue in order, so
a failed entry is retried before the next one is handled. A second consumer joins after half of the
entries.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import defaultdict
from random import Random

from batonmq import Admin, Consumer, ConsumerSettings, Message, Producer, ReceivedMessage

TOPIC, GROUP = "ledger-entries", "ledger"
ACCOUNTS, ENTRIES = 12, 40
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
SETTINGS = ConsumerSettings(consume_from="first", order="queue", retry_first_ms=20)


class Ledger:
    """Books entries. The first attempt of every tenth entry of a queue fails.

    Attributes:
        balances: Balance by account.
        overdrawn: Accounts whose balance was negative at any time.
        failures: Number of failed attempts.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._booked = 0
        self.half, self.complete = asyncio.Event(), asyncio.Event()
        self.balances: dict[str, int] = defaultdict(int)
        self.overdrawn: set[str] = set()
        self.failures = 0

    async def book(self, message: ReceivedMessage) -> None:
        """Book an entry."""
        run, account, amount = message.body.decode().split()
        if run != self._run:
            return
        await asyncio.sleep(0.002)
        if message.offset % 10 == 0 and message.attempts == 1:
            self.failures += 1
            raise ConnectionError("the database is busy")
        self.balances[account] += int(amount)
        if self.balances[account] < 0:
            self.overdrawn.add(account)
        self._booked += 1
        if self._booked == ACCOUNTS * ENTRIES // 2:
            self.half.set()
        if self._booked == ACCOUNTS * ENTRIES:
            self.complete.set()


def entries(random: Random) -> list[tuple[str, int]]:
    """Return entries of account and amount; in this order no balance becomes negative."""
    balances = {f"account-{number:02}": 0 for number in range(ACCOUNTS)}
    found = []
    for _ in range(ENTRIES):
        for account, balance in balances.items():
            amount = random.choice([random.randint(1, 100), -balance])
            balances[account] += amount
            found.append((account, amount))
    return found


async def send(nameserver: str, run: str) -> dict[str, int]:
    """Send the entries; return the expected balances."""
    balances: dict[str, int] = defaultdict(int)
    async with Admin(nameserver) as admin, Producer(nameserver) as producer:
        await admin.create_topic(TOPIC, 4)
        for account, amount in entries(Random(run)):
            entry = Message(f"{run} {account} {amount}".encode())
            await producer.submit(TOPIC, entry, ordering_key=account)
            balances[account] += amount
    return balances


async def book(nameserver: str, ledger: Ledger) -> None:
    """Book all entries, first with one consumer, then with two."""
    async with (
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as first,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(first.run(ledger.book))
        await ledger.half.wait()
        async with Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as second:
            running = tasks.create_task(second.run(ledger.book))
            await ledger.complete.wait()
            first.stop()
            second.stop()
            await running


async def main(nameserver: str = NAMESERVER) -> None:
    """Send entries, book them, and compare the balances."""
    run = secrets.token_hex(3)
    balances, ledger = await send(nameserver, run), Ledger(run)
    await book(nameserver, ledger)
    for account, balance in sorted(ledger.balances.items()):
        print(f"{account} {balance}")
    if ledger.overdrawn:
        sys.exit(f"overdrawn: {sorted(ledger.overdrawn)}")
    if ledger.balances != balances:
        sys.exit("some entries were lost or booked twice")
    print(f"{ACCOUNTS * ENTRIES} entries booked in order, {ledger.failures} at the second attempt")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
