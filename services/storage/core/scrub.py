"""Goes round and round the log and checks what is safe on disk, range_ by range_.

Each range_ is read through a file of its own, so that another thread can do it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.files import UNREADABLE, Disk, File
from batonmq_server.storage.core.scan import END_OF_LOG, LogScan

RANGE_BYTES = 256 * 1024


@dataclass(slots=True)
class ScrubRange:
    """A part of one segment to check, and what came of it.

    Attributes:
        position: Where it begins; once it is checked, where the next one begins.
        next_position: Where it ends, if no batch begins before and ends behind it.
        end_position: End of the segment, or of what is safe on disk.
        damaged: Positions of damaged batches, and what is wrong with them.
    """

    path: str
    segment_position: int
    segment_end_position: int
    position: int
    next_position: int
    end_position: int
    damaged: dict[int, str] = field(default_factory=dict)


class LogScrub:
    """One owner; `check` may run in another thread.

    Attributes:
        position: How far the present round has come.
    """

    def __init__(self, disk: Disk, log: CommitLog) -> None:
        self._disk, self._log = disk, log
        self.position = log.first_position

    def next_range(self) -> ScrubRange | None:
        """What is to be checked next; None at the end of a round."""
        log = self._log
        self.position = max(self.position, log.first_position)
        if self.position >= log.synced_position:
            self.position = log.first_position
            return None
        path, begin, end = log.segment_of(self.position)
        end_position = min(end, log.synced_position)
        next_position = min(self.position + RANGE_BYTES, end_position)
        return ScrubRange(path, begin, end, self.position, next_position, end_position)

    def check(self, range_: ScrubRange) -> None:
        """Check a range_.

        Raises:
            FileNotFoundError: its segment is no longer there.
        """
        file = self._disk.open(range_.path)
        try:
            scan = LogScan(_Segment(file, range_), range_.position, RANGE_BYTES)
            while scan.position < range_.next_position:
                for header, _ in scan:
                    if header.position + header.length >= range_.next_position:
                        scan.position += header.length
                        break
                else:
                    if scan.position >= range_.next_position:
                        break
                    range_.damaged[scan.position] = (
                        "nothing is there" if scan.reason == END_OF_LOG else scan.reason
                    )
                    scan.find_next()
            range_.position = min(scan.position, range_.end_position)
        finally:
            file.close()

    def checked(self, range_: ScrubRange) -> None:
        """Go on behind a range_."""
        self.position = range_.position


class _Segment:
    """One segment, as far as it is safe, as a scan wants it."""

    def __init__(self, file: File, range_: ScrubRange) -> None:
        self._file, self._range = file, range_
        self.next_position = range_.end_position

    def segment_end(self, position: int) -> int:
        return self._range.segment_end_position

    def read(self, position: int, bytes_max: int) -> bytes:
        """What a file that was cut short has lost reads as zeros, and so does a bad sector."""
        at = position - self._range.segment_position
        wanted = min(bytes_max, self._range.segment_end_position - position)
        try:
            found = self._file.read(at, wanted)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            found = b""
        return found.ljust(wanted, b"\0")
