"""`baton context …`: named clusters, so that commands need no address."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit

from batonmq.cli import context_file
from batonmq.cli.command_classes import LazyGroup, argument
from batonmq.cli.completion import complete_contexts
from batonmq.cli.context_file import SECURITY, ContextError, Contexts
from batonmq.cli.output import Columns, Minor, OutputFormat
from batonmq.cli.session import CommandSession, global_options, local_session, open_session

commands = LazyGroup("context", help="Name clusters, and choose one.", no_args_is_help=True)
name_argument = partial(
    argument, metavar="NAME", shell_complete=complete_contexts, help="Name of the context."
)
file_option = partial(click.option, metavar="FILE")
_COLUMNS: Columns = {
    "CURRENT": lambda item: "*" if item["current"] else None,
    "NAME": "name",
    "NAMESERVER": "nameserver",
    "FORMAT": Minor("format"),
    "BY": Minor("by"),
}
_MORE_COLUMNS: Columns = {
    "TLS": lambda item: any(item[name] for name in SECURITY) or None,
    "CA-FILE": "ca_file",
    "CERT-FILE": "cert_file",
    "KEY-FILE": "key_file",
    "SERVER-NAME": "server_name",
    "TOKEN-FILE": "token_file",
}


@commands.command("list")
@local_session
def list_(session: CommandSession) -> None:
    """List the contexts; the current one has a star."""
    contexts = _read(session)
    items = [_item(contexts, name) for name in sorted(contexts.by_name)]
    session.output.items(items, _COLUMNS, _MORE_COLUMNS)


@commands.command()
@argument(
    "name",
    required=False,
    default="",
    metavar="[NAME]",
    shell_complete=complete_contexts,
    help="Name of the context; by default the current one.",
)
@local_session
def show(session: CommandSession, name: str) -> None:
    """Show one context, the current one by default."""
    contexts = _read(session)
    name = name or contexts.current
    if not name:
        raise _fail(session, ContextError("no context is in use"))
    try:
        item = _item(contexts, name)
    except ContextError as error:
        raise _fail(session, error) from error
    session.output.detail(item, [item], _COLUMNS, _MORE_COLUMNS)


@commands.command()
@name_argument("name")
@local_session
def use(session: CommandSession, name: str) -> None:
    """Make a context the current one, for all commands."""
    _change(session, lambda contexts: contexts.with_current(name))
    session.output.line({"current": name}, f"{name} is in use")


@commands.command("set")
@name_argument("name")
@click.option(
    "--nameserver",
    metavar="HOST:PORT",
    help="Address of a nameserver; several separated by commas; empty for none.",
)
@click.option(
    "--format",
    type=click.Choice([form.value for form in OutputFormat]),
    help="What commands print with this context.",
)
@click.option("--by", help="Name to record with changes; empty for user@host.")
@click.option("--tls/--no-tls", default=None, help="Use TLS; it is used too if a file is set.")
@file_option("--ca-file", help="PEM file of the trusted authorities; empty for those of gRPC.")
@file_option("--cert-file", help="PEM file of the certificate; empty for none.")
@file_option("--key-file", help="PEM file of the certificate's key; empty for none.")
@click.option("--server-name", metavar="NAME", help="Name in the servers' certificates.")
@file_option("--token-file", help="File of the bearer token; empty for none.")
@click.pass_context
def set_(
    context: click.Context,
    /,
    name: str,
    nameserver: str | None,
    by: str | None,
    tls: bool | None,
    server_name: str | None,
    **options: str | None,
) -> None:
    """Create a context, or change its settings. The first context is used at once.

    The files are read when a command needs them.
    """
    given: dict[str, str | bool | None] = {
        "nameserver": nameserver,
        "format": options.pop("format"),
        "by": by,
        "tls": tls,
        "server_name": server_name,
    }
    given |= {key: path and str(Path(path).absolute()) for key, path in options.items()}
    changes = {key: value for key, value in given.items() if value is not None}
    if not changes:
        raise click.UsageError("nothing to set: give --nameserver, --format, --by or a file")
    session = open_session(context, None, None)

    def changed(contexts: Contexts) -> Contexts:
        after = contexts.with_changes(name, changes)
        return after if contexts.by_name else after.with_current(name)

    item = _item(_change(session, changed), name)
    session.output.detail(item, [item], _COLUMNS, _MORE_COLUMNS)


@commands.command()
@name_argument("name")
@local_session
def delete(session: CommandSession, name: str) -> None:
    """Delete a context. The cluster does not change."""
    _change(session, lambda contexts: contexts.without(name))
    session.output.line({"name": name, "deleted": True}, f"context {name} is deleted")


def _path() -> Path:
    return global_options(click.get_current_context()).config


def _read(session: CommandSession) -> Contexts:
    try:
        return context_file.read(_path())
    except ContextError as error:
        raise _fail(session, error) from error


def _change(session: CommandSession, change: Callable[[Contexts], Contexts]) -> Contexts:
    contexts = _read(session)
    try:
        changed = change(contexts)
        context_file.write(_path(), changed)
    except (ContextError, OSError) as error:
        raise _fail(session, error) from error
    return changed


def _fail(session: CommandSession, error: Exception) -> Exit:
    session.output.failure("BAD_CONTEXT", str(error), "")
    return Exit(1)


def _item(contexts: Contexts, name: str) -> dict[str, Any]:
    absent = dict.fromkeys(context_file.KEYS)
    values = contexts.get(name).values()
    return {"name": name, "current": name == contexts.current, **absent, **values}
