"""The floors file: next offsets of queues that have lost all their messages to retention.

The log no longer says where these queues continue. Offsets of a queue must never start again at 0:
a group would take new messages for messages that it has handled. The file is replaced, durably,
before the segments are removed. It can't be derived from the log.

    floors, big-endian:
    at  size  field
     0     4  magic "BTNO"
     4     2  version, 1
     6     2  reserved, 0
     8     4  count n
           n floors: 1 length of the topic's name, the name in ASCII, 8 topic id, 4 queue id,
             8 next offset
   end     4  CRC-32C of everything before
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import NamedTuple

from batonmq._core.checksum import crc32c
from batonmq.errors import DataLoss, DataLossDetail

PATH = "floors"
MAGIC, VERSION = 0x42544E4F, 1
HEAD = struct.Struct(">IHHI")
ROW = struct.Struct(">qIq")
CRC = struct.Struct(">I")


class QueueFloor(NamedTuple):
    """The lowest offset that the next message of a queue may get."""

    topic: str
    topic_id: int
    queue_id: int
    next_offset: int


def encode(floors: Collection[QueueFloor]) -> bytes:
    """Return the content of the file."""
    rows = (
        bytes((len(floor.topic),)) + floor.topic.encode("ascii") + ROW.pack(*floor[1:])
        for floor in floors
    )
    content = b"".join((HEAD.pack(MAGIC, VERSION, 0, len(floors)), *rows))
    return content + CRC.pack(crc32c(content))


def decode(raw: bytes) -> list[QueueFloor]:
    """Decode a file; empty if there is no file.

    Raises:
        DataLoss: the file is damaged, or of another version.
    """
    if not raw:
        return []
    content = raw[: -CRC.size]
    if len(raw) < HEAD.size + CRC.size or raw[-CRC.size :] != CRC.pack(crc32c(content)):
        raise _damaged("its checksum is wrong")
    magic, version, _, count = HEAD.unpack_from(content)
    if (magic, version) != (MAGIC, VERSION):
        raise _damaged(f"magic {magic:#x}, version {version}")
    at, floors = HEAD.size, []
    for _ in range(count):
        name = content[at + 1 : at + 1 + content[at]]
        at += 1 + len(name)
        floors.append(QueueFloor(name.decode("ascii"), *ROW.unpack_from(content, at)))
        at += ROW.size
    return floors


def _damaged(why: str) -> DataLoss:
    return DataLoss(
        f"{PATH} can't be read: {why}",
        remedy="Restore the file from a backup; or set BATON_STORAGE_ACCEPT_LOSS=true: queues "
        "without messages then start at offset 0, and groups with higher progress skip messages.",
        detail=DataLossDetail(position=0),
    )
