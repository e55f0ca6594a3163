"""Compares the sections of compacted queues with the orders and the batches that they refer to.

The scan of the log has verified each batch by itself. Here follows what links them: a checkpoint
has the sections that the orders in the log describe, and each message that an order lists is in the
batch that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batonmq._columns.batch_columns import tag_hashes
from batonmq.errors import BatonError, NotLeader
from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.compacted import CompactedPart, Section
from batonmq_server.storage.core.compaction_order import SectionRows
from batonmq_server.storage.core.consumequeue import topic_of
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_reader import verified_header
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tag_filter import batch_starts


class SectionProblem(NamedTuple):
    """Something that does not fit.

    Attributes:
        position: Position in the log.
        is_missing: Whether that part of the log is not there, because it was removed.
    """

    position: int
    detail: str
    is_missing: bool = False


def compare_sections(
    log: CommitLog,
    from_log: Mapping[QueueKey, CompactedPart],
    saved: Sequence[tuple[QueueKey, Section]],
) -> Iterator[SectionProblem]:
    """Yield how the sections of a checkpoint differ from those of the orders before it.

    An order that the log no longer has was replaced after the checkpoint, and says nothing. A queue
    without sections in the checkpoint may belong to a deleted topic.
    """
    by_queue: dict[QueueKey, set[Section]] = {}
    for key, section in saved:
        by_queue.setdefault(key, set()).add(section)
    for key, sections in sorted(by_queue.items()):
        part = from_log.get(key)
        expected = set(part.sections) if part is not None else set()
        removed = [one for one in sections if _is_removed(log, one.order_position)]
        for section in sorted(expected - sections):
            if not any(_overlap(section, one) for one in removed):
                text = f"the checkpoint lacks section {_range(section)} of queue {key[1]}"
                yield SectionProblem(section.order_position, f"{text}, topic id {key[0]}")
        for section in sorted(sections - expected - set(removed)):
            text = f"the checkpoint has section {_range(section)} of queue {key[1]}"
            yield SectionProblem(
                section.order_position,
                f"{text}, topic id {key[0]}; the order at {section.order_position} does not say so",
            )


def check_sections(store: MessageStore) -> Iterator[SectionProblem]:
    """Yield how the sections of a store differ from the batches that their orders list."""
    for key, part in sorted(store.compacted.parts.items()):
        queue = store.queues.get(key)
        name = topic_of(queue.folder) if queue is not None else f"topic id {key[0]}"
        for section in part.sections:
            where = f"queue {key[1]} of {name}, offsets {_range(section)}"
            for problem in _check_section(store, key, section):
                yield problem._replace(detail=f"{where}: {problem.detail}")


def _check_section(
    store: MessageStore, key: QueueKey, section: Section
) -> Iterator[SectionProblem]:
    """Yield the first problem of a section: the order can't be read, or a batch does not fit."""
    try:
        rows = store.compacted.rows(section)
    except NotLeader:
        yield _missing(section.order_position, "the order")
        return
    except BatonError as error:
        yield SectionProblem(section.order_position, error.message)
        return
    if not len(rows):
        return
    first, last = int(rows.offsets[0]), int(rows.offsets[-1])
    if first < section.first_offset or last >= section.next_offset:
        text = f"the order at {section.order_position} lists offsets {first} to {last}"
        yield SectionProblem(section.order_position, text)
        return
    starts = batch_starts(rows.positions).tolist()
    for begin, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        if (problem := _check_batch(store, key, rows, slice(begin, end))) is not None:
            yield problem
            return


def _check_batch(
    store: MessageStore, key: QueueKey, rows: SectionRows, part: slice
) -> SectionProblem | None:
    """Compare the rows of one batch with it; return what is wrong."""
    offsets = rows.offsets[part]
    position, size = int(rows.positions[part][0]), int(rows.sizes[part][0])
    listed = f"the batch at {position} with offsets {offsets[0]} to {offsets[-1]}"
    if _is_removed(store.log, position):
        return _missing(position, listed)
    try:
        raw = store.log.read(position, size)
        header = verified_header(raw, position, key)
    except BatonError as error:
        return SectionProblem(position, f"{listed} is not what the order lists: {error.message}")
    if not np.array_equal(offsets, np.arange(header.first_offset, header.next_offset)):
        text = f"has offsets {header.first_offset} to {header.next_offset - 1}"
        return SectionProblem(position, f"{listed} {text}")
    if not np.array_equal(rows.tags[part], tag_hashes(raw, header)):
        return SectionProblem(position, f"{listed} has other tags than the order lists")
    return None


def _missing(position: int, what: str) -> SectionProblem:
    return SectionProblem(position, f"{what} is in a removed part of the log", is_missing=True)


def _is_removed(log: CommitLog, position: int) -> bool:
    return position < log.first_position or log.is_purged(position)


def _overlap(one: Section, other: Section) -> bool:
    return one.first_offset < other.next_offset and other.first_offset < one.next_offset


def _range(section: Section) -> str:
    return f"[{section.first_offset}, {section.next_offset})"
