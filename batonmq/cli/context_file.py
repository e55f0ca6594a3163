"""The file of named contexts: address, output format and credentials of each cluster, in TOML.

    current = "prod"

    [contexts.prod]
    nameserver = "a.example:9876,b.example:9876"
    format = "wide"
    by = "carol"
    ca_file = "/etc/baton/ca.pem"
    cert_file = "/etc/baton/carol.pem"
    key_file = "/etc/baton/carol.key"

The file holds paths of secrets, never the secrets themselves. An unknown key is an error. Commands
replace the whole file, so comments in it are lost when a command changes it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click

_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")
SECURITY = ("tls", "ca_file", "cert_file", "key_file", "server_name", "token_file")
"""Keys of a context that concern TLS."""
KEYS = ("nameserver", "format", "by", *SECURITY)
"""All keys of a context."""
_FORMATS = ("table", "json", "wide")
_LENGTH_MAX = {"nameserver": 1_024, "by": 255}
_PATH_LENGTH_MAX = 1_024


class ContextError(Exception):
    """The file can't be used, or a context is missing or not valid."""


@dataclass(frozen=True, slots=True)
class Context:
    """The settings of one context; None leaves a setting at its default.

    Attributes:
        nameserver: host:port of a nameserver; several separated by commas.
        format: What commands print: table, json or wide.
        by: Name that is recorded with changes.
        tls: True to use TLS; it is used too if one of the following is set.
        ca_file: PEM file of the trusted authorities; by default those of gRPC.
        cert_file: PEM file of the client's certificate.
        key_file: PEM file of the certificate's key.
        server_name: Name in the servers' certificates, if it is not the name in their addresses.
        token_file: File of the bearer token.

    Raises:
        ContextError: a value has the wrong type or is not allowed.
    """

    nameserver: str | None = None
    format: str | None = None
    by: str | None = None
    tls: bool | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    token_file: str | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        for key, value in self.values().items():
            _check(key, value)

    def values(self) -> dict[str, str | bool]:
        """Return the settings that are set, by key."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def _check(key: str, value: object) -> None:
    """Raise ContextError if the value is not allowed for the key."""
    if key == "tls":
        if value is not True:
            raise ContextError(f"tls must be true or absent, got {value!r}")
        return
    if not isinstance(value, str):
        raise ContextError(f"{key} must be a string, got {value!r}")
    if key == "format":
        if value not in _FORMATS:
            raise ContextError(f"format must be one of {', '.join(_FORMATS)}, got {value!r}")
        return
    length_max = _LENGTH_MAX.get(key, _PATH_LENGTH_MAX)
    if not 1 <= len(value) <= length_max:
        raise ContextError(f"{key} must have 1 to {length_max} characters, got {len(value)}")
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise ContextError(f"{key} must not contain control characters, got {value!r}")
    if key == "nameserver" and not re.fullmatch(r"[!-~]+", value):
        raise ContextError(f"nameserver must be HOST:PORT in ASCII without spaces, got {value!r}")


def _context(values: Mapping[str, Any]) -> Context:
    """Return a context; raise ContextError if a key is unknown or a value is not allowed."""
    known = [one.name for one in fields(Context)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ContextError(f"{unknown[0]} is not a known key; known: {', '.join(known)}")
    return Context(**values)


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contents of the file.

    Attributes:
        current: Name of the context in use; empty for none.
    """

    current: str = ""
    by_name: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """Return the context of a name.

        Raises:
            ContextError: there is no such context.
        """
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise ContextError(f"context {name!r} does not exist; existing: {known}")
        return self.by_name[name]

    def with_current(self, name: str) -> Contexts:
        """Return the contexts with `name` in use.

        Raises:
            ContextError: there is no such context.
        """
        self.get(name)
        return replace(self, current=name)

    def with_changes(self, name: str, changes: Mapping[str, str | bool]) -> Contexts:
        """Return the contexts with values of one changed; it is created if it does not exist.

        Args:
            changes: Values by key; an empty value removes the key.

        Raises:
            ContextError: the name or a value is not allowed.
        """
        _check_name(name)
        before = self.by_name.get(name, Context()).values()
        after = {key: value for key, value in (before | dict(changes)).items() if value}
        return replace(self, by_name={**self.by_name, name: _context(after)})

    def without(self, name: str) -> Contexts:
        """Return the contexts without one; if it was in use, no context is in use.

        Raises:
            ContextError: there is no such context.
        """
        self.get(name)
        rest = {known: context for known, context in self.by_name.items() if known != name}
        return Contexts("" if self.current == name else self.current, rest)


def default_config() -> Path:
    """Return the path of the file if the caller names none."""
    return Path(click.get_app_dir("baton")) / "config.toml"


def read(path: Path) -> Contexts:
    """Return the contents of the file; no contexts if it does not exist.

    Raises:
        ContextError: the file can't be read or is not valid; the text names the field.
    """
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return Contexts()
    except (OSError, ValueError) as error:  # not readable, not UTF-8 or not TOML
        raise ContextError(f"{path}: {error}") from error
    current, tables = document.pop("current", ""), document.pop("contexts", {})
    if document:
        raise ContextError(f"{path}: {min(document)} is not a known key; known: current, contexts")
    if not isinstance(current, str):
        raise ContextError(f"{path}: current must be a string, got {current!r}")
    if not isinstance(tables, dict):
        raise ContextError(f"{path}: contexts must be a table, got {tables!r}")
    contexts = {}
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise ContextError(f"{path}: contexts.{name} must be a table, got {values!r}")
        try:
            _check_name(name)
        except ContextError as error:
            raise ContextError(f"{path}: {error}") from error
        try:
            contexts[name] = _context(values)
        except ContextError as error:
            raise ContextError(f"{path}: contexts.{name}.{error}") from error
    return Contexts(current, contexts)


def write(path: Path, contexts: Contexts) -> None:
    """Replace the file atomically.

    Raises:
        OSError: the file can't be written; it is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        draft = Path(file.name)
        try:
            file.write(_as_toml(contexts))
            file.flush()
            os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink()
            raise


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ContextError(
            f"{name!r} is not a valid name: use 1 to 63 characters of A-Z a-z 0-9 _ -"
        )


def _as_toml(contexts: Contexts) -> str:
    """Return the contexts as TOML.

    Names are bare keys and values have no control characters, so JSON's quoting is valid TOML.
    """
    lines = [f"current = {json.dumps(contexts.current)}"] if contexts.current else []
    for name, context in sorted(contexts.by_name.items()):
        lines += ["", f"[contexts.{name}]"]
        for key, value in context.values().items():
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, ""])
