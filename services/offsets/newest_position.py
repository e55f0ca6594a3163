"""The position of the newest durable write, in a file of its own beside LMDB's.

LMDB keeps the root of its state in two meta pages without checksums. If one bit of the newer page
flips, LMDB opens the state before the last write, and nothing in that state shows that the write is
missing. So the position is recorded a second time, after the write is durable and before its caller
learns of it. A state with a lower position was rolled back.

    slot      4,096 bytes; there are two, written in turn, so that a torn write spares the other one
      magic   4 bytes
      number  8 bytes: the slot with the greater number is the newest
      epoch   8 bytes
      version 8 bytes
      crc32c  4 bytes, of all before

A crash between the write and the record leaves a record that is one write old: the state is then
ahead of it, which is no fault.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import lmdb

from batonmq._core.checksum import crc32c
from batonmq.errors import DataLoss
from batonmq_server.offsets.codec import META, unseal
from batonmq_server.offsets.core.change_log import HISTORY, POSITION, Entry
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition

FILE = "newest"
SLOT_BYTES = 4_096
_SLOT = struct.Struct("<4sQQQ")
_CRC = struct.Struct("<I")
_MAGIC = b"BNP1"
_POSITION_KEY, _HISTORY_KEY = _OWN = (META + POSITION, META + HISTORY)


class NewestPosition:
    """The open file; `record` blocks until the position is durable.

    Args:
        folder: Folder of the LMDB environment.

    Attributes:
        position: The recorded position.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        newest = _read(path)
        self._number, self.position = newest or (0, NO_POSITION)
        created = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if created:  # Later writes change no metadata, so that `fdatasync` writes one block.
            os.pwrite(self._file, bytes(2 * SLOT_BYTES), 0)
            os.fsync(self._file)

    def record(self, position: ReplicaPosition) -> None:
        """Replace the recorded position, durably.

        Raises:
            OSError: not known which position is recorded.
        """
        self._number += 1
        os.pwrite(self._file, _encode(self._number, position), self._number % 2 * SLOT_BYTES)
        os.fdatasync(self._file)
        self.position = position

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def recorded_position(folder: Path) -> ReplicaPosition:
    """Return the recorded position; NO_POSITION if there is none, as in an earlier version."""
    newest = _read(folder / FILE)
    return newest[1] if newest else NO_POSITION


def check_not_rolled_back(
    folder: Path, stored: ReplicaPosition, newest: ReplicaPosition | None = None
) -> None:
    """Return if LMDB's state, at `stored`, has the newest write that was recorded in `folder`.

    Args:
        newest: The recorded position. A caller that does not own the folder reads it before the
            state: the node may write between the two.

    Raises:
        DataLoss: writes that were confirmed are missing.
    """
    newest = recorded_position(folder) if newest is None else newest
    if stored >= newest:
        return
    raise DataLoss(
        f"stored progress in {folder} was rolled back: it is at version {stored.version} of epoch "
        f"{stored.epoch}, and version {newest.version} of epoch {newest.epoch} was confirmed",
        remedy="In a replica set, move the folder away: the node copies the leader. Alone, restore "
        f"the folder from a backup; or accept that the newest acknowledgements are lost: remove "
        f"{folder / FILE}, start the node, and expect redelivered messages.",
        facts={"stored": stored.version, "confirmed": newest.version},
    )


def position_after(
    before: ReplicaPosition, entries: Iterable[Entry], *, replace: bool = False
) -> ReplicaPosition:
    """Return the position of a store at `before` after a write of `entries`.

    Args:
        replace: The write replaces everything.

    Raises:
        DataLoss: the entries of the position can't be read.
    """
    own = {key: value for key, value in entries if key in _OWN and value is not None}
    if replace:
        before = NO_POSITION
    if not own:
        return before
    try:
        values = {key: unseal(key, value) for key, value in own.items()}
        version = int(values.get(_POSITION_KEY, b"%d" % before.version))
        history = values.get(_HISTORY_KEY, b"").split()
        epoch = int(history[-1].partition(b":")[0]) if history else before.epoch
    except ValueError as error:
        raise DataLoss(f"stored position or history can't be read: {error}") from error
    return ReplicaPosition(epoch, version)


def read_position(environment: lmdb.Environment) -> ReplicaPosition:
    """Return the position of the state that LMDB has opened.

    Raises:
        DataLoss, lmdb.Error: it can't be read.
    """
    with environment.begin() as transaction:
        return position_after(NO_POSITION, position_entries(transaction.get))


def position_entries(get: Callable[[bytes], bytes | None]) -> list[tuple[bytes, bytes]]:
    """Return the stored entries from which `position_after` finds the position of a store."""
    values = ((key, get(key)) for key in _OWN)
    return [(key, value) for key, value in values if value is not None]


def _encode(number: int, position: ReplicaPosition) -> bytes:
    raw = _SLOT.pack(_MAGIC, number, position.epoch, position.version)
    return raw + _CRC.pack(crc32c(raw))


def _read(path: Path) -> tuple[int, ReplicaPosition] | None:
    """Return number and position of the newest readable slot; None if there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    positions = []
    for at in (0, SLOT_BYTES):
        raw, crc = content[at : at + _SLOT.size], content[at + _SLOT.size :][: _CRC.size]
        if len(crc) == _CRC.size and _CRC.unpack(crc)[0] == crc32c(raw):
            magic, number, epoch, version = _SLOT.unpack(raw)
            if magic == _MAGIC:
                positions.append((number, ReplicaPosition(epoch, version)))
    return max(positions, default=None)
