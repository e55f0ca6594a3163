"""A process that books numbers in a database and sends each in a transaction, until it is killed.

    python -m tests.e2e.transaction_shop NAMESERVER DATABASE TOPIC GROUP

Every third number fails in its block. A booked number has a row.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq._producer.producer import Producer
from batonmq.errors import BatonError

AT_ONCE = 20


class Refused(Exception):
    """A number that must not be booked."""


class Ledger:
    """The booked numbers, and the numbers that were begun."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("CREATE TABLE IF NOT EXISTS booked (number INTEGER PRIMARY KEY)")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS begun (number INTEGER PRIMARY KEY AUTOINCREMENT)"
        )

    def begin(self) -> int:
        """Return a number that no process has used."""
        cursor = self._database.execute("INSERT INTO begun DEFAULT VALUES")
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def book(self, number: int) -> None:
        """Book a number, unless a check has refused it."""
        if number % 3 == 0:
            raise Refused
        self._database.execute("INSERT INTO booked VALUES (?)", (number,))

    def booked(self) -> set[int]:
        """Return the booked numbers."""
        return {number for (number,) in self._database.execute("SELECT number FROM booked")}

    def is_booked(self, number: int) -> bool:
        """Return whether a number is booked."""
        query = "SELECT 1 FROM booked WHERE number = ?"
        return bool(self._database.execute(query, (number,)).fetchone())

    def close(self) -> None:
        """Close the database."""
        self._database.close()


def state_of(ledger: Ledger, pending: PendingTransaction) -> TransactionState:
    """Return the state of a transaction that is older than any living block."""
    booked = ledger.is_booked(int(pending.message.body))
    return TransactionState.COMMIT if booked else TransactionState.ROLLBACK


async def main(nameserver: str, path: Path, topic: str, group: str) -> None:
    """Book numbers until killed."""
    with closing(Ledger(path)) as ledger:
        running: set[int] = set()

        async def check(pending: PendingTransaction) -> TransactionState:
            if int(pending.message.body) in running:
                return TransactionState.UNKNOWN
            return state_of(ledger, pending)

        async def book() -> None:
            while True:
                number = ledger.begin()
                running.add(number)
                try:
                    async with producer.transaction(topic, b"%d" % number, keys=[str(number)]):
                        ledger.book(number)
                except (Refused, BatonError):
                    pass
                running.discard(number)

        async with (
            Producer(nameserver, group=group, transaction_checker=check) as producer,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(AT_ONCE):
                tasks.create_task(book())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
