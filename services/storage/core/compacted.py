"""The compacted part of queues: sections of offsets of which only some messages are kept.

A queue of a compacted topic has two parts. Its oldest offsets belong to sections: each is described
by one order in the log, which lists the kept messages. The other offsets are in the consume queue,
without gaps. Sections follow each other; the consume queue begins where the last one ends.

All of it is derived from the log. In memory is one `Section` each, below 200 bytes, and the rows of
the sections that were read last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batonmq._core.records import check_body, check_stamp, read_header
from batonmq.errors import BadBatch, BatonError, DataLoss, DataLossDetail, NotLeader
from batonmq_server.storage.core.commitlog import CommitLog, PositionRange
from batonmq_server.storage.core.compaction_order import (
    ORDERS,
    CompactionOrder,
    SectionRows,
    decode_order,
)
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt

SECTIONS_CACHED = 32
"""Sections of which the rows stay in memory; up to 1 MB each."""


class Section(NamedTuple):
    """A section of a queue; see `CompactionOrder`.

    Attributes:
        order_position, order_bytes: Place of its order in the log.
        data_position, data_end: Part of the log with its batches; empty if it has no message.
        message_count, bytes_count: Its messages, and the bytes of their batches.
        tombstone_unix_ms: Earliest time of a tombstone in it; 0 without one.
    """

    first_offset: int
    next_offset: int
    compacted_to: int
    order_position: int
    order_bytes: int
    data_position: int
    data_end: int
    message_count: int
    bytes_count: int
    tombstone_unix_ms: int

    @property
    def first_position(self) -> int:
        """Position from which the log is needed for it."""
        return (
            min(self.data_position, self.order_position)
            if self.message_count
            else self.order_position
        )

    def ranges(self) -> Iterator[PositionRange]:
        """Yield the parts of the log that it needs."""
        yield self.order_position, self.order_position + self.order_bytes
        if self.message_count:
            yield self.data_position, self.data_end


class PendingOrder(NamedTuple):
    """An order that is not applied yet, because it is not safe."""

    next_position: int
    key: QueueKey
    queue_position: int
    section: Section


def section_of(order: CompactionOrder, receipt: StoreReceipt) -> Section:
    """Return the section of an order that is in the log."""
    rows = order.rows
    return Section(
        order.first_offset,
        order.next_offset,
        order.compacted_to,
        receipt.position,
        receipt.next_position - receipt.position,
        order.data_position,
        order.data_end,
        len(rows),
        rows.bytes_count,
        int(rows.tombstone_since.min()) if len(rows.tombstone_since) else 0,
    )


class CompactedPart:
    """The sections of one queue, by offset; they do not overlap.

    On a copy that lacks a part of the log there may be gaps between them.
    """

    __slots__ = ("sections",)

    def __init__(self) -> None:
        self.sections: list[Section] = []

    @property
    def first_offset(self) -> int:
        """First offset of the first section."""
        return self.sections[0].first_offset

    @property
    def next_offset(self) -> int:
        """Offset after the last section."""
        return self.sections[-1].next_offset

    @property
    def compacted_to(self) -> int:
        """Up to here no section has a message that is older than another one of its key."""
        return min(section.compacted_to for section in self.sections)

    @property
    def count(self) -> int:
        """Number of messages."""
        return sum(section.message_count for section in self.sections)

    @property
    def bytes_count(self) -> int:
        """Bytes of the batches."""
        return sum(section.bytes_count for section in self.sections)

    @property
    def first_position(self) -> int:
        """Position from which the log is needed."""
        return min(section.first_position for section in self.sections)

    def put(self, section: Section) -> None:
        """Add a section in place of those that it covers."""
        kept = [
            one
            for one in self.sections
            if one.next_offset <= section.first_offset or one.first_offset >= section.next_offset
        ]
        at = bisect_right(kept, section.first_offset, key=lambda one: one.first_offset)
        self.sections = [*kept[:at], section, *kept[at:]]

    def find(self, offset: int) -> Section | None:
        """Return the section with `offset`; None if it is in a gap or after the last one."""
        at = bisect_right(self.sections, offset, key=lambda one: one.first_offset) - 1
        if at < 0 or self.sections[at].next_offset <= offset:
            return None
        return self.sections[at]

    def covered_from(self, offset: int) -> int | None:
        """Return the first offset from `offset` on that a section has; None without any."""
        for section in self.sections:
            if section.next_offset > offset:
                return max(offset, section.first_offset)
        return None

    def needs(self, position: int, next_position: int) -> bool:
        """Return whether a part of the log has an order or a message of it."""
        return any(
            begin < next_position and end > position
            for section in self.sections
            for begin, end in section.ranges()
        )


class CompactedQueues:
    """The compacted parts of all queues of a log.

    Attributes:
        pending: Orders that are not applied yet, in log order.
        writing_from: Position from which a run writes batches of which the order is still to come;
            None if none does.
    """

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._parts: dict[QueueKey, CompactedPart] = {}
        self._rows: OrderedDict[int, SectionRows] = OrderedDict()
        self.pending: list[PendingOrder] = []
        self.writing_from: int | None = None

    @property
    def parts(self) -> Mapping[QueueKey, CompactedPart]:
        """The queues with a compacted part."""
        return self._parts

    def get(self, key: QueueKey) -> CompactedPart | None:
        """Return the compacted part of a queue; None if it has none."""
        return self._parts.get(key)

    def put(self, key: QueueKey, section: Section) -> None:
        """Add a section to a queue."""
        self._parts.setdefault(key, CompactedPart()).put(section)

    def forget(self, key: QueueKey) -> None:
        """Remove the compacted part of a queue."""
        self._parts.pop(key, None)

    def ranges(self) -> dict[QueueKey, tuple[PositionRange, ...]]:
        """Return the parts of the log that are needed, by queue, pending orders included."""
        needed: dict[QueueKey, list[PositionRange]] = {}
        for key, part in self._parts.items():
            for section in part.sections:
                needed.setdefault(key, []).extend(section.ranges())
        for order in self.pending:
            needed.setdefault(order.key, []).extend(order.section.ranges())
        return {key: tuple(ranges) for key, ranges in needed.items()}

    def is_writing(self, next_position: int) -> bool:
        """Return whether a part of the log before a position may still wait for its order."""
        return self.writing_from is not None and next_position > self.writing_from

    def needs(self, key: QueueKey, position: int, next_position: int) -> bool:
        """Return whether a queue needs a part of the log, pending orders included."""
        part = self._parts.get(key)
        if part is not None and part.needs(position, next_position):
            return True
        return any(
            begin < next_position and end > position
            for order in self.pending
            if order.key == key
            for begin, end in order.section.ranges()
        )

    def rows(self, section: Section) -> SectionRows:
        """Return the messages of a section.

        Raises:
            DataLoss: its order is damaged.
            NotLeader: this copy has not got the newer order yet that replaces it.
        """
        position = section.order_position
        if (rows := self._rows.get(position)) is not None:
            self._rows.move_to_end(position)
            return rows
        self._check_present(position)
        raw = self._log.read(position, section.order_bytes)
        try:
            header = read_header(raw)
            check_stamp(raw)
            check_body(raw)
            if header.position != position or (header.topic_id, header.queue_id) != ORDERS:
                raise BadBatch("it is not a compaction order")
            rows = decode_order(header, raw).rows
        except BatonError as error:
            raise DataLoss(
                f"the compaction order at {position} is damaged: {error}",
                detail=DataLossDetail(position=position),
            ) from error
        self._rows[position] = rows
        if len(self._rows) > SECTIONS_CACHED:
            self._rows.popitem(last=False)
        return rows

    def check_positions(self, positions: Sequence[int]) -> None:
        """Check that the log has the batches at ascending positions of a section.

        Raises:
            NotLeader: it has not got the newer order yet that replaces the section.
        """
        for position in positions:
            self._check_present(position)

    def _check_present(self, position: int) -> None:
        if position < self._log.first_position or self._log.is_purged(position):
            raise NotLeader(
                f"this copy of the log lacks position {position}: it does not have the newest "
                "compaction yet",
                retry_after_ms=100,
            )

    def position_of(self, key: QueueKey, offset: int) -> int | None:
        """Return the position of the batch of a message; None if the part does not keep it.

        Raises:
            DataLoss, NotLeader: as `rows`.
        """
        part = self._parts.get(key)
        section = part.find(offset) if part is not None else None
        if section is None:
            return None
        rows = self.rows(section)
        at = int(np.searchsorted(rows.offsets, offset))
        if at == len(rows) or rows.offsets[at] != offset:
            return None
        return int(rows.positions[at])

    def count_from(self, key: QueueKey, offset: int) -> int:
        """Return how many messages at or after `offset` the part keeps.

        Raises:
            DataLoss, NotLeader: as `rows`.
        """
        part, count = self._parts.get(key), 0
        for section in part.sections if part is not None else ():
            if section.first_offset >= offset:
                count += section.message_count
            elif section.next_offset > offset and section.message_count:
                rows = self.rows(section)
                count += len(rows) - int(np.searchsorted(rows.offsets, offset))
        return count
