"""The file with batches of the metrics stream that a process left for its next incarnation.

    magic   4 bytes
    size    4 bytes: bytes of the content
    crc32c  4 bytes, of the content
    content for each batch its size in 4 bytes, then the batch

A new file replaces the old one at once, so a crash leaves either of them. A damaged file is logged
and dropped: its batches are a gap in the stream.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from batonmq._core.checksum import crc32c

log = logging.getLogger(__name__)

FILE = "unsent-metrics"
BYTES_MAX = 16 * 1024 * 1024
"""Most bytes of content; the oldest batches beyond it are lost."""
_HEAD = struct.Struct("<4sII")
_SIZE = struct.Struct("<I")
_MAGIC = b"BMU1"


class UnsentBatches:
    """The file in the data directory of a service.

    Args:
        folder: The data directory, which only this process uses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FILE

    def read(self) -> list[bytes]:
        """Return the batches, oldest first; none if there is no file, or no readable one."""
        try:
            if not self._path.exists():
                return []
            return _decoded(self._path.read_bytes())
        except ValueError as error:
            log.warning("unsent metrics are lost: %s is damaged: %s", self._path, error)
            self.remove()
        except OSError as error:
            log.warning("unsent metrics can't be read error=%s", error)
        return []

    def write(self, batches: Sequence[bytes]) -> bool:
        """Replace the batches, durably; return whether all of them are in the file."""
        kept = _newest(batches)
        temporary = self._path.with_suffix(".tmp")
        content = b"".join(_SIZE.pack(len(batch)) + batch for batch in kept)
        try:
            with temporary.open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, len(content), crc32c(content)) + content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            self._sync_folder()
        except OSError as error:
            log.warning("unsent metrics are lost batches=%d error=%s", len(batches), error)
            return False
        if lost := len(batches) - len(kept):
            log.warning("oldest unsent metrics are lost batches=%d limit=%d", lost, BYTES_MAX)
        return not lost

    def remove(self) -> None:
        """Remove the file, durably."""
        try:
            self._path.unlink(missing_ok=True)
            self._sync_folder()
        except OSError as error:
            log.warning("file of sent metrics is not removed error=%s", error)

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _newest(batches: Sequence[bytes]) -> Sequence[bytes]:
    """Return the newest batches that fit into a file."""
    room = BYTES_MAX
    for place in range(len(batches) - 1, -1, -1):
        room -= _SIZE.size + len(batches[place])
        if room < 0:
            return batches[place + 1 :]
    return batches


def _decoded(raw: bytes) -> list[bytes]:
    """Return the batches of a file.

    Raises:
        ValueError: It is damaged.
    """
    if len(raw) < _HEAD.size:
        raise ValueError(f"it has {len(raw)} bytes, expected at least {_HEAD.size}")
    magic, size, crc = _HEAD.unpack_from(raw)
    content = raw[_HEAD.size :]
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}, expected {_MAGIC!r}")
    if size != len(content):
        raise ValueError(f"it has {len(content)} bytes of content, expected {size}")
    if crc != crc32c(content):
        raise ValueError("its checksum does not match")
    batches: list[bytes] = []
    at = 0
    while at < len(content):
        (length,) = _SIZE.unpack_from(content, at)
        batches.append(content[at + _SIZE.size : at + _SIZE.size + length])
        at += _SIZE.size + length
    return batches
