"""Goal: the public names are stated once and documented, and load no package for services only.

Method: the names in `__all__` are loaded; a fresh interpreter imports them with these packages
hidden.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args, get_origin, get_type_hints

import pytest

import batonmq
import batonmq.admin
import batonmq.errors
import batonmq.idempotence
import batonmq.schemas

PACKAGES = [batonmq, batonmq.admin, batonmq.idempotence, batonmq.schemas]
PUBLIC_MODULES = {
    "batonmq.admin",
    "batonmq.cli",
    "batonmq.errors",
    "batonmq.idempotence",
    "batonmq.kombu",
    "batonmq.schemas",
}
API_PAGES = Path(__file__).parents[2] / "docs" / "reference" / "api"
NOT_FOR_CLIENTS = (
    "amqp",
    "celery",
    "fastavro",
    "google_crc32c",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "kombu",
    "numpy",
    "opentelemetry",
    "pandas",
    "prometheus_client",
    "pyarrow",
    "pydantic",
    "rich",
    "structlog",
    "typer",
    "yaml",
    "zstandard",
)
"""Packages that a client works without."""
FOR_SERVICES = ("batonmq._columns", "batonmq._process")
"""Packages of the library that need more."""
NOT_AT_IMPORT = {
    "backports.zstd",
    "baton.metrics",
    "baton.nameserver.v1.access_service_pb2",
    "baton.offsets.v1.replication_service_pb2",
    "baton.storage.v1.replication_service_pb2",
    "batonmq._core.codecs",
    "batonmq._core.sql",
    "batonmq._core.sql_parser",
    "batonmq._telemetry.event_hub",
    "batonmq.admin",
    "batonmq.cli",
    "click",
    "compression.zstd",
    "crc32c",
    "email",
    "importlib.metadata",
    "lark",
    "lz4",
    "numpy",
    "prometheus_client",
    "pydantic",
    "secrets",
    "structlog",
    "zipfile",
}
"""Modules that a producer and a consumer import when they need them, not when they are imported."""
IMPORT_CLIENTS = """
import sys
before = set(sys.modules)
from batonmq import Consumer, Producer
print(*sorted(set(sys.modules) - before))
"""
IMPORT_ALL = """
import importlib, pkgutil, sys
hidden = set(sys.argv[1].split())
class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hider())
import batonmq
for package in ("batonmq", "batonmq.admin", "batonmq.idempotence", "batonmq.schemas"):
    module = importlib.import_module(package)
    for name in module.__all__:
        try:
            getattr(module, name)
        except ImportError as error:
            assert package in ("batonmq.idempotence", "batonmq.schemas"), error
for found in pkgutil.walk_packages(batonmq.__path__, "batonmq."):
    parts = found.name.split(".")
    if parts[-1] != "__main__" and not found.name.startswith(tuple(sys.argv[2].split())):
        importlib.import_module(found.name)
print(sorted(hidden & {name.partition(".")[0] for name in sys.modules}))
"""


def imports_for_type_checkers(module: ModuleType) -> dict[str, str]:
    """Return the names that a package imports below `if TYPE_CHECKING`, with their modules."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def classes_in(hint: object) -> Iterator[type]:
    """Return the classes of the library in a type hint."""
    for part in (hint, get_origin(hint)):
        if isinstance(part, type) and part.__module__.startswith("batonmq"):
            yield part
    for argument in get_args(hint):
        yield from classes_in(argument)


class _NotInstalled(type):
    """Make a class whose every attribute is the class itself, as of a package of types."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _AnyType(metaclass=_NotInstalled):
    """A package or class that is not installed, in an annotation."""


class _Names(dict[str, object]):
    """Names for annotations; a package that is not installed has any name."""

    def __init__(self, names: Mapping[str, object], module: str) -> None:
        super().__init__(names)
        self._module = vars(sys.modules[module]) | vars(builtins)

    def __missing__(self, name: str) -> object:
        if name.startswith("__"):
            raise KeyError(name)
        return self._module.get(name, _AnyType)


@cache
def names_of_types(module: str) -> dict[str, object]:
    """Return what a module imports for type checkers only; packages of extras may be missing."""
    found: dict[str, object] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in ast.walk(node):
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    with suppress(ModuleNotFoundError):
                        exec(ast.unparse(statement), found)
    return found


def classes_of_signature(member: object) -> Iterator[type]:
    """Return the classes of the library in the signature of a function or property."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if inspect.isfunction(member):
        names = _Names(names_of_types(member.__module__), member.__module__)
        for hint in get_type_hints(member, localns=names).values():
            yield from classes_in(hint)


def classes_beside(cls: type) -> Iterator[type]:
    """Return the classes of the library in the fields and public methods of a class."""
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            if field.name.startswith("_"):
                continue
            yield from classes_in(get_type_hints(cls)[field.name])
    for name in dir(cls):
        if not name.startswith("_"):
            yield from classes_of_signature(inspect.getattr_static(cls, name))


def reachable_classes(values: list[object]) -> set[type]:
    """Return the classes of the library that these values return or accept, directly or not."""
    classes: set[type] = set()
    waiting = [value for value in values if isinstance(value, type)]
    for value in values:
        waiting += classes_of_signature(value)
    while waiting:
        cls = waiting.pop()
        if cls not in classes:
            classes.add(cls)
            waiting += classes_beside(cls)
    return classes


@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__)
def test_public_names_are_the_same_for_programs_and_for_type_checkers(module: ModuleType) -> None:
    homes = dict(module._HOMES)
    typed = imports_for_type_checkers(module)
    if module is batonmq:
        assert typed.pop("errors") == "batonmq"
        assert set(module.__all__) == {*homes, "errors"}
    else:
        assert set(module.__all__) == set(homes)
    assert typed == homes


@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    values = {name: getattr(module, name) for name in module.__all__}
    assert [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or callable(value)) and not inspect.getdoc(value)
    ] == []


@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__)
def test_every_class_that_a_public_name_accepts_or_returns_is_public(module: ModuleType) -> None:
    values = [getattr(module, name) for name in module.__all__]
    public = {getattr(package, name) for package in PACKAGES for name in package.__all__}
    assert (
        sorted(
            f"{cls.__module__}.{cls.__name__}"
            for cls in reachable_classes(values)
            if cls not in public and cls.__module__ != "batonmq.errors"
        )
        == []
    )


def test_every_module_of_administration_has_a_public_name() -> None:
    modules = {
        f"batonmq.admin.{module.name}" for module in pkgutil.iter_modules(batonmq.admin.__path__)
    }
    public = {name for name in modules if not name.startswith("batonmq.admin._")}
    assert public <= set(batonmq.admin._HOMES.values())


def test_api_pages_have_every_public_module() -> None:
    text = "".join(page.read_text() for page in API_PAGES.glob("*.md"))
    described = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    assert {"batonmq", *PUBLIC_MODULES} - {"batonmq.cli"} <= described


def test_api_page_of_administration_sorts_every_public_name() -> None:
    page = (API_PAGES / "admin.md").read_text()
    assert sorted(re.findall(r"\]\[batonmq\.admin\.(\w+)\]", page)) == sorted(batonmq.admin.__all__)


def test_every_error_has_a_docstring() -> None:
    classes = inspect.getmembers(batonmq.errors, inspect.isclass)
    assert [name for name, cls in classes if not cls.__doc__] == []


def test_public_methods_have_docstrings() -> None:
    classes = [
        value
        for module in PACKAGES
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name))
    ]
    assert [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(cls, name))
    ] == []


def test_every_module_is_public_or_has_an_underscore() -> None:
    names = {f"batonmq.{module.name}" for module in pkgutil.iter_modules(batonmq.__path__)}
    assert {name for name in names if not name.startswith("batonmq._")} == PUBLIC_MODULES


@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__)
def test_unknown_name_is_an_attribute_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


def test_client_works_without_packages_of_services_and_of_extras() -> None:
    """The extras of `batonmq.idempotence`, `.kombu` and `.schemas` may be missing."""
    program = [sys.executable, "-c", IMPORT_ALL, " ".join(NOT_FOR_CLIENTS)]
    extras = ("batonmq.idempotence.", "batonmq.kombu", "batonmq.schemas.")
    left_out = (*FOR_SERVICES, "batonmq.cli", *extras)
    done = subprocess.run(
        [*program, " ".join(left_out)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


def test_import_of_producer_and_consumer_is_small() -> None:
    command = [sys.executable, "-c", IMPORT_CLIENTS]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "batonmq._consumer.consumer" in imported
    assert sorted(NOT_AT_IMPORT & set(imported)) == []


def test_client_metrics_name_the_extra_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'batonmq\[prometheus\]'"):
        batonmq.ClientMetrics(None)  # type: ignore[arg-type]


def test_open_telemetry_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'batonmq\[opentelemetry\]'"):
        batonmq.OpenTelemetry()


def test_transport_of_kombu_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("amqp", "amqp.protocol"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "batonmq.kombu", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'batonmq\[celery\]'"):
        importlib.import_module("batonmq.kombu")
