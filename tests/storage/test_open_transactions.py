"""Goal: the table of open transactions behaves as a dict of rows, and keeps its memory bound.

Method: a state machine against a dict; a table of 120,000 transactions, measured.
"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batonmq.errors import LimitExceeded
from batonmq_server.storage.core import open_transactions
from batonmq_server.storage.core.open_transactions import (
    ROW,
    OpenTransaction,
    OpenTransactions,
)

IDS = st.integers(0, 400)
GROUPS = st.sampled_from(["payments", "refunds", "mail"])
TIMES = st.integers(0, 50)


class TableMachine(RuleBasedStateMachine):
    """The table beside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OpenTransactions()
        self.rows: dict[int, OpenTransaction] = {}

    @rule(number=IDS, moved=st.integers(0, 1_000), at=TIMES, group=GROUPS, checks=st.integers(0, 9))
    def add(self, number: int, moved: int, at: int, group: str, checks: int) -> None:
        row = OpenTransaction(number, number + moved, at, group, checks)
        self.table.add(row)
        self.rows[number] = row

    @rule(begin=IDS, count=st.integers(1, 300), at=TIMES, group=GROUPS)
    def add_many(self, begin: int, count: int, at: int, group: str) -> None:
        for number in range(begin, begin + count):
            self.add(number, 0, at, group, 0)

    @rule(number=IDS)
    def remove(self, number: int) -> None:
        assert self.table.remove(number) == (self.rows.pop(number, None) is not None)

    @rule(begin=IDS, count=st.integers(1, 300))
    def remove_many(self, begin: int, count: int) -> None:
        for number in range(begin, begin + count):
            self.remove(number)

    @rule(number=IDS, at=TIMES, checks=st.integers(0, 15))
    def checked(self, number: int, at: int, checks: int) -> None:
        self.table.checked(number, at, checks)
        if number in self.rows:
            self.rows[number] = self.rows[number]._replace(check_unix_s=at, checks=checks)

    @rule()
    def save_and_load(self) -> None:
        raw = self.table.snapshot().encode()
        self.table = OpenTransactions()
        assert self.table.restore(raw + b"more") == len(raw)

    @rule(number=IDS)
    def get(self, number: int) -> None:
        assert self.table.get(number) == self.rows.get(number)
        assert (number in self.table) == (number in self.rows)

    @rule(now=TIMES, groups=st.sets(GROUPS), count=st.integers(1, 300))
    def due(self, now: int, groups: set[str], count: int) -> None:
        due = [
            row
            for row in self.rows.values()
            if row.check_unix_s <= now and (row.group in groups or row.checks >= 7)
        ]
        ids = self.table.due(now, groups, count, checks_max=7)
        found = [self.rows[number] for number in ids]
        times = sorted(row.check_unix_s for row in due)[:count]
        assert [row.check_unix_s for row in found] == times
        assert set(found) <= set(due)

    @rule(after=st.integers(-1, 400), count=st.integers(1, 300), group=GROUPS | st.just(""))
    def page(self, after: int, count: int, group: str) -> None:
        rows = [self.rows[n] for n in sorted(self.rows) if n > after]
        wanted = [row for row in rows if group in ("", row.group)]
        assert self.table.page(after, count, group) == wanted[:count]

    @rule(position=st.integers(0, 1_500), count=st.integers(1, 300))
    def before(self, position: int, count: int) -> None:
        wanted = sorted(r.position for r in self.rows.values() if r.position < position)[:count]
        assert [row.position for row in self.table.before(position, count)] == wanted

    @invariant()
    def same_size_and_oldest(self) -> None:
        assert len(self.table) == len(self.rows)
        oldest = min((row.position for row in self.rows.values()), default=None)
        assert self.table.oldest_position() == oldest


class SmallChunks(TableMachine):
    """The same with chunks of a few rows."""

    def __init__(self) -> None:
        open_transactions.CHUNK_ROWS = 64
        super().__init__()

    def teardown(self) -> None:
        open_transactions.CHUNK_ROWS = 4_096


TestTable = TableMachine.TestCase
TestSmallChunks = SmallChunks.TestCase
TestTable.settings = TestSmallChunks.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None
)


def test_transaction_takes_24_bytes_of_memory_at_most() -> None:
    count = 120_000
    tracemalloc.start()
    table = OpenTransactions()
    for number in range(count):
        table.add(OpenTransaction(number * 500, number * 500, 1_700_000_000, "payments", 0))
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ROW.itemsize == 23
    assert used_bytes <= 24 * count


def test_group_beyond_the_limit_is_rejected_and_a_free_number_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_transactions, "GROUPS_MAX", 2)
    table = OpenTransactions()
    for number, group in enumerate(("one", "two")):
        table.add(OpenTransaction(number, number, 0, group, 0))
    table.check_group("one", set())
    with pytest.raises(LimitExceeded):
        table.check_group("three", set())
    table.remove(0)
    added = set[str]()
    for group in ("three", "two", "three"):
        table.check_group(group, added)
    assert added == {"three"}
    with pytest.raises(LimitExceeded):
        table.check_group("four", added)
    table.add(OpenTransaction(5, 5, 0, "three", 0))
    assert [row.group for row in table.page(-1, 9)] == ["two", "three"]
