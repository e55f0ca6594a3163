"""One object for each replica set, so that calls to one set never wait for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Runnable(Protocol):
    """An object with a background loop."""

    async def run(self) -> None:
        """Run until cancelled."""
        ...


Kind = TypeVar("Kind", bound=Runnable)


class PerReplicaSet(Generic[Kind]):
    """Objects by replica set, each made at its first use.

    Args:
        make: Makes the object of a set by its name.
    """

    def __init__(self, make: Callable[[str], Kind]) -> None:
        self._make = make
        self._made: dict[str, Kind] = {}
        self._new = asyncio.Event()

    def __getitem__(self, name: str) -> Kind:
        item = self._made.get(name)
        if item is None:
            item = self._made[name] = self._make(name)
            self._new.set()
        return item

    async def run(self) -> None:
        """Run the loops of all objects until cancelled; run as one task."""
        running: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._new.clear()
                for name in [name for name in self._made if name not in running]:
                    tasks.create_task(self._made[name].run())
                    running.add(name)
                await self._new.wait()
