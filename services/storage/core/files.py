"""What the core asks of files. The real ones are in `disk.py`; tests bring twins that crash."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

UNREADABLE = (errno.EIO, errno.ENOENT)
"""Errors of a read by which the disk says that it does not have the bytes any more."""


class BadIndex(Exception):
    """An index is not what it should be; it has to be made anew from the log."""


class File(Protocol):
    """An open file. Errors of the operating system pass through as OSError."""

    @property
    def size(self) -> int:
        """Length in bytes; unwritten parts of it read as zeros."""
        ...

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write `parts` one behind the other from byte `at`; all of them or an OSError."""
        ...

    def read(self, at: int, bytes_max: int) -> bytes:
        """Up to `bytes_max` bytes from byte `at`; fewer only at the end of the file."""
        ...

    def cut(self, at: int) -> int:
        """Make everything from byte `at` on zero; the size stays. Durable on return.

        A crash may leave any of these bytes as they were, or the file without some of them.

        Returns:
            `used(at)`, before.
        """
        ...

    def resize(self, size: int) -> None:
        """Make the file that long; what is added is zero, and allocated if there is room.

        Durable on return.
        """
        ...

    def used(self, at: int) -> int:
        """How many bytes from byte `at` to the last one that is not zero."""
        ...

    def sync(self) -> None:
        """Make what was written durable. The only call that other threads may make."""
        ...

    def close(self) -> None:
        """Give the file back; the object is of no use afterwards."""
        ...


class Disk(Protocol):
    """Files below one folder, named by relative paths with `/`."""

    def names(self, folder: str) -> list[str]:
        """Names in `folder`, ascending; none if it does not exist."""
        ...

    def create(self, path: str, size: int) -> File:
        """A new file of `size` zero bytes, all of them allocated; its entry is durable.

        Raises:
            DiskFull: there is no space; nothing was created.
        """
        ...

    def open(self, path: str, *, create: bool = False) -> File:
        """An existing file; with `create` an empty one is made where there is none."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all it holds; nothing happens if there is none.

        Durable on return. Other threads may call it.
        """
        ...

    def space(self) -> tuple[int, int]:
        """Bytes in use on the file system, and bytes free for us; other threads may call it."""
        ...

    def load(self, path: str) -> bytes:
        """All bytes of a small file; empty if there is none."""
        ...

    def replace(self, path: str, content: bytes) -> None:
        """Give a file new content, durably; a crash leaves the old or the new one.

        Other threads may call it.
        """
        ...

    def sync(self, paths: Sequence[str]) -> None:
        """Make files and their entries in their folders durable; other threads may call it.

        A file that is no longer there is passed over.
        """
        ...


class FileCache:
    """The files used last, open.

    Args:
        files_max: More are not kept open.
    """

    def __init__(self, disk: Disk, files_max: int = 256) -> None:
        self._disk, self._files_max = disk, files_max
        self._open: OrderedDict[str, File] = OrderedDict()

    def get(self, path: str, *, create: bool = False) -> File:
        """The file at `path`; to be used at once, not to be kept."""
        file = self._open.get(path)
        if file is None:
            file = self._disk.open(path, create=create)
            self._open[path] = file
            if len(self._open) > self._files_max:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(path)
        return file

    def forget(self, path: str) -> None:
        """Close what is open at `path` or below it: it is about to be removed."""
        for name in [n for n in self._open if n == path or n.startswith(f"{path}/")]:
            self._open.pop(name).close()

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._open.popitem()[1].close()
