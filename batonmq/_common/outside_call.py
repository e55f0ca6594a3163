"""Calls that run outside the event loop, and that tasks wait for."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class OutsideCall(Generic[T]):
    """A call that runs outside the event loop: in a thread, or in the kernel.

    It continues if a task that waits for it is cancelled.

    Attributes:
        ended: Whether the call has returned.
        error: What it has raised.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[None]] = []
        self._result: T | None = None
        self.error: BaseException | None = None
        self.ended = False

    async def wait(self) -> None:
        """Wait until the call has returned."""
        if not self.ended:
            waiting = self._loop.create_future()
            self._waiting.append(waiting)
            await waiting

    async def result(self) -> T:
        """Wait until the call has returned; return its result or raise its error."""
        await self.wait()
        if self.error is not None:
            raise self.error
        return cast(T, self._result)

    async def finish(self) -> T:
        """As `result`, but wait until the call has returned even if cancelled meanwhile.

        The cancellation is raised then, also if the call has failed.
        """
        try:
            return await self.result()
        except asyncio.CancelledError:
            while not self.ended:
                with suppress(asyncio.CancelledError):
                    await self.wait()
            raise

    def returned(self, result: T | None, error: BaseException | None) -> None:
        """Take the result or the error, in any thread."""
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            self._loop.call_soon_threadsafe(self.end, result, error)

    def end(self, result: T | None, error: BaseException | None) -> None:
        """Take the result or the error, in the event loop."""
        self._result, self.error, self.ended = result, error, True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()
