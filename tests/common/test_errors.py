"""Goal: errors can be raised for ever.

An error that is raised keeps the frames it has passed, and those keep everything. So none may be
kept to be raised again: a standby that refused calls with the same one grew with each of them.
Method: all modules but entry points are looked through.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import batonmq
import batonmq_server


def modules() -> Iterator[ModuleType]:
    for package in (batonmq, batonmq_server):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)


def test_no_module_keeps_an_error_to_raise_it_again() -> None:
    kept = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, BaseException)
    ]
    assert kept == []
