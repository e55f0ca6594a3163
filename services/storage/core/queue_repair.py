"""Finds damaged entries of a consume queue, and reads from the log what they must be.

An entry is good if it points to a batch of its queue that contains its offset. Damaged entries lie
between two good ones, so only the part of the log between these two is read. If the log itself is
damaged there, the entries stay as they are: then the messages are lost, not the index.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batonmq._core.records import check_stamp, read_header
from batonmq.errors import BatonError, DataLoss
from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.compaction_order import is_relocated
from batonmq_server.storage.core.consumequeue import ConsumeQueue, batch_entries
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.scan import HEAD_BYTES_MAX, LogScan
from batonmq_server.storage.core.scrub import SegmentPart
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tier import NotCached

ENTRIES_AT_ONCE = 1_024
"""Entries that are tested without an await; each takes two small reads."""


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """The part [position, next_position) of a segment."""

    path: str
    segment_position: int
    segment_end_position: int
    position: int
    next_position: int


@dataclass(slots=True)
class QueueRepair:
    """Damaged entries of one queue, and where the log has their batches.

    Attributes:
        first_offset, next_offset: Range that contains all damaged entries that were found.
        found: Entries that the log has, by the offset of the first one; set by `read_log`, or by
            the scrub.
    """

    key: QueueKey
    first_offset: int
    next_offset: int
    spans: list[SegmentSpan]
    found: dict[int, npt.NDArray[np.void]] = field(default_factory=dict)


def find_damage(store: MessageStore, key: QueueKey, offset: int) -> QueueRepair | None:
    """Return the damaged entries among ENTRIES_AT_ONCE from `offset` on; None without any."""
    queue = store.queues.get(key)
    if queue is None:
        return None
    begin = max(offset, queue.first_offset)
    end = min(queue.visible_offset, offset + ENTRIES_AT_ONCE)
    bad = [at for at in range(begin, end) if _batch_of(store, key, queue, at) is None]
    if not bad:
        return None
    first, end = bad[0], bad[-1] + 1
    position = next_position = None
    step, at = 1, first - 1
    while at >= queue.first_offset and position is None:
        position, step, at = _batch_of(store, key, queue, at), 2 * step, at - step
    step, at = 1, end
    while at < queue.visible_offset and next_position is None:
        next_position, step, at = _batch_of(store, key, queue, at), 2 * step, at + step
    log = store.log
    begin_position = log.first_position if position is None else position
    end_position = store.readable_position if next_position is None else next_position
    return QueueRepair(key, first, end, segment_spans(log, begin_position, end_position))


def check_first_from(store: MessageStore, key: QueueKey, position: int) -> None:
    """Check the entries by which a queue finds its first message at or after a position.

    A search that meets a damaged entry ends beside it.

    Raises:
        DataLoss: one of them is damaged, or can't be read; `offset` names it.
    """
    queue = store.queues[key]
    if queue.first_position >= position or queue.last_position < position:
        return  # nothing is searched
    first = queue.first_offset_from(position)
    for at in range(max(first - 1, queue.first_offset), min(first + 1, queue.visible_offset)):
        if _batch_of(store, key, queue, at) is None:
            raise DataLoss(
                f"entry {at} of {queue.folder} is damaged, or its batch is", facts={"offset": at}
            )


def segment_spans(log: CommitLog, position: int, next_position: int) -> list[SegmentSpan]:
    """Return the part [position, next_position) of the log, segment by segment."""
    spans = []
    while position < next_position:
        path, segment_begin, segment_end = log.segment_of(position)
        stop = min(segment_end, next_position)
        spans.append(SegmentSpan(path, segment_begin, segment_end, position, stop))
        position = segment_end
    return spans


def read_log(disk: Disk, repair: QueueRepair) -> None:
    """Read the entries of a repair from the log; blocks, and may run in another thread.

    Raises:
        OSError: a segment can't be read, for example because retention has removed it.
    """
    for span in repair.spans:
        file = disk.open(span.path)
        try:
            part = SegmentPart(
                file, span.segment_position, span.segment_end_position, span.next_position
            )
            scan = LogScan(part, span.position)
            more = True
            while more and scan.position < span.next_position:
                for header, batch in scan:
                    key = header.topic_id, header.queue_id
                    if key == repair.key and not is_relocated(header):
                        repair.found[header.first_offset] = batch_entries(header, batch)
                more = scan.position < span.next_position and scan.find_next()
        finally:
            file.close()


def apply_repair(store: MessageStore, repair: QueueRepair) -> list[str]:
    """Write the entries that the log has; return the changed files, to be synced.

    Raises:
        OSError: a file can't be written.
    """
    queue = store.queues.get(repair.key)
    if queue is None:
        return []
    changed: dict[str, None] = {}
    for first_offset, entries in repair.found.items():
        if first_offset < repair.next_offset and first_offset + len(entries) > repair.first_offset:
            changed.update(dict.fromkeys(queue.rewrite(first_offset, entries)))
    return list(changed)


def _batch_of(store: MessageStore, key: QueueKey, queue: ConsumeQueue, offset: int) -> int | None:
    """Return the position of the batch of an offset, by its entry; None if the entry is damaged."""
    try:
        entry = queue.read(offset, offset + 1)
        position = int(entry.positions[0])
        head = store.log.read(position, HEAD_BYTES_MAX)
        header = read_header(head)
        check_stamp(head)
    except NotCached:
        return position  # nothing says that the entry is damaged
    except (BatonError, DataLoss):
        return None
    good = (header.position, header.length) == (position, int(entry.sizes[0]))
    good = good and (header.topic_id, header.queue_id) == key
    return position if good and header.first_offset <= offset < header.next_offset else None
