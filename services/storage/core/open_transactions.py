"""The open transactions of a log: 23 bytes of memory for each, ascending by id.

Ids are positions in the log, so a new transaction nearly always goes to the end. Rows are kept in
chunks: one that is removed leaves a gap, and a chunk with many gaps is copied without them.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batonmq.errors import LimitExceeded

ROW = np.dtype(
    [
        ("transaction_id", "<i8"),
        ("position", "<i8"),
        ("check_unix_s", "<u4"),
        ("group", "<u2"),
        ("checks", "u1"),
    ]
)
CHUNK_ROWS = 4_096
GROUPS_MAX = 65_535
_GONE = -1
_COUNT = struct.Struct(">I")

Rows = npt.NDArray[np.void]


class OpenTransaction(NamedTuple):
    """A transaction that has not ended.

    Attributes:
        transaction_id: Position at which the half message was stored first.
        position: Position at which it is stored now.
        check_unix_s: Time from which the next check is due, Unix seconds.
        group: Producer group.
        checks: Number of checks that were recorded.
    """

    transaction_id: int
    position: int
    check_unix_s: int
    group: str
    checks: int


class OpenTransactions:
    """The open transactions of a log."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._first_ids: list[int] = []
        self._groups = _GroupNumbers()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, transaction_id: int) -> bool:
        return self._find(transaction_id) is not None

    def get(self, transaction_id: int) -> OpenTransaction | None:
        """Return a transaction; None if it is not open."""
        found = self._find(transaction_id)
        return None if found is None else self._decoded(found[0].rows[found[1]])

    def check_group(self, group: str, added: set[str]) -> None:
        """Check that a transaction of a group can be added, with those that are about to be.

        Args:
            added: Groups without a transaction that are about to get one; a new group is added.

        Raises:
            LimitExceeded: Too many groups have open transactions.
        """
        if self._groups.get(group) is None and group not in added:
            self._groups.check_room(len(added) + 1)
            added.add(group)

    def add(self, transaction: OpenTransaction) -> None:
        """Add a transaction, or replace the one with its id."""
        self.remove(transaction.transaction_id)
        number = self._groups.take(transaction.group)
        row = (*transaction[:3], number, transaction.checks)
        at = max(bisect_right(self._first_ids, transaction.transaction_id) - 1, 0)
        if not self._chunks or (
            at == len(self._chunks) - 1
            and self._chunks[at].count >= CHUNK_ROWS
            and transaction.transaction_id > self._chunks[at].last_id
        ):
            at = len(self._chunks)
            self._chunks.append(_Chunk())
            self._first_ids.append(transaction.transaction_id)
        self._chunks[at].insert(row)
        self._first_ids[at] = min(self._first_ids[at], transaction.transaction_id)
        self._count += 1

    def checked(self, transaction_id: int, check_unix_s: int, checks: int) -> None:
        """Record a check: the time of the next one, and how many there were."""
        found = self._find(transaction_id)
        if found is not None:
            chunk, index = found
            chunk.rows["check_unix_s"][index] = check_unix_s
            chunk.rows["checks"][index] = checks

    def remove(self, transaction_id: int) -> bool:
        """Remove a transaction; return False if it is not open."""
        found = self._find(transaction_id)
        if found is None:
            return False
        chunk, index = found
        self._groups.release(int(chunk.rows["group"][index]))
        chunk.remove(index)
        self._count -= 1
        if not chunk.open_count:
            at = self._chunks.index(chunk)
            del self._chunks[at], self._first_ids[at]
        return True

    def due(
        self, now_unix_s: int, groups: Collection[str], count_max: int, *, checks_max: int
    ) -> list[int]:
        """Return ids of transactions whose next check is due, the earliest first.

        Those of other groups are left out, unless they had `checks_max` checks.
        """
        numbers = [number for group in groups if (number := self._groups.get(group)) is not None]
        wanted = np.array(numbers, np.uint16)
        found = [
            rows for chunk in self._chunks if len(rows := chunk.due(now_unix_s, wanted, checks_max))
        ]
        if not found:
            return []
        rows = np.concatenate(found)
        order = np.argsort(rows["check_unix_s"], kind="stable")[:count_max]
        ids: list[int] = rows["transaction_id"][order].tolist()
        return ids

    def page(self, after_id: int, count_max: int, group: str = "") -> list[OpenTransaction]:
        """Return the transactions with the lowest ids above `after_id`."""
        number = self._groups.get(group)
        if group and number is None:
            return []
        page: list[OpenTransaction] = []
        first = max(bisect_right(self._first_ids, after_id) - 1, 0)
        for chunk in self._chunks[first:]:
            rows = chunk.open_rows()
            rows = rows[rows["transaction_id"] > after_id]
            if group:
                rows = rows[rows["group"] == number]
            page += map(self._decoded, rows[: count_max - len(page)])
            if len(page) == count_max:
                break
        return page

    def before(self, position: int, count_max: int) -> list[OpenTransaction]:
        """Return transactions stored below `position`, the lowest position first."""
        found = [
            rows[rows["position"] < position]
            for chunk in self._chunks
            if len(rows := chunk.open_rows())
        ]
        if not found:
            return []
        rows = np.concatenate(found)
        order = np.argsort(rows["position"], kind="stable")[:count_max]
        return [self._decoded(row) for row in rows[order]]

    def oldest_position(self) -> int | None:
        """Return the lowest position of a half message; None if no transaction is open."""
        return min((chunk.oldest_position() for chunk in self._chunks), default=None)

    def snapshot(self) -> TransactionSnapshot:
        """Return a snapshot; another thread may encode it."""
        return TransactionSnapshot(
            self._groups.names(), [chunk.open_rows() for chunk in self._chunks]
        )

    def restore(self, raw: bytes) -> int:
        """Load what `TransactionSnapshot.encode` has returned; return the bytes that were read."""
        (group_count,) = _COUNT.unpack_from(raw)
        at, names = _COUNT.size, {}
        for _ in range(group_count):
            number, length = int.from_bytes(raw[at : at + 2], "big"), raw[at + 2]
            names[number] = raw[at + 3 : at + 3 + length].decode("ascii")
            at += 3 + length
        (count,) = _COUNT.unpack_from(raw, at)
        at += _COUNT.size
        rows = np.frombuffer(raw, ROW, count, at)
        numbers, counts = np.unique(rows["group"], return_counts=True)
        self._groups.load(
            {
                number: (names[number], uses)
                for number, uses in zip(numbers.tolist(), counts.tolist(), strict=True)
            }
        )
        for begin in range(0, count, CHUNK_ROWS):
            chunk = _Chunk.of(rows[begin : begin + CHUNK_ROWS])
            self._chunks.append(chunk)
            self._first_ids.append(int(chunk.rows["transaction_id"][0]))
        self._count = count
        return int(at + count * ROW.itemsize)

    def _decoded(self, row: np.void) -> OpenTransaction:
        transaction_id, position, check_unix_s, number, checks = row.item()
        name = self._groups.name(number)
        return OpenTransaction(transaction_id, position, check_unix_s, name, checks)

    def _find(self, transaction_id: int) -> tuple[_Chunk, int] | None:
        at = bisect_right(self._first_ids, transaction_id) - 1
        if at < 0:
            return None
        index = self._chunks[at].find(transaction_id)
        return None if index is None else (self._chunks[at], index)


@dataclass(frozen=True, slots=True)
class TransactionSnapshot:
    """All open transactions at one moment, and the names of their groups by number."""

    groups: dict[int, str]
    parts: list[Rows]

    def encode(self) -> bytes:
        """Return the bytes of a checkpoint: groups, then 23 bytes for each transaction."""
        groups = [
            number.to_bytes(2, "big") + bytes((len(name),)) + name.encode("ascii")
            for number, name in self.groups.items()
        ]
        count = sum(map(len, self.parts))
        rows = b"".join(part.tobytes() for part in self.parts)
        return b"".join((_COUNT.pack(len(groups)), *groups, _COUNT.pack(count), rows))


class _Chunk:
    """Rows ascending by id, with room for more; a removed row keeps its id until the next copy."""

    __slots__ = ("_oldest", "count", "open_count", "rows")

    def __init__(self) -> None:
        self.rows: Rows = np.empty(64, ROW)
        self.count = self.open_count = 0
        self._oldest: int | None = None

    @classmethod
    def of(cls, rows: Rows) -> _Chunk:
        chunk = cls()
        chunk.rows, chunk.count, chunk.open_count = rows.copy(), len(rows), len(rows)
        return chunk

    @property
    def last_id(self) -> int:
        return int(self.rows["transaction_id"][self.count - 1])

    def find(self, transaction_id: int) -> int | None:
        ids = self.rows["transaction_id"][: self.count]
        index = int(np.searchsorted(ids, transaction_id))
        if index == self.count or ids[index] != transaction_id:
            return None
        return None if self.rows["position"][index] == _GONE else index

    def insert(self, row: tuple[int, ...]) -> None:
        ids = self.rows["transaction_id"][: self.count]
        index = int(np.searchsorted(ids, row[0]))
        if index < self.count and ids[index] == row[0]:  # a removed row
            self.rows[index] = row
        else:
            if self.count == len(self.rows):
                room = np.empty(min(self.count, CHUNK_ROWS // 4), ROW)
                self.rows = np.concatenate([self.rows, room])
            self.rows[index + 1 : self.count + 1] = self.rows[index : self.count].copy()
            self.rows[index] = row
            self.count += 1
        self.open_count += 1
        if self._oldest is not None:
            self._oldest = min(self._oldest, row[1])

    def remove(self, index: int) -> None:
        if self.rows["position"][index] == self._oldest:
            self._oldest = None
        self.rows["position"][index] = _GONE
        self.open_count -= 1
        if self.count - self.open_count > max(64, self.count // 4):
            self.rows = self.open_rows()
            self.count = self.open_count

    def open_rows(self) -> Rows:
        """Return a copy of the rows that are not removed."""
        rows = self.rows[: self.count]
        kept: Rows = rows[rows["position"] != _GONE]
        return kept

    def due(self, now_unix_s: int, groups: npt.NDArray[np.uint16], checks_max: int) -> Rows:
        rows = self.rows[: self.count]
        due = (rows["check_unix_s"] <= now_unix_s) & (rows["position"] != _GONE)
        if not due.any():
            return rows[:0]
        rows = rows[due]
        found: Rows = rows[np.isin(rows["group"], groups) | (rows["checks"] >= checks_max)]
        return found

    def oldest_position(self) -> int:
        if self._oldest is None:
            self._oldest = int(self.open_rows()["position"].min())
        return self._oldest


class _GroupNumbers:
    """Numbers of the groups that have open transactions; a number without a user is free again."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._uses: dict[int, int] = {}
        self._free: list[int] = []

    def get(self, group: str) -> int | None:
        return self._numbers.get(group)

    def name(self, number: int) -> str:
        return self._names[number]

    def names(self) -> dict[int, str]:
        return dict(self._names)

    def check_room(self, count: int) -> None:
        if len(self._numbers) + count > GROUPS_MAX:
            raise LimitExceeded(
                f"{GROUPS_MAX} producer groups have open transactions; that is the limit",
                facts={"field": "group", "limit": GROUPS_MAX},
            )

    def take(self, group: str) -> int:
        number = self._numbers.get(group)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[group], self._names[number] = number, group
        self._uses[number] = self._uses.get(number, 0) + 1
        return number

    def release(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._uses[number], self._numbers[self._names.pop(number)]
            self._free.append(number)

    def load(self, groups: dict[int, tuple[str, int]]) -> None:
        self._names = {number: name for number, (name, _) in groups.items()}
        self._uses = {number: uses for number, (_, uses) in groups.items()}
        self._numbers = {name: number for number, name in self._names.items()}
        self._free = list(_gaps(self._names))


def _gaps(numbers: Collection[int]) -> Iterator[int]:
    """Yield the numbers below the largest one that are not used."""
    return (number for number in range(max(numbers, default=-1)) if number not in numbers)
