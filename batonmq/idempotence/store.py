"""What `idempotent` asks of the place where claims are kept."""

from __future__ import annotations

from typing import Protocol

DONE = "done"
"""What stands at a key whose message is handled. No owner has this name."""


class Store(Protocol):
    """Short texts under keys, each until its time is over.

    Both calls are atomic among all processes that share the store, and both may be repeated: a
    client that lost the answer asks again. A text whose time is over is not there any more.
    Failures are those of the database's client.
    """

    async def put(self, key: str, owner: str, value: str, keep_ms: int) -> str:
        """Write `value` for `keep_ms`, if the key is free or has `owner`.

        Returns:
            What stands at the key afterwards: `value`, or what somebody else has written.
        """

    async def remove(self, key: str, owner: str) -> None:
        """Free the key, if it has `owner`."""
