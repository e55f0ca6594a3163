"""Named contexts in a TOML file: which cluster, in which form, in whose name.

    current = "prod"

    [contexts.prod]
    nameserver = "a.example:9876,b.example:9876"
    format = "wide"
    by = "carol"
    ca_file = "/etc/baton/ca.pem"
    cert_file = "/etc/baton/carol.pem"
    key_file = "/etc/baton/carol.key"

Of what is secret there are paths, not the thing itself.

A key that is not known is an error. The file is replaced whole: what somebody wrote into it beside
the keys, such as comments, is lost when a command changes it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")
SECURITY = ("tls", "ca_file", "cert_file", "key_file", "server_name", "token_file")
"""What a context may say of TLS."""
KEYS = ("nameserver", "format", "by", *SECURITY)
"""What a context may set."""
_TEXT = r"^[^\x00-\x1f\x7f]{1,1024}$"


class ContextError(Exception):
    """The file can't be used, or a context is not there or not allowed."""


class Context(BaseModel):
    """What one context sets; None leaves the default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nameserver: str | None = Field(default=None, pattern=r"^[!-~]{1,1024}$")
    """host:port of a nameserver; several separated by commas."""
    format: Literal["table", "json", "wide"] | None = None
    """What commands print."""
    by: str | None = Field(default=None, pattern=r"^[^\x00-\x1f\x7f]{1,255}$")
    """Whose name is recorded with changes."""
    tls: Literal[True] | None = None
    """Services are talked to over TLS; so too if one of the next is there."""
    ca_file: str | None = Field(default=None, pattern=_TEXT)
    """Certificates of the authorities that are trusted; those that gRPC brings if not given."""
    cert_file: str | None = Field(default=None, pattern=_TEXT)
    """Certificate to show."""
    key_file: str | None = Field(default=None, pattern=_TEXT)
    """Its key."""
    server_name: str | None = Field(default=None, pattern=_TEXT)
    """Name in the servers' certificates, where it is not that of their addresses."""
    token_file: str | None = Field(default=None, pattern=_TEXT)
    """Holds the bearer token."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    current: str = ""
    contexts: dict[str, Context] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contexts:
    """All of one file; an empty `current` is no context."""

    current: str = ""
    by_name: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """The context of a name.

        Raises:
            ContextError: there is none.
        """
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise ContextError(f"there is no context {name!r}; there is: {known}")
        return self.by_name[name]

    def used(self, name: str) -> Contexts:
        """With `name` as the current one."""
        self.get(name)
        return replace(self, current=name)

    def with_changes(self, name: str, changes: Mapping[str, str | bool]) -> Contexts:
        """With other values in a context, which is new if there was none; empty takes one away.

        Raises:
            ContextError: a name or value is not allowed.
        """
        if not _NAME.fullmatch(name):
            raise ContextError(f"{name!r} can't name a context: use A-Z a-z 0-9 _ -, up to 63")
        before = self.by_name.get(name, Context()).model_dump(exclude_none=True)
        after = {key: value for key, value in (before | dict(changes)).items() if value}
        try:
            changed = Context.model_validate(after)
        except ValidationError as error:
            raise ContextError(_told(error)) from error
        return replace(self, by_name={**self.by_name, name: changed})

    def without(self, name: str) -> Contexts:
        """Without a context; if it was the current one, there is none."""
        self.get(name)
        rest = {known: context for known, context in self.by_name.items() if known != name}
        return Contexts("" if self.current == name else self.current, rest)


def read(path: Path) -> Contexts:
    """What the file says; nothing if it does not exist.

    Raises:
        ContextError: it can't be read, or says something that is not known.
    """
    try:
        found = _File.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError:
        return Contexts()
    except ValidationError as error:
        raise ContextError(f"{path}: {_told(error)}") from error
    except (OSError, ValueError) as error:  # no UTF-8, no TOML
        raise ContextError(f"{path}: {error}") from error
    if bad := [name for name in found.contexts if not _NAME.fullmatch(name)]:
        raise ContextError(f"{path}: {bad[0]!r} can't name a context")
    return Contexts(found.current, found.contexts)


def write(path: Path, contexts: Contexts) -> None:
    """Replace the file: at any moment it is the old one or the new one.

    Raises:
        OSError: it is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        beside = Path(file.name)
        try:
            file.write(_as_toml(contexts))
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink()
            raise


def _as_toml(contexts: Contexts) -> str:
    """Names are bare keys and values have no control characters, so JSON's quoting is TOML's."""
    lines = [f"current = {json.dumps(contexts.current)}"] if contexts.current else []
    for name, context in sorted(contexts.by_name.items()):
        lines += ["", f"[contexts.{name}]"]
        for key, value in context.model_dump(exclude_none=True).items():
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, ""])


def _told(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
    )
