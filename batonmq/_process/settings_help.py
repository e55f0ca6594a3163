"""Description of the settings of a process: meaning, default, value, and source of the value."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from batonmq._process.config import ConfigError, ConfigProblem, Settings, load, read_raw_settings


@dataclass(frozen=True, slots=True)
class SettingHelp:
    """One setting of a process.

    Attributes:
        default: The default, as a user types it; None if the setting is required.
        allowed: The allowed values, in Markdown; empty for any.
        value: The current value as it was typed, even if it is invalid; None if it is missing.
        source: `default`, `environment`, or the path of the file; empty if the value is missing.
    """

    name: str
    variable: str
    unit: str
    default: str | None
    allowed: str
    meaning: str
    value: str | None
    source: str


def settings_help(
    kind: type[Settings], prefix: str, env: Mapping[str, str] | None = None
) -> tuple[tuple[SettingHelp, ...], tuple[ConfigProblem, ...]]:
    """Return a description of every setting of `kind`, and the errors in the configuration.

    Args:
        env: The environment; that of the process if None.
    """
    problems: tuple[ConfigProblem, ...] = ()
    by_env: Mapping[str, object] = {}
    by_file: Mapping[str, object] = {}
    path = ""
    try:
        raw = read_raw_settings(prefix, env)
        by_env, by_file, path = raw.by_env, raw.by_file, raw.path
        load(kind, prefix, env)
    except ConfigError as error:
        problems = error.problems
    texts, settings = meanings(kind), []
    for name, field in kind.model_fields.items():
        value, source = default_of(field), "default"
        if name in by_env:
            value, source = str(by_env[name]), "environment"
        elif name in by_file:
            value, source = str(by_file[name]), path
        elif value is None:
            source = ""
        settings.append(
            SettingHelp(
                name=name,
                variable=f"{prefix}_{name.upper()}",
                unit=unit_of(name, field),
                default=default_of(field),
                allowed=allowed_of(field),
                meaning=texts[name],
                value=value,
                source=source,
            )
        )
    return tuple(settings), problems


def meanings(kind: type[Settings]) -> dict[str, str]:
    """Return the meaning of each setting: the docstring below its field, on one line."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not issubclass(cls, Settings):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts


def unit_of(name: str, field: FieldInfo) -> str:
    """Return the unit of a setting, or the kind of its value if it has no unit."""
    units = {
        "bytes_per_s": "bytes/s",
        "_per_s": "1/s",
        "_ms": "ms",
        "_s": "s",
        "bytes": "bytes",
        "_percent": "%",
        "port": "port",
    }
    for part, unit in units.items():
        if name.endswith(part) or f"{part}_" in name:
            return unit
    kinds = {bool: "true or false", int: "count", float: "number", Path: "path"}
    return kinds.get(field.annotation, "text") if isinstance(field.annotation, type) else "text"


def default_of(field: FieldInfo) -> str | None:
    """Return the default of a setting as a user types it; None if the setting is required."""
    if field.default is PydanticUndefined:
        return None
    value = field.default.value if isinstance(field.default, Enum) else field.default
    return str(value).lower() if isinstance(value, bool) else str(value)


def allowed_of(field: FieldInfo) -> str:
    """Return the allowed values of a setting, in Markdown; empty for any."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    limits = {
        limit: getattr(rule, limit)
        for rule in field.metadata
        for limit in ("gt", "ge", "lt", "le", "pattern")
        if getattr(rule, limit, None) is not None
    }
    signs = {"gt": "> {:,}", "ge": "≥ {:,}", "lt": "< {:,}", "le": "≤ {:,}", "pattern": "`{}`"}
    return ", ".join(signs[limit].format(value) for limit, value in limits.items())
