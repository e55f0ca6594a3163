"""Goal: on a terminal no line of a table is longer than the terminal, and no word is folded.

Method: lay out rows of all kinds for many widths, and compare lines and cells.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.cli.table_layout import ColumnKind, TableLayout, fit_columns
from batonmq.cli.text_table import shorten, text_width, wrap

MAIN, MINOR, PROSE = ColumnKind.MAIN, ColumnKind.MINOR, ColumnKind.PROSE
HEADINGS = ("GROUP", "TOPIC", "LAG", "HOST", "REMEDY")
KINDS = (MINOR, MAIN, MAIN, MINOR, PROSE)
ROW = (
    "billing",
    "orders-of-the-north",
    "1" * 15,
    "host-7.example",
    "Start a member of it.",
)


def _lines(width: int | None, row: tuple[str, ...] = ROW, *, whole: bool = False) -> list[str]:
    return [text for text, _ in TableLayout(HEADINGS, KINDS, width, whole=whole).lines([row])]


def test_without_a_width_every_cell_is_whole_on_one_line() -> None:
    heading, row = _lines(None)
    assert heading.split() == list(HEADINGS)
    assert all(cell in row for cell in ROW)


def test_table_that_fits_is_the_same_with_and_without_a_width() -> None:
    assert _lines(200) == _lines(None)


def test_sentence_moves_below_its_row_first() -> None:
    heading, row, below = _lines(70)
    assert heading.split() == ["GROUP", "TOPIC", "LAG", "HOST"]
    assert row.split() == list(ROW[:4])
    assert below == "  remedy: Start a member of it."


def test_minor_columns_are_left_out_next_from_the_right() -> None:
    assert _lines(50)[0].split() == ["GROUP", "TOPIC", "LAG"]
    assert _lines(40)[0].split() == ["TOPIC", "LAG"]


def test_name_is_shortened_in_its_middle_and_a_number_is_not() -> None:
    name, number = _lines(31)[1].split()
    assert "…" in name
    assert number == ROW[2]


def test_first_column_that_is_not_minor_stays_at_last() -> None:
    (heading, row, *_) = _lines(14)
    assert heading.split() == ["TOPIC"]
    assert text_width(row) == 14


def test_whole_table_that_does_not_fit_has_one_line_for_each_column() -> None:
    lines = _lines(40, whole=True)
    assert [line.split(maxsplit=1) for line in lines] == [
        [heading, cell] for heading, cell in zip(HEADINGS, ROW, strict=True)
    ]


def test_hidden_columns_and_shortened_names_are_known() -> None:
    layout = TableLayout(HEADINGS, KINDS, 31)
    list(layout.lines([ROW]))
    assert list(layout.hidden) == ["GROUP", "HOST"]
    assert layout.shortened


def test_columns_of_a_later_part_may_be_wider_and_stay_within_the_line() -> None:
    layout = TableLayout(("TOPIC", "HOST"), (MAIN, MINOR), 30)
    first = [text for text, _ in layout.lines([("orders", "host-7")])]
    later = [text for text, _ in layout.lines([("orders" * 3, "host-7" * 3)])]
    assert first[0].split() == ["TOPIC", "HOST"]
    assert later == ["TOPIC", "orders" * 3]


_CELLS = (
    st.text("abc -.,1é日", min_size=1, max_size=60).map(str.strip).map(lambda text: text or "-")
)


@given(
    rows=st.lists(st.tuples(*[_CELLS] * 5), max_size=4),
    width=st.integers(12, 120),
    whole=st.booleans(),
)
def test_no_line_is_longer_than_the_terminal(
    rows: list[tuple[str, ...]], width: int, whole: bool
) -> None:
    layout = TableLayout(HEADINGS, KINDS, width, whole=whole)
    assert all(text_width(text) <= width for text, _ in layout.lines(rows))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(ColumnKind)), min_size=1, max_size=12),
    st.integers(1, 150),
)
def test_every_column_is_shown_below_or_hidden(
    columns: list[tuple[int, ColumnKind]], width: int
) -> None:
    sizes, kinds = [size for size, _ in columns], [kind for _, kind in columns]
    fit = fit_columns(sizes, [min(size, 12) for size in sizes], kinds, width)
    assert sorted((*fit.shown, *fit.below, *fit.hidden)) == list(range(len(columns)))
    assert sum(fit.widths) + 2 * max(len(fit.widths) - 1, 0) <= width


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("orders", 6, "orders"), ("orders-eu", 7, "ord…-eu"), ("日本語", 5, "日…語"), ("ab", 1, "…")],
)
def test_shortened_name_keeps_its_beginning_and_its_end(text: str, width: int, short: str) -> None:
    assert shorten(text, width) == short


@given(st.text("ab, ", max_size=80), st.integers(1, 40))
def test_wrapped_text_keeps_its_words(text: str, width: int) -> None:
    assert "".join(wrap(text, width)).replace(" ", "") == text.replace(" ", "")
    assert all(text_width(line) <= width or " " not in line for line in wrap(text, width))
