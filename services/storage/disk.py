"""The real files below the data directory. No other module of the service accesses the disk."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from batonmq.errors import DiskFull
from batonmq_server.storage.core.commitlog import NO_SPACE
from batonmq_server.storage.core.files import UNREADABLE, Disk, File

PARTS_MAX = 1_024
"""Maximum number of parts in one pwritev call (IOV_MAX)."""
SYNCED_ALONE_MAX = 64
"""If there are more files to sync, the whole file system is synced, which is cheaper."""
_ZEROS = bytes(1024 * 1024)


class InUse(Exception):
    """Another process uses the data directory."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` against other processes; it is created if it does not exist.

    Raises:
        InUse: another process has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise InUse(f"{folder} is used by process {file.read() or 'unknown'}") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class RealFile(File):
    """A file of the operating system."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o644)

    @property
    def size(self) -> int:
        """See File."""
        return os.fstat(self._fd).st_size

    @property
    def descriptor(self) -> int:
        """See File."""
        return self._fd

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        """See File."""
        rest = iter(parts)
        while chunk := list(islice(rest, PARTS_MAX)):
            wanted = sum(map(len, chunk))
            written = os.pwritev(self._fd, chunk, at)
            at += written
            if written < wanted:
                left = memoryview(b"".join(chunk))[written:]
                while left:
                    written = os.pwrite(self._fd, left, at)
                    at, left = at + written, left[written:]

    def read(self, at: int, bytes_max: int) -> bytes:
        """See File."""
        first = os.pread(self._fd, bytes_max, at)
        if len(first) == bytes_max or not first:
            return first
        return first + self.read(at + len(first), bytes_max - len(first))

    def cut(self, at: int) -> int:
        """See File."""
        size, used = self.size, self.used(at)
        if used:
            os.ftruncate(self._fd, at)
            self.resize(size)
        return used

    def resize(self, size: int) -> None:
        """See File."""
        os.ftruncate(self._fd, size)
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise  # without space to allocate, the later write fails instead
        os.fsync(self._fd)

    def sync(self) -> None:
        """See File."""
        os.fdatasync(self._fd)

    def allocate(self, size: int) -> None:
        """Allocate `size` bytes on disk, durably."""
        os.posix_fallocate(self._fd, 0, size)
        os.fsync(self._fd)

    def close(self) -> None:
        """See File."""
        os.close(self._fd)

    def used(self, at: int) -> int:
        """See File. Holes of a sparse file are not read; what can't be read counts as used."""
        used_to = at
        for begin, end in list(self._data(at)):  # a list: reading makes the kernel fill holes
            for position in range(begin, end, len(_ZEROS)):
                wanted = min(len(_ZEROS), end - position)
                try:
                    chunk = self.read(position, wanted)
                except OSError as error:
                    if error.errno not in UNREADABLE:
                        raise
                    used_to = position + wanted
                    continue
                if chunk != _ZEROS[: len(chunk)]:
                    used_to = position + len(chunk.rstrip(b"\0"))
        return used_to - at

    def _data(self, at: int) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges from `at` on that are not holes; unwritten space is a hole."""
        end = at
        while True:
            try:
                begin = os.lseek(self._fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            end = os.lseek(self._fd, begin, os.SEEK_HOLE)
            yield begin, end


class RealDisk(Disk):
    """Files below `folder`.

    Args:
        folder: The data directory, locked by the caller.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: str) -> list[str]:
        """See Disk."""
        path = self._folder / folder
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def create(self, path: str, size: int) -> File:
        """See Disk."""
        full = self._folder / path
        try:
            return self._created(full, size)
        except FileExistsError:
            raise
        except OSError as error:
            full.unlink(missing_ok=True)
            if error.errno not in NO_SPACE:
                raise
            raise DiskFull(f"no space on disk for a segment of {size} bytes") from error

    def open(self, path: str, *, create: bool = False) -> File:
        """See Disk."""
        full = self._folder / path
        try:
            return RealFile(full, os.O_CREAT if create else 0)
        except FileNotFoundError:
            if not create:
                raise
        full.parent.mkdir(parents=True, exist_ok=True)
        return RealFile(full, os.O_CREAT)

    def remove(self, path: str) -> None:
        """See Disk."""
        full = self._folder / path
        if full.is_dir():
            shutil.rmtree(full)
        else:
            full.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # nothing was ever written there
            _sync_folder(full.parent)

    def space(self) -> tuple[int, int]:
        """See Disk. Counts as `df` does: space reserved for root is neither used nor free."""
        status = os.statvfs(self._folder)
        used = status.f_blocks - status.f_bfree
        return used * status.f_frsize, status.f_bavail * status.f_frsize

    def load(self, path: str) -> bytes:
        """See Disk."""
        full = self._folder / path
        return full.read_bytes() if full.exists() else b""

    def replace(self, path: str, content: bytes) -> None:
        """See Disk."""
        self.replace_sparse(path, content, len(content))

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        """See Disk."""
        full = self._folder / path
        fresh = full.with_name(f"{full.name}.new")
        self._add_folder(full.parent)
        try:
            with fresh.open("wb") as file:
                file.write(head)
                file.truncate(size)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(full)
        except OSError:
            fresh.unlink(missing_ok=True)  # on a full disk it would take the last space
            raise
        _sync_folder(full.parent)

    def sync(self, paths: Sequence[str]) -> None:
        """See Disk. Many files are synced with one call for the whole file system."""
        if len(paths) > SYNCED_ALONE_MAX:
            _sync_file_system(self._folder)
            return
        folders: set[Path] = set()
        for path in paths:
            full = self._folder / path
            with suppress(FileNotFoundError), full.open("rb") as file:
                os.fsync(file.fileno())
                folders.update(p for p in full.parents if p.is_relative_to(self._folder))
        for folder in folders:
            with suppress(FileNotFoundError):
                _sync_folder(folder)

    def _add_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._add_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            _sync_folder(folder.parent)

    def _created(self, full: Path, size: int) -> File:
        self._add_folder(full.parent)
        file = RealFile(full, os.O_CREAT | os.O_EXCL)
        try:
            file.allocate(size)
            _sync_folder(full.parent)
        except OSError:
            file.close()
            raise
        return file


def _sync_file_system(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), f"file system of {folder} not synced")
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
