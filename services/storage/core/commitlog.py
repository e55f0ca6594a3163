"""The commit log: batches one after another, in segments of fixed size.

The log knows positions, not queues. A batch lies in one segment. If the next batch does not fit, a
filler closes the segment. docs/reference/format.md describes the bytes.

    log/00000000000000000000    segment, named by the position of its first byte, 20 digits
    log/00000000001073741824

    filler:  0  4 magic "BTNF"    4  4 bytes to the end of the segment, including these 8
             if fewer than 8 bytes are left at the end of a segment, they stay zero

A purged segment has no batches: its file is sparse and contains only a filler, at its begin. It
reads as a filler from every position. Only whole segments are purged, and the log is never cut
within one.

The file of a segment that is only in the object store contains only its manifest; see `tier.py`.
"""

from __future__ import annotations

import errno
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from batonmq.errors import DataLoss, DataLossDetail, DiskFull, InvalidArgument, LimitExceeded
from batonmq_server.runtime.descriptor_shortage import is_shortage, no_descriptors
from batonmq_server.storage.core.files import UNREADABLE, Disk, File, FileCache
from batonmq_server.storage.core.tier import RemoteSegments, TierManifest, is_stub, read_stub
from batonmq_server.storage.core.tier_file import TierFile

FOLDER = "log"
FILLER_MAGIC = 0x42544E46
FILLER = struct.Struct(">II")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NAME = re.compile(r"\d{20}")

PositionRange = tuple[int, int]
"""`(first_position, next_position)`, half-open."""


@dataclass(frozen=True, slots=True)
class StampedBatch:
    """A batch to write: its stamped head of 56 bytes, and the rest as the producer sent it."""

    position: int
    head: bytes
    rest: memoryview

    @property
    def next_position(self) -> int:
        """Position after the batch."""
        return self.position + len(self.head) + len(self.rest)


@dataclass(frozen=True, slots=True)
class UnsyncedFiles:
    """The files to sync, in order of position, and the position that is synced afterwards."""

    files: tuple[File, ...]
    position: int


@dataclass(slots=True)
class _Segment:
    first_position: int
    size: int
    file: File | None = None
    """Open from the first write until everything in the segment is synced."""
    purged: bool = False
    stored: TierManifest | None = None
    """Set if the segment is only in the object store."""

    @property
    def path(self) -> str:
        return segment_path(self.first_position)

    @property
    def next_position(self) -> int:
        return self.first_position + self.size


def segment_path(first_position: int) -> str:
    """Return the path of the segment that begins at `first_position`."""
    return f"{FOLDER}/{first_position:020d}"


def purged_head(size: int) -> bytes:
    """Return the bytes with which the file of a purged segment of `size` bytes begins."""
    return FILLER.pack(FILLER_MAGIC, size)


def purged_bytes(room: int, bytes_max: int) -> bytes:
    """Return what a purged segment reads as, `room` bytes before its end: a filler."""
    head = FILLER.pack(FILLER_MAGIC, room) if room >= FILLER.size else b""
    wanted = min(max(bytes_max, 0), room)
    return head[:wanted].ljust(wanted, b"\0")


def has_purged_head(file: File, size: int) -> bool:
    """Return whether a segment file of `size` bytes is that of a purged segment."""
    return _read_head(file) == purged_head(size)


def _read_head(file: File) -> bytes:
    try:
        return file.read(0, FILLER.size)
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return b""  # a read of the log reports it


@contextmanager
def _opening() -> Iterator[None]:
    """Open segments in the body, before anything is written.

    Raises:
        Overloaded: the process has no free descriptor.
    """
    try:
        yield
    except OSError as error:
        if not is_shortage(error):
            raise
        raise no_descriptors() from error


class CommitLog:
    """The log of one data directory.

    Positions [first_position, next_position) are written; those below `synced_position` are on
    disk. After opening, `next_position` is the end of the last segment; the caller finds the end of
    the last good batch and calls `truncate`.

    Args:
        cache: Open files of segments that are only read.
        segment_bytes: Size of new segments; existing segments keep theirs.
        remote: Reads segments that are only in the object store; None without a store.

    Raises:
        DataLoss: a segment between two others is missing.
        InvalidArgument: a segment is in the object store, and there is no `remote`.
    """

    def __init__(
        self,
        disk: Disk,
        cache: FileCache,
        segment_bytes: int,
        remote: RemoteSegments | None = None,
    ) -> None:
        self._disk, self._cache, self._segment_bytes = disk, cache, segment_bytes
        self._remote = remote
        self._stored_end = 0
        self._segments: list[_Segment] = []
        self._firsts: list[int] = []
        for name in filter(_NAME.fullmatch, disk.names(FOLDER)):
            self._add_segment(int(name))
        self.first_position = self._firsts[0] if self._firsts else 0
        self.next_position = self._end()
        self.synced_position = self.first_position

    @property
    def end_position(self) -> int:
        """End of the last segment; the part after `next_position` is not written yet."""
        return self._end()

    @property
    def segment_bytes(self) -> int:
        """Size of new segments."""
        return self._segment_bytes

    @property
    def purged_bytes_count(self) -> int:
        """Bytes of the log that belong to purged segments; they take no space on disk."""
        return sum(segment.size for segment in self._segments if segment.purged)

    @property
    def stored_bytes_count(self) -> int:
        """Bytes of the log that belong to segments that are only in the object store."""
        return sum(segment.size for segment in self._segments if segment.stored is not None)

    def stored(self, position: int) -> TierManifest | None:
        """Return the manifest of the segment with `position`; None if the segment is local."""
        if not self.first_position <= position < self._stored_end:
            return None
        return self._segment_at(position).stored

    def next_local(self, position: int) -> int:
        """Return the first position from `position` on that is not only in the object store."""
        while (manifest := self.stored(position)) is not None:
            position = manifest.next_position
        return position

    def readable_count(self, positions: Sequence[int], sizes: Sequence[int]) -> int:
        """Return how many of these batches, in order, can be read now.

        It is all of them unless a batch is in the object store and not in the cache.
        """
        if not len(positions) or positions[0] >= self._stored_end:
            return len(positions)
        assert self._remote is not None
        for index, (position, size) in enumerate(zip(positions, sizes, strict=True)):
            manifest = self.stored(position)
            if manifest is None:
                continue
            if not self._remote.has(manifest, position - manifest.first_position, size):
                return index
        return len(positions)

    def is_purged(self, position: int) -> bool:
        """Return whether the segment that contains `position` is purged."""
        if not self.first_position <= position < self._end():
            return False
        return self._segment_at(position).purged

    def purged_between(self, position: int, next_position: int) -> bool:
        """Return whether a purged segment contains a part of [position, next_position)."""
        return any(segment.purged for segment in self._between(position, next_position))

    def cut_position(self, position: int) -> int:
        """Return where to cut the log so that it ends at `position` at the latest.

        That is the start of the segment if `position` is within a purged one.
        """
        return self._segment_at(position).first_position if self.is_purged(position) else position

    def file_cut_position(self, position: int) -> int:
        """As `cut_position`; also the start of a segment whose messages are not in its file."""
        if self.stored(position) is not None:
            return self._segment_at(position).first_position
        return self.cut_position(position)

    def next_kept(self, position: int) -> int:
        """Return the first position from `position` on that no purged segment contains."""
        while self.is_purged(position):
            position = self._segment_at(position).next_position
        return position

    def check_length(self, length: int) -> None:
        """Check that a batch of `length` bytes fits into a new segment.

        Raises:
            LimitExceeded: it does not fit.
        """
        if length > self._segment_bytes:
            raise LimitExceeded(
                f"batch has {length} bytes; the limit is the segment size, {self._segment_bytes}",
                facts={"field": "batch", "limit": self._segment_bytes, "actual": length},
            )

    def place(self, lengths: Sequence[int]) -> list[int]:
        """Return the positions that batches of `lengths` bytes would get, in order.

        Args:
            lengths: Lengths in bytes, each at most the size of a new segment.
        """
        at, positions = self.next_position, []
        end = self.segment_end(at)
        for length in lengths:
            while at + length > end:  # a segment of an earlier setting may be shorter
                at, end = end, self.segment_end(end)
            positions.append(at)
            at += length
        return positions

    def append(self, batches: Sequence[StampedBatch]) -> None:
        """Write batches at the positions that `place` has just returned: one write per segment.

        Raises:
            DiskFull: there is no space; nothing was written.
            Overloaded: a segment can't be opened for lack of a descriptor; nothing was written.
            OSError: the disk has failed; it is unknown what was written.
        """
        position = self.next_position
        with _opening():
            while self._end() <= batches[-1].position:
                self._create()
            for segment in self._between(position, batches[-1].next_position):
                self._writable(segment)
        try:
            self._write_all(batches)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._undo(position)
            raise DiskFull("no space on disk for a batch") from error

    def _write_all(self, batches: Sequence[StampedBatch]) -> None:
        begin = 0
        while begin < len(batches):
            segment = self._segment_at(batches[begin].position)
            count = bisect_left(
                batches, segment.next_position, begin, key=lambda batch: batch.position
            )
            while self.next_position < segment.first_position:
                self._fill()
            self._write(segment, batches[begin:count])
            begin = count

    def copy(self, data: bytes, segment: PositionRange, next_position: int) -> None:
        """Write bytes that another log has at `next_position`: whole batches, and then a filler.

        Args:
            segment: The segment of the other log that contains all of `data`.
            next_position: Position after `data`. After a filler that is the end of the segment,
                whatever part of the filler `data` contains.

        Raises:
            DiskFull: there is no space; nothing was written.
            DataLoss: the segment does not follow the segments of this log; nothing was written.
            Overloaded: a segment can't be opened for lack of a descriptor; nothing was written.
            OSError: the disk has failed; it is unknown what was written.
        """
        begin, end = segment
        if self.next_position == begin and data.startswith(purged_head(end - begin)):
            self._copy_purged(segment)
            return
        with _opening():
            target = self._matching_segment(*segment)
            self._writable(target)
        position = self.next_position
        try:
            self._writable(target).write(position - target.first_position, [data])
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._undo(position)
            raise DiskFull("no space on disk for the log of the leader") from error
        self.next_position = next_position

    def _copy_purged(self, segment: PositionRange) -> None:
        """Add a segment that is purged in the other log. Durable on return.

        Raises:
            DiskFull: there is no space; nothing was written.
            DataLoss: the segment does not follow the segments of this log; nothing was written.
            OSError: the disk has failed; it is unknown what was written.
        """
        begin, end = segment
        if self._segments and self._segments[-1].first_position == begin:
            self.drop_empty()
        elif self._segments:
            self._resize(self._segments[-1], begin)
        self._check_follows(begin, end)
        purged = _Segment(begin, end - begin, purged=True)
        try:
            self._disk.replace_sparse(purged.path, purged_head(purged.size), purged.size)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise DiskFull("no space on disk for the log of the leader") from error
        self._add(purged)
        self.next_position = end

    def read(self, position: int, bytes_max: int) -> bytes:
        """Read up to `bytes_max` bytes at `position`; fewer only at the end of its segment.

        Raises:
            DataLoss: the disk can't read them.
            NotCached: they have to be fetched from the object store first.
        """
        if not self.first_position <= position < self._end():
            return b""  # only a damaged index points outside the log
        segment = self._segment_at(position)
        if segment.purged:
            return purged_bytes(segment.next_position - position, bytes_max)
        at = position - segment.first_position
        if segment.stored is not None:
            assert self._remote is not None
            return self._remote.read(segment.stored, at, bytes_max)
        try:
            file = segment.file or self._cache.get(segment.path)
            return file.read(at, min(max(bytes_max, 0), segment.size - at))
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            raise DataLoss(
                f"the log can't be read at {position}: {error.strerror}",
                detail=DataLossDetail(position=position),
            ) from error

    def segment_of(self, position: int) -> tuple[str, int, int]:
        """Return path, first position and end of the segment that contains `position`."""
        segment = self._segment_at(position)
        return segment.path, segment.first_position, segment.next_position

    def segment_end(self, position: int) -> int:
        """Return the end of the segment that contains, or will contain, `position`."""
        if position >= self._end():
            return position + self._segment_bytes
        return self._segment_at(position).next_position

    def unsynced(self) -> UnsyncedFiles:
        """Return what to sync so that everything written until now is on disk."""
        segments = self._between(self.synced_position, self.next_position)
        return UnsyncedFiles(tuple(map(self._writable, segments)), self.next_position)

    def synced(self, position: int) -> None:
        """Record that everything below `position` is synced."""
        for segment in self._between(self.synced_position, position):
            if segment.next_position <= position:
                self._close(segment)
        self.synced_position = max(self.synced_position, position)

    def sync_closed(self) -> None:
        """Sync all segments but the last one. At a start that is the whole log.

        Only one of them is open at a time: a log may have more segments than the process may have
        descriptors.

        Raises:
            OSError: the disk has failed.
        """
        for segment in self._between(self.synced_position, self.next_position)[:-1]:
            self._writable(segment).sync()
            self._close(segment)
            self.synced_position = segment.next_position

    def sealed(self) -> list[PositionRange]:
        """Return the ranges of segments that are synced and followed by a batch, oldest first."""
        return [
            (segment.first_position, segment.next_position)
            for segment in self._between(self.first_position, self.next_position)
            if segment.next_position < self.next_position
            and segment.next_position <= self.synced_position
        ]

    def segments_between(self, position: int, next_position: int) -> list[PositionRange]:
        """Return the segments, not purged, with a part of [position, next_position)."""
        return [
            (segment.first_position, segment.next_position)
            for segment in self._between(position, next_position)
            if not segment.purged
        ]

    def roll(self) -> None:
        """Close the current segment unless it is empty: the next batch begins a new one.

        Raises:
            OSError: the disk has failed; it is unknown what was written.
        """
        position = self.next_position
        if position < self._end() and self._segment_at(position).first_position < position:
            self._fill()

    def purged(self, segment: PositionRange) -> None:
        """Record that the file of a synced segment now is that of a purged one."""
        target = self._segment_at(segment[0])
        self._close(target)
        self._cache.forget(target.path)
        target.purged, target.stored = True, None

    def move_out(self, manifest: TierManifest) -> None:
        """Read a sealed segment from the object store from now on; its file may be replaced."""
        target = self._segment_at(manifest.first_position)
        assert (target.first_position, target.next_position) == (
            manifest.first_position, manifest.next_position,
        )  # fmt: skip
        self._close(target)
        self._cache.forget(target.path)
        target.stored = manifest
        self._stored_end = max(self._stored_end, target.next_position)

    def move_back(self, manifest: TierManifest) -> None:
        """Undo `move_out`: the file could not be replaced."""
        self._segment_at(manifest.first_position).stored = None

    def drop_before(self, position: int) -> list[str]:
        """Forget the segments before `position`, which is the start of a segment.

        Returns:
            Their paths, oldest first. The caller removes the files in this order: otherwise a crash
            leaves a gap in the log.
        """
        count = bisect_left(self._firsts, position)
        dropped, self._segments = self._segments[:count], self._segments[count:]
        del self._firsts[:count]
        for segment in dropped:
            self._close(segment)
            self._cache.forget(segment.path)
        if dropped:
            self.first_position = dropped[-1].next_position
        return [segment.path for segment in dropped]

    def truncate(self, position: int) -> int:
        """Cut the log at `position`, which `file_cut_position` has returned. Durable on return.

        Returns:
            The number of bytes dropped, up to the last one that was not zero.
        """
        dropped = 0
        while self._segments and self._segments[-1].first_position > position:
            segment = self._segments.pop()
            self._firsts.pop()
            dropped += self._writable(segment).used(0)
            self._close(segment)
            self._cache.forget(segment.path)
            self._disk.remove(segment.path)
        if position < self._end():
            last = self._segments[-1]
            dropped += self._writable(last).cut(position - last.first_position)
        self.next_position = position
        return dropped

    def close(self) -> None:
        """Close the files; nothing is synced."""
        for segment in self._segments:
            self._close(segment)

    def _add_segment(self, first_position: int) -> None:
        segment = _Segment(first_position, 0)
        file = self._disk.open(segment.path)
        try:
            segment.size = file.size
            if isinstance(file, TierFile):
                segment.stored = file.manifest
            elif is_stub(head := _read_head(file)):
                segment.stored = read_stub(file, segment.size)
            else:
                segment.purged = head == purged_head(segment.size)
        finally:
            file.close()
        if segment.size == 0:
            self._disk.remove(segment.path)  # a crash interrupted the creation of the segment
            return
        if segment.stored is not None:
            self._check_remote(segment.stored, segment)
        if self._segments and self._end() != first_position:
            raise DataLoss(
                f"the log has no segment at {self._end()}, but one at {first_position}",
                detail=DataLossDetail(position=self._end()),
            )
        self._segments.append(segment)
        self._firsts.append(first_position)

    def _check_remote(self, manifest: TierManifest, segment: _Segment) -> None:
        if (manifest.first_position, manifest.next_position) != (
            segment.first_position, segment.next_position,
        ):  # fmt: skip
            raise DataLoss(
                f"{segment.path} has the manifest of the segment at {manifest.first_position}",
                detail=DataLossDetail(position=segment.first_position),
            )
        if self._remote is None:
            raise InvalidArgument(
                f"the segment at {segment.first_position} is in an object store, and no store is "
                "set",
                remedy="Set BATON_STORAGE_TIER_URL to the store with the segments of this log.",
                facts={"field": "tier_url"},
            )
        self._stored_end = segment.next_position

    def _create(self) -> None:
        segment = _Segment(self._end(), self._segment_bytes)
        segment.file = self._disk.create(segment.path, segment.size)
        self._segments.append(segment)
        self._firsts.append(segment.first_position)

    def _matching_segment(self, first_position: int, end: int) -> _Segment:
        """Return the segment of this log that equals [first_position, end) of another log.

        The last segment here gets the end that it has there: a crash during a cut may have changed
        either. An empty last segment is removed if it begins elsewhere.

        Raises:
            DiskFull: there is no space for a new segment.
            DataLoss: the segment does not follow the segments of this log.
        """
        if self._segments:
            last = self._segments[-1]
            empty = last.first_position == self.next_position
            fits = last.next_position == end or (not empty and self.next_position <= end)
            if last.first_position == first_position and fits:
                self._resize(last, end)
                return last
            if empty:
                self.drop_empty()
            elif self.next_position == first_position:
                self._resize(last, first_position)
        self._check_follows(first_position, end)
        segment = _Segment(first_position, end - first_position)
        segment.file = self._disk.create(segment.path, segment.size)
        self._add(segment)
        return segment

    def _check_follows(self, first_position: int, end: int) -> None:
        if not self.next_position == self._end() == first_position:
            raise DataLoss(
                f"segment [{first_position}, {end}) of the leader does not follow this log, which "
                f"ends at {self.next_position}",
                detail=DataLossDetail(position=self.next_position),
            )

    def _add(self, segment: _Segment) -> None:
        if not self._segments:
            self.first_position = segment.first_position
        self._segments.append(segment)
        self._firsts.append(segment.first_position)

    def _resize(self, segment: _Segment, end: int) -> None:
        """Change the end of a segment; nothing is written after either end."""
        if segment.next_position != end:
            size = end - segment.first_position
            self._writable(segment).resize(size)
            segment.size = size

    def drop_empty(self) -> None:
        """Remove the last segment, which is still empty. Durable on return."""
        segment = self._segments.pop()
        self._firsts.pop()
        assert segment.first_position == self.next_position
        self._close(segment)
        self._cache.forget(segment.path)
        self._disk.remove(segment.path)
        if not self._segments:
            self.first_position = segment.first_position

    def _fill(self) -> None:
        """Close the current segment, because the next batch does not fit; it may be empty."""
        segment = self._segment_at(self.next_position)
        room = segment.next_position - self.next_position
        if room >= FILLER.size:
            at = self.next_position - segment.first_position
            self._writable(segment).write(at, [FILLER.pack(FILLER_MAGIC, room)])
        self.next_position += room

    def _undo(self, position: int) -> None:
        """Undo an append that began at `position`; parts of it may be on disk.

        They must be removed: otherwise a later batch could end where a rejected batch begins, and
        recovery would take the rejected batch for a stored one. Later segments are removed first: a
        crash may leave the file that is cut shorter, and no other one may follow it then.

        Raises:
            OSError: the disk has failed.
        """
        self.truncate(position)

    def _write(self, segment: _Segment, batches: Sequence[StampedBatch]) -> None:
        assert batches[0].position == self.next_position, (batches[0].position, self.next_position)
        parts = [part for batch in batches for part in (batch.head, batch.rest)]
        self._writable(segment).write(self.next_position - segment.first_position, parts)
        self.next_position = batches[-1].next_position

    def _writable(self, segment: _Segment) -> File:
        if segment.file is None:
            segment.file = self._disk.open(segment.path)
        return segment.file

    @staticmethod
    def _close(segment: _Segment) -> None:
        if segment.file is not None:
            segment.file.close()
            segment.file = None

    def _end(self) -> int:
        return self._segments[-1].next_position if self._segments else self.first_position

    def _segment_at(self, position: int) -> _Segment:
        return self._segments[bisect_right(self._firsts, position) - 1]

    def _between(self, begin: int, end: int) -> list[_Segment]:
        """Return the segments that contain a part of [begin, end)."""
        if begin >= end:
            return []
        first = max(bisect_right(self._firsts, begin) - 1, 0)
        return self._segments[first : bisect_left(self._firsts, end)]
