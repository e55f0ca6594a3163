"""Goal: no error object is raised twice, which would leak memory.

A raised error refers to the frames it has passed and to all of their variables. A module-level
error that is raised for every call would collect them all.
Method: the names of all modules but entry points are checked.
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
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                yield importlib.import_module(module.name)


def test_no_module_has_an_error_as_a_constant() -> None:
    kept = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, BaseException)
    ]
    assert kept == []
