"""The queue of scheduled batches, ordered by delivery time: 18 bytes of memory for each.

The queue knows delivery times and positions in the log, not batches. The caller passes the time,
which may jump. Delays of any length work the same way; RocketMQ's delay levels name 18 of them.

Entries are kept in buckets of one minute. When a minute is due it is split into seconds, and a
second that is due is sorted and consumed from its front. So one step sorts only few entries.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

MINUTE_MS, SECOND_MS = 60_000, 1_000
ROW = np.dtype([("deliver_unix_ms", ">i8"), ("schedule_id", ">i8"), ("position", ">i8")])
_ROW = ROW.newbyteorder("=")
LISTED_AT_ONCE = 16_384
_GONE = -1
_GONE_MAX = 64

DelayKey = tuple[int, int]
"""Delivery time and schedule id."""


class DelayedBatch(NamedTuple):
    """A scheduled batch that is not delivered yet.

    Attributes:
        deliver_unix_ms: Earliest delivery time, Unix milliseconds; not negative.
        schedule_id: Position at which the batch was stored first.
        position: Position at which the batch is stored now.
    """

    deliver_unix_ms: int
    schedule_id: int
    position: int

    @property
    def key(self) -> DelayKey:
        """Key of the entry: delivery time and schedule id."""
        return self.deliver_unix_ms, self.schedule_id


class DelayQueue:
    """The scheduled batches of a log: added, taken by `due`, and removed once delivered.

    Adding an entry with a known key only changes its position.
    """

    def __init__(self) -> None:
        self._minutes: dict[int, _Bucket] = {}
        self._seconds: dict[int, _Bucket] = {}
        self._runs: deque[_SortedBucket] = deque()
        self._late: dict[DelayKey, int] = {}
        self._late_keys: list[DelayKey] = []
        self._taken: dict[DelayKey, int] = {}
        self._first_minute: int | None = None
        self._split_ms = self._opened_ms = 0
        self._count = 0
        self._listed = np.empty(0, _ROW)
        self._listed_from = self._listed_to = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: DelayKey) -> bool:
        return self.position(key) is not None

    def position(self, key: DelayKey) -> int | None:
        """Return the position at which an entry is stored now; None if there is no such entry."""
        if (loose := self._loose(key)) is not None:
            return loose[key]
        stored = self._stored(key)
        return stored[0].positions[stored[1]] if stored is not None else None

    def add(self, entry: DelayedBatch) -> None:
        """Add an entry, or change its position if it is there already."""
        key, position = entry.key, entry.position
        if (loose := self._loose(key)) is not None:
            loose[key] = position
        elif (stored := self._stored(key)) is not None:
            stored[0].move(stored[1], position)
        else:
            self._count += 1
            if entry.deliver_unix_ms < self._opened_ms:
                self._add_late(key, position)
            else:
                self._bucket(entry.deliver_unix_ms).add(entry)

    def remove(self, key: DelayKey) -> bool:
        """Remove an entry; return False if there is no such entry."""
        if (loose := self._loose(key)) is not None:
            del loose[key]
        elif (stored := self._stored(key)) is not None:
            bucket, index = stored
            bucket.remove(index)
            if key[0] >= self._opened_ms:
                bucket.tidy()
        else:
            return False
        self._count -= 1
        return True

    def due(self, now_unix_ms: int, count_max: int) -> list[DelayedBatch]:
        """Take entries that are due, the earliest first.

        They still count in `len`, but are not returned again until they are released.
        """
        taken: list[DelayedBatch] = []
        while len(taken) < count_max:
            head = self._head()
            if head is None and self._open_next(now_unix_ms):
                continue
            if head is None or head.deliver_unix_ms > now_unix_ms:
                break
            if self._late.pop(head.key, None) is None:
                self._runs[0].take()
            self._taken[head.key] = head.position
            taken.append(head)
        return taken

    @property
    def taken(self) -> KeysView[DelayKey]:
        """Keys that `due` has returned and that were neither removed nor released since."""
        return self._taken.keys()

    def release(self, keys: Iterable[DelayKey]) -> None:
        """Make taken entries due again."""
        for key in list(keys):
            self._add_late(key, self._taken.pop(key))

    def next_unix_ms(self) -> int | None:
        """Return a lower bound of the next delivery time; None if all entries are taken."""
        head = self._head()
        if head is not None:
            return head.deliver_unix_ms
        if self._seconds:
            return min(self._seconds) * SECOND_MS
        return None if self._first_minute is None else self._first_minute * MINUTE_MS

    def oldest_position(self) -> int | None:
        """Return the lowest position of an entry; None if there is no entry."""
        positions = [bucket.oldest() for bucket in self._buckets()]
        positions += [*self._late.values(), *self._taken.values()]
        return min((position for position in positions if position != _GONE), default=None)

    def before(self, position: int, count_max: int) -> list[DelayedBatch]:
        """Return entries stored below `position`, the lowest position first."""
        buckets = [bucket for bucket in self._buckets() if 0 <= bucket.oldest() < position]
        rows = self._copy(buckets).rows()
        rows = rows[rows["position"] < position]
        order = np.argsort(rows["position"], kind="stable")[:count_max]
        return [DelayedBatch(*row) for row in rows[order].tolist()]

    def by_position(self, position: int, count_max: int) -> list[DelayedBatch]:
        """Return the entries stored at or after a position, ascending by position.

        To find them, all entries are copied. So more are found at once, for the next pages: an
        entry that is added or moved later gets a greater position than all that were found.
        """
        entries: list[DelayedBatch] = []
        while len(entries) < count_max:
            if not self._listed_from <= position < self._listed_to:
                self._listed = self.snapshot().by_position(position, LISTED_AT_ONCE)
                self._listed_from = self._listed_to = position
                if not len(self._listed):
                    break
                self._listed_to = int(self._listed["position"][-1]) + 1
            begin = int(np.searchsorted(self._listed["position"], position))
            rows = self._listed[begin : begin + count_max - len(entries)].tolist()
            position = rows[-1][2] + 1
            found = (DelayedBatch(*row) for row in rows)
            entries += [one for one in found if self.position(one.key) == one.position]
        return entries

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of all entries, ascending."""
        return self.snapshot().ascending_positions()

    def snapshot(self) -> DelaySnapshot:
        """Return a snapshot of all entries."""
        return self._copy(list(self._buckets()))

    def restore(self, raw: bytes) -> None:
        """Load what `DelaySnapshot.encode` has returned, into an empty queue."""
        rows = np.frombuffer(raw, ROW).astype(_ROW)
        minutes = rows["deliver_unix_ms"] // MINUTE_MS
        order = np.lexsort((rows["schedule_id"], minutes))
        distinct_minutes, begins = np.unique(minutes[order], return_index=True)
        for minute, part in zip(
            distinct_minutes.tolist(), np.split(rows[order], begins[1:]), strict=False
        ):
            self._minutes[minute] = _Bucket.of(minute * MINUTE_MS, part)
        self._first_minute = min(self._minutes, default=None)
        self._count = len(rows)

    def _head(self) -> DelayedBatch | None:
        """Return the earliest entry of the sorted ones."""
        while self._late_keys and self._late_keys[0] not in self._late:
            heappop(self._late_keys)
        while self._runs and (head := self._runs[0].head()) is None:
            self._runs.popleft()
        run = head if self._runs else None
        if not self._late_keys or (run is not None and run.key < self._late_keys[0]):
            return run
        return DelayedBatch(*self._late_keys[0], self._late[self._late_keys[0]])

    def _open_next(self, now_unix_ms: int) -> bool:
        """Sort the next second if it is due; return whether it was."""
        while not self._seconds:
            minute = self._first_minute
            if minute is None or minute * MINUTE_MS > now_unix_ms:
                return False
            self._seconds = self._minutes.pop(minute).split()
            self._split_ms = (minute + 1) * MINUTE_MS
            self._first_minute = min(self._minutes, default=None)
        second = min(self._seconds)
        if second * SECOND_MS > now_unix_ms:
            return False
        self._runs.append(_SortedBucket(self._seconds.pop(second)))
        self._opened_ms = (second + 1) * SECOND_MS
        return True

    def _add_late(self, key: DelayKey, position: int) -> None:
        self._late[key] = position
        heappush(self._late_keys, key)

    def _bucket(self, deliver_unix_ms: int) -> _Bucket:
        if deliver_unix_ms < self._split_ms:
            second = deliver_unix_ms // SECOND_MS
            return self._seconds.setdefault(second, _Bucket(second * SECOND_MS))
        minute = deliver_unix_ms // MINUTE_MS
        bucket = self._minutes.get(minute)
        if bucket is None:
            bucket = self._minutes[minute] = _Bucket(minute * MINUTE_MS)
            if self._first_minute is None or minute < self._first_minute:
                self._first_minute = minute
        return bucket

    def _loose(self, key: DelayKey) -> dict[DelayKey, int] | None:
        if key in self._taken:
            return self._taken
        return self._late if key in self._late else None

    def _stored(self, key: DelayKey) -> tuple[_Bucket, int] | None:
        deliver_unix_ms = key[0]
        if deliver_unix_ms >= self._split_ms:
            bucket = self._minutes.get(deliver_unix_ms // MINUTE_MS)
        elif deliver_unix_ms >= self._opened_ms:
            bucket = self._seconds.get(deliver_unix_ms // SECOND_MS)
        else:
            begin = deliver_unix_ms - deliver_unix_ms % SECOND_MS
            runs = (run.bucket for run in self._runs)
            bucket = next((one for one in runs if one.begin_unix_ms == begin), None)
        index = bucket.index(key) if bucket is not None else None
        return (bucket, index) if bucket is not None and index is not None else None

    def _buckets(self) -> Iterator[_Bucket]:
        yield from self._minutes.values()
        yield from self._seconds.values()
        yield from (run.bucket for run in self._runs)

    def _copy(self, buckets: Sequence[_Bucket]) -> DelaySnapshot:
        """Return a snapshot of `buckets` and of the entries that are in no bucket."""
        return DelaySnapshot(
            [
                (*key, position)
                for table in (self._late, self._taken)
                for key, position in table.items()
            ],
            [bucket.begin_unix_ms for bucket in buckets],
            [len(bucket.ids) for bucket in buckets],
            b"".join([bucket.after_ms for bucket in buckets]),
            b"".join([bucket.ids for bucket in buckets]),
            b"".join([bucket.positions for bucket in buckets]),
        )


@dataclass(frozen=True, slots=True)
class DelaySnapshot:
    """All entries at one moment: those in no bucket, then the columns of all buckets.

    Taking a snapshot only copies bytes; another thread may encode it.
    """

    loose: list[tuple[int, int, int]]
    begins_unix_ms: list[int]
    counts: list[int]
    after_ms: bytes
    ids: bytes
    positions: bytes

    def rows(self) -> npt.NDArray[np.void]:
        """Return one row per entry."""
        positions = np.frombuffer(self.positions, np.int64)
        kept = positions != _GONE
        rows = np.empty(int(kept.sum()), _ROW)
        begins = np.repeat(np.array(self.begins_unix_ms, np.int64), self.counts)
        rows["deliver_unix_ms"] = (begins + np.frombuffer(self.after_ms, np.uint16))[kept]
        rows["schedule_id"] = np.frombuffer(self.ids, np.int64)[kept]
        rows["position"] = positions[kept]
        return np.concatenate([np.array(self.loose, _ROW), rows])

    def ascending_positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of all entries, ascending."""
        loose = np.array([entry[2] for entry in self.loose], np.int64)
        stored = np.frombuffer(self.positions, np.int64)
        return np.sort(np.concatenate([loose, stored[stored != _GONE]]))

    def by_position(self, position: int, count_max: int) -> npt.NDArray[np.void]:
        """Return the first rows stored at or after a position, ascending by position.

        Only what is returned is sorted.
        """
        loose = np.array(self.loose, _ROW)
        positions = np.concatenate([loose["position"], np.frombuffer(self.positions, np.int64)])
        found = np.flatnonzero(positions >= max(position, 0))
        if len(found) > count_max:
            found = found[np.argpartition(positions[found], count_max - 1)[:count_max]]
        found = found[np.argsort(positions[found])]
        rows, is_loose = np.empty(len(found), _ROW), found < len(loose)
        rows[is_loose] = loose[found[is_loose]]
        stored = found[~is_loose] - len(loose)
        buckets = np.searchsorted(np.cumsum(np.array(self.counts, np.int64)), stored, "right")
        begins = np.array(self.begins_unix_ms, np.int64)[buckets]
        after_ms = np.frombuffer(self.after_ms, np.uint16)[stored]
        rows["deliver_unix_ms"][~is_loose] = begins + after_ms
        rows["schedule_id"][~is_loose] = np.frombuffer(self.ids, np.int64)[stored]
        rows["position"][~is_loose] = positions[found[~is_loose]]
        return rows

    def encode(self) -> bytes:
        """Return 24 bytes per entry, for `DelayQueue.restore`."""
        return self.rows().astype(ROW).tobytes()


class _Bucket:
    """Entries of a minute or a second from `begin_unix_ms` on, ascending by schedule id."""

    __slots__ = ("_gone_count", "_oldest", "after_ms", "begin_unix_ms", "ids", "positions")

    def __init__(self, begin_unix_ms: int) -> None:
        self.begin_unix_ms = begin_unix_ms
        self.after_ms, self.ids, self.positions = array("H"), array("q"), array("q")
        self._gone_count = 0
        self._oldest: int | None = None

    @classmethod
    def of(cls, begin_unix_ms: int, rows: npt.NDArray[np.void]) -> Self:
        """Make a bucket of `rows`, which ascend by schedule id."""
        bucket = cls(begin_unix_ms)
        after_ms = rows["deliver_unix_ms"] - begin_unix_ms
        bucket.after_ms.frombytes(after_ms.astype(np.uint16).tobytes())
        bucket.ids.frombytes(rows["schedule_id"].astype(np.int64).tobytes())
        bucket.positions.frombytes(rows["position"].astype(np.int64).tobytes())
        bucket._oldest = int(rows["position"].min())
        return bucket

    def add(self, entry: DelayedBatch) -> None:
        """Add an entry that is not in the bucket."""
        ids = self.ids
        at = len(ids)
        if ids and entry.schedule_id < ids[-1]:
            at = bisect_left(ids, entry.schedule_id)
        if at < len(ids) and ids[at] == entry.schedule_id:  # a removed entry
            self._gone_count -= 1
            self.after_ms[at] = entry.deliver_unix_ms - self.begin_unix_ms
            self.positions[at] = entry.position
        else:
            self.after_ms.insert(at, entry.deliver_unix_ms - self.begin_unix_ms)
            ids.insert(at, entry.schedule_id)
            self.positions.insert(at, entry.position)
        if self._oldest is not None:
            self._oldest = min(self._oldest, entry.position)

    def index(self, key: DelayKey) -> int | None:
        """Return the index of an entry; None if it is not in the bucket."""
        deliver_unix_ms, schedule_id = key
        at = bisect_left(self.ids, schedule_id)
        if at == len(self.ids) or self.ids[at] != schedule_id or self.positions[at] == _GONE:
            return None
        return at if self.after_ms[at] == deliver_unix_ms - self.begin_unix_ms else None

    def entry(self, at: int) -> DelayedBatch | None:
        """Return the entry at an index; None if it was removed."""
        position = self.positions[at]
        if position == _GONE:
            return None
        return DelayedBatch(self.begin_unix_ms + self.after_ms[at], self.ids[at], position)

    def move(self, at: int, position: int) -> None:
        """Change the position of the entry at an index."""
        if self.positions[at] == self._oldest:
            self._oldest = None
        self.positions[at] = position

    def remove(self, at: int) -> None:
        """Remove the entry at an index; other entries keep theirs."""
        self.move(at, _GONE)
        self._gone_count += 1

    def tidy(self) -> None:
        """Free the room of removed entries if there are many; this changes indexes."""
        if self._gone_count < max(_GONE_MAX, len(self.ids) // 2):
            return
        kept = self._kept()
        for column in (self.after_ms, self.ids, self.positions):
            left = np.frombuffer(column, column.typecode)[kept].tobytes()
            del column[:]
            column.frombytes(left)
        self._gone_count = 0

    def oldest(self) -> int:
        """Return the lowest position; negative if the bucket is empty."""
        if self._oldest is None:
            positions = np.frombuffer(self.positions, np.int64)[self._kept()]
            if not positions.size:
                return _GONE
            self._oldest = int(positions.min())
        return self._oldest

    def rows(self) -> npt.NDArray[np.void]:
        """Return one row per entry."""
        kept = self._kept()
        rows = np.empty(int(kept.sum()), _ROW)
        rows["deliver_unix_ms"] = np.frombuffer(self.after_ms, np.uint16)[kept]
        rows["deliver_unix_ms"] += self.begin_unix_ms
        rows["schedule_id"] = np.frombuffer(self.ids, np.int64)[kept]
        rows["position"] = np.frombuffer(self.positions, np.int64)[kept]
        return rows

    def split(self) -> dict[int, _Bucket]:
        """Split the bucket of a minute into buckets of a second."""
        rows = self.rows()
        seconds = rows["deliver_unix_ms"] // SECOND_MS
        return {
            second: _Bucket.of(second * SECOND_MS, rows[seconds == second])
            for second in np.unique(seconds).tolist()
        }

    def order(self) -> npt.NDArray[np.int64]:
        """Return the indexes sorted by time, then by schedule id."""
        return np.argsort(np.frombuffer(self.after_ms, np.uint16), kind="stable")

    def _kept(self) -> npt.NDArray[np.bool_]:
        kept: npt.NDArray[np.bool_] = np.frombuffer(self.positions, np.int64) != _GONE
        return kept


class _SortedBucket:
    """A bucket that accepts no more entries, read in order of time."""

    __slots__ = ("_cursor", "_order", "bucket")

    def __init__(self, bucket: _Bucket) -> None:
        self.bucket, self._order, self._cursor = bucket, bucket.order(), 0

    def head(self) -> DelayedBatch | None:
        """Return the first entry that is left; None if there is none."""
        while self._cursor < len(self._order):
            if (entry := self.bucket.entry(int(self._order[self._cursor]))) is not None:
                return entry
            self._cursor += 1
        return None

    def take(self) -> None:
        """Remove the head."""
        self.bucket.remove(int(self._order[self._cursor]))
        self._cursor += 1
