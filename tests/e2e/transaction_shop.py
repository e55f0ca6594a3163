"""A process that books numbers in a database and sends each in a transaction, until it is killed.

    python -m tests.e2e.transaction_shop NAMESERVER DATABASE TOPIC GROUP
    python -m tests.e2e.transaction_shop NAMESERVER DATABASE TOPIC GROUP check

Every third number fails in its block. A booked number has a row. With `check` it only answers
checks, each after a while. A check refuses a number that is not booked, and then no block can book
it: so a check may come at any step of a block.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq._producer.producer import Producer
from batonmq.errors import BatonError

AT_ONCE = 20
THOUGHT_S_MAX = 0.3
"""Longest time that the process with `check` takes for an answer."""


class Refused(Exception):
    """A number that must not be booked."""


class Ledger:
    """The begun, the booked and the refused numbers."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("CREATE TABLE IF NOT EXISTS booked (number INTEGER PRIMARY KEY)")
        self._database.execute("CREATE TABLE IF NOT EXISTS refused (number INTEGER PRIMARY KEY)")
        self._database.execute("CREATE TABLE IF NOT EXISTS asked (number INTEGER)")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS begun (number INTEGER PRIMARY KEY AUTOINCREMENT)"
        )

    def begin(self) -> int:
        """Return a number that no process has used."""
        cursor = self._database.execute("INSERT INTO begun DEFAULT VALUES")
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def book(self, number: int) -> None:
        """Book a number, unless it must not be or a check has refused it."""
        if number % 3 == 0:
            raise Refused
        with self._transaction():
            if self._has("refused", number):
                raise Refused
            self._database.execute("INSERT INTO booked VALUES (?)", (number,))

    def decide(self, number: int) -> TransactionState:
        """Answer a check: a number that is not booked is refused for ever."""
        with self._transaction():
            self._database.execute("INSERT INTO asked VALUES (?)", (number,))
            if self._has("booked", number):
                return TransactionState.COMMIT
            self._database.execute("INSERT OR IGNORE INTO refused VALUES (?)", (number,))
            return TransactionState.ROLLBACK

    def booked(self) -> set[int]:
        """Return the booked numbers."""
        return {number for (number,) in self._database.execute("SELECT number FROM booked")}

    def booked_count(self) -> int:
        """Return the number of booked numbers."""
        ((count,),) = self._database.execute("SELECT count(*) FROM booked")
        return int(count)

    def asked_count(self) -> int:
        """Return the number of checks that were answered."""
        ((count,),) = self._database.execute("SELECT count(*) FROM asked")
        return int(count)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _has(self, table: str, number: int) -> bool:
        query = f"SELECT 1 FROM {table} WHERE number = ?"
        return bool(self._database.execute(query, (number,)).fetchone())

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def state_of(ledger: Ledger, pending: PendingTransaction) -> TransactionState:
    """Return the state of a transaction; see `Ledger.decide`."""
    return ledger.decide(int(pending.message.body))


async def shop(nameserver: str, path: Path, topic: str, group: str) -> None:
    """Book numbers until killed. It answers no checks: blocks are open when it dies."""
    with closing(Ledger(path)) as ledger:

        async def book() -> None:
            while True:
                number = ledger.begin()
                try:
                    async with producer.transaction(topic, b"%d" % number, keys=[str(number)]):
                        ledger.book(number)
                except Refused:
                    pass
                except BatonError as error:
                    print(f"producer: number {number}: {error}", file=sys.stderr, flush=True)

        async with Producer(nameserver, group=group) as producer, asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(book())


async def check(nameserver: str, path: Path, group: str) -> None:
    """Answer checks until killed; half of the answers are given some time after the decision."""
    random = Random()
    with closing(Ledger(path)) as ledger:

        async def answer(pending: PendingTransaction) -> TransactionState:
            state = state_of(ledger, pending)
            await asyncio.sleep(random.choice((0, THOUGHT_S_MAX)) * random.random())
            return state

        async with Producer(nameserver, group=group, transaction_checker=answer):
            await asyncio.Event().wait()


def main(nameserver: str, path: str, topic: str, group: str, role: str = "") -> None:
    """Run one role until killed."""
    if role == "check":
        asyncio.run(check(nameserver, Path(path), group))
    else:
        asyncio.run(shop(nameserver, Path(path), topic, group))


if __name__ == "__main__":
    main(*sys.argv[1:])
