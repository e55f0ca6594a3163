"""The index of one queue: the position in the log of each message, by offset.

Entry N is at byte 20 N. The index is derived from the log, and its newest entries may be only in
memory. Recovery trusts the entries that the checkpoint covers and rebuilds the rest from the log.

    at  size  entry, big-endian
     0     8  position of the batch that holds the message
     8     4  size of that batch, bytes
    12     8  tag hash of the message, sign-extended

Source: RocketMQ ConsumeQueue. Deviation: an entry points to the batch, not to the message; the
index within the batch is the offset less the batch's first offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batonmq._columns.batch_columns import tag_hashes
from batonmq._core.records import Header
from batonmq.errors import DataLoss
from batonmq_server.storage.core.files import UNREADABLE, BadIndex, Disk, FileCache

FOLDER = "consumequeue"
ENTRY = np.dtype([("position", ">i8"), ("size", ">i4"), ("tag", ">i8")])
ENTRIES_PER_FILE = 300_000
_TAIL_MIN, _TAIL_MAX = 64, 4_096

Int64Array = npt.NDArray[np.int64]


def folder_of(topic: str, topic_id: int, queue_id: int) -> str:
    """Return the folder of one queue's files."""
    return f"{FOLDER}/{topic}-{topic_id}/{queue_id}"


def topic_of(folder: str) -> str:
    """Return the topic name in a folder name that `folder_of` returned, or in a path below it."""
    return folder.split("/")[1].rpartition("-")[0]


def batch_entries(header: Header, batch: bytes | memoryview) -> npt.NDArray[np.void]:
    """Return the entries of a batch that is in the log."""
    entries = np.empty(header.count, ENTRY)
    entries["position"], entries["size"] = header.position, header.length
    entries["tag"] = tag_hashes(batch, header)
    return entries


@dataclass(frozen=True, slots=True)
class Entries:
    """Columns of consecutive entries, each of shape (count,)."""

    positions: Int64Array
    sizes: Int64Array
    tags: Int64Array

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def in_one_batch(self) -> bool:
        """Whether all entries are of the same batch; False if there is none."""
        return len(self.positions) > 0 and bool(self.positions[0] == self.positions[-1])


@dataclass(frozen=True, slots=True)
class LastEntry:
    """The batch that the last entry of a queue points to."""

    position: int
    size: int


class EntriesWrite(NamedTuple):
    """Entries to write to one file."""

    path: str
    at: int
    raw: bytes


class FiledEntries(NamedTuple):
    """Entries as one file must contain them.

    Attributes:
        offset: Offset of the first entry.
        at: Byte of the first entry in the file.
    """

    offset: int
    path: str
    at: int
    entries: npt.NDArray[np.void]


class UnsavedEntries(NamedTuple):
    """The entries of one queue that a checkpoint must make durable. Immutable.

    Attributes:
        paths: Files to sync after the writes.
    """

    paths: list[str]
    writes: tuple[EntriesWrite, ...]
    flushed_offset: int
    next_offset: int


class ConsumeQueue:
    """The index of one queue.

    Offsets [first_offset, next_offset) are indexed; those below `visible_offset` are readable.

    Args:
        folder: Folder of its files.
        first_offset: Offset of the first message that the log still has.

    Attributes:
        first_position: Position of the first batch, or of one before it; -1 if there was none.
        last_position: Position of the last batch; -1 if there was none.
    """

    __slots__ = (
        "_entries_per_file", "_files", "_flushed_offset", "_saved_offset", "_tail", "first_offset",
        "first_position", "folder", "last_position", "next_offset", "visible_offset",
    )  # fmt: skip

    def __init__(
        self,
        files: FileCache,
        folder: str,
        *,
        first_offset: int = 0,
        entries_per_file: int = ENTRIES_PER_FILE,
    ) -> None:
        self._files, self.folder, self._entries_per_file = files, folder, entries_per_file
        self.first_offset = self.next_offset = self.visible_offset = first_offset
        self._flushed_offset = self._saved_offset = first_offset
        self.first_position = self.last_position = -1
        self._tail = np.empty(_TAIL_MIN, ENTRY)

    def resume(self, next_offset: int, first_position: int, last_position: int) -> None:
        """Continue after entries that are in the files, durable and visible."""
        self.next_offset = self.visible_offset = next_offset
        self._flushed_offset = self._saved_offset = next_offset
        self.first_position, self.last_position = first_position, last_position

    def read_last_entry(self, disk: Disk, next_offset: int) -> LastEntry:
        """Return the entry before `next_offset`, after a check that the files have all entries.

        Raises:
            BadIndex: a file is too short.
            OSError: a file is missing.
        """
        raw = b""
        for path in self.paths(self.first_offset, next_offset):
            wanted = self._entries_per_file * ENTRY.itemsize
            if path == self._place(next_offset - 1)[0]:
                wanted = self._place(next_offset - 1)[1] + ENTRY.itemsize
            file = disk.open(path)
            try:
                raw = file.read(wanted - ENTRY.itemsize, ENTRY.itemsize)
            finally:
                file.close()
            if len(raw) < ENTRY.itemsize:
                raise BadIndex(f"{path} is too short")
        position, size, _ = np.frombuffer(raw, ENTRY)[0].tolist()
        return LastEntry(position, size)

    def append(self, position: int, size: int, tag_hashes: npt.NDArray[np.int32]) -> None:
        """Index a batch: one entry per element of `tag_hashes`."""
        count = len(tag_hashes)
        begin = self.next_offset - self._flushed_offset
        if begin + count > len(self._tail):
            begin = self._make_room(begin, count)
        added = self._tail[begin : begin + count]
        added["position"] = position
        added["size"] = size
        added["tag"] = tag_hashes
        if self.first_offset == self.next_offset:
            self.first_position = position
        self.next_offset += count
        self.last_position = position

    def make_visible(self, next_offset: int) -> None:
        """Make everything below `next_offset` visible to consumers: it is safe."""
        assert self.visible_offset <= next_offset <= self.next_offset
        self.visible_offset = next_offset

    def read(self, first_offset: int, next_offset: int) -> Entries:
        """Return the entries of [first_offset, next_offset), which must be visible.

        Ends before the first entry of a file that no batch can have: a filter would skip it as a
        message with another tag.

        Raises:
            DataLoss: that is the first entry, or a file can't be read.
        """
        assert self.first_offset <= first_offset <= next_offset <= self.visible_offset
        entries = self._read(first_offset, next_offset)
        if first_offset >= self._flushed_offset:
            return entries
        bad = (entries.sizes <= 0) | (entries.tags != entries.tags.astype(np.int32))
        count = int(bad.argmax()) if bad.any() else len(entries)
        if count == len(entries):
            return entries
        if not count:
            raise _lost(self._place(first_offset)[0], "has a damaged entry", first_offset)
        return Entries(entries.positions[:count], entries.sizes[:count], entries.tags[:count])

    def _read(self, first_offset: int, next_offset: int) -> Entries:
        split = min(max(first_offset, self._flushed_offset), next_offset)
        pieces = []
        if first_offset < split:
            pieces.append(self._read_files(first_offset, split))
        if split < next_offset or not pieces:
            begin = split - self._flushed_offset
            pieces.append(self._tail[begin : begin + next_offset - split])
        raw = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return Entries(
            raw["position"].astype(np.int64),
            raw["size"].astype(np.int64),
            raw["tag"].astype(np.int64),
        )

    def rewrite(self, first_offset: int, entries: npt.NDArray[np.void]) -> list[str]:
        """Replace entries in the files from `first_offset` on, where they differ.

        Entries that are only in memory, or no longer kept, are left out.

        Returns:
            The files that were changed; the caller syncs them.

        Raises:
            OSError: a file can't be read or written.
        """
        changed: list[str] = []
        for part in self.filed(first_offset, entries):
            raw = part.entries.tobytes()
            file = self._files.get(part.path, create=True)
            if file.read(part.at, len(raw)) != raw:
                file.write(part.at, [raw])
                changed.append(part.path)
        return changed

    def filed(self, first_offset: int, entries: npt.NDArray[np.void]) -> Iterator[FiledEntries]:
        """Yield the part of `entries`, which begin at `first_offset`, that the files must have.

        Entries that are only in memory, or no longer kept, are left out.
        """
        begin = max(first_offset, self.first_offset)
        end = min(first_offset + len(entries), self._flushed_offset)
        while begin < end:
            path, at = self._place(begin)
            count = min(end - begin, self._entries_per_file - at // ENTRY.itemsize)
            index = begin - first_offset
            yield FiledEntries(begin, path, at, entries[index : index + count])
            begin += count

    def flush(self) -> None:
        """Move the entries that are only in memory to the files.

        Raises:
            OSError: a file can't be written; nothing is lost.
        """
        for write in self._writes():
            self._files.get(write.path, create=True).write(write.at, [write.raw])
        self._flushed_offset = self.next_offset

    @property
    def has_unsaved(self) -> bool:
        """Whether there are entries that are not known to be durable."""
        return self._saved_offset < self.next_offset

    def unsaved(self) -> UnsavedEntries:
        """Return what to write and sync so that all entries are durable."""
        writes = tuple(self._writes())
        return UnsavedEntries(
            self.paths(self._saved_offset, self.next_offset),
            writes,
            self._flushed_offset,
            self.next_offset,
        )

    def saved(self, unsaved: UnsavedEntries) -> None:
        """Record that `unsaved` is written and synced."""
        self._saved_offset = max(self._saved_offset, unsaved.next_offset)
        if self._flushed_offset == unsaved.flushed_offset:  # else `flush` has run meanwhile
            used = unsaved.next_offset - self._flushed_offset
            left = self.next_offset - unsaved.next_offset
            tail = np.empty(max(_TAIL_MIN, 1 << max(left - 1, 0).bit_length()), ENTRY)
            tail[:left] = self._tail[used : used + left]
            self._tail, self._flushed_offset = tail, unsaved.next_offset

    def paths(self, first_offset: int, next_offset: int) -> list[str]:
        """Return the files of the entries of [first_offset, next_offset)."""
        numbers = range(
            first_offset // self._entries_per_file, -(-next_offset // self._entries_per_file)
        )
        return [self._path(number) for number in numbers] if first_offset < next_offset else []

    def trim_before(self, position: int) -> list[str]:
        """Drop the messages of batches before `position`, because the log drops them.

        The next offset does not change. Messages that are not visible yet must not be dropped.

        Returns:
            Files that hold no entry any more; the caller removes them.
        """
        if self.first_position >= position or self.first_offset == self.next_offset:
            return []
        if self.last_position < position:
            return self.trim_to(self.next_offset, position)
        return self.trim_to(*self._first_from(position))

    def trim_to(self, offset: int, position: int) -> list[str]:
        """Drop the messages before `offset`; the queue may have done so already.

        The next offset does not change. Messages that are not visible yet must not be dropped.

        Args:
            offset: First offset of a batch, or the next offset.
            position: Position of that batch, or one between it and the batch before.

        Returns:
            Files that hold no entry any more; the caller removes them.
        """
        if offset <= self.first_offset:
            if offset == self.first_offset < self.next_offset:
                self.first_position = max(self.first_position, position)
            return []
        assert offset <= self.next_offset, (self.folder, offset, self.next_offset)
        first_number = self._number(self.first_offset)
        if offset == self.next_offset:
            self.first_position = self.last_position
            self._flushed_offset = offset  # entries that are only in memory are dropped
        else:
            self.first_position = position
            self._forget_unflushed(offset)
        self.first_offset = offset
        self._saved_offset = max(self._saved_offset, self.first_offset)
        return [
            self._path(number) for number in range(first_number, self._number(self.first_offset))
        ]

    def has_batch(self, position: int, next_position: int) -> bool:
        """Return whether a batch with messages that are kept begins in this part of the log.

        Raises:
            DataLoss: the index can't be read.
        """
        if self.first_offset == self.next_offset or self.last_position < position:
            return False
        if self.first_position >= next_position:
            return False
        return self._first_from(position)[1] < next_position

    def first_offset_from(self, position: int) -> int:
        """Return the first offset of a batch at or after `position`; the next one without any.

        Raises:
            DataLoss: the index can't be read.
        """
        if self.first_offset == self.next_offset or self.last_position < position:
            return self.next_offset
        return self._first_from(position)[0]

    def skip_to(self, offset: int) -> None:
        """Drop all messages; the next one gets `offset`, which is not before the next offset."""
        assert offset >= self.next_offset
        self.first_offset = self.next_offset = self._flushed_offset = offset
        self._saved_offset = max(self._saved_offset, offset)
        self.first_position = self.last_position

    def _forget_unflushed(self, first_offset: int) -> None:
        """Drop entries below `first_offset` from memory, so that they are not written to a file."""
        unneeded = first_offset - self._flushed_offset
        if unneeded > 0:
            kept = self.next_offset - first_offset
            self._tail[:kept] = self._tail[unneeded : unneeded + kept].copy()
            self._flushed_offset = first_offset

    def _writes(self) -> Iterator[EntriesWrite]:
        """Yield the entries that are only in memory, by file."""
        offset = self._flushed_offset
        raw = self._tail[: self.next_offset - offset].tobytes()
        while raw:
            path, at = self._place(offset)
            chunk = raw[: self._entries_per_file * ENTRY.itemsize - at]
            yield EntriesWrite(path, at, chunk)
            offset += len(chunk) // ENTRY.itemsize
            raw = raw[len(chunk) :]

    def _number(self, offset: int) -> int:
        """Return the number of the file that has, or will have, the entry of `offset`."""
        return offset // self._entries_per_file

    def _first_from(self, position: int) -> tuple[int, int]:
        """Return the first offset of a batch at or after `position`, and its position."""
        low, high = self.first_offset, self.next_offset - 1
        while low < high:
            middle = (low + high) // 2
            if int(self._read(middle, middle + 1).positions[0]) < position:
                low = middle + 1
            else:
                high = middle
        return low, int(self._read(low, low + 1).positions[0])

    def _make_room(self, used: int, count: int) -> int:
        """Make room for `count` more entries in the tail; return the index of the first one."""
        wanted = used + count
        if wanted > _TAIL_MAX:
            with suppress(OSError):  # for example a full disk: the entries stay in memory
                self.flush()
            used = self.next_offset - self._flushed_offset
            wanted = used + count
        if wanted > len(self._tail):
            grown = np.empty(1 << (wanted - 1).bit_length(), ENTRY)
            grown[:used] = self._tail[:used]
            self._tail = grown
        return used

    def _read_files(self, first_offset: int, next_offset: int) -> npt.NDArray[np.void]:
        chunks = []
        while first_offset < next_offset:
            path, at = self._place(first_offset)
            wanted = (next_offset - first_offset) * ENTRY.itemsize
            room = self._entries_per_file * ENTRY.itemsize - at
            try:
                chunk = self._files.get(path).read(at, min(wanted, room))
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise
                raise _lost(path, f"can't be read: {error.strerror}", first_offset) from error
            if len(chunk) != min(wanted, room):
                raise _lost(path, "is too short", first_offset)
            chunks.append(chunk)
            first_offset += len(chunk) // ENTRY.itemsize
        return np.frombuffer(b"".join(chunks), ENTRY)

    def _place(self, offset: int) -> tuple[str, int]:
        """Return the file of the entry of `offset`, and its byte position in the file."""
        number, index = divmod(offset, self._entries_per_file)
        return self._path(number), index * ENTRY.itemsize

    def _path(self, number: int) -> str:
        return f"{self.folder}/{number * self._entries_per_file * ENTRY.itemsize:020d}"


def _lost(path: str, how: str, offset: int) -> DataLoss:
    return DataLoss(
        f"{path} {how}",
        remedy="Stop the node and run: baton fsck DIR --repair.",
        facts={"offset": offset},
    )
