"""How commands speak: tables or JSON on standard output, failures on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from textwrap import indent
from typing import Any

import click
from click.exceptions import Exit
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batonmq.errors import BatonError

Item = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Item], object]]
"""Heading to the key of an item, or to what makes the cell from the item."""
_NONE: Columns = {}


class OutputFormat(StrEnum):
    """What output is made for."""

    TABLE = "table"
    """People."""
    JSON = "json"
    """Programs."""
    WIDE = "wide"
    """People with room: more columns, and no line is folded."""


class Output:
    """Prints in one form. Items are the same in both; a table shows some of their keys."""

    def __init__(self, form: OutputFormat) -> None:
        self.form = form

    def items(self, items: Sequence[Item], columns: Columns, more: Columns = _NONE) -> None:
        """A list: a table, which has `more` columns if it is to be wide, or one JSON array."""
        if self.form is OutputFormat.JSON:
            print(json.dumps(list(items), indent=2), flush=True)
            return
        columns = {**columns, **more} if self.form is OutputFormat.WIDE else columns
        self._table(_rows(items, columns), list(columns))

    async def item_pages(
        self, pages: AsyncIterator[Sequence[Item]], columns: Columns, more: Columns = _NONE
    ) -> None:
        """Print a list like `items`, each page as it arrives; only one page is kept in memory.

        Columns are as wide as the widest cell so far, so those of a later page may be wider.
        """
        if self.form is OutputFormat.JSON:
            await _json_array(pages)
            return
        columns = {**columns, **more} if self.form is OutputFormat.WIDE else columns
        widths, header = [len(heading) for heading in columns], True
        async for page in pages:
            rows = _rows(page, columns)
            for row in rows:
                widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
            self._table(rows, list(columns), widths, header=header)
            header = False
        if header:
            self._table([], list(columns))

    def _table(
        self,
        rows: Sequence[Sequence[str]],
        headings: Sequence[str],
        widths: Sequence[int] = (),
        *,
        header: bool = True,
    ) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold", show_header=header)
        # Not a terminal: as wide as it needs to be, so that a program finds one row per line.
        folds = sys.stdout.isatty() and self.form is not OutputFormat.WIDE
        for index, heading in enumerate(headings):
            width = widths[index] if widths and not folds else None
            table.add_column(heading, overflow="fold", min_width=width)
        for row in rows:
            table.add_row(*map(Text, row))
        console = Console(width=None if folds else 10_000, highlight=False)
        with console.capture() as capture:
            console.print(table)
        print("\n".join(map(str.rstrip, capture.get().splitlines())), flush=True)

    def detail(
        self, item: Item, parts: Sequence[Item], columns: Columns, more: Columns = _NONE
    ) -> None:
        """One thing with parts: a table of the parts, or one JSON object of all."""
        if self.form is OutputFormat.JSON:
            print(json.dumps(item, indent=2), flush=True)
        else:
            self.items(parts, columns, more)

    def problems(self, problems: Sequence[str]) -> None:
        """What keeps an answer from being complete, or good: told, and the exit status is 1.

        Raises:
            Exit: There are problems.
        """
        for problem in problems:
            self.failure("INCOMPLETE", problem, "")
        if problems:
            raise Exit(1)

    def line(self, item: Item, text: str) -> None:
        """One of many: a line of text, or a line of JSON; out at once."""
        print(json.dumps(item) if self.form is OutputFormat.JSON else text, flush=True)

    def note(self, text: str) -> None:
        """Something a person wants to know beside the result; a program doesn't."""
        if self.form is not OutputFormat.JSON:
            print("\n".join(map(printable, text.split("\n"))), flush=True)

    def error(self, error: BatonError) -> None:
        """A refusal or failure: its reason, its sentence, its remedy."""
        if self.form is not OutputFormat.JSON:
            self.failure(error.reason, error.message, error.remedy)
            for line in differences(error):
                print(f"  {line}", file=sys.stderr)
            return
        print(json.dumps({"error": described(error)}), file=sys.stderr)

    def failure(self, reason: str, message: str, remedy: str) -> None:
        """A failure that did not come from a service."""
        if self.form is OutputFormat.JSON:
            failure = {"reason": reason, "message": message, "remedy": remedy}
            print(json.dumps({"error": failure}), file=sys.stderr)
        else:
            print(f"error: {reason}: {message}", file=sys.stderr)
            if remedy:
                print(f"  {remedy}", file=sys.stderr)


def described(error: BatonError) -> dict[str, Any]:
    """A refusal or failure for a program, with everything it carries."""
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
    """For people: on what two members of a group disagree, one line for each point."""
    return [
        f"{d.topic} {d.setting}: {d.newcomer_client_id} has "
        f"{d.newcomer_value!r}, {d.member_client_id} has {d.member_value!r}"
        for d in error.differences
    ]


def printable(text: str) -> str:
    """`text` without what a terminal would obey: control characters as escapes."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def wall_time(unix_ms: int) -> str:
    """A wall stamp for people, in UTC, to the millisecond."""
    stamp = datetime.fromtimestamp(unix_ms / 1000, UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.") + f"{unix_ms % 1000:03d}Z"


def duration(milliseconds: int) -> str:
    """A span for people: its two largest units."""
    seconds = max(milliseconds, 0) // 1000
    if seconds == 0:
        return f"{max(milliseconds, 0)}ms"
    parts = [(seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m")]
    shown = [f"{count}{unit}" for count, unit in [*parts, (seconds % 60, "s")] if count]
    return "".join(shown[:2])


def counted(number: int, noun: str) -> str:
    """A number of things for people: 1 queue, 2 queues."""
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


def _cell(item: Item, column: str | Callable[[Item], object]) -> str:
    value = item[column] if isinstance(column, str) else column(item)
    return "-" if value is None or value == "" else str(value)
