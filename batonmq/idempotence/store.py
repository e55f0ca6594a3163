"""The interface of stores that keep the claims of `idempotent`."""

from __future__ import annotations

from typing import Protocol

DONE = "done"
"""Value of the key of a handled message. No owner has this name."""


class Store(Protocol):
    """A store of short texts by key, each with an expiry.

    Both calls must be atomic for all processes that share the store, and safe to retry, because a
    client may lose a response. An expired text must not be returned. Failures raise the errors of
    the database client.
    """

    async def put(self, key: str, owner: str, value: str, keep_ms: int) -> str:
        """Write `value` for `keep_ms` if the key has no value or the value `owner`.

        Returns:
            The value of the key afterwards: `value`, or the value of another owner.
        """

    async def remove(self, key: str, owner: str) -> None:
        """Delete the key if its value is `owner`."""
