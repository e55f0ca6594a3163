"""Text in columns. A cell is never broken across lines."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence

_GAP = "  "
_ELLIPSIS = "…"


def column_widths(rows: Sequence[Sequence[str]], at_least: Sequence[int]) -> list[int]:
    """Return the width of each column: that of its widest cell, but at least what is given."""
    widths = list(at_least)
    for row in rows:
        widths = [max(width, text_width(cell)) for width, cell in zip(widths, row, strict=True)]
    return widths


def format_rows(
    rows: Sequence[Sequence[str]], widths: Sequence[int], right: Collection[int] = ()
) -> Iterator[str]:
    """Yield the rows as lines; columns are two spaces apart.

    Args:
        right: Indexes of the columns that are aligned to the right.
    """
    for row in rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padding = " " * (width - text_width(cell))
            cells.append(padding + cell if index in right else cell + padding)
        yield _GAP.join(cells).rstrip()


def fit_widths(widths: Sequence[int], widest: int, width: int) -> list[int]:
    """Return column widths that fit into a line of `width`; only column `widest` is changed.

    It takes all that the others leave over, so the table is as wide as the line.
    """
    others = sum(widths) - widths[widest] + len(_GAP) * (len(widths) - 1)
    fitted = list(widths)
    fitted[widest] = max(width - others, 1)
    return fitted


def truncate(text: str, width: int) -> str:
    """Return `text` cut to `width`, with an ellipsis at its end if something is left out."""
    if text_width(text) <= width:
        return text
    kept, used = [], text_width(_ELLIPSIS)
    for character in text:
        used += text_width(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept) + (_ELLIPSIS if width > 0 else "")


def shorten(text: str, width: int) -> str:
    """Return `text` cut to `width`, with an ellipsis in its middle if something is left out.

    Names often differ at their end, and begin with what they are.
    """
    if text_width(text) <= width:
        return text
    end, room = "", (width - text_width(_ELLIPSIS)) // 2
    for character in reversed(text):
        if text_width(character + end) > room:
            break
        end = character + end
    return truncate(text, width - text_width(end)) + end


def wrap(text: str, width: int) -> list[str]:
    """Return `text` as lines, broken at spaces and behind commas; a longer word is a line."""
    lines = [""]
    for word in re.findall(r"[^\s,]*,+|[^\s,]+|\s+", text):
        if text_width((lines[-1] + word).rstrip()) <= width or not lines[-1]:
            lines[-1] += word
        else:
            lines.append(word.lstrip())
    return [line.rstrip() for line in lines if line.strip()]


def text_width(text: str) -> int:
    """Return how many columns of a terminal a text takes; wide East Asian characters take two."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF")
        for one in text
    )
