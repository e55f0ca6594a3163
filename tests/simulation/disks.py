"""The disks of a simulated cluster: they outlive the processes that write to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from services.offsets.disk import Entry

WRITE_MS_MAX = 8
SLOW_WRITE_MS_MAX = 400
_SLOW = 0.02


class OffsetsDisk:
    """What offsets has made durable. A write that a crash interrupts has happened, or not at all.

    Attributes:
        on_write: Called with what has just become durable.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.entries: dict[bytes, bytes] = {}
        self.on_write: list[Callable[[Sequence[Entry]], None]] = []

    def read(self) -> Iterator[Entry]:
        return iter(sorted(self.entries.items()))

    async def write(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(write_s(self._random) / 2)
        self.write_now(entries)
        await asyncio.sleep(write_s(self._random) / 2)

    def write_now(self, entries: Sequence[Entry]) -> None:
        self.entries.update(entries)
        for tell in self.on_write:
            tell(entries)


def write_s(random: Random) -> float:
    """How long a synced write takes; sometimes very long."""
    longest = SLOW_WRITE_MS_MAX if random.random() < _SLOW else WRITE_MS_MAX
    return random.uniform(0.5, longest) / 1000


def away(random: Random) -> Callable[[Callable[[Any], None], Any], Any]:
    """Makes a blocking call that syncs, without a thread."""

    async def call(blocking: Callable[[Any], None], argument: Any) -> None:
        await asyncio.sleep(write_s(random) / 2)
        blocking(argument)
        await asyncio.sleep(write_s(random) / 2)

    return call
