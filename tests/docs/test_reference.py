"""The documentation site and its API reference.

Goal: the site builds without a warning, and the reference is complete.
Method: the site is built as by `make docs`. Each public name is in it and has a docstring, each
setting is documented, and each error that a docstring names exists.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import batonmq
from batonmq import errors
from tools.docs.pages import ROOT
from tools.docs.site import build, documented_modules, public_names

NAMES = [
    (module, name)
    for module in documented_modules()
    for name in public_names(module)
    if not inspect.ismodule(getattr(importlib.import_module(module), name))
]
SETTINGS = ("ConsumerSettings", "ProducerSettings", "PullerSettings", "ClusterOptions")
FURTHER = {"ChannelError", "ClusterDirInUse"}
"""Errors in docstrings that are neither public names nor built into Python."""


def documented(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield a public name, its methods and its properties, each with its docstring."""
    value = getattr(importlib.import_module(module), name)
    yield name, inspect.getdoc(value) or ""
    if not isinstance(value, type):
        return
    for part, member in vars(value).items():
        if not part.startswith("_") and (
            inspect.isfunction(member) or isinstance(member, property)
        ):
            yield f"{name}.{part}", inspect.getdoc(member) or ""


def attributes(docstring: str) -> set[str]:
    """Return the names in the section `Attributes`."""
    _, _, section = docstring.partition("Attributes:\n")
    section = re.split(r"^\w", section, maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"^    (\w+):", section, re.MULTILINE))


def raised(docstring: str) -> list[str]:
    """Return the names in the section `Raises`."""
    section = re.split(r"^Raises[a-z ]*:\n", docstring, maxsplit=1, flags=re.MULTILINE)[1:]
    lines = re.findall(r"^    ([A-Z][\w, ]*):", "".join(section), re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


@pytest.mark.timeout(300)  # it imports and renders everything: 30 s, and more on a busy machine
def test_site_builds_without_a_warning_and_has_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.docs.site", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = documented_modules()
    for module, name in NAMES:
        page = tmp_path / pages[module].relative_to(ROOT / "docs").with_suffix(".html")
        assert f'id="{module}.{name}"' in page.read_text(), f"{module}.{name}"


def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nothing](nothing.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nstrict: true\n")
    assert build(tmp_path / "site", tmp_path / "mkdocs.yml") != 0


def test_every_public_name_has_a_docstring() -> None:
    undocumented = [part for each in NAMES for part, text in documented(*each) if not text]
    assert undocumented == []


@pytest.mark.parametrize(("module", "name"), [n for n in NAMES if n[1] in SETTINGS])
def test_every_setting_of_the_library_is_documented(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    fields = {field.name for field in dataclasses.fields(kind)}
    assert attributes(inspect.getdoc(kind) or "") == fields


def test_every_documented_error_exists() -> None:
    known = {*(name for _, name in NAMES), *vars(errors), *dir(builtins), *FURTHER}
    documented_errors = {
        (part, error)
        for each in NAMES
        for part, text in documented(*each)
        for error in raised(text)
    }
    assert ("Consumer", "SubscriptionConflict") in documented_errors
    assert {(part, error) for part, error in documented_errors if error not in known} == set()


def test_public_names_exist_for_programs_and_for_type_checkers() -> None:
    """`__all__`, the names loaded on use and the imports for type checkers are the same."""
    (checked,) = [
        node
        for node in ast.parse(Path(inspect.getfile(batonmq)).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.name for node in imports for alias in node.names) == batonmq.__all__
    assert all(getattr(batonmq, name) is not None for name in batonmq.__all__)
