"""Disks in memory, which outlive the processes that write to them.

A power cut of a storage disk may lose or tear unsynced writes. A write to an offsets disk is
complete or has no effect.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

from batonmq.errors import DiskFull
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.disk import UNLIMITED, StoredEntry, StorePart
from batonmq_server.offsets.newest_position import position_entries
from batonmq_server.storage.core.files import Disk, File
from batonmq_server.storage.flusher import InThread


class MemoryFile(File):
    """A file: `content` is what readers see, `durable` is what surely survives a power cut.

    While `failure` is set, writes and syncs raise it.
    """

    def __init__(self, size: int = 0) -> None:
        self.content = bytearray(size)
        self.durable = bytearray(size)
        self.unsynced: list[tuple[int, bytes]] = []
        self.failure: OSError | None = None

    @property
    def size(self) -> int:
        """See File."""
        return len(self.content)

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        """See File."""
        if self.failure is not None:
            raise self.failure
        raw = b"".join(parts)
        _put(self.content, at, raw)
        self.unsynced.append((at, raw))

    def read(self, at: int, bytes_max: int) -> bytes:
        """See File."""
        return bytes(self.content[at : at + bytes_max])

    def cut(self, at: int) -> int:
        """See File."""
        used, size = self.used(at), self.size
        del self.content[at:]
        self.resize(size)
        return used

    def resize(self, size: int) -> None:
        """See File."""
        self.content[:] = self.content[:size].ljust(size, b"\0")
        self.sync()
        self.durable[:] = self.content

    def used(self, at: int) -> int:
        """See File."""
        return len(bytes(self.content[at:]).rstrip(b"\0"))

    def sync(self) -> None:
        """See File."""
        if self.failure is not None:
            raise self.failure
        for at, raw in self.unsynced:
            _put(self.durable, at, raw)
        self.unsynced.clear()

    def close(self) -> None:
        """See File."""
        return


class MemoryDisk(Disk):
    """Files by path; `room` limits the total bytes that `create` may allocate."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.files: dict[str, MemoryFile] = {}
        self.room = room
        self._failure: OSError | None = None

    @property
    def fails(self) -> bool:
        """Whether writes fail."""
        return self._failure is not None

    def fail(self, failure: OSError | None) -> None:
        """Make writes and syncs raise `failure`; None repairs the disk.

        Unsynced writes stay readable but are never synced, as in a kernel that marks the pages
        clean after a failed sync.
        """
        self._failure = failure
        for file in self.files.values():
            file.failure = failure
            if failure is not None:
                file.unsynced.clear()

    def names(self, folder: str) -> list[str]:
        """See Disk."""
        start = f"{folder}/"
        return sorted(
            {path[len(start) :].split("/")[0] for path in self.files if path.startswith(start)}
        )

    def create(self, path: str, size: int) -> File:
        """See Disk."""
        assert path not in self.files
        self._check()
        if size > self.room:
            raise DiskFull("no space")
        self.room -= size
        self.files[path] = MemoryFile(size)
        return self.files[path]

    def open(self, path: str, *, create: bool = False) -> File:
        """See Disk."""
        if create and path not in self.files:
            self._check()
            self.files[path] = MemoryFile()
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self.files[path]

    def remove(self, path: str) -> None:
        """See Disk."""
        self._check()
        for name in [n for n in self.files if n == path or n.startswith(f"{path}/")]:
            del self.files[name]

    def space(self) -> tuple[int, int]:
        """See Disk."""
        return sum(len(file.content) for file in self.files.values()), self.room

    def load(self, path: str) -> bytes:
        """See Disk."""
        return bytes(self.files[path].content) if path in self.files else b""

    def replace(self, path: str, content: bytes) -> None:
        """See Disk."""
        self._check()
        file = self.files[path] = MemoryFile()
        file.write(0, [content])
        file.sync()

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        """See Disk. The room of the former file is free again."""
        self._check()
        if path in self.files:
            self.room += self.files[path].size
        file = self.files[path] = MemoryFile(size)
        file.write(0, [head])
        file.sync()

    def sync(self, paths: Sequence[str]) -> None:
        """See Disk."""
        for path in paths:
            if path in self.files:
                self.files[path].sync()

    def killed(self) -> MemoryDisk:
        """Return the disk after `kill -9`: the page cache survives."""
        return self._after(lambda file: bytes(file.content))

    def power_cut(self, survives: Callable[[int], int]) -> MemoryDisk:
        """Return the disk after a power cut.

        Args:
            survives: Takes the length of an unsynced write, oldest first, and returns how many of
                its bytes reached the disk.
        """

        def torn(file: MemoryFile) -> bytes:
            content = bytearray(file.durable)
            for at, raw in file.unsynced:
                _put(content, at, raw[: survives(len(raw))])
            return bytes(content)

        return self._after(torn)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _after(self, content: Callable[[MemoryFile], bytes]) -> MemoryDisk:
        disk = MemoryDisk(self.room)
        for path, file in self.files.items():
            copy = disk.files[path] = MemoryFile()
            copy.content[:] = content(file)
            copy.durable[:] = copy.content
        return disk


class MemoryOffsetsDisk:
    """The disk of an offsets node.

    Args:
        random: Random generator for `write_s`.
        write_s: Returns how long a write takes, in seconds.

    Attributes:
        on_write: Functions that are called with entries that have become durable.
    """

    def __init__(self, random: Random, write_s: Callable[[Random], float]) -> None:
        self._random, self._write_s = random, write_s
        self.entries: dict[bytes, bytes] = {}
        self.on_write: list[Callable[[Sequence[Entry]], None]] = []

    def read(self, skip: bytes = b"") -> Iterator[StoredEntry]:
        """See ProgressStore."""
        entries = sorted(self.entries.items())
        return (entry for entry in entries if not skip or not entry[0].startswith(skip))

    async def read_prefix(
        self, prefix: bytes, *, after: bytes = b"", bytes_max: int = UNLIMITED
    ) -> list[StoredEntry]:
        """See ProgressStore."""
        await asyncio.sleep(self._write_s(self._random) / 2)
        found = (entry for entry in self.read() if entry[0].startswith(prefix))
        return list(_limited((entry for entry in found if entry[0] > after), bytes_max))

    async def read_part(
        self, after: bytes, until: bytes | None = None, bytes_max: int = UNLIMITED
    ) -> StorePart:
        """See ProgressStore."""
        await asyncio.sleep(self._write_s(self._random) / 2)
        found = (entry for entry in self.read() if entry[0] > after)
        part = (entry for entry in found if until is None or entry[0] <= until)
        return StorePart(position_entries(self.entries.get), list(_limited(part, bytes_max)))

    async def snapshot(self, skip: bytes = b"") -> list[StoredEntry]:
        """See ProgressStore."""
        await asyncio.sleep(self._write_s(self._random) / 2)
        return list(self.read(skip))

    async def replace(self, entries: Sequence[StoredEntry]) -> None:
        """See ProgressStore."""
        await asyncio.sleep(self._write_s(self._random) / 2)
        gone = self.entries.keys() - {key for key, _ in entries}
        self.write_blocking([*((key, None) for key in gone), *entries])
        await asyncio.sleep(self._write_s(self._random) / 2)

    async def wait_idle(self) -> None:
        """See ProgressStore: a write whose caller was cancelled has been applied, or never is."""

    def check_room(self) -> None:
        """See ProgressStore: there is always room."""

    async def write(self, entries: Sequence[Entry]) -> None:
        """See ProgressStore."""
        await asyncio.sleep(self._write_s(self._random) / 2)
        self.write_blocking(entries)
        await asyncio.sleep(self._write_s(self._random) / 2)

    def write_blocking(self, entries: Sequence[Entry]) -> None:
        """See ProgressStore."""
        for key, value in entries:
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value
        for tell in self.on_write:
            tell(entries)


def _limited(entries: Iterable[StoredEntry], bytes_max: int) -> Iterator[StoredEntry]:
    """Yield entries until they have `bytes_max` bytes."""
    size = 0
    for key, value in entries:
        if size >= bytes_max:
            return
        size += len(key) + len(value)
        yield key, value


def delayed_sync(random: Random, write_s: Callable[[Random], float]) -> InThread:
    """Return a runner of blocking sync calls that uses no thread; `write_s` is their duration."""

    async def call(blocking: Callable[[Any], None], argument: Any) -> None:
        await asyncio.sleep(write_s(random) / 2)
        blocking(argument)
        await asyncio.sleep(write_s(random) / 2)

    return call


def _put(content: bytearray, at: int, raw: bytes) -> None:
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(raw)] = raw
