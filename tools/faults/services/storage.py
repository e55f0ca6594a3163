"""`python -m tools.faults.services.storage`: a broker node with injectable disk faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from batonmq._core import sql_parser
from batonmq.errors import DiskFull
from batonmq_server.runtime.app import App
from batonmq_server.runtime.process import run
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.app import replicated
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.core.files import Disk, File
from batonmq_server.storage.disk import RealDisk, locked
from tools.faults.process_faults import FaultyClock, ProcessFaults


class FaultyFile(File):
    """A file on such a disk. A failed sync loses all unsynced data."""

    def __init__(self, file: File, faults: ProcessFaults) -> None:
        self._file, self._faults = file, faults
        self._unsynced: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return self._file.size

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        size = sum(map(len, parts))
        if at + size > self._file.size:
            self._faults.grow()
        self._unsynced.append((at, size))
        self._file.write(at, parts)

    def read(self, at: int, bytes_max: int) -> bytes:
        return self._file.read(at, bytes_max)

    def cut(self, at: int) -> int:
        self._faults.sync()
        return self._file.cut(at)

    def resize(self, size: int) -> None:
        self._faults.sync()
        self._file.resize(size)

    def used(self, at: int) -> int:
        return self._file.used(at)

    def sync(self) -> None:
        unsynced, self._unsynced = self._unsynced, []
        try:
            self._faults.sync()
        except OSError:
            for at, size in unsynced:
                self._file.write(at, [bytes(size)])
            raise
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class FaultyStorageDisk(Disk):
    """A disk with injectable faults."""

    def __init__(self, disk: Disk, faults: ProcessFaults) -> None:
        self._disk, self._faults = disk, faults

    def names(self, folder: str) -> list[str]:
        return self._disk.names(folder)

    def create(self, path: str, size: int) -> File:
        try:
            self._faults.grow()
        except OSError as error:
            raise DiskFull(f"no space on disk for a segment of {size} bytes") from error
        self._faults.sync()
        return FaultyFile(self._disk.create(path, size), self._faults)

    def open(self, path: str, *, create: bool = False) -> File:
        try:
            file = self._disk.open(path)
        except FileNotFoundError:
            if not create:
                raise
            self._faults.grow()
            file = self._disk.open(path, create=True)
        return FaultyFile(file, self._faults)

    def remove(self, path: str) -> None:
        self._disk.remove(path)

    def space(self) -> tuple[int, int]:
        used, free = self._disk.space()
        return (used + free, 0) if self._faults.now().full else (used, free)

    def load(self, path: str) -> bytes:
        return self._disk.load(path)

    def replace(self, path: str, content: bytes) -> None:
        self._faults.grow()
        self._faults.sync()
        self._disk.replace(path, content)

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        self._faults.grow()
        self._faults.sync()
        self._disk.replace_sparse(path, head, size)

    def sync(self, paths: Sequence[str]) -> None:
        self._faults.sync()
        self._disk.sync(paths)


@asynccontextmanager
async def build(settings: StorageSettings, runtime: Runtime) -> AsyncIterator[App]:
    """Build the app of a replica; only its disk differs from production."""
    disk = FaultyStorageDisk(RealDisk(settings.data_dir), ProcessFaults.of(settings.node_id))
    with locked(settings.data_dir):
        async with replicated(settings, runtime, disk) as app:
            yield app


if __name__ == "__main__":
    sql_parser.prepare()
    run(
        "storage",
        StorageSettings,
        build,
        lambda settings: FaultyClock(ProcessFaults.of(settings.node_id)),
    )
