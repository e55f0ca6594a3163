"""The epoch history of a log: which epoch wrote which part of it.

With their histories two logs can be compared without reading them. An epoch has one leader, and a
leader writes each position once. So where two histories name the same epoch, the two logs hold the
same bytes. An epoch that wrote nothing is not in the history, unless it is the last one. The file
is replaced, durably, before the epoch writes.

    epochs, big-endian:
    at  size  field
     0     4  magic "BTNH"
     4     2  version, 1
     6     2  1 if the node has lost safe messages and not fetched them again yet; else 0
     8     4  count n
           n starts: 8 epoch, 8 first position
   end     4  CRC-32C of everything before
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

from batonmq._core.checksum import crc32c
from batonmq.errors import DataLoss, DataLossDetail
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition

PATH = "epochs"
MAGIC, VERSION = 0x42544E48, 1
HEAD = struct.Struct(">IHHI")
START = struct.Struct(">qq")
CRC = struct.Struct(">I")

EpochStart = tuple[int, int]
"""An epoch, and the first position it wrote, or would have written."""


@dataclass(frozen=True)
class EpochHistory:
    """The epochs of one log; epochs and positions in `starts` rise strictly.

    Attributes:
        damaged: The node has lost safe messages. It must not be elected until it has everything
            that was confirmed.
    """

    starts: tuple[EpochStart, ...] = ()
    damaged: bool = False

    @property
    def epoch(self) -> int:
        """The last epoch; 0 if there is none."""
        return self.starts[-1][0] if self.starts else 0

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `starts`, by which two nodes see that their histories are equal."""
        return sha256(b"".join(START.pack(*start) for start in self.starts)).digest()

    def position(self, end: int) -> ReplicaPosition:
        """Return the position of a node with this history and a log that ends at `end`."""
        return NO_POSITION if self.damaged else ReplicaPosition(self.epoch, end)

    def with_epoch(self, epoch: int, position: int) -> EpochHistory:
        """Return this history plus a later epoch that begins at `position`, the end of the log."""
        assert epoch > self.epoch
        kept = tuple(start for start in self.starts if start[1] < position)
        return replace(self, starts=(*kept, (epoch, position)))

    def truncated(self, end: int) -> EpochHistory:
        """Return this history for a log that ends at `end`; an epoch that starts at `end` stays."""
        return replace(self, starts=self.starts[: self._count_from(end)])

    def next_start(self, position: int) -> int | None:
        """Return where the next epoch after `position` begins; None if none does."""
        count = self._count_from(position)
        return self.starts[count][1] if count < len(self.starts) else None

    def epoch_at(self, position: int) -> int:
        """Return the epoch that wrote, or writes, the byte at `position`; 0 if unknown."""
        count = self._count_from(position)
        return self.starts[count - 1][0] if count else 0

    def _count_from(self, position: int) -> int:
        """Return how many epochs begin at or before `position`: they are found by their order."""
        return bisect_right(self.starts, position, key=_first_position)


def _first_position(start: EpochStart) -> int:
    return start[1]


def read_history(starts: Iterable[EpochStart]) -> EpochHistory:
    """Return the history with `starts`.

    Raises:
        DataLoss: epochs or positions do not rise, or are out of range.
    """
    history = EpochHistory(tuple(starts))
    rising = all(a < b and c < d for (a, c), (b, d) in pairwise(history.starts))
    if not rising or any(epoch < 1 or start < 0 for epoch, start in history.starts):
        raise DataLoss(f"epochs and positions must rise strictly, got {history.starts}")
    return history


def common_point(one: EpochHistory, one_end: int, other: EpochHistory, other_end: int) -> int:
    """Return the position up to which two logs hold the same bytes, by their histories."""
    end = min(one_end, other_end)
    if one.starts == other.starts and one.epoch_at(0):
        return end
    starts = sorted({start for _, start in (*one.starts, *other.starts) if start < end} | {0})
    for start in starts:
        epoch = one.epoch_at(start)
        if epoch != other.epoch_at(start) or not epoch:
            return min(start, end)
    return end


def encode(history: EpochHistory) -> bytes:
    """Return the content of the file."""
    head = HEAD.pack(MAGIC, VERSION, history.damaged, len(history.starts))
    content = head + b"".join(START.pack(*start) for start in history.starts)
    return content + CRC.pack(crc32c(content))


def decode(raw: bytes) -> EpochHistory:
    """Decode a file; an empty history if there is no file.

    Raises:
        DataLoss: the file is damaged, or of another version.
    """
    if not raw:
        return EpochHistory()
    content = raw[: -CRC.size]
    if len(content) < HEAD.size or raw[-CRC.size :] != CRC.pack(crc32c(content)):
        raise _damaged("its checksum is wrong")
    magic, version, damaged, count = HEAD.unpack_from(content)
    if (magic, version) != (MAGIC, VERSION) or len(content) != HEAD.size + count * START.size:
        raise _damaged(f"magic {magic:#x}, version {version}, {len(content)} bytes")
    return replace(read_history(START.iter_unpack(content[HEAD.size :])), damaged=bool(damaged))


def _damaged(why: str) -> DataLoss:
    return DataLoss(
        f"{PATH} can't be read: {why}",
        remedy="Restore the file from a backup. Or remove it, and write into a file `epoch` a "
        "number larger than every earlier epoch: recovery.json has the epoch of the last start.",
        detail=DataLossDetail(position=0),
    )
