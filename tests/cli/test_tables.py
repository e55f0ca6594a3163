"""Goal: on a terminal of 80 or 100 columns every table of `baton` fits, and no name is folded.

Method: find the tables in the modules of the commands, and render each with long names and large
numbers. A value without a sample fails the test with its key.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest

import batonmq.cli
import batonmq_server.cli
from batonmq._core.queues import QueueRef
from batonmq.cli import output
from batonmq.cli.output import Columns, Minor, Output, OutputFormat, Prose
from batonmq.cli.text_table import text_width

NAME = "a-long-name-of-the-kind-that-tools-generate-0123456789"
NUMBER = 123_456_789_012
SENTENCE = f"the member {NAME} has not acknowledged message 41 for 7 minutes: restart {NAME}"
_NUMBERS = re.compile(
    r"(^|_)(count|offset|ms|bytes|position|token|lag|epoch|generation|queue_id|topic_id|pid|percent|s"
    r"|seconds|attempts|in_flight|connections|topics|groups|full)$"
)
_SENTENCES = ("message", "remedy", "error", "meaning", "detail", "reason", "text", "body")
_LISTS: dict[str, Any] = {
    "members": [{}] * 3,
    "subscriptions": [{"topic": NAME, "expression": "*"}] * 2,
    "waiters": [NAME] * 2,
    "keys": [NAME] * 2,
    "group_names": [NAME] * 2,
    "steps": [{"replayed_count": NUMBER, "skipped_count": NUMBER}],
    "scopes": [{"role": "consumer", "resource": f"topic:{NAME}"}],
    "queue_counts": {NAME: 8},
    "writable_counts": {NAME: 8},
    "evidence": {"owner": NAME, "offset": "41"},
    "pause": None,
    "staged": None,
    "default": None,
    "queue": QueueRef(NAME, NAME, 7),
    "latency_ms": {"p50": 1.5, "p95": 2.5, "p99": 3.5, "p99.9": 4.5, "max": 5.5},
}


class LongItem(dict[str, Any]):
    """An item that has a long value for every key."""

    def __missing__(self, key: str) -> Any:
        if key in _LISTS:
            return _LISTS[key]
        if key in _SENTENCES:
            return SENTENCE
        if key == "queues":
            return [LongItem()] * 3
        if key == "incarnation_id":
            return 2**64 - 1
        return NUMBER if _NUMBERS.search(key) else NAME

    def get(self, key: str, default: Any = None) -> Any:
        """Return a long value, too."""
        return self[key]


def _tables() -> Iterator[tuple[str, Columns]]:
    """Yield the columns that commands print, by module and name."""
    for package in (batonmq.cli, batonmq_server.cli):
        for info in pkgutil.iter_modules(package.__path__):
            if info.name == "__main__":
                continue
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            for name, value in vars(module).items():
                if isinstance(value, dict) and value and all(map(_is_column, value.items())):
                    yield f"{info.name}.{name}", value


def _is_column(column: tuple[object, object]) -> bool:
    key, cell = column
    heading = isinstance(key, str) and key == key.upper() and key[:1].isalnum()
    return heading and (callable(cell) or isinstance(cell, str | Minor | Prose))


TABLES = dict(_tables())


def test_tables_are_found() -> None:
    assert {"group._QUEUE_COLUMNS", "lock._COLUMNS", "up._COLUMNS", "dlq._LETTERS"} <= TABLES.keys()
    assert len(TABLES) > 35


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("form", [OutputFormat.TABLE, OutputFormat.WIDE])
def test_table_fits_the_terminal_and_folds_no_name(
    name: str,
    width: int,
    form: OutputFormat,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns = TABLES[name]
    if form is OutputFormat.WIDE:  # with the further columns that the module may have
        more = {k: v for n, t in TABLES.items() if _pair(n, name) for k, v in t.items()}
        columns = {**columns, **more}
    monkeypatch.setattr(output, "terminal_width", lambda: None)
    Output(OutputFormat.TABLE).items([LongItem()], columns)
    heading, row = capsys.readouterr().out.splitlines()
    words = {*re.split(r"\s+", heading), *re.split(r"[\s,]+", row)}
    monkeypatch.setattr(output, "terminal_width", lambda: width)
    Output(form).items([LongItem()], columns)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(text_width, lines)) <= width, lines
    for line in takewhile(lambda line: not line.startswith(output.CUTS), lines):
        for word in filter(None, re.split(r"[\s,]+", line)):
            is_known = word in words or "…" in word or word.rstrip(":").upper() in words
            assert is_known, (word, line)


def _pair(other: str, name: str) -> bool:
    """Whether `other` has further columns for the table `name`."""
    return other.partition(".")[0] == name.partition(".")[0] and "MORE" in other


def test_table_of_a_pipe_is_as_wide_as_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    Output(OutputFormat.TABLE).items([LongItem()], TABLES["group._QUEUE_COLUMNS"])
    heading, row = capsys.readouterr().out.splitlines()
    assert row.count(NAME) == 8
    assert len(heading.split()) == len(TABLES["group._QUEUE_COLUMNS"])


def test_left_out_columns_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    Output(OutputFormat.TABLE).items([LongItem()], {"GROUP": "group", "HOST": Minor("host")})
    assert capsys.readouterr().out.splitlines()[-1] == "left out: HOST (see --format wide)"
