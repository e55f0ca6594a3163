"""Checks the synced part of the log, range by range, in rounds.

A range that is checked also has the entries that the consume queues must have for its batches.
Each range is read through a file of its own, so that another thread can read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batonmq_server.storage.core.commitlog import CommitLog, has_purged_head, purged_bytes
from batonmq_server.storage.core.compaction_order import is_relocated
from batonmq_server.storage.core.consumequeue import ENTRY, batch_entries
from batonmq_server.storage.core.files import UNREADABLE, Disk, File
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.scan import END_OF_LOG, LogScan
from batonmq_server.storage.core.tier_file import TierFile

RANGE_BYTES = 256 * 1024


@dataclass(slots=True)
class ScrubRange:
    """A part of one segment to check, and the result.

    Attributes:
        position: Begin of this range; after the check, begin of the next range.
        next_position: End of this range; a batch that begins before it is checked as a whole.
        end_position: End of the segment, or of its synced part.
        damaged: Positions of damaged batches, and the fault of each.
        entries: Entries of the good batches, by queue: runs of consecutive offsets, each with the
            offset of its first entry.
    """

    path: str
    segment_position: int
    segment_end_position: int
    position: int
    next_position: int
    end_position: int
    damaged: dict[int, str] = field(default_factory=dict)
    entries: dict[QueueKey, list[tuple[int, npt.NDArray[np.void]]]] = field(default_factory=dict)

    def add_entries(self, key: QueueKey, first_offset: int, entries: npt.NDArray[np.void]) -> None:
        """Add the entries of one batch."""
        self.entries.setdefault(key, []).append((first_offset, entries))

    def join_entries(self) -> None:
        """Join entries of consecutive offsets.

        Without a type, numpy would join them in the byte order of the machine.
        """
        for runs in self.entries.values():
            ends = [first_offset + len(entries) for first_offset, entries in runs]
            breaks = [n for n in range(1, len(runs)) if runs[n][0] != ends[n - 1]]
            bounds = zip([0, *breaks], [*breaks, len(runs)], strict=True)
            runs[:] = [
                (
                    runs[begin][0],
                    np.concatenate([entries for _, entries in runs[begin:end]], dtype=ENTRY),
                )
                for begin, end in bounds
            ]


class LogScrub:
    """Rounds of checks over one log. Only `check` may run in another thread.

    Attributes:
        position: Position that the current round has reached.
    """

    def __init__(self, disk: Disk, log: CommitLog) -> None:
        self._disk, self._log = disk, log
        self.position = log.first_position

    def next_range(self) -> ScrubRange | None:
        """Return the range to check next; None at the end of a round."""
        range_ = self.range_from(self.position)
        self.position = range_.position if range_ is not None else self._log.first_position
        return range_

    def range_from(self, position: int) -> ScrubRange | None:
        """Return the first range from `position` on; None if nothing there is to be checked."""
        log = self._log
        # Blocks from the object store are checked whenever they are read.
        position = log.next_local(max(position, log.first_position))
        if position >= log.synced_position:
            return None
        path, begin, end = log.segment_of(position)
        end_position = min(end, log.synced_position)
        next_position = min(position + RANGE_BYTES, end_position)
        return ScrubRange(path, begin, end, position, next_position, end_position)

    def check(self, range_: ScrubRange) -> None:
        """Check a range.

        Raises:
            FileNotFoundError: its segment is no longer there.
        """
        range_.entries.clear()
        file = self._disk.open(range_.path)
        try:
            segment = SegmentPart(
                file, range_.segment_position, range_.segment_end_position, range_.end_position
            )
            scan = LogScan(segment, range_.position, RANGE_BYTES)
            while scan.position < range_.next_position:
                for header, batch in scan:
                    key = header.topic_id, header.queue_id
                    if not is_relocated(header):
                        range_.add_entries(key, header.first_offset, batch_entries(header, batch))
                    if header.position + header.length >= range_.next_position:
                        scan.position += header.length
                        break
                else:
                    if scan.position >= range_.next_position:
                        break
                    range_.damaged[scan.position] = (
                        "no batch is written here" if scan.reason == END_OF_LOG else scan.reason
                    )
                    scan.find_next()
            range_.position = min(scan.position, range_.end_position)
            range_.join_entries()
        finally:
            file.close()

    def checked(self, range_: ScrubRange) -> None:
        """Continue after a range."""
        self.position = range_.position


class SegmentPart:
    """A part of one segment, as a log that a scan can read.

    Args:
        file: A file of the reader's own, so that another thread can read it.
        next_position: End of the part.
    """

    def __init__(
        self, file: File, segment_position: int, segment_end_position: int, next_position: int
    ) -> None:
        self._file, self._begin, self._end = file, segment_position, segment_end_position
        self.next_position = next_position
        size = segment_end_position - segment_position
        self._purged = not isinstance(file, TierFile) and has_purged_head(file, size)

    def segment_end(self, position: int) -> int:
        """See ReadableLog."""
        return self._end

    def read(self, position: int, bytes_max: int) -> bytes:
        """See ReadableLog. Bytes missing from a short file, or unreadable, are zeros."""
        if self._purged:
            return purged_bytes(self._end - position, bytes_max)
        at = position - self._begin
        wanted = min(bytes_max, self._end - position)
        try:
            data = self._file.read(at, wanted)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            data = b""
        return data.ljust(wanted, b"\0")
