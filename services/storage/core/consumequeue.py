"""The index of one queue: where in the log its messages are, by offset.

Entry N is at byte 20 N, so it is found by arithmetic. It is derived data: recovery makes it anew
from the log, so nothing here is ever synced, and the newest entries may be in memory only.

    at  size  entry, big-endian
     0     8  position of the batch that holds the message
     8     4  size of that batch, bytes
    12     8  tag hash of the message, sign-extended

Source: RocketMQ ConsumeQueue. Deviation: an entry points to the batch, not to the message; the
index within the batch is the offset less the batch's first offset.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage.core.files import FileCache

FOLDER = "consumequeue"
ENTRY = np.dtype([("position", ">i8"), ("size", ">i4"), ("tag", ">i8")])
ENTRIES_PER_FILE = 300_000
_TAIL_MIN, _TAIL_MAX = 64, 4_096

Int64Array = npt.NDArray[np.int64]


def folder_of(topic: str, topic_id: int, queue_id: int) -> str:
    """Folder of one queue's files."""
    return f"{FOLDER}/{topic}-{topic_id}/{queue_id}"


@dataclass(frozen=True, slots=True)
class Entries:
    """Columns of consecutive entries, each of shape (count,)."""

    positions: Int64Array
    sizes: Int64Array
    tags: Int64Array

    def __len__(self) -> int:
        return len(self.positions)


class ConsumeQueue:
    """Offsets [first_offset, next_offset) are indexed, those below `visible_offset` readable.

    Args:
        folder: Where its files are.
        first_offset: Offset of the first message the log still has.
    """

    __slots__ = (
        "_entries_per_file", "_files", "_flushed_offset", "_folder", "_tail", "first_offset",
        "next_offset", "visible_offset",
    )  # fmt: skip

    def __init__(
        self,
        files: FileCache,
        folder: str,
        *,
        first_offset: int = 0,
        entries_per_file: int = ENTRIES_PER_FILE,
    ) -> None:
        self._files, self._folder, self._entries_per_file = files, folder, entries_per_file
        self.first_offset = self.next_offset = self.visible_offset = first_offset
        self._flushed_offset = first_offset
        self._tail = np.empty(_TAIL_MIN, ENTRY)

    def append(self, position: int, size: int, tag_hashes: npt.NDArray[np.int32]) -> None:
        """Index a batch: one entry per element of `tag_hashes`."""
        count = len(tag_hashes)
        begin = self.next_offset - self._flushed_offset
        if begin + count > len(self._tail):
            begin = self._make_room(begin, count)
        added = self._tail[begin : begin + count]
        added["position"] = position
        added["size"] = size
        added["tag"] = tag_hashes
        self.next_offset += count

    def show(self, next_offset: int) -> None:
        """Let readers see everything below `next_offset`: it is safe on disk."""
        assert self.visible_offset <= next_offset <= self.next_offset
        self.visible_offset = next_offset

    def read(self, first_offset: int, next_offset: int) -> Entries:
        """Entries of [first_offset, next_offset), which lies within what is visible."""
        assert self.first_offset <= first_offset <= next_offset <= self.visible_offset
        split = min(max(first_offset, self._flushed_offset), next_offset)
        pieces = []
        if first_offset < split:
            pieces.append(self._read_files(first_offset, split))
        if split < next_offset or not pieces:
            begin = split - self._flushed_offset
            pieces.append(self._tail[begin : begin + next_offset - split])
        raw = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return Entries(
            raw["position"].astype(np.int64),
            raw["size"].astype(np.int64),
            raw["tag"].astype(np.int64),
        )

    def flush(self) -> None:
        """Move what is only in memory to the files.

        Raises:
            OSError: a file can't be written; nothing is lost.
        """
        offset = self._flushed_offset
        raw = memoryview(self._tail[: self.next_offset - offset].tobytes())
        while raw:
            path, at = self._place(offset)
            chunk = raw[: self._entries_per_file * ENTRY.itemsize - at]
            self._files.get(path, create=True).write(at, [chunk])
            offset += len(chunk) // ENTRY.itemsize
            raw = raw[len(chunk) :]
        self._flushed_offset = offset

    def _make_room(self, used: int, count: int) -> int:
        """Room for `count` more entries in the tail; the index of the first of them."""
        wanted = used + count
        if wanted > _TAIL_MAX:
            with suppress(OSError):  # as on a full disk: then it stays in memory, for now
                self.flush()
            used = self.next_offset - self._flushed_offset
            wanted = used + count
        if wanted > len(self._tail):
            grown = np.empty(1 << (wanted - 1).bit_length(), ENTRY)
            grown[:used] = self._tail[:used]
            self._tail = grown
        return used

    def _read_files(self, first_offset: int, next_offset: int) -> npt.NDArray[np.void]:
        chunks = []
        while first_offset < next_offset:
            path, at = self._place(first_offset)
            wanted = (next_offset - first_offset) * ENTRY.itemsize
            room = self._entries_per_file * ENTRY.itemsize - at
            chunk = self._files.get(path).read(at, min(wanted, room))
            chunks.append(chunk)
            first_offset += len(chunk) // ENTRY.itemsize
        return np.frombuffer(b"".join(chunks), ENTRY)

    def _place(self, offset: int) -> tuple[str, int]:
        """File of the entry of `offset`, and the byte at which it is."""
        number, index = divmod(offset, self._entries_per_file)
        first_byte = number * self._entries_per_file * ENTRY.itemsize
        return f"{self._folder}/{first_byte:020d}", index * ENTRY.itemsize
