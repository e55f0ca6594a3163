"""A ledger whose accounts never go below zero, as each is booked in the order of its entries.

    baton up                                   # in another terminal
    python examples/ledger.py [NAMESERVER]

NAMESERVER is 127.0.0.1:9876 by default. The account is the ordering key, so its entries are in one
queue; the consumers are orderly, so an entry that fails is tried again before the next one. A
second consumer joins half-way.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import defaultdict
from random import Random

from batonmq import Admin, Consumer, ConsumerSettings, Message, Producer, ReceivedMessage

TOPIC, GROUP = "ledger-entries", "ledger"
ACCOUNTS, ENTRIES = 12, 40
SETTINGS = ConsumerSettings(consume_from="first", orderly=True, retry_first_ms=20)


class Ledger:
    """Books entries. Every tenth fails at first: the database is busy.

    Attributes:
        balances: By account.
        overdrawn: Accounts that were below zero at any time.
        failures: Attempts that failed.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._booked = 0
        self.half, self.complete = asyncio.Event(), asyncio.Event()
        self.balances: dict[str, int] = defaultdict(int)
        self.overdrawn: set[str] = set()
        self.failures = 0

    async def book(self, message: ReceivedMessage) -> None:
        """Book one entry."""
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
    """Account and amount. Nobody takes what is not there, if the order is kept."""
    balances = {f"account-{number:02}": 0 for number in range(ACCOUNTS)}
    found = []
    for _ in range(ENTRIES):
        for account, balance in balances.items():
            amount = random.choice([random.randint(1, 100), -balance])
            balances[account] += amount
            found.append((account, amount))
    return found


async def send(nameserver: str, run: str) -> dict[str, int]:
    """Send the entries; what the balances must be in the end."""
    balances: dict[str, int] = defaultdict(int)
    async with Admin(nameserver) as admin, Producer(nameserver) as producer:
        await admin.create_topic(TOPIC, 4)
        for account, amount in entries(Random(run)):
            entry = Message(f"{run} {account} {amount}".encode())
            await producer.submit(TOPIC, entry, ordering_key=account)
            balances[account] += amount
    return balances


async def book(nameserver: str, ledger: Ledger) -> None:
    """Book everything: first one consumer, then two."""
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


async def main(nameserver: str = "127.0.0.1:9876") -> None:
    """Send, book, and compare."""
    run = secrets.token_hex(3)
    balances, ledger = await send(nameserver, run), Ledger(run)
    await book(nameserver, ledger)
    for account, balance in sorted(ledger.balances.items()):
        print(f"{account} {balance}")
    if ledger.overdrawn:
        sys.exit(f"overdrawn: {sorted(ledger.overdrawn)}")
    if ledger.balances != balances:
        sys.exit("some entries were lost, or booked twice")
    print(f"{ACCOUNTS * ENTRIES} entries booked in order, {ledger.failures} at the second attempt")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
