"""Output of commands: tables or JSON on standard output, failures on standard error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from textwrap import indent
from typing import Any

from click.exceptions import Exit

from batonmq.cli.progress import ProgressLine
from batonmq.cli.table_layout import ColumnKind, TableLayout
from batonmq.cli.text_table import wrap
from batonmq.errors import BatonError

Item = Mapping[str, Any]
Cell = str | Callable[[Item], object]
"""The key of an item, or a function that returns the cell of an item."""


@dataclass(frozen=True, slots=True)
class Minor:
    """A column that a table leaves out first if the terminal is too narrow."""

    cell: Cell


@dataclass(frozen=True, slots=True)
class Prose:
    """A column of sentences; they move below their rows if the terminal is too narrow."""

    cell: Cell


Columns = Mapping[str, Cell | Minor | Prose]
"""Heading to cell."""
_NONE: Columns = {}
_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"
CUTS = "left out:"
"""Start of the remark below a table that did not fit."""
_KINDS = {Minor: ColumnKind.MINOR, Prose: ColumnKind.PROSE}


class OutputFormat(StrEnum):
    """What commands print."""

    TABLE = "table"
    """Tables and text, for people."""
    JSON = "json"
    """JSON, for programs."""
    WIDE = "wide"
    """Tables with more columns."""


class Output:
    """Prints results in one format. JSON has every key of an item; a table shows some of them."""

    def __init__(self, form: OutputFormat) -> None:
        self.form = form

    def items(self, items: Sequence[Item], columns: Columns, more: Columns = _NONE) -> None:
        """Print a list: a table, which has the columns `more` if it is wide, or a JSON array."""
        if self.form is OutputFormat.JSON:
            self._print(json.dumps(list(items), indent=2))
            return
        columns = self._chosen(columns, more)
        layout = self._layout(columns)
        self._table(layout, _rows(items, columns))
        self._tell_cuts(layout)

    def further_items(self, items: Sequence[Item], columns: Columns, more: Columns = _NONE) -> None:
        """Print a second table below a result, unless it has no rows; JSON leaves it out."""
        if items and self.form is not OutputFormat.JSON:
            self.note("")
            self.items(items, columns, more)

    async def item_pages(
        self, pages: AsyncIterator[Sequence[Item]], columns: Columns, more: Columns = _NONE
    ) -> None:
        """Print a list like `items`, each page as it arrives; only one page is kept in memory.

        Columns are as wide as the widest cell so far, so those of a later page may be wider.
        """
        if self.form is OutputFormat.JSON:
            await _json_array(pages)
            return
        columns = self._chosen(columns, more)
        layout, empty = self._layout(columns), True
        async for page in pages:
            self._table(layout, _rows(page, columns))
            empty = False
        if empty:
            self._table(layout, [])
        self._tell_cuts(layout)

    def _chosen(self, columns: Columns, more: Columns) -> Columns:
        return {**columns, **more} if self.form is OutputFormat.WIDE else columns

    def _layout(self, columns: Columns) -> TableLayout:
        kinds = [_KINDS.get(type(column), ColumnKind.MAIN) for column in columns.values()]
        whole = self.form is OutputFormat.WIDE
        return TableLayout(list(columns), kinds, terminal_width(), whole=whole)

    def _table(self, layout: TableLayout, rows: Sequence[Sequence[str]]) -> None:
        bold = sys.stdout.isatty()
        lines = [
            f"{_BOLD}{line}{_NORMAL}" if bold and heading else line
            for line, heading in layout.lines(rows)
        ]
        if lines:
            self._print("\n".join(lines))

    def _tell_cuts(self, layout: TableLayout) -> None:
        """Print what the terminal has no room for."""
        text = ", ".join(layout.hidden)
        if layout.shortened:
            text = f"{text}, and parts of names" if text else "parts of names"
        if text:
            for line in wrap(f"{CUTS} {text} (see --format wide)", terminal_width() or len(text)):
                self.note(line)

    def detail(
        self, item: Item, parts: Sequence[Item], columns: Columns, more: Columns = _NONE
    ) -> None:
        """Print one thing that has parts: a table of the parts, or one JSON object of all."""
        if self.form is OutputFormat.JSON:
            self._print(json.dumps(item, indent=2))
        else:
            self.items(parts, columns, more)

    def problems(self, problems: Sequence[str]) -> None:
        """Print why an answer is incomplete or bad.

        Raises:
            Exit: there are problems; the exit status is 1.
        """
        for problem in problems:
            self.failure("INCOMPLETE", problem, "")
        if problems:
            raise Exit(1)

    def line(self, item: Item, text: str) -> None:
        """Print one result of many at once, as a line of text or as a line of JSON."""
        self._print(json.dumps(item) if self.form is OutputFormat.JSON else text)

    def note(self, text: str) -> None:
        """Print a remark beside the result; JSON leaves it out."""
        if self.form is not OutputFormat.JSON:
            self._print(_printable_lines(text))

    def error(self, error: BatonError) -> None:
        """Print a rejection or failure: its reason, its message and its remedy."""
        if self.form is not OutputFormat.JSON:
            self.failure(error.reason, error.message, error.remedy)
            for line in differences(error):
                print(f"  {_printable_lines(line)}", file=sys.stderr)
            return
        ProgressLine.erase()
        print(json.dumps({"error": described(error)}), file=sys.stderr)

    def failure(self, reason: str, message: str, remedy: str) -> None:
        """Print a failure that is not a `BatonError`."""
        ProgressLine.erase()
        if self.form is OutputFormat.JSON:
            failure = {"reason": reason, "message": message, "remedy": remedy}
            print(json.dumps({"error": failure}), file=sys.stderr)
        else:
            print(f"error: {reason}: {_printable_lines(message)}", file=sys.stderr)
            if remedy:
                print(f"  {_printable_lines(remedy)}", file=sys.stderr)

    @staticmethod
    def _print(text: str) -> None:
        ProgressLine.erase()
        print(text, flush=True)


def terminal_width() -> int | None:
    """Return the width of the terminal; None if standard output is none: any line fits then."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def described(error: BatonError) -> dict[str, Any]:
    """Return every field of an error, for JSON."""
    return {
        "reason": error.reason,
        "message": error.message,
        "remedy": error.remedy,
        "retry": error.retry.value,
        "retry_after_ms": error.retry_after_ms,
        "facts": error.facts,
        "differences": [
            {slot: getattr(d, slot) for slot in type(d).__slots__} for d in error.differences
        ],
    }


def differences(error: BatonError) -> list[str]:
    """Return one line for each setting on which two members of a group differ."""
    return [
        f"{d.topic} {d.setting}: {d.newcomer_client_id} has "
        f"{d.newcomer_value!r}, {d.member_client_id} has {d.member_value!r}"
        for d in error.differences
    ]


def printable(text: str) -> str:
    """Return `text` with control characters escaped, so that a terminal does not obey them."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def wall_time(unix_ms: int) -> str:
    """Return a wall time as text, in UTC, to the millisecond."""
    stamp = datetime.fromtimestamp(unix_ms / 1000, UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.") + f"{unix_ms % 1000:03d}Z"


def duration(milliseconds: int) -> str:
    """Return a duration as text, in its two largest units."""
    seconds = max(milliseconds, 0) // 1000
    if seconds == 0:
        return f"{max(milliseconds, 0)}ms"
    parts = [(seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m")]
    texts = [f"{count}{unit}" for count, unit in [*parts, (seconds % 60, "s")] if count]
    return "".join(texts[:2])


def seconds(milliseconds: int | None) -> str | None:
    """Return a duration in seconds as text, to the millisecond."""
    return None if milliseconds is None else f"{milliseconds / 1000:.3f}"


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: 1 queue, 2 queues."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


async def _json_array(pages: AsyncIterator[Sequence[Item]]) -> None:
    """Print what `json.dumps(items, indent=2)` returns, page by page."""
    lead = "["
    async for page in pages:
        for item in page:
            print(f"{lead}\n{indent(json.dumps(item, indent=2), '  ')}", end="")
            lead = ","
    print("[]" if lead == "[" else "\n]", flush=True)


def _rows(items: Sequence[Item], columns: Columns) -> list[list[str]]:
    """Return the cells of a table."""
    return [[printable(_cell(item, column)) for column in columns.values()] for item in items]


def _cell(item: Item, column: Cell | Minor | Prose) -> str:
    if isinstance(column, Minor | Prose):
        column = column.cell
    value = item[column] if isinstance(column, str) else column(item)
    return "-" if value is None or value == "" else str(value)
