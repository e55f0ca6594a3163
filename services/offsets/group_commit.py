"""One write at a time; what changes meanwhile goes into the next one, all together.

An answer about a key waits until the newest change of the key is durable, whether or not the
call itself changed it: so nobody learns of, or builds on, a state that a crash can take back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")
Entry = tuple[bytes, bytes]


class _Batch(Generic[Key]):
    def __init__(self) -> None:
        self.keys: dict[Key, None] = {}
        self.durable = asyncio.Event()


class GroupCommit(Generic[Key]):
    """Makes changed keys durable in the order in which they changed.

    Args:
        write: Returns when all entries are durable. If it raises, `run` does, nobody who waits is
            ever answered, and the process has to end: memory is ahead of the disk.
        entry_of: Key and value on the disk of a key's present state.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Entry]], Awaitable[None]],
        entry_of: Callable[[Key], Entry],
    ) -> None:
        self._write, self._entry_of = write, entry_of
        self._gathering: _Batch[Key] = _Batch()
        self._pending: dict[Key, _Batch[Key]] = {}
        self._arrived = asyncio.Event()

    def changed(self, key: Key) -> None:
        """Note that the state of `key` has changed in memory."""
        self._gathering.keys[key] = None
        self._pending[key] = self._gathering
        self._arrived.set()

    async def settled(self, keys: Iterable[Key]) -> None:
        """Return when every change of `keys` up to this call is durable."""
        batches = dict.fromkeys(self._pending.get(key) for key in keys)
        for batch in filter(None, batches):
            await batch.durable.wait()

    async def settled_all(self) -> None:
        """Return when every change up to this call is durable."""
        for batch in dict.fromkeys(self._pending.values()):
            await batch.durable.wait()

    async def run(self) -> None:
        """Write for ever; to be run as one task."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._gathering = self._gathering, _Batch()
            await self._write([self._entry_of(key) for key in batch.keys])
            for key in batch.keys:
                if self._pending[key] is batch:
                    del self._pending[key]
            batch.durable.set()
