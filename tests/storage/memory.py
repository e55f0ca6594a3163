"""A disk in memory that can crash: what was not synced may be gone, or torn."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from batonmq.common.errors import DiskFull
from services.storage.core.files import Disk, File


class MemoryFile(File):
    """`content` is what readers see, `durable` what a power cut leaves for certain.

    While `failure` is set, writing and syncing raise it.
    """

    def __init__(self, size: int = 0) -> None:
        self.content = bytearray(size)
        self.durable = bytearray(size)
        self.unsynced: list[tuple[int, bytes]] = []
        self.failure: OSError | None = None

    @property
    def size(self) -> int:
        return len(self.content)

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        if self.failure is not None:
            raise self.failure
        raw = b"".join(parts)
        _put(self.content, at, raw)
        self.unsynced.append((at, raw))

    def read(self, at: int, bytes_max: int) -> bytes:
        return bytes(self.content[at : at + bytes_max])

    def cut(self, at: int) -> int:
        used = len(bytes(self.content[at:]).rstrip(b"\0"))
        self.content[at:] = bytes(len(self.content) - at)
        self.sync()
        return used

    def sync(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.durable[:] = self.content
        self.unsynced.clear()

    def close(self) -> None:
        return


class MemoryDisk(Disk):
    """Files by path; `room` bounds the bytes that `create` may allocate in all."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.files: dict[str, MemoryFile] = {}
        self.room = room

    def names(self, folder: str) -> list[str]:
        start = f"{folder}/"
        return sorted(
            {path[len(start) :].split("/")[0] for path in self.files if path.startswith(start)}
        )

    def create(self, path: str, size: int) -> File:
        assert path not in self.files
        if size > self.room:
            raise DiskFull("no space")
        self.room -= size
        self.files[path] = MemoryFile(size)
        return self.files[path]

    def open(self, path: str, *, create: bool = False) -> File:
        if create:
            self.files.setdefault(path, MemoryFile())
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self.files[path]

    def remove(self, path: str) -> None:
        for name in [n for n in self.files if n == path or n.startswith(f"{path}/")]:
            del self.files[name]

    def space(self) -> tuple[int, int]:
        return sum(len(file.content) for file in self.files.values()), self.room

    def load(self, path: str) -> bytes:
        return bytes(self.files[path].content) if path in self.files else b""

    def replace(self, path: str, content: bytes) -> None:
        file = self.files[path] = MemoryFile()
        file.write(0, [content])
        file.sync()

    def sync(self, paths: Sequence[str]) -> None:
        for path in paths:
            if path in self.files:
                self.files[path].sync()

    def killed(self) -> MemoryDisk:
        """The disk after `kill -9`: the page cache survives."""
        return self._after(lambda file: bytes(file.content))

    def power_cut(self, survives: Callable[[int], int]) -> MemoryDisk:
        """The disk after a power cut.

        Args:
            survives: Takes the length of an unsynced write, oldest first; how much of it reached
                the disk.
        """

        def torn(file: MemoryFile) -> bytes:
            content = bytearray(file.durable)
            for at, raw in file.unsynced:
                _put(content, at, raw[: survives(len(raw))])
            return bytes(content)

        return self._after(torn)

    def _after(self, content: Callable[[MemoryFile], bytes]) -> MemoryDisk:
        disk = MemoryDisk(self.room)
        for path, file in self.files.items():
            copy = disk.files[path] = MemoryFile()
            copy.content[:] = content(file)
            copy.durable[:] = copy.content
        return disk


def _put(content: bytearray, at: int, raw: bytes) -> None:
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(raw)] = raw
