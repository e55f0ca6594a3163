"""One of a kind for each replica set that is asked, so that no set waits for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Runnable(Protocol):
    """What has work of its own to do."""

    async def run(self) -> None:
        """Do it for ever."""
        ...


Kind = TypeVar("Kind", bound=Runnable)


class PerReplicaSet(Generic[Kind]):
    """Made when first needed, and kept.

    Args:
        make: Makes the one of a set.
    """

    def __init__(self, make: Callable[[str], Kind]) -> None:
        self._make = make
        self._made: dict[str, Kind] = {}
        self._new = asyncio.Event()

    def __getitem__(self, name: str) -> Kind:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._make(name)
            self._new.set()
        return found

    async def run(self) -> None:
        """Run them all for ever; to be run as one task."""
        running: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._new.clear()
                for name in [name for name in self._made if name not in running]:
                    tasks.create_task(self._made[name].run())
                    running.add(name)
                await self._new.wait()
