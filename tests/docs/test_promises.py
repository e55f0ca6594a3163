"""Each promise of README leads to its code and its tests in two hops.

Goal: README's promises and the table in docs/explanation/testing.md are the same list; each row
names code that exists and tests that exist.
Method: the rows of both tables; the functions that a test file defines.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.docs.pages import ROOT

PAGE = ROOT / "docs" / "explanation" / "testing.md"


def rows(page: Path) -> dict[str, str]:
    """Return the rows of the section `Promises` by their number, such as P1."""
    _, _, section = page.read_text().partition("\n## Promises\n")
    table_rows = re.findall(r"^\| (P\d+) \|(.*)\|$", section.partition("\n## ")[0], re.MULTILINE)
    return dict(table_rows)


def functions(path: Path) -> set[str]:
    """Return the names of all functions of a test file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_every_promise_has_a_row_and_every_row_a_promise() -> None:
    promises = rows(ROOT / "README.md")
    assert len(promises) >= 8
    assert promises.keys() == rows(PAGE).keys()
    assert "docs/explanation/testing.md#promises" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("number", rows(PAGE))
def test_promise_names_code_and_tests_that_exist(number: str) -> None:
    _, code, tests = rows(PAGE)[number].split("|")
    files = re.findall(r"`([\w/.]+\.py)`", code)
    named = re.findall(r"`([\w/.]+\.py)::(\w+)`", tests)
    assert files
    assert len(named) >= 2
    assert [file for file in files if not (ROOT / file).is_file()] == []
    missing = [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)]
    assert missing == []
