"""Reading: from the consume queue of a queue, or from its compacted part, to stored batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from batonmq._core.records import Header, check_body, check_stamp, read_header
from batonmq._core.subscription import SqlFilter
from batonmq.errors import (
    BadBatch,
    BatonError,
    DataLoss,
    DataLossDetail,
    OffsetAheadOfLog,
    OffsetOutOfRange,
    OffsetOutOfRangeDetail,
)
from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.compacted import CompactedPart, CompactedQueues, Section
from batonmq_server.storage.core.consumequeue import ConsumeQueue, Entries, Int64Array
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.property_filter import find_passing
from batonmq_server.storage.core.tag_filter import HashFilter, batch_starts, select

SCANNED_MAX = 16_384
"""Maximum number of entries that one read scans, unless the caller asks for more messages."""
GAP_BYTES_MAX = 64 * 1024
"""Two batches with at most this many bytes of other queues between them are read with one read."""
READ_BYTES_MAX = 1024 * 1024


class ReadSpec(NamedTuple):
    """What to read from a queue.

    Attributes:
        offset: First offset to read.
        bytes_max: Approximate maximum of bytes; the first batch always fits.
        messages_max: Maximum number of messages that pass the filter.
        kept_position: Position of the batch that the caller still has; -1 for none.
    """

    offset: int
    bytes_max: int
    messages_max: int
    filter: HashFilter | SqlFilter
    kept_position: int = -1


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read.

    Attributes:
        batches: Stored batches with at least one message to deliver.
        next_offset: Offset after the last scanned one.
        message_count: Messages in [offset, next_offset) that pass the filter.
        filtered_count: Messages in [offset, next_offset) that do not pass it.
        lost_count: Messages in [offset, next_offset) that retention has removed.
        kept: Messages that pass, as indexes from the first one not lost; None if all pass.
        continues_batch: Whether the first messages are in the batch that the caller still has, so
            that `batches` begins with the one after it.
    """

    batches: list[bytes]
    next_offset: int
    message_count: int
    filtered_count: int
    lost_count: int = 0
    kept: Int64Array | None = field(default=None, compare=False)
    continues_batch: bool = False


class QueueReader:
    """Reads the messages of queues that are visible to consumers."""

    def __init__(self, log: CommitLog, compacted: CompactedQueues) -> None:
        self._log, self._compacted = log, compacted

    def read(self, key: QueueKey, queue: ConsumeQueue | None, spec: ReadSpec) -> ReadResult | None:
        """Read messages from `spec.offset` on; None if there is no message yet.

        Batches that are in the object store and not in the cache end the read, unless the first
        one is such a batch. The batch that the caller still has is not needed.

        Raises:
            OffsetAheadOfLog: the offset is beyond the end of the queue.
            OffsetOutOfRange: the offset is before the first offset of the queue.
            DataLoss: a stored batch is damaged.
            NotCached: the first batch has to be fetched from the object store.
        """
        part = self._compacted.get(key)
        if part is not None and (section := part.find(spec.offset)) is not None:
            return self._read_section(key, part, section, spec)
        _check_offset(queue, spec.offset)
        if queue is None or spec.offset >= queue.visible_offset:
            return None
        scanned_max = spec.messages_max
        if isinstance(spec.filter, SqlFilter) or not spec.filter.keeps_all:
            scanned_max = max(SCANNED_MAX, scanned_max)
        entries = queue.read(spec.offset, min(queue.visible_offset, spec.offset + scanned_max))
        if isinstance(spec.filter, SqlFilter):
            count = self._readable_count(entries)
            return self._find(key, _first(entries, count), spec, spec.filter)
        bytes_max = spec.bytes_max
        if entries.positions[0] == spec.kept_position:
            bytes_max += int(entries.sizes[0])
        selection = select(
            entries, spec.filter, bytes_max=bytes_max, messages_max=spec.messages_max
        )
        skipped = int(selection.positions[:1] == [spec.kept_position])
        count = skipped + self._log.readable_count(
            selection.positions[skipped:], selection.sizes[skipped:]
        )
        if 0 < count < len(selection.positions):
            before = (entries.positions == selection.positions[count]).argmax()
            selection = select(
                _first(entries, int(before)),
                spec.filter,
                bytes_max=bytes_max,
                messages_max=spec.messages_max,
            )
        positions, sizes = selection.positions[skipped:], selection.sizes[skipped:]
        return ReadResult(
            list(self._read_batches(key, positions, sizes)),
            spec.offset + selection.scanned_count,
            selection.kept_count,
            selection.scanned_count - selection.kept_count,
            kept=selection.kept,
            continues_batch=skipped > 0,
        )

    def _read_section(
        self, key: QueueKey, part: CompactedPart, section: Section, spec: ReadSpec
    ) -> ReadResult:
        """Read from a section of the compacted part; empty ones are passed over."""
        offset = spec.offset
        while True:
            rows = self._compacted.rows(section)
            begin = int(np.searchsorted(rows.offsets, offset))
            if begin < len(rows):
                break
            offset = section.next_offset
            if (following := part.find(offset)) is None:
                return ReadResult([], offset, 0, 0, kept=np.empty(0, np.int64))
            section = following
        end = begin + min(len(rows) - begin, max(SCANNED_MAX, spec.messages_max))
        offsets = rows.offsets[begin:end]
        entries = Entries(rows.positions[begin:end], rows.sizes[begin:end], rows.tags[begin:end])
        stop = section.next_offset if end == len(rows) else int(rows.offsets[end])
        count = self._readable_count(entries)
        if count < len(entries):
            stop = int(offsets[count])
            offsets, entries = offsets[:count], _first(entries, count)
        if isinstance(spec.filter, SqlFilter):
            return self._find_in_rows(key, offsets, entries, stop, spec, spec.filter)
        selection = select(
            entries, spec.filter, bytes_max=spec.bytes_max, messages_max=spec.messages_max
        )
        self._compacted.check_positions(selection.positions)
        scanned = selection.scanned_count
        kept = np.arange(scanned) if selection.kept is None else selection.kept
        return ReadResult(
            list(self._read_batches(key, selection.positions, selection.sizes)),
            stop if scanned == len(offsets) else int(offsets[scanned]),
            selection.kept_count,
            scanned - selection.kept_count,
            kept=offsets[kept] - spec.offset,
        )

    def _find_in_rows(
        self,
        key: QueueKey,
        offsets: Int64Array,
        entries: Entries,
        stop: int,
        spec: ReadSpec,
        condition: SqlFilter,
    ) -> ReadResult:
        """As `_find`, for messages of which the offsets are not consecutive."""
        starts = batch_starts(entries.positions)
        places = entries.positions[starts].tolist(), entries.sizes[starts].tolist()
        self._compacted.check_positions(places[0])
        ends = offsets[np.append(starts[1:], len(offsets)) - 1] + 1 - spec.offset
        matches = find_passing(
            zip(ends.tolist(), self._read_batches(key, *places), strict=True),
            spec.offset,
            condition,
            bytes_max=spec.bytes_max,
            messages_max=spec.messages_max,
        )
        scanned = int(np.searchsorted(offsets, spec.offset + matches.scanned_count))
        return ReadResult(
            matches.batches,
            stop if scanned == len(offsets) else int(offsets[scanned]),
            matches.kept_count,
            scanned - matches.kept_count,
            kept=np.array(matches.kept, np.int64),
        )

    def _find(
        self, key: QueueKey, entries: Entries, spec: ReadSpec, condition: SqlFilter
    ) -> ReadResult:
        """As `read`, with a condition on properties: batches must be read to test it."""
        starts = batch_starts(entries.positions)
        places = entries.positions[starts].tolist(), entries.sizes[starts].tolist()
        matches = find_passing(
            zip(
                [*starts[1:].tolist(), len(entries)], self._read_batches(key, *places), strict=True
            ),
            spec.offset,
            condition,
            bytes_max=spec.bytes_max,
            messages_max=spec.messages_max,
        )
        return ReadResult(
            matches.batches,
            spec.offset + matches.scanned_count,
            matches.kept_count,
            matches.scanned_count - matches.kept_count,
            kept=np.array(matches.kept, np.int64),
        )

    def _readable_count(self, entries: Entries) -> int:
        """Return how many entries, of whole batches, can be read now; all if not even one can."""
        starts = batch_starts(entries.positions)
        places = entries.positions[starts].tolist(), entries.sizes[starts].tolist()
        count = self._log.readable_count(*places)
        return int(starts[count]) if 0 < count < len(starts) else len(entries)

    def _read_batches(
        self, key: QueueKey, positions: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[bytes]:
        """Read the batches of a queue at ascending positions, with few reads."""
        begin = 0
        while begin < len(positions):
            first = positions[begin]
            limit = min(self._log.segment_end(first), first + READ_BYTES_MAX)
            last, end = begin + 1, first + sizes[begin]
            while (
                last < len(positions)
                and positions[last] - end <= GAP_BYTES_MAX
                and positions[last] + sizes[last] <= limit
            ):
                end = positions[last] + sizes[last]
                last += 1
            chunk = self._log.read(first, end - first)
            for index in range(begin, last):
                at = positions[index] - first
                batch = chunk[at : at + sizes[index]]
                yield verified(batch, positions[index], key)
            begin = last


def _first(entries: Entries, count: int) -> Entries:
    """Return the first `count` entries."""
    if count == len(entries):
        return entries
    return Entries(entries.positions[:count], entries.sizes[:count], entries.tags[:count])


def _check_offset(queue: ConsumeQueue | None, offset: int) -> None:
    first_offset, next_offset = (queue.first_offset, queue.next_offset) if queue else (0, 0)
    if offset > next_offset:
        raise OffsetAheadOfLog(
            f"offset {offset} is beyond the end of the queue, {next_offset}",
            facts={"offset": offset, "next_offset": next_offset},
        )
    if offset < first_offset:
        raise OffsetOutOfRange(
            f"offset {offset} is no longer kept; the queue has [{first_offset}, {next_offset})",
            facts={"next_offset": next_offset},
            detail=OffsetOutOfRangeDetail(offset=offset, first_offset=first_offset),
        )


def verified(batch: bytes, position: int, key: QueueKey) -> bytes:
    """Return `batch` if it is the undamaged batch at `position` of the queue `key`.

    Raises:
        DataLoss: it is not.
    """
    verified_header(batch, position, key)
    return batch


def verified_header(batch: bytes, position: int, key: QueueKey) -> Header:
    """Return the header of `batch`; see `verified`."""
    try:
        header = read_header(batch)
        if (header.position, header.length) != (position, len(batch)):
            raise BadBatch("its header has another position or length")
        if (header.topic_id, header.queue_id) != key:
            raise BadBatch("its header has another queue")
        check_stamp(batch)
        check_body(batch)
    except BatonError as error:
        raise DataLoss(
            f"the batch at {position} is damaged: {error}", detail=DataLossDetail(position=position)
        ) from error
    return header
