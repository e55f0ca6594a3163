"""`baton context …`: named clusters, so that no command has to be told an address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from functools import partial

import click
from click.exceptions import Exit

from batonmq.cli import context_file
from batonmq.cli.completion import contexts_that_begin
from batonmq.cli.context_file import SECURITY, ContextError, Contexts
from batonmq.cli.output import Columns, OutputFormat
from batonmq.cli.session import CommandSession, local_session, GlobalOptions, open_session

app = click.Group(help="Name clusters, and choose one.", no_args_is_help=True)
name_argument = partial(
    argument, metavar="NAME", shell_complete=contexts_that_begin, help="Name of the context."
)
# TODO names/defaults {('ca_file', 'None'), ('token_file', 'None'), ('key_file', 'None'), ('cert_file', 'None')}
__file_option = click.option("--ca-file", metavar="FILE", help="Empty for none.")
_COLUMNS: Columns = {
    "CURRENT": lambda item: "*" if item["current"] else None,
    "NAME": "name",
    "NAMESERVER": "nameserver",
    "FORMAT": "format",
    "BY": "by",
}
_MORE_COLUMNS: Columns = {
    "TLS": lambda item: any(item[name] for name in SECURITY) or None,
    "CA-FILE": "ca_file",
    "CERT-FILE": "cert_file",
    "KEY-FILE": "key_file",
    "SERVER-NAME": "server_name",
    "TOKEN-FILE": "token_file",
}


@app.command("list")
@local_session
def list_(session: CommandSession) -> None:
    """List the contexts; the current one has a star."""
    session, path = _opened(context, form)
    contexts = _read(session, path)
    items = [_item(contexts, name) for name in sorted(contexts.by_name)]
    session.output.items(items, _COLUMNS, _MORE_COLUMNS)


@app.command()
@argument("name", required=False, default="", metavar="[NAME]", shell_complete=contexts_that_begin)
@local_session
def show(session: CommandSession, name: str) -> None:
    """Show one context, the current one by default."""
    session, path = _opened(context, form)
    contexts = _read(session, path)
    name = name or contexts.current
    if not name:
        raise _failed(session, ContextError("no context is in use"))
    item = _looked_up(session, contexts, name)
    session.output.detail(item, [item], _COLUMNS, _MORE_COLUMNS)


@app.command()
@name_argument("name")
@local_session
def use(session: CommandSession, name: str) -> None:
    """Use a context from now on, for every command."""
    session, path = _opened(context, form)
    _change(session, path, lambda contexts: contexts.used(name))
    session.output.line({"current": name}, f"{name} is in use")


@app.command("set")
@name_argument("name")
@click.option(
    "--nameserver", metavar="HOST:PORT", help="Several separated by commas; empty for none."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "wide"]),
    help="What commands print with it.",
)
@click.option("--by", help="Who is recorded with changes; empty for user@host.")
@click.option(
    "--tls/--no-tls", default=None, help="Talk to services over TLS; so too if a file is set."
)
@__file_option
@__file_option
@__file_option
@click.option("--server-name", metavar="NAME", help="In the servers' certificates.")
@__file_option
@click.pass_context
def set_(
    context: click.Context,
    name: str,
    nameserver: str | None,
    form: str | None,
    by: str | None,
    tls: bool | None,
    ca_file: str | None,
    cert_file: str | None,
    key_file: str | None,
    server_name: str | None,
    token_file: str | None,
) -> None:
    """Create a context, or change what it says. The first one is used at once.

    The files are read when a command needs them: PEM files of the authorities that are trusted,
    of a certificate and its key, and the file of a bearer token.
    """
    files = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    files["token_file"] = token_file
    given = {"nameserver": nameserver, "format": form and form.value, "by": by, "tls": tls}
    given |= {key: path and str(Path(path).absolute()) for key, path in files.items()}
    given["server_name"] = server_name
    changes = {key: value for key, value in given.items() if value is not None}
    if not changes:
        raise click.UsageError("nothing to set: give --nameserver, --format, --by or a file")
    session, path = _opened(context, None)

    def changed(contexts: Contexts) -> Contexts:
        after = contexts.with_changes(name, changes)
        return after if contexts.by_name else after.used(name)

    item = _item(_change(session, path, changed), name)
    session.output.detail(item, [item], _COLUMNS, _MORE_COLUMNS)


@app.command()
@name_argument("name")
@local_session
def delete(session: CommandSession, name: str) -> None:
    """Forget a context. The cluster is not touched."""
    session, path = _opened(context, form)
    _change(session, path, lambda contexts: contexts.without(name))
    session.output.line({"name": name, "deleted": True}, f"context {name} is deleted")


def _opened(context: typer.Context, form: OutputFormat | None) -> tuple[CommandSession, Path]:
    defaults = context.find_object(GlobalOptions)
    assert defaults is not None
    return open_session(context, None, form), defaults.config


def _read(session: CommandSession, path: Path) -> Contexts:
    try:
        return context_file.read(path)
    except ContextError as error:
        raise _failed(session, error) from error


def _change(
    session: CommandSession, path: Path, change: Callable[[Contexts], Contexts]
) -> Contexts:
    contexts = _read(session, path)
    try:
        changed = change(contexts)
        context_file.write(path, changed)
    except (ContextError, OSError) as error:
        raise _failed(session, error) from error
    return changed


def _looked_up(session: CommandSession, contexts: Contexts, name: str) -> dict[str, Any]:
    try:
        return _item(contexts, name)
    except ContextError as error:
        raise _failed(session, error) from error


def _failed(session: CommandSession, error: Exception) -> Exit:
    session.output.failure("BAD_CONTEXT", str(error), "")
    return Exit(1)


def _item(contexts: Contexts, name: str) -> dict[str, Any]:
    return {"name": name, "current": name == contexts.current, **contexts.get(name).model_dump()}
