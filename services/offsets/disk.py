"""The only file access of offsets: one LMDB environment, written in synced transactions.

Knows keys and values as bytes, not what they mean.
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

import lmdb

from batonmq.errors import DataLoss, DiskFull

log = logging.getLogger(__name__)

Entry = tuple[bytes, bytes | None]
"""Key and value to be written; None takes the key away."""
StoredEntry = tuple[bytes, bytes]
"""Key and value as they stand."""

MAP_BYTES_MIN = 1 << 30
"""Address space at first, not memory and not disk; doubled when it is used up."""
FREE_BYTES_MIN = 64 << 20
"""What `write` leaves free on the disk, so that it never fails half-way for want of room."""


class DataDirInUse(Exception):
    """Another process has the data directory open."""


class Disk:
    """Ordered keys and values that survive a power cut once `write` has returned.

    Args:
        folder: Made if it does not exist; used by one process at a time.
        free_bytes_min: `write` refuses when less is free.
        free_bytes: What is free on the disk that holds `folder`.

    Raises:
        DataDirInUse: another process has it.
        DataLoss: the file is damaged.
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
        self._held = os.open(folder / "process.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._held)
            raise DataDirInUse(f"another process uses {folder}") from error
        try:
            self._environment = lmdb.open(
                str(folder / "progress"), map_size=map_bytes, readahead=False
            )
            for made in (folder / "progress", folder, folder.parent):
                _sync_folder(made)
        except lmdb.Error as error:
            os.close(self._held)
            raise DataLoss(f"stored progress in {folder} can't be opened: {error}") from error
        self._access = threading.Lock()
        self._under_way: set[asyncio.Future[None]] = set()
        self._closed = False
        self._free_bytes_min = free_bytes_min
        self._free_bytes = partial(free_bytes, folder)

    def read(self, skip: bytes = b"") -> Iterator[StoredEntry]:
        """All entries by key, ascending, as of the moment of the first.

        Args:
            skip: Leave out those whose keys begin so, if given.

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

    async def read_prefix(self, prefix: bytes) -> list[StoredEntry]:
        """The entries whose keys begin with `prefix`, by key, ascending.

        Raises:
            DataLoss: the file is damaged.
        """
        return await asyncio.to_thread(self._read_prefix, prefix)

    def _read_prefix(self, prefix: bytes) -> list[StoredEntry]:
        try:
            with self._access, self._environment.begin(buffers=False) as transaction:
                cursor = transaction.cursor()
                cursor.set_range(prefix)
                return list(takewhile(lambda found: found[0].startswith(prefix), cursor))
        except lmdb.Error as error:
            raise DataLoss(f"stored progress can't be read: {error}") from error

    async def snapshot(self, skip: bytes = b"") -> list[StoredEntry]:
        """`read`, whole, without keeping others waiting.

        Raises:
            DataLoss: the file is damaged.
        """
        return await asyncio.to_thread(self._snapshot, skip)

    def _snapshot(self, skip: bytes) -> list[StoredEntry]:
        with self._access:
            return list(self.read(skip))

    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries or none, and return when they are durable.

        Raises:
            DiskFull: nothing is written; the same write may be tried again.
            lmdb.Error, OSError: not known whether they are; the process must end.
        """
        await self._in_thread(partial(self._write_with_room, entries))

    async def replace(self, entries: Sequence[StoredEntry]) -> None:
        """Write these in place of everything, or nothing, and return when they are durable.

        Raises:
            DiskFull: nothing is written.
            lmdb.Error, OSError: not known what is; the process must end.
        """
        await self._in_thread(partial(self._write_with_room, entries, anew=True))

    async def wait_idle(self) -> None:
        """Return when no write is under way, one whose caller was cancelled included."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _in_thread(self, write: Callable[[], None]) -> None:
        job = asyncio.get_running_loop().run_in_executor(None, write)
        self._under_way.add(job)
        job.add_done_callback(self._ended)
        await asyncio.shield(job)

    def _ended(self, job: asyncio.Future[None]) -> None:
        self._under_way.discard(job)
        if (error := job.exception()) is not None:  # perhaps nobody waits for it any more
            log.debug("write failed error=%s", error)

    def check_room(self) -> None:
        """Refuse what `write` would refuse at this moment. The kernel knows it: nothing is read.

        Raises:
            DiskFull: too little is free.
        """
        free_bytes = self._free_bytes()
        if free_bytes < self._free_bytes_min:
            raise DiskFull(
                f"{free_bytes} bytes are free on the disk, {self._free_bytes_min} have to be",
                facts={"free_bytes": free_bytes, "limit": self._free_bytes_min},
            )

    def _write_with_room(self, entries: Sequence[Entry], *, anew: bool = False) -> None:
        self.check_room()
        self.write_blocking(entries, anew=anew)

    def write_blocking(self, entries: Sequence[Entry], *, anew: bool = False) -> None:
        """`write`, or `replace`, for a caller that may be blocked, whatever is free."""
        with self._access:
            if self._closed:
                raise OSError("the disk is closed")
            while not self._try_write(entries, anew):
                map_bytes = self._environment.info()["map_size"] * 2
                log.info("map grown map_bytes=%d", map_bytes)
                self._environment.set_mapsize(map_bytes)

    def _try_write(self, entries: Sequence[Entry], anew: bool) -> bool:
        try:
            with self._environment.begin(write=True) as transaction:
                if anew:
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
        """Wait for a write under way, then let go of the folder."""
        with self._access:
            if not self._closed:
                self._closed = True
                self._environment.close()
                os.close(self._held)

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def set_aside_damage(folder: Path) -> None:
    """Leave nothing in place of progress that is damaged: a replica gets it from the others.

    What was there is kept as `progress.damaged`. Blocks, as long as it takes to read it all.
    """
    stored, aside = folder / "progress", folder / "progress.damaged"
    if not stored.exists():
        return
    # Not in this process, which the damage might end: see there.
    command = [sys.executable, "-m", "batonmq_server.offsets.verify", str(stored)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return
    shutil.rmtree(aside, ignore_errors=True)
    stored.rename(aside)
    _sync_folder(folder)
    log.error(
        "stored progress is damaged, begins anew from the replica set folder=%s kept=%s "
        "exit_status=%d detail=%r",
        folder,
        aside.name,
        done.returncode,
        done.stderr[-500:].strip(),
    )


def _sync_folder(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(held)
    finally:
        os.close(held)
