"""The API reference, made from the docstrings: `make docs`, or `python -m tools.docs.reference`."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pdoc

from tools.docs.pages import ROOT

FOLDER = ROOT / "build" / "docs"
MODULES = (
    "batonmq",
    "batonmq.admin.admin",
    "batonmq.errors",
    "batonmq.admin.dead_letters",
    "batonmq.admin.group_reports",
    "batonmq.idempotence",
    "batonmq_server.local.cluster",
    "batonmq_server.local.layout",
    "batonmq.admin.locks",
    "batonmq.admin.operation",
    "batonmq.admin.query",
    "batonmq.admin.reports",
    "batonmq.admin.resets",
    "batonmq_server.testing",
)
"""What programs import."""


def public_names(module: str) -> list[str]:
    """Its `__all__`, or else the classes that it defines."""
    found = importlib.import_module(module)
    own = [
        name
        for name, value in vars(found).items()
        if isinstance(value, type) and value.__module__ == module and not name.startswith("_")
    ]
    return list(getattr(found, "__all__", own))


def build(folder: Path) -> None:
    """Write the pages into `folder`; what pdoc would warn of is an error."""
    for module in MODULES:
        _resolve(importlib.import_module(module), public_names(module))
    pdoc.render.configure(docformat="google", show_source=False)
    others = [f"!{MODULES[0]}\\..*", *MODULES[1:]]
    with warnings.catch_warnings(action="error"):
        pdoc.pdoc(MODULES[0], *others, output_directory=folder)


def _resolve(module: ModuleType, names: list[str]) -> None:
    """Do what pdoc does not: ask for names that are loaded when used, and know named tuples."""
    vars(module)["__all__"] = names
    for name in names:
        value = vars(module)[name] = getattr(module, name)
        if isinstance(value, type) and hasattr(value, "_fields"):
            value.__new__.__annotations__ = get_type_hints(value)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
