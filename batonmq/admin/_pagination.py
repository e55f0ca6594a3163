"""Iteration over the pages of a list call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar


class ListResponse(Protocol):
    """The answer to a list call."""

    @property
    def next_page_token(self) -> str:
        """The token of the next page; empty if this is the last."""


Answer = TypeVar("Answer", bound=ListResponse)


async def iter_pages(read: Callable[[str], Awaitable[Answer]]) -> AsyncIterator[Answer]:
    """Yield each page of a list, until the last.

    Args:
        read: Reads the page of a token; the first page has the empty token.
    """
    page_token = ""
    while True:
        answer = await read(page_token)
        yield answer
        page_token = answer.next_page_token
        if not page_token:
            return
