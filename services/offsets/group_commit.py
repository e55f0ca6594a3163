"""Group commit: one write at a time; all keys that change during a write go into the next one.

An answer about a key waits until the newest change of the key is durable, also if another call made
the change. So no caller sees, or builds on, a state that a crash can take back. While the disk is
full the same write is retried, and the calls that wait for it go on waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from batonmq.errors import DiskFull, Unreachable
from batonmq_server.offsets.core.change_log import Entry

log = logging.getLogger(__name__)

Key = TypeVar("Key")
RETRY_MS = 1_000


class _Batch(Generic[Key]):
    def __init__(self) -> None:
        self.keys: dict[Key, None] = {}
        self.durable = asyncio.Event()
        self.given_up = False

    async def wait(self) -> None:
        await self.durable.wait()
        if self.given_up:
            raise Unreachable("it is not known whether the change is durable", retry_after_ms=200)

    def give_up(self) -> None:
        self.given_up = True
        self.durable.set()


class GroupCommit(Generic[Key]):
    """Makes changed keys durable in the order in which they changed.

    Args:
        write: Returns when all entries are durable. If it raises anything but `DiskFull`, `run`
            raises it too, the waiting calls are never answered, and the process must end: memory is
            ahead of the disk. When `run` is cancelled, the waiting calls raise `Unreachable`.
        entries_of: Returns the entries that store a key's current state; the value None deletes.
        check: Raises if no change can be made at the moment for a reason other than a full disk.

    Attributes:
        disk_full: The error of the disk while it has no room, else None; no change may be made
            while it is set.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Entry]], Awaitable[None]],
        entries_of: Callable[[Key], Sequence[Entry]],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._write, self._entries_of, self._check = write, entries_of, check
        self._gathering: _Batch[Key] = _Batch()
        self._writing = self._gathering
        self._pending: dict[Key, _Batch[Key]] = {}
        self._arrived = asyncio.Event()
        self.disk_full: DiskFull | None = None

    def check_room(self) -> None:
        """Return if a change could become durable now.

        Raises:
            DiskFull: the disk has no room.
            BatonError: raised by `check`.
        """
        self._check()
        if self.disk_full is not None:
            raise DiskFull(
                self.disk_full.message, retry_after_ms=RETRY_MS, facts=self.disk_full.facts
            )

    def mark_changed(self, key: Key) -> None:
        """Put the state of `key`, changed in memory, into the next write."""
        self._gathering.keys[key] = None
        self._pending[key] = self._gathering
        self._arrived.set()

    async def wait_durable(self, keys: Iterable[Key]) -> None:
        """Return when every change of `keys` up to this call is durable.

        Raises:
            Unreachable: `run` was cancelled first.
        """
        batches = dict.fromkeys(self._pending.get(key) for key in keys)
        for batch in filter(None, batches):
            await batch.wait()

    async def wait_all_durable(self) -> None:
        """Return when every change up to this call is durable; raises as `wait_durable`."""
        for batch in dict.fromkeys(self._pending.values()):
            await batch.wait()

    async def drain(self) -> None:
        """Wait until all changes are durable; return at once while the disk is full.

        No caller has an answer for a change that is not durable.
        """
        if self.disk_full is None:
            await self.wait_all_durable()

    async def run(self) -> None:
        """Write changes until cancelled."""
        try:
            await self._run()
        except asyncio.CancelledError:
            self._writing.give_up()
            self._gathering.give_up()
            raise

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._gathering = self._gathering, _Batch()
            self._writing = batch
            # Encoded once, not at each retry: a later state belongs to the batch of its own change.
            entries = [entry for key in batch.keys for entry in self._entries_of(key)]
            await self._write_when_there_is_room(entries)
            for key in batch.keys:
                if self._pending[key] is batch:
                    del self._pending[key]
            batch.durable.set()

    async def _write_when_there_is_room(self, entries: Sequence[Entry]) -> None:
        while True:
            try:
                await self._write(entries)
                break
            except DiskFull as error:
                if self.disk_full is None:
                    log.warning("disk is full, changes are rejected error=%s", error)
                self.disk_full = error
                await asyncio.sleep(RETRY_MS / 1000)
        if self.disk_full is not None:
            log.warning("disk has room again")
            self.disk_full = None
