"""`baton config …`: the settings of the services, what they are here, and what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from batonmq.cli.output import Columns, Item
from batonmq.cli.service_settings import SERVICES, settings_of
from batonmq.cli.session import CommandSession, FormatOption, open_session
from batonmq.errors import InvalidArgument

app = typer.Typer(
    help="Look at the settings of the services, and check them.", no_args_is_help=True
)


class Service(StrEnum):
    """A service, as people type it."""

    STORAGE = "storage"
    OFFSETS = "offsets"
    LOCKMGR = "lockmgr"
    NAMESERVER = "nameserver"


ServiceArgument = Annotated[
    Service | None,
    typer.Argument(metavar="[SERVICE]", help=f"One of {', '.join(SERVICES)}; by default all."),
]
EnvFileOption = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Lines of NAME=VALUE, such as of a container, in place of the environment of this "
        "command.",
        show_default=False,
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        exists=True,
        dir_okay=False,
        help="The service's TOML file, as if BATON_<SERVICE>_CONFIG_FILE named it.",
        show_default=False,
    ),
]
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
def print_(
    context: typer.Context,
    service: ServiceArgument = None,
    *,
    file: FileOption = None,
    env_file: EnvFileOption = None,
    form: FormatOption = None,
) -> None:
    """Print every setting of a service, its value, and where that comes from."""
    session = open_session(context, None, form)
    found = _found(session, service, file, env_file)
    settings = [setting for one in found.values() for setting in one["settings"]]
    session.output.items(settings, _COLUMNS, _MORE_COLUMNS)


@app.command()
def check(
    context: typer.Context,
    service: ServiceArgument = None,
    *,
    file: FileOption = None,
    env_file: EnvFileOption = None,
    form: FormatOption = None,
) -> None:
    """Check the settings that a service would start with; the exit status is 1 if one is wrong."""
    session = open_session(context, None, form)
    found = _found(session, service, file, env_file)
    problems = [
        {"service": name} | problem for name, one in found.items() for problem in one["problems"]
    ]
    columns: Columns = {"SERVICE": "service", "SOURCE": "source", "PROBLEM": "text"}
    item = {"services": list(found), "problems": problems}
    if problems:
        session.output.detail(item, problems, columns)
        raise typer.Exit(1)
    session.output.line(item, f"{', '.join(found)}: nothing is wrong")


@app.command()
def explain(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Such as flush, storage.flush or BATON_STORAGE_FLUSH.",
        ),
    ],
    *,
    form: FormatOption = None,
) -> None:
    """Say what a setting means, what it may be, and what it is here."""
    session = open_session(context, None, form)
    found = _found(session, None, None, None)
    settings = list(_named(name, found))
    if not settings:
        session.output.failure(
            "UNKNOWN_SETTING", f"no service has a setting {name!r}", "See: baton config print."
        )
        raise typer.Exit(1)
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
        raise typer.BadParameter("--file belongs to one service: name it")
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
    raise typer.Exit(1)


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
