"""The `async with` block of a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from batonmq.errors import InvalidArgument


class ClientBlock:
    """The block of a client, and its event loop: elsewhere a call would wait for ever.

    Args:
        client: Name of the client's class.

    Attributes:
        loop: The event loop of the block; None before the block.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self.loop: asyncio.AbstractEventLoop | None = None

    def enter(self) -> None:
        """Note that the block begins.

        Raises:
            InvalidArgument: The client had a block before.
        """
        if self.loop is not None:
            raise InvalidArgument(
                f"this {self._client} was used in a block before",
                remedy=f"Make another {self._client} for each `async with` block.",
            )
        self.loop = asyncio.get_running_loop()

    def undo(self) -> None:
        """Note that the block has not begun after all: it may be tried again."""
        self.loop = None

    def runs_here(self) -> bool:
        """Return whether the caller runs in the event loop of the block."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def passes_on(self, call: Callable[[], object]) -> bool:
        """Have the loop of the block make a call, and return True, if the caller runs elsewhere."""
        if self.loop is None or self.runs_here():
            return False
        with suppress(RuntimeError):  # the loop is closed, and so is the client
            self.loop.call_soon_threadsafe(call)
        return True

    def check(self) -> None:
        """Return if the block has begun, in the running event loop.

        Raises:
            InvalidArgument: It has not.
        """
        if self.loop is None:
            raise InvalidArgument(
                f"this {self._client} is not open",
                remedy=f"Use it in a block: async with {self._client}(...) as client.",
            )
        if not self.runs_here():
            raise InvalidArgument(
                f"this {self._client} belongs to another event loop",
                remedy=f"Call it in the loop of its block, or use a Blocking{self._client}, which "
                "threads may share.",
            )
