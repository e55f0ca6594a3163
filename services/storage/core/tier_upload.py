"""Prepares a segment for the object store: checks its batches, and cuts it into parts.

Each step blocks, reads about one part, and may run in another thread.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from batonmq._core.records import Header
from batonmq.errors import DataLoss, DataLossDetail
from batonmq_server.storage.core.commitlog import FILLER, segment_path
from batonmq_server.storage.core.compaction_order import written_unix_ms
from batonmq_server.storage.core.files import Disk, File
from batonmq_server.storage.core.scan import LogScan
from batonmq_server.storage.core.scrub import SegmentPart
from batonmq_server.storage.core.tier import (
    BLOCK_BYTES,
    PART_BYTES,
    LocalSegment,
    TierManifest,
    block_checksums,
)


class SegmentUpload:
    """The parts of one segment, in order. A damaged segment is not stored.

    Args:
        part_bytes: Size of a part, a multiple of `block_bytes`.

    Attributes:
        manifest: The manifest, once all parts are read; None if the segment has no batch.
    """

    def __init__(
        self,
        disk: Disk,
        segment: LocalSegment,
        *,
        part_bytes: int = PART_BYTES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._disk, self._segment = disk, segment
        self._part_bytes, self._block_bytes = part_bytes, block_bytes
        self._size = segment.next_position - segment.first_position
        self._file: File | None = None
        self._scan: LogScan | None = None
        self._batches: Iterator[tuple[Header, memoryview]] = iter(())
        self._used, self._read, self._unix_ms = 0, 0, 0
        self._checksums: list[int] = []
        self.manifest: TierManifest | None = None

    def next_part(self) -> bytes:
        """Return the next part; empty after the last one.

        Raises:
            DataLoss: the segment is damaged.
            OSError: it can't be read; FileNotFoundError if retention has removed it.
        """
        begin, segment = self._segment.first_position, self._segment
        if self._file is None:
            self._file = self._disk.open(segment_path(begin))
            end = segment.next_position
            self._scan = LogScan(SegmentPart(self._file, begin, end, end), begin)
            self._batches = iter(self._scan)
        ended = self._check(begin + self._read + self._part_bytes)
        wanted = min(self._part_bytes, self._used - self._read if ended else self._part_bytes)
        if wanted <= 0:
            if self._checksums:
                self.manifest = self._manifest()
            return b""
        part = self._file.read(self._read, wanted)
        self._read += len(part)
        self._checksums += block_checksums(part, self._block_bytes)
        return part

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _check(self, position: int) -> bool:
        """Check the batches that begin before `position`; return whether all are checked."""
        segment, scan = self._segment, self._scan
        assert scan is not None
        for header, _ in self._batches:
            if not self._used:
                self._unix_ms = written_unix_ms(header)
            used = header.position + header.length - segment.first_position
            self._used = min(used + FILLER.size, self._size)
            if header.position >= position:
                return False
        if scan.position != segment.next_position:
            raise DataLoss(
                f"the segment at {segment.first_position} is damaged at {scan.position}: "
                f"{scan.reason}; it is not stored in the object store",
                detail=DataLossDetail(position=scan.position),
            )
        return True

    def _manifest(self) -> TierManifest:
        segment = self._segment
        return TierManifest(
            segment.first_position, segment.next_position, segment.name.epoch, self._unix_ms,
            self._read, tuple(self._checksums), self._block_bytes, self._part_bytes,
        )  # fmt: skip


class SegmentComparison:
    """Compares a local segment with its manifest, one part with each step."""

    def __init__(self, disk: Disk, manifest: TierManifest) -> None:
        self._disk, self._manifest, self._read = disk, manifest, 0

    def compare_next(self) -> bool:
        """Compare the next part; return False after the last one.

        Raises:
            DataLoss: the segment is not the one that the store has, or has an unreadable sector.
            OSError: it can't be read; FileNotFoundError if retention has removed it.
        """
        manifest = self._manifest
        wanted = min(manifest.part_bytes, manifest.stored_bytes - self._read)
        if wanted <= 0:
            return False
        file = self._disk.open(segment_path(manifest.first_position))
        try:
            content = file.read(self._read, wanted)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise DataLoss(
                f"the segment at {manifest.first_position} can't be read; the local copy is kept: "
                f"{error.strerror}",
                detail=DataLossDetail(position=manifest.first_position + self._read),
            ) from error
        finally:
            file.close()
        first = self._read // manifest.block_bytes
        known = list(manifest.checksums[first : first + -(-wanted // manifest.block_bytes)])
        if len(content) != wanted or block_checksums(content, manifest.block_bytes) != known:
            raise DataLoss(
                f"the segment at {manifest.first_position} differs from {manifest.name} in the "
                "object store; the local copy is kept",
                remedy="If the local copy is good, another log has written to this folder of the "
                "store: set another BATON_STORAGE_TIER_URL.",
                detail=DataLossDetail(position=manifest.first_position + self._read),
            )
        self._read += wanted
        return True
