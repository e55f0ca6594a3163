"""The files that the core uses, as protocols.

`services/storage/disk.py` implements them for real files, `services/testing` in memory with
simulated crashes.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from batonmq_server.runtime.descriptor_shortage import is_shortage

FILES_MAX = 256
"""Files that a cache keeps open."""
UNREADABLE = (errno.EIO, errno.ENOENT)
"""Errors of a read that mean that the disk no longer has the bytes."""


class BadIndex(Exception):
    """An index is damaged or incomplete; it must be rebuilt from the log."""


class File(Protocol):
    """An open file. Errors of the operating system are raised as OSError."""

    @property
    def size(self) -> int:
        """Length in bytes; unwritten parts of it read as zeros."""
        ...

    @property
    def descriptor(self) -> int:
        """Descriptor by which the kernel can sync the file, as `sync` does; -1: it can't."""
        return -1

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write `parts` one after another from byte `at` on: all of them, or raise OSError."""
        ...

    def read(self, at: int, bytes_max: int) -> bytes:
        """Read up to `bytes_max` bytes from byte `at` on; fewer only at the end of the file."""
        ...

    def cut(self, at: int) -> int:
        """Set everything from byte `at` on to zero; the size stays. Durable on return.

        After a crash any of these bytes may have its old value, or the file may be shorter.

        Returns:
            `used(at)` before the call.
        """
        ...

    def resize(self, size: int) -> None:
        """Set the size of the file. Added bytes are zero, and allocated if there is space.

        Durable on return.
        """
        ...

    def used(self, at: int) -> int:
        """Return the number of bytes from byte `at` to the last one that is not zero."""
        ...

    def sync(self) -> None:
        """Make everything written durable. This is the only method that other threads may call."""
        ...

    def close(self) -> None:
        """Close the file; no method may be called afterwards."""
        ...


class Disk(Protocol):
    """The files below one folder, named by relative paths with `/`."""

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, ascending; empty if the folder does not exist."""
        ...

    def create(self, path: str, size: int) -> File:
        """Create a file of `size` zero bytes, all allocated. Durable on return.

        Raises:
            DiskFull: there is no space; nothing was created.
        """
        ...

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file; with `create`, create an empty one if it does not exist."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content; does nothing if it does not exist.

        Durable on return. Other threads may call it.
        """
        ...

    def space(self) -> tuple[int, int]:
        """Return used and free bytes of the file system. Other threads may call it."""
        ...

    def load(self, path: str) -> bytes:
        """Read a small file; empty if it does not exist."""
        ...

    def replace(self, path: str, content: bytes) -> None:
        """Replace the content of a file, durably; a crash leaves the old or the new content.

        Other threads may call it.
        """
        ...

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        """As `replace`, by a file of `size` bytes: `head`, and zeros that take no space."""
        ...

    def sync(self, paths: Sequence[str]) -> None:
        """Make files and their folder entries durable. Other threads may call it.

        Files that no longer exist are skipped.
        """
        ...


class FileCache:
    """The most recently used files, kept open.

    Args:
        files_max: Maximum number of open files.
    """

    def __init__(self, disk: Disk, files_max: int = FILES_MAX) -> None:
        self._disk, self._files_max = disk, files_max
        self._open: OrderedDict[str, File] = OrderedDict()

    def get(self, path: str, *, create: bool = False) -> File:
        """Return the file at `path`. Use it at once: a later call may close it.

        Raises:
            OSError: it can't be opened.
        """
        file = self._open.get(path)
        if file is None:
            file = self._open_file(path, create=create)
            self._open[path] = file
            if len(self._open) > self._files_max:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(path)
        return file

    def _open_file(self, path: str, *, create: bool) -> File:
        """Open a file; without a free descriptor, close half of the other files first."""
        try:
            return self._disk.open(path, create=create)
        except OSError as error:
            if not (is_shortage(error) and self._open):
                raise
        for _ in range((len(self._open) + 1) // 2):
            self._open.popitem(last=False)[1].close()
        return self._disk.open(path, create=create)

    def forget(self, path: str) -> None:
        """Close the files at `path` or below it, because they are about to be removed."""
        for name in [n for n in self._open if n == path or n.startswith(f"{path}/")]:
            self._open.pop(name).close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()
