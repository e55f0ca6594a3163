"""Settings of a process: a frozen model, read once from a file and the environment.

A setting `port` of the service `storage` is `BATON_STORAGE_PORT` in the environment and `port`
in the TOML file that `BATON_STORAGE_CONFIG_FILE` names. The environment wins. A name that is
not known, in either place, is an error: a misspelt setting never silently does nothing.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from batonmq.common.logs import LogFormat


class ConfigError(Exception):
    """File and environment do not describe a valid configuration."""


class Settings(BaseSettings):
    """Base of every service's settings. A field's name ends in its unit."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    log_level: str = Field("INFO", pattern=r"^(?i:debug|info|warning|error|critical)$")
    """Lowest level that is logged."""
    log_format: LogFormat = "auto"
    """`json`, `text`, or `auto`: text on a terminal, JSON elsewhere."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` gives: pydantic by itself would take a bare PORT or HOST for ours."""
        return (init_settings,)


S = TypeVar("S", bound=Settings)


def load(kind: type[S], prefix: str, env: Mapping[str, str] | None = None) -> S:
    """Settings of `kind` from `<prefix>_CONFIG_FILE` and `<prefix>_*`.

    Args:
        env: The environment; the process's if not given.

    Raises:
        ConfigError: a name is unknown, a value does not parse, one is missing, or the file can't
            be read.
    """
    env = os.environ if env is None else env  # noqa: TID251  the one place that reads it
    start = f"{prefix}_"
    given = {k[len(start) :].lower(): v for k, v in env.items() if k.startswith(start)}
    path = given.pop("config_file", None)
    try:
        from_file = tomllib.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError) as error:  # no such file, no UTF-8, no TOML
        raise ConfigError(f"{start}CONFIG_FILE={path}: {error}") from error
    known = set(kind.model_fields)
    problems = [f"{path}: unknown setting {name}" for name in sorted(set(from_file) - known)]
    problems += [f"unknown variable {start}{k.upper()}" for k in sorted(set(given) - known)]
    if problems:
        raise ConfigError("; ".join(problems))
    try:
        return kind(**(from_file | given))
    except ValidationError as error:
        raise ConfigError(
            "; ".join(
                f"{'_'.join([prefix, *map(str, e['loc'])]).upper()}: {e['msg']}"
                for e in error.errors()
            )
        ) from error
