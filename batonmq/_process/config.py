"""Settings of a process: a frozen model, read once from a file and the environment.

A setting `port` of the service `storage` is `BATON_STORAGE_PORT` in the environment and `port`
in the TOML file that `BATON_STORAGE_CONFIG_FILE` names. The environment wins. A name that is
not known, in either place, is an error: a misspelt setting never silently does nothing.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batonmq._process.logs import LogFormat


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """What is wrong with a configuration.

    Attributes:
        place: The variable, or the file and the name in it.
        text: A sentence that has the place, too.
    """

    place: str
    text: str


class ConfigError(Exception):
    """File and environment do not describe a valid configuration."""

    def __init__(self, *problems: ConfigProblem) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class RawSettings:
    """What stands in the environment and in the file it names; nothing is checked yet.

    Attributes:
        path: The file; empty if none is named.
    """

    by_env: Mapping[str, str]
    by_file: Mapping[str, object]
    path: str


class Settings(BaseModel):
    """Base of every service's settings. A field's name ends in its unit."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    log_level: str = Field("INFO", pattern=r"^(?i:debug|info|warning|error|critical)$")
    """Lowest level that is logged."""
    log_format: LogFormat = "auto"
    """`json`, `text`, or `auto`: text on a terminal, JSON elsewhere."""


S = TypeVar("S", bound=Settings)


def load(kind: type[S], prefix: str, env: Mapping[str, str] | None = None) -> S:
    """Settings of `kind` from `<prefix>_CONFIG_FILE` and `<prefix>_*`.

    Args:
        env: The environment; the process's if not given.

    Raises:
        ConfigError: a name is unknown, a value does not parse, one is missing, or the file can't
            be read.
    """
    found = read_raw_settings(prefix, env)
    known = set(kind.model_fields)
    problems = [
        ConfigProblem(f"{found.path}: {name}", f"{found.path}: unknown setting {name}")
        for name in sorted(found.by_file.keys() - known)
    ]
    variables = [f"{prefix}_{name.upper()}" for name in sorted(found.by_env.keys() - known)]
    problems += [ConfigProblem(variable, f"unknown variable {variable}") for variable in variables]
    values = {k: v for k, v in {**found.by_file, **found.by_env}.items() if k in known}
    try:
        settings = kind(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        for wrong in error.errors():
            place = "_".join([prefix, *map(str, wrong["loc"])]).upper()
            problems.append(ConfigProblem(place, f"{place}: {wrong['msg']}"))
        raise ConfigError(*problems) from error
    if problems:
        raise ConfigError(*problems)
    return settings


def read_raw_settings(prefix: str, env: Mapping[str, str] | None = None) -> RawSettings:
    """What `<prefix>_CONFIG_FILE` and `<prefix>_*` say, in lower case and without the prefix.

    Raises:
        ConfigError: the file can't be read.
    """
    env = os.environ if env is None else env  # noqa: TID251  the one place that reads it
    start = f"{prefix}_"
    by_env = {k[len(start) :].lower(): v for k, v in env.items() if k.startswith(start)}
    path = by_env.pop("config_file", "")
    try:
        by_file = tomllib.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError) as error:  # no such file, no UTF-8, no TOML
        place = f"{start}CONFIG_FILE"
        raise ConfigError(ConfigProblem(place, f"{place}={path}: {error}")) from error
    return RawSettings(by_env, by_file, path)
