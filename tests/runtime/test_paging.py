"""Pages of list calls, without a server.

Goal: pages have at most the requested number of entries and a bounded size; following the tokens
lists every entry once, also while entries come and go; a malformed token is rejected; a list of
which the caller sees little does not block other tasks.
Method: property tests of `page_of` over any set of keys, single cases at the limits, and a task
that counts how often it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import given
from hypothesis import strategies as st

from batonmq._common.aio import STEP_ITEMS
from batonmq.errors import InvalidArgument
from batonmq_server.runtime.paging import (
    PAGE_BYTES_MAX,
    PAGE_SIZE_DEFAULT,
    PAGE_SIZE_MAX,
    Page,
    key_of_token,
    listed,
    page_of,
    page_size_of,
    token_of_key,
)


def page_after(keys: set[str], page_token: str, page_size: int = 0) -> Page[StringValue]:
    after = key_of_token(page_token)
    names = sorted(key for key in keys if key > after)
    return page_of(((name, StringValue(value=name)) for name in names), page_size)


def listing(keys: set[str], page_size: int) -> Iterator[list[str]]:
    """All pages; `keys` may be changed between two of them."""
    page = page_after(keys, "", page_size)
    yield [entry.value for entry in page.entries]
    while page.next_page_token:
        page = page_after(keys, page.next_page_token, page_size)
        yield [entry.value for entry in page.entries]


@given(keys=st.sets(st.text(min_size=1)), page_size=st.integers(1, 5))
def test_pages_list_every_entry_once_in_order(keys: set[str], page_size: int) -> None:
    pages = list(listing(keys, page_size))
    assert [key for page in pages for key in page] == sorted(keys)
    assert [len(page) for page in pages[:-1]] == [page_size] * (len(pages) - 1)
    assert not keys or pages[-1], "the last page is empty only if there is nothing to list"


@given(
    kept=st.sets(st.text(min_size=1), min_size=3),
    removed=st.sets(st.text(min_size=1)),
    added=st.sets(st.text(min_size=1)),
    page_size=st.integers(1, 3),
)
def test_entry_that_exists_during_the_whole_listing_is_listed_once(
    kept: set[str], removed: set[str], added: set[str], page_size: int
) -> None:
    present, listed = kept | removed, []
    for page in listing(present, page_size):
        listed += page
        present -= removed - kept
        present |= added
    assert [key for key in listed if key in kept] == sorted(kept)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("requested", "size"),
    [
        (0, PAGE_SIZE_DEFAULT),
        (1, 1),
        (PAGE_SIZE_MAX, PAGE_SIZE_MAX),
        (PAGE_SIZE_MAX + 1, PAGE_SIZE_MAX),
        (2**32 - 1, PAGE_SIZE_MAX),
    ],
)
def test_page_size_has_a_default_and_a_maximum(requested: int, size: int) -> None:
    assert page_size_of(requested) == size


def test_page_ends_before_its_entries_exceed_the_size_limit() -> None:
    entry = StringValue(value="x" * (PAGE_BYTES_MAX // 3))
    page = page_of(((str(number), entry) for number in range(9)), 9)
    assert (len(page.entries), key_of_token(page.next_page_token)) == (2, "1")


def test_entry_above_the_size_limit_is_a_page_of_its_own() -> None:
    entry = StringValue(value="x" * (PAGE_BYTES_MAX + 1))
    page = page_of(((str(number), entry) for number in range(2)), 9)
    assert (len(page.entries), key_of_token(page.next_page_token)) == (1, "0")


def test_entries_beyond_the_page_are_not_made() -> None:
    numbers = []

    def entries() -> Iterator[tuple[str, StringValue]]:
        for number in range(1_000):
            numbers.append(number)
            yield f"{number:03}", StringValue()

    page = page_of(entries(), 10)
    assert (len(page.entries), len(numbers)) == (10, 11)


@given(st.text(min_size=1))
def test_token_gives_back_its_key(key: str) -> None:
    assert key_of_token(token_of_key(key)) == key


@pytest.mark.parametrize(
    "page_token", ["MQ==", "x", "flights", "Mcw=", "MmZsaWdodHM=", "ü", "M WI="]
)
def test_malformed_token_is_rejected(page_token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        key_of_token(page_token)
    assert caught.value.facts == {"field": "page_token"}


async def test_names_of_a_page_are_found_while_other_tasks_run() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    names = [f"{number:04}" for number in range(3_200)]
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        found = await listed(names, "1000", lambda name: name if name.endswith("99") else None, 5)
        hidden: list[tuple[str, str]] = await listed(names, "", lambda _: None, 5)
        counting.cancel()
    assert [name for name, _ in found] == ["1099", "1199", "1299", "1399", "1499", "1599"]
    assert hidden == []
    assert turns >= len(names) // STEP_ITEMS
