"""Reads the log batch by batch and checks each batch: position, lengths, both checksums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from batonmq._core.records import (
    BATCH_BYTES_MAX,
    BODY_FROM,
    HEADER_BYTES,
    MAGIC,
    TOPIC_BYTES_MAX,
    Header,
    check_body,
    check_stamp,
    read_header,
)
from batonmq.errors import BadBatch, BatonError, DataLoss
from batonmq_server.storage.core.commitlog import FILLER, FILLER_MAGIC

CHUNK_BYTES = 1024 * 1024
SECTOR_BYTES = 4_096
"""Where the disk can't read a chunk, a scan reads pieces down to this size."""
HEAD_BYTES_MAX = HEADER_BYTES + TOPIC_BYTES_MAX
END_OF_LOG = "end of log"
_MAGIC = MAGIC.to_bytes(4, "big")
_LENGTH_AT = 8


class ReadableLog(Protocol):
    """The part of a log that a scan reads."""

    @property
    def next_position(self) -> int:
        """End of the log."""
        ...

    def segment_end(self, position: int) -> int:
        """Return the end of the segment that contains `position`."""
        ...

    def read(self, position: int, bytes_max: int) -> bytes:
        """Read up to `bytes_max` bytes; fewer only at the end of the segment."""
        ...


class LogScan:
    """Iterates over the batches from `position` on, until one is damaged or the log ends.

    Attributes:
        position: Position of the next batch.
        reason: Why the iteration ended there: `end of log`, or the fault of the batch.
    """

    def __init__(self, log: ReadableLog, position: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._log, self._chunk_bytes = log, chunk_bytes
        self.position, self.reason = position, END_OF_LOG

    def __iter__(self) -> Iterator[tuple[Header, memoryview]]:
        """Yield headers and batches; a batch is valid until the next one is requested."""
        self.reason = END_OF_LOG
        wanted = 0
        while self.position < self._log.next_position:
            end = self._log.segment_end(self.position)
            try:
                view = memoryview(self._read(max(wanted, self._chunk_bytes), wanted))
            except DataLoss as error:
                self.reason = str(error)
                return
            wanted = 0
            while self.position < end:
                room = end - self.position
                if len(view) < room and len(view) < (wanted := _wanted(view)):
                    break  # the chunk ends within the batch: read again from here
                try:
                    header, length = examine(view, self.position, room)
                except BatonError as error:
                    self.reason = str(error)
                    return
                if not length:
                    return
                if header is not None:
                    yield header, view[:length]
                self.position += length
                view = view[length:]

    def find_next(self) -> bool:
        """Skip a damaged batch: move to the next position with a valid stamp.

        Returns:
            False if there is none; `position` is then the end of the last segment.
        """
        self.position += 1
        while self.position < self._log.next_position:
            try:
                chunk = self._read(self._chunk_bytes)
            except DataLoss:
                sector_end = (self.position // SECTOR_BYTES + 1) * SECTOR_BYTES
                self.position = min(sector_end, self._log.segment_end(self.position))
                continue
            at = chunk.find(_MAGIC)
            while at >= 0:
                if _is_stamped(chunk[at : at + HEADER_BYTES], self.position + at):
                    self.position += at
                    return True
                at = chunk.find(_MAGIC, at + 1)
            end = self._log.segment_end(self.position)
            self.position += len(chunk)
            if self.position < end:
                self.position -= HEADER_BYTES  # the chunk may end within a header
        return False

    def _read(self, bytes_max: int, needed: int = 0) -> bytes:
        """Read from here: less if the disk can't read all of it, but at least `needed` bytes.

        Raises:
            DataLoss: the disk can't read as few bytes either.
        """
        while True:
            try:
                return self._log.read(self.position, bytes_max)
            except DataLoss:
                if bytes_max <= max(needed, SECTOR_BYTES):
                    raise
                bytes_max = max(needed, SECTOR_BYTES, bytes_max // 2)


def examine(view: memoryview, position: int, room: int) -> tuple[Header | None, int]:
    """Return header and length of the batch at `position`; the header is None for a filler.

    The length is 0 if nothing is written there.

    Args:
        view: The log from `position` on: at least the whole batch, or the rest of the segment.
        room: Bytes to the end of the segment.

    Raises:
        BadBatch, BadChecksum: there is neither a valid batch nor a filler.
    """
    if room < FILLER.size:
        if any(view[:room]):
            raise BadBatch(f"{room} bytes before the end of the segment are not zero")
        return None, room
    magic, length = FILLER.unpack_from(view)
    if magic == length == 0:
        return None, 0
    if magic == FILLER_MAGIC and length == room:
        return None, room
    header = read_header(view)
    if header.length > room or header.position != position:
        raise BadBatch(
            f"header has position {header.position} and {header.length} bytes; expected position "
            f"{position} and at most {room} bytes"
        )
    batch = view[: header.length]
    check_stamp(batch)
    check_body(batch)
    return header, header.length


def _wanted(view: memoryview) -> int:
    """Return how many bytes `examine` needs for the batch at the start of `view`."""
    if len(view) < HEAD_BYTES_MAX:
        return HEAD_BYTES_MAX
    if view[:4] != _MAGIC:
        return 0
    return min(int.from_bytes(view[_LENGTH_AT : _LENGTH_AT + 4], "big"), BATCH_BYTES_MAX)


def _is_stamped(head: bytes, position: int) -> bool:
    """Return whether `head` is a stamped header for `position`."""
    try:
        if len(head) < HEADER_BYTES or int.from_bytes(head[16:24], "big") != position:
            return False
        check_stamp(head[:BODY_FROM])
    except BatonError:
        return False
    return True
