"""Search and pages of long lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of a list.

    Attributes:
        number: Number of the page, from 1.
        pages: Number of pages, at least 1.
        found: Items that match the search.
        total: Items of the whole list.
    """

    items: Sequence[Item]
    number: int
    pages: int
    found: int
    total: int
    search: str

    @property
    def before(self) -> int | None:
        """Number of the page before; None on the first page."""
        return self.number - 1 if self.number > 1 else None

    @property
    def after(self) -> int | None:
        """Number of the page after; None on the last page."""
        return self.number + 1 if self.number < self.pages else None


def page_of(
    items: Sequence[Item],
    text_of: Callable[[Item], str],
    *,
    search: str = "",
    number: int = 1,
    page_size: int = 50,
) -> Page[Item]:
    """Return a page of the items whose text contains every word of `search`, in any case.

    Args:
        number: Number of the page; a number outside of the list is the nearest page.
    """
    words = search.lower().split()
    found = [item for item in items if all(word in text_of(item).lower() for word in words)]
    pages = max(1, -(-len(found) // page_size))
    number = min(max(number, 1), pages)
    start = (number - 1) * page_size
    return Page(found[start : start + page_size], number, pages, len(found), len(items), search)
