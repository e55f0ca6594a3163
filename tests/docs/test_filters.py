"""Goal: the forms, the limits and the truth tables in docs/reference/filters.md are correct.

Method: the tables of the page are compared with the code.
"""

from __future__ import annotations

import re

import pytest

from batonmq._core.sql_parser import CONDITIONS_MAX
from batonmq._core.subscription import EXPRESSION_CHARACTERS_MAX, parse_filter
from batonmq_server.storage.core.property_filter import BYTES_PER_STEP, STEPS_MAX, STEPS_PER_BATCH
from batonmq_server.storage.core.queue_reader import SCANNED_MAX
from tools.docs.pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "filters.md").read_text()
VALUES = {"true": "a = 1", "false": "a = 2", "unknown": "b = 1"}
"""Conditions with this value for a message whose only property is `a=1`."""


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    _, _, rest = PAGE.partition(f"## {heading}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


FORMS = [
    form
    for cell, *_ in rows("Conditions")
    for form in re.findall(r"`([^`]+)`", cell)
    if re.match(r"[a-z] |TRUE|FALSE", form)
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_parsed(form: str) -> None:
    assert parse_filter(f"sql: {form}").canonical() == f"sql: {form}"


def test_table_has_forms() -> None:
    assert len(FORMS) > 12


LIMITS = (
    EXPRESSION_CHARACTERS_MAX, CONDITIONS_MAX, STEPS_MAX, SCANNED_MAX, BYTES_PER_STEP,
    STEPS_PER_BATCH,
)  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_are_those_of_the_code(limit: int) -> None:
    text = " ".join(cell for row in rows("Evaluation and cost") for cell in row)
    assert re.search(rf"\b{limit:,}\b", text)


def _value(condition: str) -> str:
    value, opposite = (
        parse_filter(f"sql: {text}").accepts("", (), {"a": "1"})
        for text in (condition, f"NOT ({condition})")
    )
    return "true" if value else "false" if opposite else "unknown"


@pytest.mark.parametrize("word", ["AND", "OR"])
def test_truth_tables_are_those_of_the_code(word: str) -> None:
    table = rows("True, false, unknown")
    assert len(table) == 3
    for one, *answers in table:
        left = VALUES[one.strip("*")]
        begin = 0 if word == "AND" else 3
        documented = answers[begin : begin + 3]
        assert documented == [_value(f"{left} {word} {VALUES[other]}") for other in VALUES]
        assert answers[6] == _value(f"NOT {left}")
