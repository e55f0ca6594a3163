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
     4     2  version, 2
     6     2  reserved, 0
     8     8  position at which the run begins
    16     8  position at which it ends
    24     8  store time of its first batch with a key, Unix milliseconds; 0 if there is none
    32     8  store time of its last batch with a key
    40     4  entry count n
    44     4  CRC-32C of everything from byte 52 on
    48     4  CRC-32C of [0, 48)
    52     8m every 512th hash of the hash column, the first included
          8m for each 512 entries: 4 CRC-32C of their hashes, 4 of their positions and indexes
           4 CRC-32C from byte 52 to here
          8n hash column, ascending: topic id, modulo 2^32, in the upper half, key hash in the lower
          8n positions of the batches
          2n indexes of the messages in their batches

Equal hashes are in log order. A hash is only a hint: the reader compares the real key. Everything
that a search reads is compared with its checksum, so a flipped bit hides no message. Version 1 has
no checksums of 512 entries. It is read, not written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batonmq._columns.batch_columns import key_hashes
from batonmq._core.checksum import crc32c
from batonmq._core.records import Header
from batonmq_server.storage.core.compaction_order import written_unix_ms
from batonmq_server.storage.core.files import UNREADABLE, BadIndex, Disk, FileCache

FOLDER = "keyindex"
RUN_ENTRIES = 1 << 19
ENDED_MAX = 8
"""Maximum number of ended runs in memory; if there are more, they are written at once."""
MAGIC, VERSION, OLD_VERSION = 0x42544E4B, 2, 1
HEAD = struct.Struct(">IHHqqqqII")
CRC = struct.Struct(">I")
FENCE_STEP = 512
ROW = np.dtype([("hash", ">u8"), ("position", ">i8"), ("index", ">u2")])
BLOCK_CRCS = np.dtype([("hashes", ">u4"), ("places", ">u4")])
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


class DamagedRun(Exception):
    """The file of a run can't be read, or does not match its checksums.

    Attributes:
        extent: The part of the log from which the run can be rebuilt.
    """

    def __init__(self, extent: RunExtent) -> None:
        super().__init__(f"{_path(extent.first_position)} is damaged")
        self.extent = extent


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
    hashes, positions, indexes = (rows[name].tobytes() for name in ("hash", "position", "index"))
    crcs = np.empty(-(-len(rows) // FENCE_STEP), BLOCK_CRCS)
    for number in range(len(crcs)):
        crcs[number] = _crcs_of(
            *(
                column[size * FENCE_STEP * number : size * FENCE_STEP * (number + 1)]
                for size, column in ((8, hashes), (8, positions), (2, indexes))
            )
        )
    directory = rows["hash"][::FENCE_STEP].tobytes() + crcs.tobytes()
    columns = b"".join((directory, CRC.pack(crc32c(directory)), hashes, positions, indexes))
    at = run.extent
    head = HEAD.pack(
        MAGIC, VERSION, 0, at.first_position, at.next_position, at.first_unix_ms, at.last_unix_ms,
        len(rows), crc32c(columns),
    )  # fmt: skip
    return head + CRC.pack(crc32c(head)) + columns


def rebuilt_run(extent: RunExtent, batches: Iterable[tuple[Header, memoryview]]) -> EndedRun:
    """Return an ended run, given all batches of its part of the log."""
    rebuilt = _OpenRunRows(extent.first_position)
    for header, batch in batches:
        keys = key_hashes(batch, header)
        if len(keys[0]):
            rebuilt.add(header.position, header.topic_id, keys, written_unix_ms(header))
    return EndedRun(rebuilt.extent(extent.next_position), rebuilt.rows)


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
        """Yield the places of messages that may have a key, run by run, newest first.

        Raises:
            DamagedRun: a run must be rebuilt first.
        """
        wanted = np.uint64(search_hash(topic_id, key_hash))
        for extent, rows in [
            (self._open.extent(-1), self._open.rows),
            *((ended.extent, ended.rows) for ended in reversed(self._ended)),
        ]:
            hits = rows[rows["hash"] == wanted]
            if len(hits):
                yield KeyHits(extent, hits["position"].astype(np.int64), hits["index"])
        for run in reversed(self._runs):
            run_hits = run.find(self._cache, wanted)
            if run_hits is not None:
                yield run_hits

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
        """Drop the runs before `position`, the start of a segment; return the files to remove."""
        gone = [run.path for run in self._runs if run.extent.next_position <= position]
        self._runs = [run for run in self._runs if run.extent.next_position > position]
        return gone

    def replace(self, run: EndedRun) -> bool:
        """Use the rewritten file of a run; return whether the index still has that run."""
        self._cache.forget(run.path)
        for number, old in enumerate(self._runs):
            if old.path == run.path:
                self._runs[number] = _RunFile(run.extent, len(run.rows))
                return True
        return False

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
    has_crcs: bool = True
    """False for version 1."""
    _fence: npt.NDArray[np.uint64] | None = field(default=None)
    _crcs: npt.NDArray[np.void] | None = field(default=None)

    @property
    def path(self) -> str:
        return _path(self.extent.first_position)

    @property
    def _block_count(self) -> int:
        return -(-self.count // FENCE_STEP)

    @property
    def _hashes_at(self) -> int:
        crcs = BLOCK_CRCS.itemsize * self._block_count + CRC.size if self.has_crcs else 0
        return _COLUMNS_AT + 8 * self._block_count + crcs

    def find(self, cache: FileCache, wanted: np.uint64) -> KeyHits | None:
        """Return the entries with a hash; takes at most three reads unless there are many.

        Raises:
            DamagedRun: the file can't be read, or does not match its checksums.
        """
        if not self.count:
            return None
        if self._fence is None:
            self._fence = self._read_directory(cache)
        begin = max(int(np.searchsorted(self._fence, wanted, "left")) - 1, 0) * FENCE_STEP
        end = int(np.searchsorted(self._fence, wanted, "right")) * FENCE_STEP
        end = min(end, self.count)
        if begin >= end:
            return None
        raw = self._column(cache, 0, 8, begin, end)
        self._check("hashes", begin, (raw, 8))
        hashes = np.frombuffer(raw, ">u8")
        first = int(np.searchsorted(hashes, wanted, "left"))
        last = int(np.searchsorted(hashes, wanted, "right"))
        if first == last:
            return None
        end = min(begin + -(-last // FENCE_STEP) * FENCE_STEP, self.count)
        skipped = first // FENCE_STEP * FENCE_STEP
        begin, first, last = begin + skipped, first - skipped, last - skipped
        positions = self._column(cache, 8 * self.count, 8, begin, end)
        indexes = self._column(cache, 16 * self.count, 2, begin, end)
        self._check("places", begin, (positions, 8), (indexes, 2))
        return KeyHits(
            self.extent,
            np.frombuffer(positions, ">i8")[first:last].astype(np.int64),
            np.frombuffer(indexes, ">u2")[first:last].astype(np.uint16),
        )

    def _read_directory(self, cache: FileCache) -> npt.NDArray[np.uint64]:
        raw = self._read(cache, _COLUMNS_AT, self._hashes_at - _COLUMNS_AT)
        fence_bytes = 8 * self._block_count
        if self.has_crcs:
            if CRC.unpack(raw[-CRC.size :])[0] != crc32c(raw[: -CRC.size]):
                raise DamagedRun(self.extent)
            self._crcs = np.frombuffer(raw[fence_bytes : -CRC.size], BLOCK_CRCS)
        return np.frombuffer(raw[:fence_bytes], ">u8").astype(np.uint64)

    def _check(self, name: str, begin: int, *columns: tuple[bytes, int]) -> None:
        """Compare columns from entry `begin` on, the first one of a block, with their CRCs."""
        if self._crcs is None:
            return
        content, size = columns[0]
        for number in range(-(-len(content) // (size * FENCE_STEP))):
            crc = _crc_of(
                *(
                    column[size * FENCE_STEP * number : size * FENCE_STEP * (number + 1)]
                    for column, size in columns
                )
            )
            if crc != self._crcs[name][begin // FENCE_STEP + number]:
                raise DamagedRun(self.extent)

    def _column(self, cache: FileCache, column_at: int, size: int, begin: int, end: int) -> bytes:
        return self._read(cache, self._hashes_at + column_at + begin * size, (end - begin) * size)

    def _read(self, cache: FileCache, at: int, size: int) -> bytes:
        try:
            data = cache.get(self.path).read(at, size)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            data = b""
        if len(data) != size:
            raise DamagedRun(self.extent)
        return data


def _crcs_of(hashes: bytes, positions: bytes, indexes: bytes) -> tuple[int, int]:
    """Return the checksums of the entries of a block."""
    return _crc_of(hashes), _crc_of(positions, indexes)


def _crc_of(*parts: bytes) -> int:
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return crc


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
    extent = RunExtent(begin, end, first_unix_ms, last_unix_ms)
    run = _RunFile(extent, count, has_crcs=version != OLD_VERSION)
    known = magic == MAGIC and version in (VERSION, OLD_VERSION) and begin == first_position
    if not known or size != run._hashes_at + ROW.itemsize * count:
        raise BadIndex(f"{path} is not a run of version {VERSION}, or is too short")
    return run


def _path(first_position: int) -> str:
    return f"{FOLDER}/{first_position:020d}"
