"""`baton context …`: named clusters, so that no command has to be told an address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from batonmq.cli import context_file
from batonmq.cli.completion import contexts_that_begin
from batonmq.cli.context_file import SECURITY, ContextError, Contexts
from batonmq.cli.output import Columns, OutputFormat
from batonmq.cli.session import CommandSession, FormatOption, GlobalOptions, open_session

app = typer.Typer(help="Name clusters, and choose one.", no_args_is_help=True)
NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the context.", autocompletion=contexts_that_begin),
]
_FileOption = Annotated[str | None, typer.Option(metavar="FILE", help="Empty for none.")]
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
def list_(context: typer.Context, *, form: FormatOption = None) -> None:
    """List the contexts; the current one has a star."""
    session, path = _opened(context, form)
    contexts = _read(session, path)
    items = [_item(contexts, name) for name in sorted(contexts.by_name)]
    session.output.items(items, _COLUMNS, _MORE_COLUMNS)


@app.command()
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", autocompletion=contexts_that_begin)] = "",
    *,
    form: FormatOption = None,
) -> None:
    """Show one context, the current one by default."""
    session, path = _opened(context, form)
    contexts = _read(session, path)
    name = name or contexts.current
    if not name:
        raise _failed(session, ContextError("no context is in use"))
    item = _looked_up(session, contexts, name)
    session.output.detail(item, [item], _COLUMNS, _MORE_COLUMNS)


@app.command()
def use(context: typer.Context, name: NameArgument, *, form: FormatOption = None) -> None:
    """Use a context from now on, for every command."""
    session, path = _opened(context, form)
    _change(session, path, lambda contexts: contexts.used(name))
    session.output.line({"current": name}, f"{name} is in use")


@app.command("set")
def set_(
    context: typer.Context,
    name: NameArgument,
    *,
    nameserver: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Several separated by commas; empty for none."),
    ] = None,
    form: Annotated[
        OutputFormat | None, typer.Option("--format", help="What commands print with it.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Who is recorded with changes; empty for user@host.")
    ] = None,
    tls: Annotated[
        bool | None,
        typer.Option("--tls/--no-tls", help="Talk to services over TLS; so too if a file is set."),
    ] = None,
    ca_file: _FileOption = None,
    cert_file: _FileOption = None,
    key_file: _FileOption = None,
    server_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="In the servers' certificates.")
    ] = None,
    token_file: _FileOption = None,
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
        raise typer.BadParameter("nothing to set: give --nameserver, --format, --by or a file")
    session, path = _opened(context, None)

    def changed(contexts: Contexts) -> Contexts:
        after = contexts.with_changes(name, changes)
        return after if contexts.by_name else after.used(name)

    item = _item(_change(session, path, changed), name)
    session.output.detail(item, [item], _COLUMNS, _MORE_COLUMNS)


@app.command()
def delete(context: typer.Context, name: NameArgument, *, form: FormatOption = None) -> None:
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


def _failed(session: CommandSession, error: Exception) -> typer.Exit:
    session.output.failure("BAD_CONTEXT", str(error), "")
    return typer.Exit(1)


def _item(contexts: Contexts, name: str) -> dict[str, Any]:
    return {"name": name, "current": name == contexts.current, **contexts.get(name).model_dump()}
