"""Reads a run of the key index from the log again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batonmq._core.records import Header
from batonmq_server.storage.core.files import BadIndex, Disk
from batonmq_server.storage.core.keyindex import EndedRun, RunExtent, encode_run, rebuilt_run
from batonmq_server.storage.core.queue_repair import SegmentSpan
from batonmq_server.storage.core.scan import LogScan
from batonmq_server.storage.core.scrub import SegmentPart


@dataclass(slots=True)
class KeyRunRepair:
    """A damaged run, and the part of the log that it covers.

    Attributes:
        run: The run as it is in the log; set by `rewrite`.
    """

    extent: RunExtent
    spans: Sequence[SegmentSpan]
    run: EndedRun | None = None


def rewrite(disk: Disk, repair: KeyRunRepair) -> None:
    """Rewrite the file of a run from the log; blocks, and may run in another thread.

    Raises:
        BadIndex: the log is damaged there; the file stays as it is.
        OSError: a segment can't be read, or the file can't be written.
    """
    run = rebuilt_run(repair.extent, _batches(disk, repair.spans))
    disk.replace(run.path, encode_run(run))
    repair.run = run


def _batches(disk: Disk, spans: Sequence[SegmentSpan]) -> Iterator[tuple[Header, memoryview]]:
    for span in spans:
        file = disk.open(span.path)
        try:
            part = SegmentPart(
                file, span.segment_position, span.segment_end_position, span.next_position
            )
            scan = LogScan(part, span.position)
            yield from scan
            if scan.position < span.next_position:
                raise BadIndex(f"the log is damaged at {scan.position}: {scan.reason}")
        finally:
            file.close()
