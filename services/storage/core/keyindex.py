"""The key index: finds messages by topic and key hash, newest first.

Entries are collected in log order, in *runs*. A run covers a part of one segment: it ends with the
segment, or once it has `RUN_ENTRIES` entries. An ended run is sorted and written to a file of its
own, which never changes. The open run is in memory; each checkpoint appends its new rows to a file.
Both can be rebuilt from the log, byte for byte.

    keyindex/<position, 20 digits>         ended run, named by its first position in the log
    keyindex/<position, 20 digits>.open    the open run: rows in log order

A run file, big-endian; docs/reference/format.md has the same in prose:

    at  size  field
     0     4  magic "BTNK"
     4     2  version, 1
     6     2  reserved, 0
     8     8  position at which the run begins
    16     8  position at which it ends
    24     8  store time of its first batch with a key, Unix milliseconds; 0 if there is none
    32     8  store time of its last batch with a key
    40     4  entry count n
    44     4  CRC-32C of everything from byte 52 on
    48     4  CRC-32C of [0, 48)
    52     8m every 512th hash of the hash column, the first included
          8n hash column, ascending: topic id, modulo 2^32, in the upper half, key hash in the lower
          8n positions of the batches
          2n indexes of the messages in their batches

Equal hashes are in log order. A hash is only a hint: the reader compares the real key.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from batonmq.errors import DataLoss
from batonmq_server.storage.core.files import UNREADABLE, BadIndex, Disk, FileCache

FOLDER = "keyindex"
RUN_ENTRIES = 1 << 19
ENDED_MAX = 8
"""Maximum number of ended runs in memory; if there are more, they are written at once."""
MAGIC, VERSION = 0x42544E4B, 1
HEAD = struct.Struct(">IHHqqqqII")
CRC = struct.Struct(">I")
FENCE_STEP = 512
ROW = np.dtype([("hash", ">u8"), ("position", ">i8"), ("index", ">u2")])
_NAME = re.compile(r"\d{20}")
_ENTRIES_MIN = 256
_COLUMNS_AT = HEAD.size + CRC.size

Rows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class RunExtent:
    """The part of the log that a run covers, and the store times of its batches with keys."""

    first_position: int
    next_position: int
    first_unix_ms: int = 0
    last_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The open run at a checkpoint; `extent` ends at the checkpoint."""

    extent: RunExtent
    count: int
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class EndedRun:
    """A run that has ended and is not written yet; its rows are in log order."""

    extent: RunExtent
    rows: Rows

    @property
    def path(self) -> str:
        """Path of its file."""
        return _path(self.extent.first_position)


@dataclass(frozen=True, slots=True, eq=False)
class UnsavedRuns:
    """The rows that a checkpoint must write first. Immutable.

    Attributes:
        ended: Ended runs without a file.
        rows_from: Number of rows that the file of the open run has already.
        rows: The rows after them.
        obsolete: File of the run that was open at the previous checkpoint; empty if there is none.
    """

    ended: tuple[EndedRun, ...]
    open_run: OpenRun
    rows_from: int
    rows: Rows
    obsolete: str


def search_hash(topic_id: int, key_hash: int) -> int:
    """Return the hash of a key of a topic, as it is in the index."""
    return (topic_id & 0xFFFFFFFF) << 32 | key_hash


def open_path(first_position: int) -> str:
    """Return the path of the open run that begins at `first_position`."""
    return f"{_path(first_position)}.open"


def encode_run(run: EndedRun) -> bytes:
    """Return the file content of a run."""
    rows = run.rows[np.argsort(run.rows["hash"].astype(np.uint64), kind="stable")]
    columns = b"".join(
        (
            rows["hash"][::FENCE_STEP].tobytes(),
            rows["hash"].tobytes(),
            rows["position"].tobytes(),
            rows["index"].tobytes(),
        )
    )
    at = run.extent
    head = HEAD.pack(
        MAGIC, VERSION, 0, at.first_position, at.next_position, at.first_unix_ms, at.last_unix_ms,
        len(rows), crc32c(columns),
    )  # fmt: skip
    return head + CRC.pack(crc32c(head)) + columns


class KeyIndex:
    """The key index of one log. `UnsavedRuns` may be written by another thread.

    Args:
        segment_end: Returns the end of the segment that contains, or will contain, a position. The
            end of the last segment may change as long as nothing is written after it.
        first_position: First position of the log.
    """

    def __init__(
        self,
        disk: Disk,
        cache: FileCache,
        segment_end: Callable[[int], int],
        first_position: int = 0,
        *,
        run_entries: int = RUN_ENTRIES,
    ) -> None:
        self._disk, self._cache, self._segment_end = disk, cache, segment_end
        self._run_entries = run_entries
        self._runs: list[_RunFile] = []
        self._ended: list[EndedRun] = []
        self._handed_out: tuple[EndedRun, ...] = ()
        self._saved_path = ""
        self._open = _OpenRunRows(first_position)

    def append(
        self,
        span: tuple[int, int],
        topic_id: int,
        keys: tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]],
        store_unix_ms: int,
    ) -> None:
        """Index a batch; batches are added in log order.

        Args:
            span: First position of the batch, and the position after it.
            keys: For each key: index of its message in the batch, and hash of the key.
        """
        position, next_position = span
        while position >= (end := self._segment_end(self._open.first_position)):
            self._end(end)
        if len(keys[0]):
            self._open.add(position, topic_id, keys, store_unix_ms)
            if self._open.count >= self._run_entries:
                self._end(next_position)

    def find(self, topic_id: int, key_hash: int) -> Iterator[KeyHits]:
        """Yield the places of messages that may have a key, run by run, newest first."""
        wanted = np.uint64(search_hash(topic_id, key_hash))
        for extent, rows in [
            (self._open.extent(-1), self._open.rows),
            *((ended.extent, ended.rows) for ended in reversed(self._ended)),
        ]:
            hits = rows[rows["hash"] == wanted]
            if len(hits):
                yield KeyHits(extent, hits["position"].astype(np.int64), hits["index"])
        for run in reversed(self._runs):
            found = run.find(self._cache, wanted)
            if found is not None:
                yield found

    def unsaved(self, position: int) -> UnsavedRuns:
        """Return what a checkpoint at `position`, the end of the log, must write."""
        run = self._open
        rows = run.rows
        self._handed_out = tuple(self._ended)
        return UnsavedRuns(
            self._handed_out,
            OpenRun(run.extent(position), run.count, run.crc()),
            run.saved_count,
            rows[run.saved_count :],
            self._saved_path if self._saved_path != open_path(run.first_position) else "",
        )

    def saved(self, unsaved: UnsavedRuns) -> None:
        """Record that `unsaved` is written and that a durable checkpoint refers to it."""
        self._handed_out = ()
        self._saved_path = open_path(unsaved.open_run.extent.first_position)
        self._written(unsaved.ended)
        if self._open.first_position == unsaved.open_run.extent.first_position:
            self._open.saved_count = unsaved.open_run.count

    def resume(self, open_run: OpenRun, first_position: int) -> None:
        """Load the runs of a checkpoint.

        Args:
            first_position: First position of the log; runs must cover everything from there on.

        Raises:
            BadIndex: the files do not match the checkpoint.
        """
        at = open_run.extent
        if at.first_position < first_position:  # the log has dropped that part
            at, open_run = RunExtent(first_position, first_position), OpenRun(at, 0, 0)
        runs = []
        position = first_position
        for begin in sorted(int(name) for name in self._names() if _NAME.fullmatch(name)):
            if position <= begin < at.first_position:
                run = _read_run(self._disk, begin)
                if begin != position:
                    break
                position = run.extent.next_position
                runs.append(run)
        if position != at.first_position:
            raise BadIndex(f"the key index has no run that begins at position {position}")
        self._open = _OpenRunRows(at.first_position)
        self._open.resume(at, self._read_open(open_run))
        self._runs, self._saved_path = runs, open_path(at.first_position)
        kept = {run.path for run in runs} | {open_path(at.first_position)}
        for name in self._names():
            if f"{FOLDER}/{name}" not in kept:
                self._disk.remove(f"{FOLDER}/{name}")

    def drop_before(self, position: int) -> list[str]:
        """Drop the runs before `position`, the begin of a segment; return the files to remove."""
        gone = [run.path for run in self._runs if run.extent.next_position <= position]
        self._runs = [run for run in self._runs if run.extent.next_position > position]
        return gone

    def write_ended_runs(self) -> None:
        """Write the ended runs now, except those that `unsaved` has returned."""
        ended = tuple(run for run in self._ended if run not in self._handed_out)
        for run in ended:
            self._disk.replace(run.path, encode_run(run))
        self._written(ended)

    def _written(self, ended: tuple[EndedRun, ...]) -> None:
        self._ended = [run for run in self._ended if run not in ended]
        self._runs += [_RunFile(run.extent, len(run.rows)) for run in ended]
        self._runs.sort(key=lambda run: run.extent.first_position)

    def _end(self, next_position: int) -> None:
        """End the open run at `next_position`, and begin the next one."""
        if self._open.first_position < next_position:
            if len(self._ended) >= ENDED_MAX:
                with suppress(OSError):  # for example a full disk: the runs stay in memory
                    self.write_ended_runs()
            self._ended.append(EndedRun(self._open.extent(next_position), self._open.rows))
        self._open = _OpenRunRows(next_position)

    def _names(self) -> Sequence[str]:
        return self._disk.names(FOLDER)

    def _read_open(self, open_run: OpenRun) -> Rows:
        path = open_path(open_run.extent.first_position)
        raw = self._disk.load(path)[: open_run.count * ROW.itemsize]
        if len(raw) != open_run.count * ROW.itemsize or crc32c(raw) != open_run.crc:
            raise BadIndex(f"{path} does not match the checkpoint")
        return np.frombuffer(raw, ROW)


@dataclass(frozen=True, slots=True)
class KeyHits:
    """Messages of one run with the searched key hash, oldest first."""

    extent: RunExtent
    positions: npt.NDArray[np.int64]
    indexes: npt.NDArray[np.uint16]


class _OpenRunRows:
    """The rows of the open run. Rows are added, never changed."""

    def __init__(self, first_position: int) -> None:
        self.first_position = first_position
        self.count = self.saved_count = 0
        self._first_unix_ms = self._last_unix_ms = 0
        self._all = np.empty(_ENTRIES_MIN, ROW)
        self._crc = self._crc_count = 0

    @property
    def rows(self) -> Rows:
        return self._all[: self.count]

    def extent(self, next_position: int) -> RunExtent:
        return RunExtent(
            self.first_position, next_position, self._first_unix_ms, self._last_unix_ms
        )

    def add(
        self,
        position: int,
        topic_id: int,
        keys: tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]],
        store_unix_ms: int,
    ) -> None:
        indexes, hashes = keys
        end = self.count + len(indexes)
        if end > len(self._all):
            grown = np.empty(1 << (end - 1).bit_length(), ROW)
            grown[: self.count] = self.rows
            self._all = grown
        added = self._all[self.count : end]
        added["hash"] = hashes.astype(np.uint64) | np.uint64(search_hash(topic_id, 0))
        added["position"] = position
        added["index"] = indexes
        if not self.count:
            self._first_unix_ms = store_unix_ms
        self._last_unix_ms = store_unix_ms
        self.count = end

    def crc(self) -> int:
        """Return the CRC-32C of the rows."""
        added = self.rows[self._crc_count :].tobytes()
        self._crc = crc32c(added, self._crc)
        self._crc_count = self.count
        return self._crc

    def resume(self, extent: RunExtent, rows: Rows) -> None:
        self._first_unix_ms, self._last_unix_ms = extent.first_unix_ms, extent.last_unix_ms
        self._all = rows.copy()
        self.count = self.saved_count = len(rows)


@dataclass(slots=True)
class _RunFile:
    """A run in a file."""

    extent: RunExtent
    count: int
    _fence: npt.NDArray[np.uint64] | None = field(default=None)

    @property
    def path(self) -> str:
        return _path(self.extent.first_position)

    @property
    def _hashes_at(self) -> int:
        return _COLUMNS_AT + 8 * -(-self.count // FENCE_STEP)

    def find(self, cache: FileCache, wanted: np.uint64) -> KeyHits | None:
        """Return the entries with a hash; takes at most three reads unless there are many.

        Raises:
            DataLoss: the file can't be read or is too short.
        """
        if not self.count:
            return None
        if self._fence is None:
            raw = self._read(cache, _COLUMNS_AT, self._hashes_at - _COLUMNS_AT)
            self._fence = np.frombuffer(raw, ">u8").astype(np.uint64)
        begin = max(int(np.searchsorted(self._fence, wanted, "left")) - 1, 0) * FENCE_STEP
        end = int(np.searchsorted(self._fence, wanted, "right")) * FENCE_STEP
        end = min(end, self.count)
        if begin >= end:
            return None
        hashes = self._column(cache, 0, ">u8", begin, end)
        first = begin + int(np.searchsorted(hashes, wanted, "left"))
        last = begin + int(np.searchsorted(hashes, wanted, "right"))
        if first == last:
            return None
        return KeyHits(
            self.extent,
            self._column(cache, 8 * self.count, ">i8", first, last).astype(np.int64),
            self._column(cache, 16 * self.count, ">u2", first, last).astype(np.uint16),
        )

    def _column(
        self, cache: FileCache, column_at: int, kind: str, begin: int, end: int
    ) -> npt.NDArray[np.integer[npt.NBitBase]]:
        dtype = np.dtype(kind)
        at = self._hashes_at + column_at + begin * dtype.itemsize
        return np.frombuffer(self._read(cache, at, (end - begin) * dtype.itemsize), dtype)

    def _read(self, cache: FileCache, at: int, size: int) -> bytes:
        try:
            found = cache.get(self.path).read(at, size)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            found = b""
        if len(found) != size:
            raise DataLoss(
                f"{self.path} can't be read or is too short",
                remedy="Stop the node and run: baton fsck DIR --repair.",
            )
        return found


def _read_run(disk: Disk, first_position: int) -> _RunFile:
    """Read the head of a run file and check it; the columns are not checked."""
    path = _path(first_position)
    file = disk.open(path)
    try:
        raw, size = file.read(0, _COLUMNS_AT), file.size
    finally:
        file.close()
    if len(raw) < _COLUMNS_AT or CRC.unpack_from(raw, HEAD.size)[0] != crc32c(raw[: HEAD.size]):
        raise BadIndex(f"{path} has a damaged head")
    magic, version, _, begin, end, first_unix_ms, last_unix_ms, count, _ = HEAD.unpack_from(raw)
    run = _RunFile(RunExtent(begin, end, first_unix_ms, last_unix_ms), count)
    if (magic, version, begin) != (MAGIC, VERSION, first_position) or size != (
        run._hashes_at + ROW.itemsize * count
    ):
        raise BadIndex(f"{path} is not a run of version {VERSION}, or is too short")
    return run


def _path(first_position: int) -> str:
    return f"{FOLDER}/{first_position:020d}"
