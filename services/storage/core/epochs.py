"""Which epoch wrote which part of the log: what makes two logs comparable without reading them.

An epoch has one leader, and a leader writes a position once. So where two histories name the same
epoch, the two logs hold the same bytes. An epoch that wrote nothing is not in it, but for the last.
The file is replaced, durably, before the epoch writes.

    epochs, big-endian:
    at  size  field
     0     4  magic "BTNH"
     4     2  version, 1
     6     2  1 if the node has lost a part of what it had, or all, and not got it back yet; else 0
     8     4  count n
           n starts: 8 epoch, 8 first position
   end     4  CRC-32C of everything before
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import google_crc32c

from batonmq.errors import DataLoss, DataLossDetail
from batonmq_server.runtime.position import NOWHERE, Position

PATH = "epochs"
MAGIC, VERSION = 0x42544E48, 1
HEAD = struct.Struct(">IHHI")
START = struct.Struct(">qq")
CRC = struct.Struct(">I")

EpochStart = tuple[int, int]
"""An epoch, and the first position it wrote, or would have written."""


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """The epochs of one log; both numbers of `starts` rise strictly.

    Attributes:
        damaged: The node has lost a part of what it had: until it has everything again that was
            confirmed, it must not be leader.
    """

    starts: tuple[EpochStart, ...] = ()
    damaged: bool = False

    @property
    def epoch(self) -> int:
        """The last one; 0 for none."""
        return self.starts[-1][0] if self.starts else 0

    def position(self, end: int) -> Position:
        """How far a node has come whose log has this history and ends at `end`."""
        return NOWHERE if self.damaged else Position(self.epoch, end)

    def with_epoch(self, epoch: int, position: int) -> EpochHistory:
        """A later epoch begins to write at `position`, the end of the log."""
        assert epoch > self.epoch
        kept = tuple(start for start in self.starts if start[1] < position)
        return replace(self, starts=(*kept, (epoch, position)))

    def truncated(self, end: int) -> EpochHistory:
        """What of it a log has that ends at `end`: who has all before a start has its epoch too."""
        return replace(self, starts=tuple(start for start in self.starts if start[1] <= end))

    def next_start(self, position: int) -> int | None:
        """Where an epoch begins after `position`; None if none does."""
        return next((start for _, start in self.starts if start > position), None)

    def epoch_at(self, position: int) -> int:
        """The epoch that wrote, or writes, the byte at `position`; 0 if it is not known."""
        return max((epoch for epoch, start in self.starts if start <= position), default=0)


def read_history(starts: Iterable[EpochStart]) -> EpochHistory:
    """The history that somebody tells.

    Raises:
        DataLoss: it is none.
    """
    history = EpochHistory(tuple(starts))
    rising = all(a < b and c < d for (a, c), (b, d) in pairwise(history.starts))
    if not rising or any(epoch < 1 or start < 0 for epoch, start in history.starts):
        raise DataLoss(f"the epochs {history.starts} do not rise")
    return history


def common_point(one: EpochHistory, one_end: int, other: EpochHistory, other_end: int) -> int:
    """Up to where two logs hold the same bytes, as far as their histories can tell."""
    end = min(one_end, other_end)
    starts = sorted({start for _, start in (*one.starts, *other.starts) if start < end} | {0})
    for start in starts:
        epoch = one.epoch_at(start)
        if epoch != other.epoch_at(start) or not epoch:
            return min(start, end)
    return end


def encode(history: EpochHistory) -> bytes:
    """The file."""
    head = HEAD.pack(MAGIC, VERSION, history.damaged, len(history.starts))
    content = head + b"".join(START.pack(*start) for start in history.starts)
    return content + CRC.pack(google_crc32c.value(content))


def decode(raw: bytes) -> EpochHistory:
    """The history in a file; an empty one if there is no file.

    Raises:
        DataLoss: it is damaged, or of another version.
    """
    if not raw:
        return EpochHistory()
    content = raw[: -CRC.size]
    if len(content) < HEAD.size or raw[-CRC.size :] != CRC.pack(google_crc32c.value(content)):
        raise _damaged("its checksum is wrong")
    magic, version, damaged, count = HEAD.unpack_from(content)
    if (magic, version) != (MAGIC, VERSION) or len(content) != HEAD.size + count * START.size:
        raise _damaged(f"magic {magic:#x}, version {version}, {len(content)} bytes")
    return replace(read_history(START.iter_unpack(content[HEAD.size :])), damaged=bool(damaged))


def _damaged(why: str) -> DataLoss:
    return DataLoss(
        f"{PATH} can't be read: {why}",
        remedy="Restore the file from a backup; or remove it, and write into a file `epoch` a "
        "number that is larger than any epoch before: recovery.json has the one of the last start.",
        detail=DataLossDetail(position=0),
    )
