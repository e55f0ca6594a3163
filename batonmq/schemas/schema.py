"""What a schema does."""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")


class Schema(Protocol[T]):
    """Turns values of one type into bodies of messages, and back."""

    def encode(self, value: T) -> bytes:
        """Return the body for a value.

        Raises:
            InvalidArgument: The value does not fit the schema.
        """
        ...

    async def decode(self, body: bytes) -> T:
        """Return the value in a body.

        Raises:
            BadBody: The body does not fit the schema; no retry can help.
            BatonError: What is needed to read the body is not known yet; try again later.
        """
        ...
