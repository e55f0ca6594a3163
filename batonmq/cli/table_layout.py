"""Layout of a table on a terminal: no line is longer than the terminal, and no word is folded.

A table that is too wide is fitted in these steps, until it fits:

1. Sentences (`ColumnKind.PROSE`) move below their row, broken between words.
2. Minor columns are left out, from the right.
3. Names are shortened in their middle; numbers, times and ids are not.
4. Other columns are left out, from the right; the first of them stays.

A table that must be whole has one block per row instead, with one line per column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from batonmq.cli.text_table import column_widths, format_rows, shorten, text_width, wrap

_GAP = 2
_NAME_MIN = 12
_INDENT = "  "
_NO_VALUE = "-"
_EXACT = re.compile(r"[-+\d]|[0-9a-f]{16}")
"""Start of a cell that is never shortened: of a number, a time, an address or an id."""


class ColumnKind(Enum):
    """What happens to a column if the table is too wide."""

    MAIN = auto()
    MINOR = auto()
    """It is left out before columns are shortened."""
    PROSE = auto()
    """Its sentences move below the row."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The columns that are beside each other with their widths, those below, and those left out."""

    shown: tuple[int, ...]
    widths: tuple[int, ...]
    below: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()


def fit_columns(
    widths: Sequence[int], floors: Sequence[int], kinds: Sequence[ColumnKind], width: int
) -> Fit:
    """Fit columns into a line.

    Args:
        widths: Width of each column if nothing is shortened.
        floors: Width to which each column may be shortened.
        width: Longest line.
    """
    shown, below = list(range(len(widths))), list[int]()
    if _total(widths) > width:
        below = [index for index in shown if kinds[index] is ColumnKind.PROSE]
        shown = [index for index in shown if index not in below]
    for index in reversed(range(len(widths))):
        if _total([widths[i] for i in shown]) <= width or len(shown) == 1:
            break
        if kinds[index] is ColumnKind.MINOR:
            shown.remove(index)
    while len(shown) > 1 and _total([floors[i] for i in shown]) > width:
        shown.pop()
    fitted = [widths[index] for index in shown]
    lowest = [floors[index] for index in shown] if len(shown) > 1 else [1]
    while _total(fitted) > width:
        room = [size if size > low else 0 for size, low in zip(fitted, lowest, strict=True)]
        fitted[room.index(max(room))] -= 1
    hidden = [index for index in range(len(widths)) if index not in shown and index not in below]
    return Fit(tuple(shown), tuple(fitted), tuple(below), tuple(hidden))


class TableLayout:
    """Lays out the rows of one table, which may arrive in several parts.

    Columns are as wide as the widest cell so far, so those of a later part may be wider.

    Args:
        width: Longest line; None for any length.
        whole: Whether every cell is shown in full: as blocks if the table is too wide.
    """

    def __init__(
        self,
        headings: Sequence[str],
        kinds: Sequence[ColumnKind],
        width: int | None,
        *,
        whole: bool = False,
    ) -> None:
        self._headings, self._kinds = tuple(headings), tuple(kinds)
        self._width, self._whole = width, whole
        self._widths = list(map(text_width, headings))
        self._floors = [min(size, width or size) for size in self._widths]
        self._shown: tuple[int, ...] | None = None
        self.hidden: dict[str, None] = {}
        self.shortened = False

    def lines(self, rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, bool]]:
        """Yield the lines of some rows; True for a line that is a heading."""
        self._widths = column_widths(rows, self._widths)
        if self._width is None:
            fit = Fit(tuple(range(len(self._headings))), tuple(self._widths))
        elif self._whole and _total(self._widths) > self._width:
            yield from ((line, False) for row in rows for line in self._block(row, self._width))
            return
        else:
            self._floors = column_widths([list(map(_floor, row)) for row in rows], self._floors)
            fit = fit_columns(self._widths, self._floors, self._kinds, self._width)
        self.hidden.update((self._headings[index], None) for index in fit.hidden)
        if fit.shown != self._shown:
            self._shown = fit.shown
            yield self._line(self._headings, fit), True
        for row in rows:
            yield self._line(row, fit), False
            for index in fit.below:
                if row[index] != _NO_VALUE:
                    text = f"{self._headings[index].lower()}: {row[index]}"
                    yield from ((line, False) for line in self._wrapped(text))

    def _line(self, row: Sequence[str], fit: Fit) -> str:
        cells = []
        for index, size in zip(fit.shown, fit.widths, strict=True):
            cells.append(self._shorten(row[index], size))
        (line,) = format_rows([cells], fit.widths)
        return line

    def _block(self, row: Sequence[str], width: int) -> Iterator[str]:
        """Yield a row as lines `HEADING  value`; a value that is too long is broken at spaces."""
        if self._shown is not None:
            yield ""
        self._shown = ()
        lead = max(map(text_width, self._headings)) + _GAP
        for heading, cell in zip(self._headings, row, strict=True):
            if lead + text_width(cell) <= width:
                yield heading.ljust(lead) + cell
            else:
                yield heading
                yield from self._wrapped(cell)

    def _wrapped(self, text: str) -> Iterator[str]:
        assert self._width is not None
        room = max(self._width - len(_INDENT), 1)
        for line in wrap(text, room):
            yield _INDENT + self._shorten(line, room)

    def _shorten(self, text: str, size: int) -> str:
        short = shorten(text, size)
        self.shortened |= short != text
        return short


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _floor(cell: str) -> str:
    """Return the part of a cell that has to be shown at least."""
    return cell if _EXACT.match(cell) else cell[:_NAME_MIN]
