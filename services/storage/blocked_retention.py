"""Whether a batch that still waits blocks retention, so that it is to be written again."""

from __future__ import annotations

from collections.abc import Callable

from batonmq._core.records import HEADER_BYTES, check_stamp, read_header
from batonmq.errors import BatonError
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.retention import DiskState, SealedSegment

REWRITE_INTERVAL_MS = 10_000
REWRITE_AGE_MS_MIN = 600_000
"""A batch younger than this is not rewritten, however full the disk is."""


def blocked_segment_end(
    appender: Appender, oldest_position: int | None, *, age_ms_max: int
) -> int | None:
    """Return the end of the sealed segment which the oldest waiting batch keeps from retention.

    Args:
        oldest_position: Position of the oldest waiting batch; None if no batch waits.
        age_ms_max: Retention time of messages; 0 for unlimited.

    Returns:
        The end of the segment; None if the batch blocks nothing.
    """
    if oldest_position is None:
        return None
    sealed = appender.store.log.sealed()
    end = next((end for begin, end in sealed if begin <= oldest_position < end), None)
    if end is None or not _blocks(appender, oldest_position, age_ms_max):
        return None
    return end


def blocking_segment_end(
    appender: Appender,
    position: int,
    newest_unix_ms: Callable[[SealedSegment], int],
    *,
    age_ms_max: int,
    log_bytes_max: int,
) -> int | None:
    """Return the end of the sealed segment with `position` if it keeps retention from removing it.

    Args:
        newest_unix_ms: Returns a time by which all messages of a segment were stored.
        age_ms_max: Retention time of messages; 0 for unlimited.
        log_bytes_max: Maximum size of the log; 0 for unlimited.

    Returns:
        The end of the segment; None if retention would not remove it yet.
    """
    log = appender.store.log
    segment = next((one for one in log.sealed() if one[0] <= position < one[1]), None)
    if segment is None:
        return None
    age_ms = appender.clock.unix_ms() - newest_unix_ms(SealedSegment(*segment))
    if 0 < age_ms_max <= age_ms:
        return segment[1]
    log_bytes = log.end_position - log.first_position - log.purged_bytes_count
    full = appender.retention.state >= DiskState.CLEAN_FORCIBLY
    if (full or 0 < log_bytes_max < log_bytes) and age_ms >= REWRITE_AGE_MS_MIN:
        return segment[1]
    return None


def _blocks(appender: Appender, position: int, age_ms_max: int) -> bool:
    try:
        head = appender.store.log.read(position, HEADER_BYTES)
        header = read_header(head)
        check_stamp(head)
    except BatonError:  # the caller reads the whole batch and reports the damage
        return True
    age_ms = appender.clock.unix_ms() - header.store_unix_ms
    if appender.retention.state >= DiskState.CLEAN_FORCIBLY:
        return age_ms >= REWRITE_AGE_MS_MIN
    return 0 < age_ms_max <= 2 * age_ms
