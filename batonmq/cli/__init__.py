"""The `baton` command; one file per noun."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated

import click
from click.exceptions import Exit

from batonmq._connection.security import Security
from batonmq.cli import (
    access,
    bench,
    cluster,
    config,
    context_file,
    debug,
    dlq,
    group,
    lock,
    message,
    mqadmin,
    topic,
)
from batonmq.cli import context as contexts
from batonmq.cli.completion import contexts_that_begin, default_config
from batonmq.cli.consume import consume
from batonmq.cli.context_file import Context, ContextError
from batonmq.cli.group_lag import lag, why_stuck
from batonmq.cli.group_placement import move, spread_groups
from batonmq.cli.group_resets import clone, reset_offsets, resets
from batonmq.cli.message_cancel import cancel
from batonmq.cli.message_trace import trace
from batonmq.cli.output import Output, OutputFormat
from batonmq.cli.produce import produce
from batonmq.cli.session import DEFAULT_NAMESERVER, GlobalOptions
from batonmq.cli.tls_options import (
    ca_file_option,
    cert_file_option,
    key_file_option,
    server_name_option,
    tls_option,
    TlsOptions,
    token_file_option,
    choose_security,
    token_of_environment,
)
from batonmq.cli.top import top
from batonmq.cli.topic_stats import stats
from batonmq.errors import InvalidArgument

app = click.Group(
    name="baton",
    help="A message broker whose queues change hands like a baton.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("batonmq"))
        raise Exit


@app.callback()
def baton(
    context: typer.Context,
    *,
    nameserver: Annotated[
        str | None,
        typer.Option(
            envvar="BATON_NAMESERVER",
            metavar="HOST:PORT",
            help="Address of a nameserver; several separated by commas. By default what the "
            f"context says, or {DEFAULT_NAMESERVER}.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        OutputFormat | None,
        typer.Option(
            "--format",
            envvar="BATON_FORMAT",
            help="What to print. By default what the context says, or table.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--context",
            envvar="BATON_CONTEXT",
            metavar="NAME",
            help="Use this context; see baton context.",
            show_default=False,
            autocompletion=contexts_that_begin,
        ),
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar="BATON_CONFIG",
            dir_okay=False,
            metavar="FILE",
            help=f"File of the contexts. By default {default_config()}.",
            show_default=False,
        ),
    ] = None,
    tls: tls_option = None,
    ca_file: ca_file_option = None,
    cert_file: cert_file_option = None,
    key_file: key_file_option = None,
    server_name: server_name_option = None,
    token_file: token_file_option = None,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Version.")
    ] = False,
) -> None:
    """A message broker whose queues change hands like a baton."""
    path = file or default_config()
    try:
        mending = context.invoked_subcommand == "context"
        chosen = _chosen(path, name, lenient=mending)
    except ContextError as error:
        Output(form or OutputFormat.TABLE).failure(
            "BAD_CONTEXT", str(error), "See: baton context list."
        )
        raise Exit(1) from error
    given: dict[str, str | bool | None] = {
        "tls": tls,
        "ca_file": ca_file,
        "cert_file": cert_file,
        "key_file": key_file,
        "server_name": server_name,
        "token_file": token_file,
    }
    token = token_of_environment()
    if _on_command_line(context, "name"):  # who names a cluster does not mean that of a variable
        if not _on_command_line(context, "nameserver"):
            nameserver = chosen.nameserver or nameserver
        if not _on_command_line(context, "form") and chosen.format:
            form = OutputFormat(chosen.format)
        given = {
            key: value if _on_command_line(context, key) else None for key, value in given.items()
        }
        token = ""
    usual = OutputFormat(chosen.format) if chosen.format else OutputFormat.TABLE
    context.obj = GlobalOptions(
        nameserver or chosen.nameserver or DEFAULT_NAMESERVER,
        form or usual,
        chosen.by or "",
        path,
        None if mending else _security(given, token, chosen, form or usual),
    )


def _security(
    given: TlsOptions, token: str, chosen: Context, form: OutputFormat
) -> Security | None:
    try:
        return choose_security(given, token, chosen)
    except InvalidArgument as error:
        Output(form).error(error)
        raise Exit(1) from error


def _on_command_line(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _chosen(path: Path, name: str, *, lenient: bool) -> Context:
    """The context that is asked for, or the current one, or an empty one.

    Args:
        lenient: A current one that is missing does not matter: the command may mend that.
    """
    known = context_file.read(path)
    wanted = name or known.current
    if not wanted or (lenient and wanted not in known.by_name):
        return Context()
    return known.get(wanted)


app.command()(produce)
app.command()(consume)
app.command()(top)
topic.app.command()(stats)
app.add_typer(topic.app, name="topic")
message.app.command()(cancel)
message.app.command()(trace)
app.add_typer(message.app, name="message")
for command in (reset_offsets, resets, clone, why_stuck, lag, move):
    group.app.command()(command)
group.app.command("reset", hidden=True)(reset_offsets)
app.add_typer(group.app, name="group")
app.add_typer(dlq.app, name="dlq")
app.add_typer(lock.app, name="lock")
cluster.app.command()(spread_groups)
app.add_typer(cluster.app, name="cluster")
app.add_typer(access.app, name="access")
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(debug.app, name="debug")
app.add_typer(mqadmin.app, name="mqadmin")
app.add_typer(contexts.app, name="context")
for point in sorted(entry_points(group="batonmq.commands"), key=lambda point: point.name):
    app.command(point.name)(point.load())
