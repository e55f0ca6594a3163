"""The commit log: segments of fixed size, batches one behind the other.

It knows positions, not queues. A batch lies in one segment: where the next one does not fit, a
filler closes the segment. docs/format.md has the bytes.

    log/00000000000000000000    segment, named by the position of its first byte, 20 digits
    log/00000000001073741824

    filler:  0  4 magic "BTNF"    4  4 bytes to the end of the segment, these 8 included
             fewer than 8 bytes at the end of a segment stay zero
"""

from __future__ import annotations

import errno
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from batonmq.errors import DataLoss, DataLossDetail, DiskFull, LimitExceeded
from batonmq_server.storage.core.files import UNREADABLE, Disk, File, FileCache

FOLDER = "log"
FILLER_MAGIC = 0x42544E46
FILLER = struct.Struct(">II")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NAME = re.compile(r"\d{20}")

PositionRange = tuple[int, int]
"""`(first_position, next_position)`, half-open."""


@dataclass(frozen=True, slots=True)
class StampedBatch:
    """A batch ready to be written: its stamped head of 56 bytes, and the rest as it came."""

    position: int
    head: bytes
    rest: memoryview

    @property
    def next_position(self) -> int:
        """Position after the batch."""
        return self.position + len(self.head) + len(self.rest)


@dataclass(frozen=True, slots=True)
class UnsyncedFiles:
    """What one sync has to do: files in order of position, and the position it reaches."""

    files: tuple[File, ...]
    position: int


@dataclass(slots=True)
class _Segment:
    first_position: int
    size: int
    file: File | None = None
    """Open from the first write until everything in the segment is synced."""

    @property
    def path(self) -> str:
        return segment_path(self.first_position)

    @property
    def next_position(self) -> int:
        return self.first_position + self.size


def segment_path(first_position: int) -> str:
    """File of the segment that begins there."""
    return f"{FOLDER}/{first_position:020d}"


class CommitLog:
    """Positions [first_position, next_position) are written, those below `synced_position` safe.

    After opening, `next_position` is the end of the last segment; `truncate` says where the last
    good batch ends.

    Args:
        cache: For segments that are only read.
        segment_bytes: Size of new segments; existing ones keep theirs.

    Raises:
        DataLoss: a segment is missing between others.
    """

    def __init__(self, disk: Disk, cache: FileCache, segment_bytes: int) -> None:
        self._disk, self._cache, self._segment_bytes = disk, cache, segment_bytes
        self._segments: list[_Segment] = []
        self._firsts: list[int] = []
        for name in filter(_NAME.fullmatch, disk.names(FOLDER)):
            self._found(int(name))
        self.first_position = self._firsts[0] if self._firsts else 0
        self.next_position = self._end()
        self.synced_position = self.first_position

    @property
    def end_position(self) -> int:
        """Where the last segment ends: what lies behind `next_position` is yet to be written."""
        return self._end()

    def check_length(self, length: int) -> None:
        """Check that a batch of `length` bytes fits into a new segment, wherever it may come.

        Raises:
            LimitExceeded: it does not.
        """
        if length > self._segment_bytes:
            raise LimitExceeded(
                f"batch has {length} bytes; a segment has {self._segment_bytes}",
                facts={"field": "batch", "limit": self._segment_bytes, "actual": length},
            )

    def place(self, lengths: Sequence[int]) -> list[int]:
        """Positions that batches of `lengths` bytes would get, in order; nothing changes.

        Args:
            lengths: None is longer than a new segment.
        """
        at, positions = self.next_position, []
        end = self.segment_end(at)
        for length in lengths:
            while at + length > end:  # a segment from another setting may be shorter
                at, end = end, self.segment_end(end)
            positions.append(at)
            at += length
        return positions

    def append(self, batches: Sequence[StampedBatch]) -> None:
        """Write batches whose positions `place` gave just now: one write per segment.

        Raises:
            DiskFull: there is no space; nothing was written.
            OSError: the disk has failed; what was written is not known.
        """
        while self._end() <= batches[-1].position:
            self._create()
        position = self.next_position
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

    def copy(self, data: bytes, segment: PositionRange) -> None:
        """Write what another log has from `next_position` on: whole batches and fillers.

        Args:
            segment: All of it lies in this one.

        Raises:
            DiskFull: there is no space; nothing was written.
            DataLoss: the segments of this log lie elsewhere; nothing was written.
            OSError: the disk has failed; what was written is not known.
        """
        found = self._shared(*segment)
        position = self.next_position
        try:
            self._writable(found).write(position - found.first_position, [data])
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._undo(position)
            raise DiskFull("no space on disk for what the leader has written") from error
        self.next_position += len(data)

    def read(self, position: int, bytes_max: int) -> bytes:
        """Up to `bytes_max` bytes from `position` on; fewer only at the end of its segment.

        Raises:
            DataLoss: the disk does not give them.
        """
        if not self.first_position <= position < self._end():
            return b""  # a damaged index points there
        segment = self._segment_at(position)
        at = position - segment.first_position
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
        """File of the segment that holds `position`, where it begins and where it ends."""
        segment = self._segment_at(position)
        return segment.path, segment.first_position, segment.next_position

    def segment_end(self, position: int) -> int:
        """End of the segment that holds, or will hold, `position`."""
        if position >= self._end():
            return position + self._segment_bytes
        return self._segment_at(position).next_position

    def unsynced(self) -> UnsyncedFiles:
        """What to sync so that everything written until now is safe."""
        segments = self._between(self.synced_position, self.next_position)
        return UnsyncedFiles(tuple(map(self._writable, segments)), self.next_position)

    def synced(self, position: int) -> None:
        """Note that a sync of everything below `position` has ended well."""
        for segment in self._between(self.synced_position, position):
            if segment.next_position <= position:
                self._close(segment)
        self.synced_position = max(self.synced_position, position)

    def sealed(self) -> list[PositionRange]:
        """Where the segments begin and end that are safe and followed by a batch, oldest first."""
        return [
            (segment.first_position, segment.next_position)
            for segment in self._between(self.first_position, self.next_position)
            if segment.next_position < self.next_position
            and segment.next_position <= self.synced_position
        ]

    def drop_before(self, position: int) -> list[str]:
        """Forget the segments before `position`, where a segment begins.

        Returns:
            Their files, oldest first: to be removed in this order, or a crash leaves a hole.
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
        """Forget everything from `position` on. Durable on return.

        Returns:
            How many bytes were dropped: up to the last one that was not zero.
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

    def _found(self, first_position: int) -> None:
        segment = _Segment(first_position, 0)
        file = self._disk.open(segment.path)
        segment.size = file.size
        file.close()
        if segment.size == 0:
            self._disk.remove(segment.path)  # a crash came between its creation and its first byte
            return
        if self._segments and self._end() != first_position:
            raise DataLoss(
                f"the log has no segment at {self._end()}, but one at {first_position}",
                detail=DataLossDetail(position=self._end()),
            )
        self._segments.append(segment)
        self._firsts.append(first_position)

    def _create(self) -> None:
        segment = _Segment(self._end(), self._segment_bytes)
        segment.file = self._disk.create(segment.path, segment.size)
        self._segments.append(segment)
        self._firsts.append(segment.first_position)

    def _shared(self, first_position: int, end: int) -> _Segment:
        """The segment [first_position, end) of another log, which holds what follows there.

        The last one here gets the end that it has there: either may have met with a crash while its
        tail was cut. One that is still empty makes way.

        Raises:
            DiskFull: there is no space for it.
            DataLoss: it does not follow what is here.
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
        if not self.next_position == self._end() == first_position:
            raise DataLoss(
                f"the other log has a segment [{first_position}, {end}); this one has others",
                detail=DataLossDetail(position=self.next_position),
            )
        segment = _Segment(first_position, end - first_position)
        segment.file = self._disk.create(segment.path, segment.size)
        if not self._segments:
            self.first_position = first_position
        self._segments.append(segment)
        self._firsts.append(first_position)
        return segment

    def _resize(self, segment: _Segment, end: int) -> None:
        """Let a segment end there, behind which nothing is written."""
        if segment.next_position != end:
            size = end - segment.first_position
            self._writable(segment).resize(size)
            segment.size = size

    def drop_empty(self) -> None:
        """Remove the last segment, in which nothing is written yet. Durable on return."""
        segment = self._segments.pop()
        self._firsts.pop()
        assert segment.first_position == self.next_position
        self._close(segment)
        self._cache.forget(segment.path)
        self._disk.remove(segment.path)
        if not self._segments:
            self.first_position = segment.first_position

    def _fill(self) -> None:
        """Close the segment in which the next batch has no room; it may be empty."""
        segment = self._segment_at(self.next_position)
        room = segment.next_position - self.next_position
        if room >= FILLER.size:
            at = self.next_position - segment.first_position
            self._writable(segment).write(at, [FILLER.pack(FILLER_MAGIC, room)])
        self.next_position += room

    def _undo(self, position: int) -> None:
        """Be as before the append that began at `position`, of which a part may be on disk.

        It has to go: what comes next could end where a refused batch begins.

        Raises:
            OSError: the disk has failed.
        """
        for segment in self._between(position, self._end()):
            self._writable(segment).cut(max(0, position - segment.first_position))
        self.next_position = position

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
        """Segments that hold a part of [begin, end)."""
        if begin >= end:
            return []
        first = max(bisect_right(self._firsts, begin) - 1, 0)
        return self._segments[first : bisect_left(self._firsts, end)]
