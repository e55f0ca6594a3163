"""Waiting until something is true, without an event for each condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Wakeup:
    """Wakes tasks so that they look again at what they wait for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake every task that waits now."""
        self._event.set()
        self._event.clear()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()


class Condition:
    """A fact that tasks can wait for.

    Args:
        wakeup: Notified after each change that can make the fact true.
        holds: Whether the fact is true now.
    """

    def __init__(self, wakeup: Wakeup, holds: Callable[[], bool]) -> None:
        self._wakeup, self._holds = wakeup, holds

    def __bool__(self) -> bool:
        return self._holds()

    def either(self, holds: Callable[[], bool]) -> Condition:
        """Return the condition that this fact or another one is true.

        Args:
            holds: Whether the other one is true now.
        """
        return Condition(self._wakeup, lambda: self._holds() or holds())

    async def wait(self) -> None:
        """Wait until the fact is true; return at once if it is."""
        while not self._holds():
            await self._wakeup.wait()
