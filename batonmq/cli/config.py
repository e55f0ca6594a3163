"""`baton config …`: the settings of the services, what they are here, and what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from functools import partial

import click
from click.exceptions import Exit

from batonmq.cli.output import Columns, Item
from batonmq.cli.service_settings import SERVICES, settings_of
from batonmq.cli.session import CommandSession, local_session, open_session
from batonmq.errors import InvalidArgument

app = click.Group(
    help="Look at the settings of the services, and check them.", no_args_is_help=True
)


class Service(StrEnum):
    """A service, as people type it."""

    STORAGE = "storage"
    OFFSETS = "offsets"
    LOCKMGR = "lockmgr"
    NAMESERVER = "nameserver"


service_argument = partial(
    argument,
    type=click.Choice(SERVICES),
    metavar="[SERVICE]",
    help=f"One of {', '.join(SERVICES)}; by default all.",
)
env_file_option = click.option(
    "--env-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Lines of NAME=VALUE, such as of a container, in place of the environment of this "
    "command.",
)
file_option = click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The service's TOML file, as if BATON_<SERVICE>_CONFIG_FILE named it.",
)
_COLUMNS: Columns = {
    "VARIABLE": "variable",
    "VALUE": "value",
    "SOURCE": lambda item: item["source"] or "missing",
}
_MORE_COLUMNS: Columns = {
    "UNIT": "unit",
    "DEFAULT": lambda item: "required" if item["default"] is None else item["default"],
    "ALLOWED": "allowed",
    "MEANING": "meaning",
}
_EXPLAIN_COLUMNS: Columns = {**_COLUMNS, **_MORE_COLUMNS}


@app.command("print")
@service_argument("service", required=False)
@file_option
@env_file_option
@local_session
def print_(
    session: CommandSession, service: str | None, file: Path | None, env_file: Path | None
) -> None:
    """Print every setting of a service, its value, and where that comes from."""
    found = _found(session, service, file, env_file)
    settings = [setting for one in found.values() for setting in one["settings"]]
    session.output.items(settings, _COLUMNS, _MORE_COLUMNS)


@app.command()
@service_argument("service", required=False)
@file_option
@env_file_option
@local_session
def check(
    session: CommandSession, service: str | None, file: Path | None, env_file: Path | None
) -> None:
    """Check the settings that a service would start with; the exit status is 1 if one is wrong."""
    found = _found(session, service, file, env_file)
    problems = [
        {"service": name} | problem for name, one in found.items() for problem in one["problems"]
    ]
    columns: Columns = {"SERVICE": "service", "PLACE": "place", "PROBLEM": "text"}
    item = {"services": list(found), "problems": problems}
    if problems:
        session.output.detail(item, problems, columns)
        raise Exit(1)
    session.output.line(item, f"{', '.join(found)}: nothing is wrong")


@app.command()
@argument("name", metavar="NAME", help="Such as flush, storage.flush or BATON_STORAGE_FLUSH.")
@local_session
def explain(session: CommandSession, name: str) -> None:
    """Say what a setting means, what it may be, and what it is here."""
    found = _found(session, None, None, None)
    settings = list(_named(name, found))
    if not settings:
        session.output.failure(
            "UNKNOWN_SETTING", f"no service has a setting {name!r}", "See: baton config print."
        )
        raise Exit(1)
    session.output.items(settings, _EXPLAIN_COLUMNS)


def _named(name: str, found: dict[str, dict[str, Any]]) -> Iterator[Item]:
    """The settings that people may mean."""
    for service, one in found.items():
        for setting in one["settings"]:
            if name.lower() in (
                setting["name"],
                f"{service}.{setting['name']}",
                setting["variable"].lower(),
            ):
                yield setting


def _found(
    session: CommandSession, service: Service | None, file: Path | None, env_file: Path | None
) -> dict[str, dict[str, Any]]:
    """What the services say, by service."""
    if file is not None and service is None:
        raise click.UsageError("--file belongs to one service: name it")
    names = SERVICES if service is None else (service.value,)
    try:
        given = None if env_file is None else parse_env(env_file.read_text().splitlines())
        if file is not None:
            given = {} if given is None else given
            given[f"BATON_{names[0].upper()}_CONFIG_FILE"] = str(file)
        return {name: settings_of(name, given) for name in names}
    except InvalidArgument as error:
        session.output.failure("BAD_ENV_FILE", f"{env_file}: {error.message}", error.remedy)
    except (OSError, ValueError) as error:
        session.output.failure("SYSTEM_ERROR", str(error), "")
    raise Exit(1)


def parse_env(lines: Iterable[str]) -> dict[str, str]:
    """Variables from lines of NAME=VALUE, as docker and systemd read them; `#` begins a comment.

    Raises:
        InvalidArgument: a line is something else; it is named.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        pair = re.fullmatch(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", text)
        if pair is None:
            raise InvalidArgument(
                f"line {number}: {text!r} is no NAME=VALUE", facts={"line": number}
            )
        value = pair[2]
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[pair[1]] = value
    return found
