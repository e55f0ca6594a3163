"""`baton config …`: settings of the services, here or of a running node, and their problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit

from batonmq.admin.effective_settings import NodeSetting, node_settings
from batonmq.cli.command_classes import LazyGroup, argument
from batonmq.cli.output import Columns, Item, Prose
from batonmq.cli.service_settings import SERVICES, settings_of
from batonmq.cli.session import CommandSession, cluster_session, local_session
from batonmq.errors import InvalidArgument

commands = LazyGroup(
    "config", help="Show and check settings of the services.", no_args_is_help=True
)

service_argument = partial(
    argument,
    required=False,
    type=click.Choice(SERVICES),
    metavar="[SERVICE]",
    help=f"One of {', '.join(SERVICES)}; by default all.",
)
env_file_option = click.option(
    "--env-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with lines NAME=VALUE, such as the env file of a container. The variables of this "
    "process are then not read.",
)
file_option = click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file of the service, as if BATON_<SERVICE>_CONFIG_FILE named it.",
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
    "MEANING": Prose("meaning"),
}
_PROBLEM_COLUMNS: Columns = {"SERVICE": "service", "SOURCE": "source", "PROBLEM": Prose("text")}
_EXPLAIN_COLUMNS: Columns = {**_COLUMNS, **_MORE_COLUMNS}


@commands.command("print")
@service_argument("service")
@file_option
@env_file_option
@click.option(
    "--remote",
    default="",
    metavar="NODE",
    help="Ask this node of the cluster, such as broker-0 or storage/broker-0, with which settings "
    "it was started; needs the role admin. Secrets are masked.",
)
@cluster_session
def print_(
    session: CommandSession,
    service: str | None,
    file: Path | None,
    env_file: Path | None,
    remote: str,
) -> None:
    """Print every setting of a service, its value, and the source of the value.

    Without --remote these are the settings that a service started here would have.
    """
    if remote:
        if file is not None or env_file is not None:
            raise click.UsageError("--file and --env-file can't be combined with --remote")
        described = session.run(_ask(session, remote, service or ""))
        session.output.items(list(map(asdict, described)), _COLUMNS, _MORE_COLUMNS)
        return
    by_service = _read_settings(session, service, file, env_file)
    settings = [setting for one in by_service.values() for setting in one["settings"]]
    session.output.items(settings, _COLUMNS, _MORE_COLUMNS)


@commands.command()
@service_argument("service")
@file_option
@env_file_option
@local_session
def check(
    session: CommandSession, service: str | None, file: Path | None, env_file: Path | None
) -> None:
    """Check the settings that a service would start with.

    Exit status 1 if a setting is wrong.
    """
    by_service = _read_settings(session, service, file, env_file)
    problems = [
        {"service": name} | problem
        for name, one in by_service.items()
        for problem in one["problems"]
    ]
    item = {"services": list(by_service), "problems": problems}
    if problems:
        session.output.detail(item, problems, _PROBLEM_COLUMNS)
        raise Exit(1)
    session.output.line(item, f"{', '.join(by_service)}: no problems")


@commands.command()
@argument("name", metavar="NAME", help="Such as flush, storage.flush or BATON_STORAGE_FLUSH.")
@local_session
def explain(session: CommandSession, name: str) -> None:
    """Print what a setting means, its allowed values, and its value here."""
    by_service = _read_settings(session, None, None, None)
    settings = list(_matching_settings(name, by_service))
    if not settings:
        session.output.failure(
            "UNKNOWN_SETTING", f"no service has a setting {name!r}", "See: baton config print."
        )
        raise Exit(1)
    session.output.items(settings, _EXPLAIN_COLUMNS)


async def _ask(session: CommandSession, node: str, service: str) -> tuple[NodeSetting, ...]:
    async with session.admin() as admin:
        return await node_settings(admin, node, service)


def _matching_settings(name: str, by_service: dict[str, dict[str, Any]]) -> Iterator[Item]:
    """Yield the settings that `name` may stand for."""
    for service, one in by_service.items():
        for setting in one["settings"]:
            if name.lower() in (
                setting["name"],
                f"{service}.{setting['name']}",
                setting["variable"].lower(),
            ):
                yield setting


def _read_settings(
    session: CommandSession, service: str | None, file: Path | None, env_file: Path | None
) -> dict[str, dict[str, Any]]:
    """Return the settings and problems of one service, or of all, by the name of the service.

    Raises:
        click.UsageError: there is a file but no service.
        Exit: the settings can't be read.
    """
    if file is not None and service is None:
        raise click.UsageError("--file is the file of one service: SERVICE is required")
    names = SERVICES if service is None else (service,)
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
    """Return variables from lines NAME=VALUE, as docker and systemd read them; `#` is a comment.

    Raises:
        InvalidArgument: a line has another form; the message has its number.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        pair = re.fullmatch(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", text)
        if pair is None:
            raise InvalidArgument(
                f"line {number}: must be NAME=VALUE, got {text!r}", facts={"line": number}
            )
        value = pair[2]
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[pair[1]] = value
    return variables
