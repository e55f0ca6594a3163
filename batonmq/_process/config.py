"""Settings of a process: a frozen model, read once from a file and the environment.

The setting `port` of the service `storage` is `BATON_STORAGE_PORT` in the environment, and `port`
in the TOML file that `BATON_STORAGE_CONFIG_FILE` names. The environment takes precedence. An
unknown name is an error in both, so that a misspelt setting is not ignored.
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
    """One error in a configuration.

    Attributes:
        source: The variable, or the file and the setting in it.
        text: The message; contains the source.
    """

    source: str
    text: str


class ConfigError(Exception):
    """The file and the environment are not a valid configuration."""

    def __init__(self, *problems: ConfigProblem) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class RawSettings:
    """Settings as text, from the environment and the file that it names; not validated.

    Attributes:
        path: The file; empty if there is none.
    """

    by_env: Mapping[str, str]
    by_file: Mapping[str, object]
    path: str


class Settings(BaseModel):
    """Base of every service's settings. The name of a field ends in its unit."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    log_level: str = Field("INFO", pattern=r"^(?i:debug|info|warning|error|critical)$")
    """Lowest level of log lines that are written."""
    log_format: LogFormat = "auto"
    """Format of log lines: `json`, `text`, or `auto` for text on a terminal and JSON elsewhere."""


S = TypeVar("S", bound=Settings)


def load(kind: type[S], prefix: str, env: Mapping[str, str] | None = None) -> S:
    """Return the settings of `kind` from `<prefix>_CONFIG_FILE` and `<prefix>_*`.

    Args:
        env: The environment; that of the process if None.

    Raises:
        ConfigError: A name is unknown, a value is invalid or missing, or the file can't be read.
    """
    raw = read_raw_settings(prefix, env)
    known = set(kind.model_fields)
    problems = [
        ConfigProblem(f"{raw.path}: {name}", f"{raw.path}: unknown setting {name}")
        for name in sorted(raw.by_file.keys() - known)
    ]
    variables = [f"{prefix}_{name.upper()}" for name in sorted(raw.by_env.keys() - known)]
    problems += [
        ConfigProblem(variable, f"{variable} is not valid UTF-8")
        for name, value in sorted(raw.by_env.items())
        for variable in [f"{prefix}_{name.upper()}"]
        if not _is_text(value)
    ]
    problems += [ConfigProblem(variable, f"unknown variable {variable}") for variable in variables]
    values = {k: v for k, v in {**raw.by_file, **raw.by_env}.items() if k in known}
    try:
        settings = kind(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        for wrong in error.errors():
            variable = "_".join([prefix, *map(str, wrong["loc"])]).upper()
            problems.append(ConfigProblem(variable, f"{variable}: {wrong['msg']}"))
        raise ConfigError(*problems) from error
    if problems:
        raise ConfigError(*problems)
    return settings


def _is_text(value: str) -> bool:
    """Return whether the bytes of a variable are UTF-8; Python has surrogates for other bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_raw_settings(prefix: str, env: Mapping[str, str] | None = None) -> RawSettings:
    """Return the values of `<prefix>_*` and of the file `<prefix>_CONFIG_FILE`, not validated.

    Names are in lower case and without the prefix.

    Raises:
        ConfigError: The file can't be read.
    """
    env = os.environ if env is None else env  # noqa: TID251  the only reader of the environment
    start = f"{prefix}_"
    by_env = {k[len(start) :].lower(): v for k, v in env.items() if k.startswith(start)}
    path = by_env.pop("config_file", "")
    try:
        by_file = tomllib.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError) as error:  # no such file, not UTF-8, not TOML
        variable = f"{start}CONFIG_FILE"
        raise ConfigError(ConfigProblem(variable, f"{variable}={path}: {error}")) from error
    return RawSettings(by_env, by_file, path)
