"""The `baton` command; one file per noun."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from batonmq.cli import cluster, group, lock, message, topic
from batonmq.cli.cancel import cancel
from batonmq.cli.consume import consume
from batonmq.cli.demo import demo
from batonmq.cli.fsck import fsck
from batonmq.cli.output import Form
from batonmq.cli.produce import produce
from batonmq.cli.resets import clone, reset, resets
from batonmq.cli.session import DEFAULT_NAMESERVER, Defaults
from batonmq.cli.stuck import lag, why_stuck
from batonmq.cli.up import up

app = typer.Typer(
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
        raise typer.Exit


@app.callback()
def baton(
    context: typer.Context,
    nameserver: Annotated[
        str,
        typer.Option(
            envvar="BATON_NAMESERVER",
            metavar="HOST:PORT",
            help="Address of a nameserver; several separated by commas.",
        ),
    ] = DEFAULT_NAMESERVER,
    form: Annotated[Form, typer.Option("--format", help="What to print.")] = Form.TABLE,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Version.")
    ] = False,
) -> None:
    """A message broker whose queues change hands like a baton."""
    context.obj = Defaults(nameserver, form)


app.command()(up)
app.command()(produce)
app.command()(consume)
app.add_typer(topic.app, name="topic")
message.app.command()(cancel)
app.add_typer(message.app, name="message")
for command in (reset, resets, clone, why_stuck, lag):
    group.app.command()(command)
app.add_typer(group.app, name="group")
app.add_typer(lock.app, name="lock")
app.add_typer(cluster.app, name="cluster")
app.command()(demo)
app.command()(fsck)
