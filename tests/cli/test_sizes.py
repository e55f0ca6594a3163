"""Goal: sizes are parsed as documented, and written so that they can be read again.

Method: tables, and a round trip.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.cli.sizes import parse_bytes, size_text
from batonmq.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("17", 17), ("17B", 17), ("2KiB", 2_048), ("64MiB", 1 << 26), ("1GiB", 1 << 30)],
)
def test_size_has_a_binary_unit_or_is_in_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5GiB", "1 GiB", "1GB", "1gib", "9" * 19])
def test_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a size"):
        parse_bytes(text)


def test_size_beyond_64_bits_is_rejected() -> None:
    assert parse_bytes("8388607TiB") < 2**63
    with pytest.raises(InvalidArgument, match="is more than"):
        parse_bytes("8388608TiB")


def test_text_of_no_bytes_is_in_bytes() -> None:
    assert size_text(0) == "0B"


@given(st.integers(0, 10**17))
def test_text_of_a_size_reads_as_the_size(count: int) -> None:
    assert parse_bytes(size_text(count)) == count
