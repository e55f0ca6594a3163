"""Goal: a pull delivers exactly the run that its limits allow, and skips filtered messages.

Method: entries are built directly; Hypothesis compares with a loop over messages.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.subscription import TagFilter
from batonmq_server.storage.core.consumequeue import Entries
from batonmq_server.storage.core.tag_filter import HashFilter, Selection, select

HASHES = {
    "TagA": 2598919, "TagB": 2598920, "TagC": 2598921, "tag1": 3552215, "tag2": 3552216,
    "hello": 99162322, "Aa": 2112, "BB": 2112, "订单": 1129459, "😀": 1772899,
    "polygenelubricants": -2147483648,
}  # fmt: skip


def entries(*batches: tuple[int, int, list[int]]) -> Entries:
    """Return the entries of batches of (position, size, tag hashes)."""
    rows = [(position, size, tag) for position, size, tags in batches for tag in tags]
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return Entries(*columns)


def hash_filter(expression: str) -> HashFilter:
    return HashFilter(TagFilter.parse(expression).hashes)


@pytest.mark.parametrize("tag", HASHES)
def test_tag_passes_by_its_java_hash(tag: str) -> None:
    column = np.array([0, HASHES[tag], 42], np.int64)
    assert hash_filter(tag).kept(column).tolist() == [1]


def test_colliding_tags_both_pass() -> None:
    column = np.array([HASHES["Aa"], HASHES["BB"], HASHES["TagA"]], np.int64)
    assert hash_filter("Aa").kept(column).tolist() == [0, 1]
    assert not TagFilter.parse("Aa").accepts("BB")


def test_star_passes_all_messages_including_untagged_ones() -> None:
    assert hash_filter("*").kept(np.array([0, 5], np.int64)).tolist() == [0, 1]
    assert hash_filter("*").keeps_all


def test_first_batch_always_fits() -> None:
    selection = select(
        entries((0, 900, [1, 1]), (900, 5, [1])), HashFilter(None), bytes_max=10, messages_max=9
    )
    assert selection == Selection([0], [900], scanned_count=2, kept_count=2)


def test_byte_limit_ends_before_the_next_batch() -> None:
    selection = select(
        entries((0, 6, [1, 1]), (6, 4, [1]), (10, 1, [1])),
        HashFilter(None),
        bytes_max=10,
        messages_max=9,
    )
    assert selection == Selection([0, 6], [6, 4], scanned_count=3, kept_count=3)


def test_message_limit_may_end_inside_a_batch() -> None:
    selection = select(entries((0, 6, [1, 1, 1])), HashFilter(None), bytes_max=10, messages_max=2)
    assert selection == Selection([0], [6], scanned_count=2, kept_count=2)


def test_filtered_messages_are_skipped() -> None:
    selection = select(
        entries((0, 6, [1, 1]), (6, 6, [2])),
        HashFilter(frozenset({5})),
        bytes_max=9,
        messages_max=1,
    )
    assert selection == Selection([], [], scanned_count=3, kept_count=0)


def test_filtered_messages_before_the_next_kept_one_are_covered() -> None:
    selection = select(
        entries((0, 6, [5]), (6, 6, [1, 1, 5])),
        HashFilter(frozenset({5})),
        bytes_max=99,
        messages_max=1,
    )
    assert selection == Selection([0], [6], scanned_count=3, kept_count=1)


@given(
    batches=st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(0, 3), min_size=1, max_size=6)),
        min_size=1,
        max_size=12,
    ),
    wanted_tags=st.sets(st.integers(0, 3)),
    bytes_max=st.integers(1, 200),
    messages_max=st.integers(1, 30),
)
def test_selection_equals_a_loop_over_messages(
    batches: list[tuple[int, list[int]]], wanted_tags: set[int], bytes_max: int, messages_max: int
) -> None:
    positions = np.cumsum([0] + [size for size, _ in batches]).tolist()
    rows = [(p, size, tags) for p, (size, tags) in zip(positions, batches, strict=False)]
    selection = select(
        entries(*rows),
        HashFilter(frozenset(wanted_tags)),
        bytes_max=bytes_max,
        messages_max=messages_max,
    )
    chosen: list[tuple[int, int]] = []
    scanned = kept_count = 0
    for position, size, tag in [(p, s, tag) for p, s, tags in rows for tag in tags]:
        if tag in wanted_tags:
            fresh = (position, size) not in chosen
            too_big = fresh and chosen and sum(s for _, s in chosen) + size > bytes_max
            if kept_count == messages_max or too_big:
                break
            chosen += [(position, size)] if fresh else []
            kept_count += 1
        scanned += 1
    expected = Selection([p for p, _ in chosen], [s for _, s in chosen], scanned, kept_count)
    assert selection == expected
