"""The `async with` block of a client."""

from __future__ import annotations

from batonmq.errors import InvalidArgument


class ClientBlock:
    """Whether a client is in its block, or was: outside of it a call would wait for ever.

    Args:
        client: Name of the client's class.
    """

    def __init__(self, client: str) -> None:
        self._client, self._entered = client, False

    def enter(self) -> None:
        """Note that the block begins.

        Raises:
            InvalidArgument: The client had a block before.
        """
        if self._entered:
            raise InvalidArgument(
                f"this {self._client} was used in a block before",
                remedy=f"Make another {self._client} for each `async with` block.",
            )
        self._entered = True

    def check(self) -> None:
        """Return if the block has begun.

        Raises:
            InvalidArgument: It has not.
        """
        if not self._entered:
            raise InvalidArgument(
                f"this {self._client} is not open",
                remedy=f"Use it in a block: async with {self._client}(...) as client.",
            )
