"""Output of commands: tables or JSON on standard output, failures on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from textwrap import indent
from typing import Any

from click.exceptions import Exit

from batonmq.cli.progress import ProgressLine
from batonmq.cli.text_table import column_widths, format_rows
from batonmq.errors import BatonError

Item = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Item], object]]
"""Heading to the key of an item, or to a function that returns the cell of an item."""
_NONE: Columns = {}
_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"


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
        rows = _rows(items, columns)
        self._table(rows, columns, column_widths(rows, _heading_widths(columns)))

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
        widths, header = _heading_widths(columns), True
        async for page in pages:
            rows = _rows(page, columns)
            widths = column_widths(rows, widths)
            self._table(rows, columns, widths, header=header)
            header = False
        if header:
            self._table([], columns, widths)

    def _chosen(self, columns: Columns, more: Columns) -> Columns:
        return {**columns, **more} if self.form is OutputFormat.WIDE else columns

    def _table(
        self,
        rows: Sequence[Sequence[str]],
        columns: Columns,
        widths: Sequence[int],
        *,
        header: bool = True,
    ) -> None:
        lines = list(format_rows(rows, widths))
        if header:
            (heading,) = format_rows([list(columns)], widths)
            bold = sys.stdout.isatty()
            lines.insert(0, f"{_BOLD}{heading}{_NORMAL}" if bold else heading)
        if lines:
            self._print("\n".join(lines))

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
            self._print("\n".join(map(printable, text.split("\n"))))

    def error(self, error: BatonError) -> None:
        """Print a rejection or failure: its reason, its message and its remedy."""
        if self.form is not OutputFormat.JSON:
            self.failure(error.reason, error.message, error.remedy)
            for line in differences(error):
                print(f"  {line}", file=sys.stderr)
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
            print(f"error: {reason}: {message}", file=sys.stderr)
            if remedy:
                print(f"  {remedy}", file=sys.stderr)

    @staticmethod
    def _print(text: str) -> None:
        ProgressLine.erase()
        print(text, flush=True)


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


def _heading_widths(columns: Columns) -> list[int]:
    return [len(heading) for heading in columns]


def _rows(items: Sequence[Item], columns: Columns) -> list[list[str]]:
    """Return the cells of a table."""
    return [[printable(_cell(item, column)) for column in columns.values()] for item in items]


def _cell(item: Item, column: str | Callable[[Item], object]) -> str:
    value = item[column] if isinstance(column, str) else column(item)
    return "-" if value is None or value == "" else str(value)
