"""The store of offsets on disk: one LMDB environment, written in synced transactions.

No other module of the service reads or writes files. Keys and values are plain bytes here.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import lmdb

from batonmq._common.outside_call import OutsideCall
from batonmq._common.threads import DaemonThreads
from batonmq.errors import DataLoss, DiskFull
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.newest_position import (
    NewestPosition,
    check_not_rolled_back,
    position_after,
    position_entries,
    read_position,
)
from batonmq_server.runtime.replication.position import NO_POSITION

log = logging.getLogger(__name__)

StoredEntry = tuple[bytes, bytes]
"""A stored key and its value."""

MAP_BYTES_MIN = 1 << 30
"""Initial size of the address space, not of memory or disk; doubled when it is used up."""
FREE_BYTES_MIN = 64 << 20
"""Space that `write` leaves free on the disk, so that it never fails half-way."""
UNLIMITED = 1 << 62
_THREADS = DaemonThreads("disk")

T = TypeVar("T")


class StorePart(NamedTuple):
    """Entries of one moment, ascending by key.

    Attributes:
        position: The entries from which `position_after` finds the position of that moment.
    """

    position: list[StoredEntry]
    entries: list[StoredEntry]


class DataDirInUse(Exception):
    """Another process has the data directory open."""


class LmdbDisk:
    """Ordered keys and values that survive a power cut once `write` has returned.

    Args:
        folder: Created if it does not exist; used by one process at a time.
        free_bytes_min: `write` raises `DiskFull` if less is free.
        free_bytes: Returns the free space of the disk that has `folder`.

    Raises:
        DataDirInUse: another process uses the folder.
        DataLoss: the file is damaged, or confirmed writes are missing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        map_bytes: int = MAP_BYTES_MIN,
        free_bytes_min: int = FREE_BYTES_MIN,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = os.open(
            folder / "process.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_file)
            raise DataDirInUse(f"another process uses {folder}") from error
        try:
            stored = folder / "progress"
            self._environment = lmdb.open(str(stored), map_size=map_bytes, readahead=False)
            self._newest = self._checked_newest(stored)
            for created in (folder / "progress", folder, folder.parent):
                _sync_folder(created)
        except lmdb.Error as error:
            os.close(self._lock_file)
            raise DataLoss(f"stored progress in {folder} can't be opened: {error}") from error
        except DataLoss:
            self._environment.close()
            os.close(self._lock_file)
            raise
        self._lock = threading.Lock()
        self._in_progress: list[OutsideCall[None]] = []
        self._closed = False
        self._free_bytes_min = free_bytes_min
        self._free_bytes = partial(free_bytes, folder)

    def _checked_newest(self, folder: Path) -> NewestPosition:
        """Return the record of the newest position, which agrees with the stored progress.

        Raises:
            DataLoss: the stored progress was rolled back.
        """
        self._position = read_position(self._environment)
        check_not_rolled_back(folder, self._position)
        newest = NewestPosition(folder)
        if newest.position != self._position:
            newest.record(self._position)
        return newest

    def read(self, skip: bytes = b"") -> Iterator[StoredEntry]:
        """Yield all entries, ascending by key, in the state at the first one.

        Args:
            skip: Leave out the keys that begin with this prefix; empty for none.

        Raises:
            DataLoss: the file is damaged.
        """
        try:
            with self._environment.begin(buffers=False) as transaction:
                cursor = transaction.cursor()
                more = cursor.first()
                while more:
                    key = cursor.key()
                    if skip and key.startswith(skip):
                        more = cursor.set_range(skip[:-1] + bytes([skip[-1] + 1]))
                        continue
                    yield key, cursor.value()
                    more = cursor.next()
        except lmdb.Error as error:
            raise DataLoss(f"stored progress can't be read: {error}") from error

    async def read_prefix(
        self, prefix: bytes, *, after: bytes = b"", bytes_max: int = UNLIMITED
    ) -> list[StoredEntry]:
        """Return the entries with keys that begin with `prefix`, ascending by key.

        Args:
            after: Leave out the keys up to this one.
            bytes_max: Return no more entries once they have so many bytes.

        Raises:
            DataLoss: the file is damaged.
        """

        def read(transaction: lmdb.Transaction[bytes]) -> list[StoredEntry]:
            found = _entries_after(transaction, after, prefix, bytes_max)
            return list(takewhile(lambda entry: entry[0].startswith(prefix), found))

        return await self._read_in_thread(read)

    async def read_part(
        self, after: bytes, until: bytes | None = None, bytes_max: int = UNLIMITED
    ) -> StorePart:
        """Return a part of all entries, with those of the position at the same moment.

        Args:
            after, until: Only keys greater than `after`, up to `until`; None for the end.
            bytes_max: Return no more entries once they have so many bytes.

        Raises:
            DataLoss: the file is damaged.
        """

        def read(transaction: lmdb.Transaction[bytes]) -> StorePart:
            found = _entries_after(transaction, after, b"", bytes_max)
            part = takewhile(lambda entry: until is None or entry[0] <= until, found)
            return StorePart(position_entries(transaction.get), list(part))

        return await self._read_in_thread(read)

    async def _read_in_thread(self, read: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        def run() -> T:
            try:
                with self._lock, self._environment.begin(buffers=False) as transaction:
                    return read(transaction)
            except lmdb.Error as error:
                raise DataLoss(f"stored progress can't be read: {error}") from error

        return await asyncio.to_thread(run)

    async def snapshot(self, skip: bytes = b"") -> list[StoredEntry]:
        """Return all entries of `read`, without blocking other tasks.

        Raises:
            DataLoss: the file is damaged.
        """
        return await asyncio.to_thread(self._snapshot, skip)

    def _snapshot(self, skip: bytes) -> list[StoredEntry]:
        with self._lock:
            return list(self.read(skip))

    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries or none, and return when they are durable.

        Raises:
            DiskFull: nothing is written; the same write may be retried.
            lmdb.Error, OSError: the outcome is not known; the process must end.
        """
        await self._in_thread(partial(self._write_with_room, entries))

    async def replace(self, entries: Sequence[StoredEntry]) -> None:
        """Replace everything by these entries atomically, and return when they are durable.

        Raises:
            DiskFull: nothing is written.
            lmdb.Error, OSError: the outcome is not known; the process must end.
        """
        await self._in_thread(partial(self._write_with_room, entries, replace=True))

    async def wait_idle(self) -> None:
        """Return when no write is in progress, including those of cancelled callers."""
        while running := [call for call in self._in_progress if not call.ended]:
            await running[0].wait()

    async def _in_thread(self, write: Callable[[], None]) -> None:
        call = _THREADS.begin(partial(_logged, write))
        self._in_progress = [one for one in self._in_progress if not one.ended]
        self._in_progress.append(call)
        await call.result()

    def check_room(self) -> None:
        """Return if `write` has enough room; asks the kernel and reads nothing from disk.

        Raises:
            DiskFull: less than `free_bytes_min` is free.
        """
        free_bytes = self._free_bytes()
        if free_bytes < self._free_bytes_min:
            raise DiskFull(
                f"{free_bytes} bytes are free on the disk, the minimum is {self._free_bytes_min}",
                facts={"free_bytes": free_bytes, "limit": self._free_bytes_min},
            )

    def _write_with_room(self, entries: Sequence[Entry], *, replace: bool = False) -> None:
        self.check_room()
        self.write_blocking(entries, replace=replace)

    def write_blocking(self, entries: Sequence[Entry], *, replace: bool = False) -> None:
        """Do what `write` or `replace` does, blocking, and without a check of the free space."""
        with self._lock:
            if self._closed:
                raise OSError("the disk is closed")
            position = position_after(self._position, entries, replace=replace)
            if position < self._position:
                # Else a crash after the write would look like a rollback.
                self._newest.record(NO_POSITION)
            while not self._try_write(entries, replace):
                map_bytes = self._environment.info()["map_size"] * 2
                log.info("LMDB map enlarged map_bytes=%d", map_bytes)
                self._environment.set_mapsize(map_bytes)
            if position != self._newest.position:
                self._newest.record(position)
            self._position = position

    def _try_write(self, entries: Sequence[Entry], replace: bool) -> bool:
        try:
            with self._environment.begin(write=True) as transaction:
                if replace:
                    transaction.drop(self._environment.open_db(None, transaction), delete=False)
                for key, value in entries:
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, value)
        except lmdb.MapFullError:
            return False
        return True

    def close(self) -> None:
        """Wait for a write in progress, then release the folder."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._environment.close()
                self._newest.close()
                os.close(self._lock_file)

    def __enter__(self) -> LmdbDisk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def _entries_after(
    transaction: lmdb.Transaction[bytes], after: bytes, prefix: bytes, bytes_max: int
) -> Iterator[StoredEntry]:
    """Yield the entries from `prefix` on with keys greater than `after`, up to `bytes_max`."""
    cursor = transaction.cursor()
    more, size = cursor.set_range(max(prefix, after)), 0
    if more and cursor.key() == after:
        more = cursor.next()
    while more and size < bytes_max:
        key, value = cursor.key(), cursor.value()
        size += len(key) + len(value)
        yield key, value
        more = cursor.next()


def _logged(write: Callable[[], None]) -> None:
    """Call `write`; log its error, because its caller may be cancelled and not see it."""
    try:
        write()
    except Exception as error:
        log.debug("write failed error=%s", error)
        raise


def set_aside_damage(folder: Path) -> None:
    """Move damaged progress aside, so that the node copies everything from the leader.

    The damaged folder is kept as `progress.damaged`. Blocks until everything is read.
    """
    stored, aside = folder / "progress", folder / "progress.damaged"
    if not stored.exists():
        return
    # In a process of its own: reading a damaged file can kill the process, see verify.py.
    command = [sys.executable, "-m", "batonmq_server.offsets.verify", str(stored)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return
    shutil.rmtree(aside, ignore_errors=True)
    stored.rename(aside)
    _sync_folder(folder)
    log.error(
        "stored progress is damaged, the node copies it from the leader folder=%s kept=%s "
        "exit_status=%d detail=%r",
        folder,
        aside.name,
        done.returncode,
        done.stderr[-500:].strip(),
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
