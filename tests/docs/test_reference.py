"""The documentation site and its API reference.

Goal: the site builds without a warning, and the reference has what a program needs to know.
Method: `make docs` builds it; then each public name is there and has a docstring, each setting is
documented, and each error that a docstring names exists.
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
FURTHER = {"ClusterDirInUse"}
"""What is raised, and is no public name, nor one of Python."""


def documented(module: str, name: str) -> Iterator[tuple[str, str]]:
    """The value of a public name, its methods and properties, each with its docstring."""
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
    """Names that its section of attributes tells."""
    _, _, section = docstring.partition("Attributes:\n")
    section = re.split(r"^\w", section, maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"^    (\w+):", section, re.MULTILINE))


def raised(docstring: str) -> list[str]:
    """Names that its section of errors tells."""
    section = re.split(r"^Raises[a-z ]*:\n", docstring, maxsplit=1, flags=re.MULTILINE)[1:]
    lines = re.findall(r"^    ([A-Z][\w, ]*):", "".join(section), re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def test_the_site_is_built_without_a_warning_and_has_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.docs.site", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = documented_modules()
    for module, name in NAMES:
        page = tmp_path / pages[module].relative_to(ROOT / "docs").with_suffix(".html")
        assert f'id="{module}.{name}"' in page.read_text(), f"{module}.{name}"


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nothing](nothing.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nstrict: true\n")
    assert build(tmp_path / "site", tmp_path / "mkdocs.yml") != 0


def test_every_public_name_has_a_docstring() -> None:
    bare = [part for each in NAMES for part, text in documented(*each) if not text]
    assert bare == []


@pytest.mark.parametrize(("module", "name"), [n for n in NAMES if n[1] in SETTINGS])
def test_every_setting_of_the_library_is_told(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    fields = {field.name for field in dataclasses.fields(kind)}
    assert attributes(inspect.getdoc(kind) or "") == fields


def test_every_error_that_is_told_exists() -> None:
    known = {*(name for _, name in NAMES), *vars(errors), *dir(builtins), *FURTHER}
    told = {
        (part, error)
        for each in NAMES
        for part, text in documented(*each)
        for error in raised(text)
    }
    assert ("Consumer", "SubscriptionConflict") in told
    assert {(part, error) for part, error in told if error not in known} == set()


def test_what_the_package_offers_is_typed_and_there() -> None:
    """`__all__`, what is loaded when used, and what type checkers see are the same names."""
    (checked,) = [
        node
        for node in ast.parse(Path(inspect.getfile(batonmq)).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.name for node in imports for alias in node.names) == batonmq.__all__
    assert all(getattr(batonmq, name) is not None for name in batonmq.__all__)
