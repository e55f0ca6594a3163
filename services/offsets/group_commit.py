"""One write at a time; what changes meanwhile goes into the next one, all together.

An answer about a key waits until the newest change of the key is durable, whether or not the
call itself changed it: so nobody learns of, or builds on, a state that a crash can take back. While
the disk is full the same write is tried again and again; who waits for it waits on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from batonmq.errors import DiskFull, Unreachable

log = logging.getLogger(__name__)

Key = TypeVar("Key")
Entry = tuple[bytes, bytes | None]
RETRY_MS = 1_000


class _Batch(Generic[Key]):
    def __init__(self) -> None:
        self.keys: dict[Key, None] = {}
        self.durable = asyncio.Event()
        self.given_up = False

    async def settled(self) -> None:
        await self.durable.wait()
        if self.given_up:
            raise Unreachable("it is not known whether the change is kept", retry_after_ms=200)

    def give_up(self) -> None:
        self.given_up = True
        self.durable.set()


class GroupCommit(Generic[Key]):
    """Makes changed keys durable in the order in which they changed.

    Args:
        write: Returns when all entries are durable. If it raises anything but `DiskFull`, so does
            `run`, nobody who waits is ever answered, and the process has to end: memory is ahead
            of the disk. Once `run` is cancelled whoever waits is told that nothing is known.
        entries_of: What stands on the disk of a key's present state; None for what doesn't.
        check: Raises if nothing could be written at the moment for another reason.

    Attributes:
        full: The refusal of the disk, as long as it has no room; no change may be made meanwhile.
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
        self.full: DiskFull | None = None

    def check_room(self) -> None:
        """Refuse a change that could not become durable now.

        Raises:
            DiskFull: the disk has no room.
            BatonError: as `check` says.
        """
        self._check()
        if self.full is not None:
            raise DiskFull(self.full.message, retry_after_ms=RETRY_MS, facts=self.full.facts)

    def mark_changed(self, key: Key) -> None:
        """Note that the state of `key` has changed in memory."""
        self._gathering.keys[key] = None
        self._pending[key] = self._gathering
        self._arrived.set()

    async def wait_durable(self, keys: Iterable[Key]) -> None:
        """Return when every change of `keys` up to this call is durable.

        Raises:
            Unreachable: `run` was cancelled before.
        """
        batches = dict.fromkeys(self._pending.get(key) for key in keys)
        for batch in filter(None, batches):
            await batch.settled()

    async def wait_all_durable(self) -> None:
        """As `wait_durable`, for all keys."""
        for batch in dict.fromkeys(self._pending.values()):
            await batch.settled()

    async def drain(self) -> None:
        """Wait until all changes are durable; return at once while the disk is full.

        No caller has an answer for a change that is not durable.
        """
        if self.full is None:
            await self.wait_all_durable()

    async def run(self) -> None:
        """Write for ever; to be run as one task."""
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
            # Once: a state that came later has to become durable with what changed with it.
            entries = [entry for key in batch.keys for entry in self._entries_of(key)]
            await self._write_once_there_is_room(entries)
            for key in batch.keys:
                if self._pending[key] is batch:
                    del self._pending[key]
            batch.durable.set()

    async def _write_once_there_is_room(self, entries: Sequence[Entry]) -> None:
        while True:
            try:
                await self._write(entries)
                break
            except DiskFull as error:
                if self.full is None:
                    log.warning("disk is full, changes are refused error=%s", error)
                self.full = error
                await asyncio.sleep(RETRY_MS / 1000)
        if self.full is not None:
            log.warning("disk has room again")
            self.full = None
