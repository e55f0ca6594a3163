"""Pages of a list call: which entries one answer has, and the token that names the next page.

All list calls page in the same way (AIP-158): entries ascend by a key, and the token holds the last
key of the page. So a page needs no state at the server, any replica can answer for the next one,
and an entry that exists during the whole listing is listed exactly once, whatever is added or
removed meanwhile.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from batonmq._common.aio import in_steps
from batonmq.errors import InvalidArgument

PAGE_SIZE_DEFAULT = 1_000
PAGE_SIZE_MAX = 10_000
PAGE_BYTES_MAX = 1_000_000
"""A page ends early, after at least one entry, when its entries have more bytes than this."""
_VERSION = b"1"

Entry = TypeVar("Entry", bound=Message)
Value = TypeVar("Value")


class Page(NamedTuple, Generic[Entry]):
    """The entries of one answer, and the token of the next page; empty if this is the last."""

    entries: list[Entry]
    next_page_token: str


def page_size_of(requested: int) -> int:
    """Return the number of entries for a requested page size; 0 stands for the default."""
    return min(requested or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)


def key_of_token(page_token: str) -> str:
    """Return the key after which the page starts; empty for the first page.

    Raises:
        InvalidArgument: the token was not made by `token_of_key`.
    """
    if not page_token:
        return ""
    try:
        decoded = base64.b64decode(page_token.encode("ascii"), altchars=b"-_", validate=True)
        if decoded[:1] == _VERSION and len(decoded) > 1:
            return decoded[1:].decode()
    except (binascii.Error, UnicodeError):
        pass
    raise malformed_token(page_token)


def malformed_token(page_token: str) -> InvalidArgument:
    """Return the error for a page token that no page of this list has given."""
    return InvalidArgument(
        f"page_token {page_token[:100]!r} is not a page token",
        remedy="Use the next_page_token of the previous page, or leave it empty to start anew.",
        facts={"field": "page_token"},
    )


def token_of_key(key: str) -> str:
    """Return the token of the page that starts after `key`."""
    return base64.urlsafe_b64encode(_VERSION + key.encode()).decode("ascii")


async def listed(
    names: Iterable[str], after: str, find: Callable[[str], Value | None], page_size: int
) -> list[tuple[str, Value]]:
    """Return the names after a page token with their values, ascending: one more than a page has.

    Other tasks run meanwhile: there may be many names, and the caller may see few of them.

    Args:
        after: Key of the page token; empty for the first page.
        find: Returns the value of a name; None if it is not to be listed.
        page_size: As requested.
    """
    found: list[tuple[str, Value]] = []
    async for name in in_steps(sorted(name for name in names if name > after)):
        value = find(name)
        if value is not None:
            found.append((name, value))
            if len(found) > page_size_of(page_size):
                break
    return found


def page_of(entries: Iterable[tuple[str, Entry]], page_size: int) -> Page[Entry]:
    """Return the first page of `entries`; no more of them are made than it needs, and one.

    Args:
        entries: The entries after the page token, with their keys, ascending by key.
        page_size: As requested; 0 stands for the default.
    """
    page: list[Entry] = []
    size, last_key, byte_count = page_size_of(page_size), "", 0
    for key, entry in entries:
        byte_count += entry.ByteSize()
        if page and (len(page) == size or byte_count > PAGE_BYTES_MAX):
            return Page(page, token_of_key(last_key))
        page.append(entry)
        last_key = key
    return Page(page, "")
