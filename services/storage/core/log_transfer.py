"""Copies the log between nodes: the sender cuts at batch ends, the receiver checks each batch.

Of a filler, only its first 8 bytes are sent: the rest of the segment is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

from batonmq._core.records import MAGIC, Header
from batonmq.errors import DataLoss, DataLossDetail
from batonmq_server.storage.core.commitlog import FILLER, FILLER_MAGIC, CommitLog, PositionRange
from batonmq_server.storage.core.compaction_order import is_relocated
from batonmq_server.storage.core.epochs import EpochHistory
from batonmq_server.storage.core.recovery import Recovery
from batonmq_server.storage.core.scan import END_OF_LOG, LogScan

_MAGIC, _FILLER_MAGIC = MAGIC.to_bytes(4, "big"), FILLER_MAGIC.to_bytes(4, "big")
_LENGTH_FROM = {_MAGIC: 8, _FILLER_MAGIC: 4}
_HEAD_BYTES = 12
BATCHES_MAX = 4_096
"""Batches that a leader looks at without an await: 5 ms."""
PIECE_BYTES = 64 * 1024
"""Bytes that a follower takes without an await: 5 ms, if each message is a small batch."""


def read_whole_batches(
    log: CommitLog, history: EpochHistory, position: int, bytes_max: int
) -> bytes:
    """Read the synced log from `position` on: whole batches and fillers of one segment and epoch.

    Args:
        bytes_max: Approximate maximum; one batch always fits. There are at most BATCHES_MAX.

    Raises:
        DataLoss: there is neither a batch nor a filler at `position`.
    """
    if position >= log.synced_position:
        return b""
    segment_end = log.segment_end(position)
    if log.is_purged(position):
        return log.read(position, FILLER.size)
    end = min(log.synced_position, segment_end, history.next_start(position) or segment_end)
    whole, wanted = 0, bytes_max
    while not whole:  # at most three times: the first batch may be longer than the bytes read
        raw = log.read(position, min(end - position, wanted))
        whole, wanted = count_whole_bytes(raw, position, segment_end)
        if not whole and wanted <= len(raw):
            raise DataLoss(
                f"the log ends within a batch at {end}", detail=DataLossDetail(position=position)
            )
    return raw[:whole]


def count_whole_bytes(raw: bytes, position: int, segment_end: int) -> tuple[int, int]:
    """Return how many bytes of `raw` are whole batches, and the length of the next batch.

    No more than BATCHES_MAX are counted.

    Raises:
        DataLoss: there is neither a batch nor a filler at one of the positions.
    """
    at = count = 0
    while at < len(raw) and count < BATCHES_MAX:
        count += 1
        room = segment_end - position - at
        if room < FILLER.size:
            return (at + room, 0) if len(raw) - at >= room else (at, room)
        if len(raw) - at < _HEAD_BYTES and raw[at : at + 4] != _FILLER_MAGIC:
            return at, _HEAD_BYTES
        if raw[at : at + FILLER.size] == FILLER.pack(FILLER_MAGIC, room):
            return at + FILLER.size, 0
        length_from = _LENGTH_FROM.get(raw[at : at + 4])
        length = 0
        if length_from is not None:
            field = raw[at + length_from : at + length_from + 4]
            length = int.from_bytes(field, "big") if len(field) == 4 else FILLER.size
        if not 0 < length <= room:
            raise DataLoss(
                f"there is no valid batch at position {position + at}",
                detail=DataLossDetail(position=position + at),
            )
        if at + length > len(raw):
            return at, length
        at += length
    return at, 0


def split(
    data: bytes, position: int, segment_end: int, piece_bytes: int = PIECE_BYTES
) -> Iterator[bytes]:
    """Yield the bytes that a leader sent at `position` in pieces of whole batches.

    Args:
        piece_bytes: Approximate size of a piece; one batch always fits.

    Raises:
        DataLoss: there is neither a batch nor a filler where one must be.
    """
    if position + len(data) > segment_end:
        yield data  # `check_received` says what is wrong
        return
    at = 0
    while at < len(data):
        size = piece_bytes
        while True:  # at most three times, as in `read_whole_batches`
            piece = data[at : at + size]
            whole, wanted = count_whole_bytes(piece, position + at, segment_end)
            if whole or at + size >= len(data):
                break
            size = wanted
        yield piece[: whole or len(piece)]
        at += whole or len(piece)


def check_received(
    recovery: Recovery, position: int, data: bytes, segment: PositionRange
) -> tuple[list[tuple[Header, memoryview]], int]:
    """Check `data` like a recovery at the end of the log.

    Returns:
        The batches, and the position after `data`: after a filler, the end of the segment.

    Raises:
        DataLoss: a batch is damaged, or does not follow the last batch of its queue.
    """
    first_position, end = segment
    if not first_position <= position <= position + len(data) <= end:
        raise DataLoss(
            f"{len(data)} bytes at {position} are not in the segment [{first_position}, {end})",
            detail=DataLossDetail(position=position),
        )
    scan = LogScan(_ReceivedLog(position, data, end), position, len(data))
    batches = list(scan)
    after = position + len(data)
    if scan.position not in (after, end) or scan.reason != END_OF_LOG:
        raise DataLoss(
            f"the bytes that the leader sent are damaged at {scan.position}: {scan.reason}",
            detail=DataLossDetail(position=scan.position),
        )
    next_offsets: dict[tuple[int, int], int] = {}
    for header, _ in batches:
        if is_relocated(header):
            continue
        key = header.topic_id, header.queue_id
        expected = next_offsets.get(key)
        if expected is None:
            expected = recovery.expected_offset(header)
        if header.first_offset != expected:
            raise DataLoss(
                f"the batch at {header.position} starts at offset {header.first_offset}; queue "
                f"{header.queue_id} of {header.topic} continues at {expected}",
                detail=DataLossDetail(position=header.position),
            )
        next_offsets[key] = header.next_offset
    last = batches[-1][0] if batches else None
    batches_end = last.position + last.length if last else position
    return batches, after if batches_end == after else end


class _ReceivedLog:
    """Received bytes, as a log that a scan can read."""

    def __init__(self, position: int, data: bytes, segment_end: int) -> None:
        self._position, self._data, self._segment_end = position, data, segment_end
        self.next_position = position + len(data)

    def segment_end(self, position: int) -> int:
        return self._segment_end

    def read(self, position: int, bytes_max: int) -> bytes:
        """See ReadableLog. The rest of the segment is zeros."""
        at = position - self._position
        wanted = min(bytes_max, self._segment_end - position)
        return self._data[at : at + wanted].ljust(wanted, b"\0")
