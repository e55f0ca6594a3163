"""The root of the `baton` command: options before the command, and the table of commands.

A command's module is imported when the command is called, so that help pages and short commands
start fast. Commands of other distributions, such as `baton up` of batonmq-server, are found by the
entry-point group `batonmq.commands`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit
from click.shell_completion import get_completion_class

from batonmq.cli import context_file, tls_options
from batonmq.cli.command_classes import LazyCommand, LazyGroup
from batonmq.cli.completion import complete_contexts
from batonmq.cli.context_file import Context, ContextError
from batonmq.cli.global_options import DEFAULT_NAMESERVER, GlobalOptions
from batonmq.cli.output import Output, OutputFormat
from batonmq.cli.tls_options import TlsOptions

if TYPE_CHECKING:
    from batonmq._connection.security import Security

COMMANDS = {
    "access": LazyCommand(
        "batonmq.cli.access:commands", "Grant roles, create credentials, and block callers."
    ),
    "backup": LazyCommand(
        "batonmq.cli.backup:commands", "Take, verify and restore snapshots of a cluster."
    ),
    "bench": LazyCommand("batonmq.cli.bench:commands", "Measure the speed of a running cluster."),
    "cluster": LazyCommand(
        "batonmq.cli.cluster:commands", "Show, check and change the nodes of the cluster."
    ),
    "config": LazyCommand(
        "batonmq.cli.config:commands", "Show and check settings of the services."
    ),
    "consume": LazyCommand(
        "batonmq.cli.consume:consume",
        "Print messages as a member of a group, and acknowledge each after it is printed.",
    ),
    "context": LazyCommand("batonmq.cli.context:commands", "Name clusters, and choose one."),
    "debug": LazyCommand("batonmq.cli.debug:commands", "Collect data for remote support."),
    "dlq": LazyCommand("batonmq.cli.dlq:commands", "Show dead letters, and send them again."),
    "gateway": LazyCommand(
        "batonmq.cli.gateway:commands",
        "Show the clients of the gateways and the messages that they hold.",
    ),
    "group": LazyCommand(
        "batonmq.cli.group:commands", "Show and change consumer groups, and move their progress."
    ),
    "lock": LazyCommand("batonmq.cli.lock:commands", "Show and release the locks of queues."),
    "message": LazyCommand(
        "batonmq.cli.message:commands", "Look up and trace messages; cancel scheduled ones."
    ),
    "mirror": LazyCommand(
        "batonmq.cli.mirror:commands",
        "Copy topics to another cluster with the progress of groups, and fail over to it.",
    ),
    "mqadmin": LazyCommand(
        "batonmq.cli.mqadmin:commands",
        "Common commands of RocketMQ's mqadmin, with their names and flags.",
    ),
    "produce": LazyCommand(
        "batonmq.cli.produce:produce", "Send each line as a message, and print where it is stored."
    ),
    "request": LazyCommand("batonmq.cli.request:request", "Send a request and print its reply."),
    "quota": LazyCommand("batonmq.cli.quota:commands", "Limit what an identity may use."),
    "top": LazyCommand(
        "batonmq.cli.top:top", "Show rates, lag, owners, hand-overs and conflicts, live."
    ),
    "transaction": LazyCommand(
        "batonmq.cli.transaction:commands", "Show and end transactions of producers."
    ),
    "topic": LazyCommand(
        "batonmq.cli.topic:commands", "Create, list, describe, change and delete topics."
    ),
}
SERVER_COMMANDS = {
    "demo": "Publish all New York flights of 2013, consume them while members join and leave, and "
    "check.",
    "fsck": "Check every batch of a storage node, and its indexes against the batches.",
    "traffic": "Send to topic `traffic`, handle in group `drivers`, and compare the two.",
    "up": "Start etcd and the services on loopback ports, and keep them running until Ctrl-C.",
}
"""Commands of batonmq-server with their summaries; they are listed if it is installed."""


class RootGroup(LazyGroup):
    """The root group: its own commands, and those of other distributions."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the command line; arguments and variables that are not UTF-8 are usage errors."""
        problem = _undecodable(args, os.environ)  # noqa: TID251  checked, not used
        if problem:
            raise click.UsageError(problem)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Import and run a command; an interrupt ends it with status 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Exit(130) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        for point in _plugins():
            if point.name not in self.lazy:
                summary = SERVER_COMMANDS.get(point.name, f"From {point.module.partition('.')[0]}.")
                self.lazy[point.name] = LazyCommand(point.value, summary)
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; a command of batonmq-server that is not installed says so."""
        if cmd_name in self.lazy:
            return super().get_command(ctx, cmd_name)
        for point in _plugins():
            if point.name == cmd_name:
                return LazyCommand(point.value).load()
        return _missing_command(cmd_name) if cmd_name in SERVER_COMMANDS else None


def _undecodable(arguments: list[str], env: Mapping[str, str]) -> str:
    """Return what is wrong with the first text that is not UTF-8; empty if there is none.

    Python represents such bytes by surrogates, which can be neither sent nor printed. The value of
    a variable is not shown: it may be a secret.
    """
    for number, text in enumerate(arguments, 1):
        if not _is_text(text):
            return f"argument {number} is not valid UTF-8: {ascii(os.fsencode(text))[1:]}"
    for name, text in env.items():
        if name.startswith("BATON_") and not (_is_text(name) and _is_text(text)):
            return f"variable {ascii(name)[1:-1]} is not valid UTF-8"
    return ""


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plugins() -> Iterable[EntryPoint]:
    return entry_points(group="batonmq.commands")


def _missing_command(name: str) -> click.Command:
    """Return a command that tells what to install."""

    def fail() -> None:
        message = f"baton {name} is part of batonmq-server, which is not installed"
        options = click.get_current_context().find_object(GlobalOptions)
        output = Output(options.form if options else OutputFormat.TABLE)
        output.failure("NOT_INSTALLED", message, "Install it: pip install 'batonmq-server[local]'")
        raise Exit(1)

    return click.Command(
        name,
        callback=fail,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _print_version(_: click.Context, __: click.Parameter, wanted: bool) -> None:
    if wanted:
        print(version("batonmq"))
        raise Exit


def _print_completion(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is not None:
        shell_class = get_completion_class(shell)
        assert shell_class is not None
        print(shell_class(context.command, {}, "baton", "_BATON_COMPLETE").source())
        raise Exit


@click.command(
    "baton",
    cls=RootGroup,
    lazy=COMMANDS,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--nameserver",
    envvar="BATON_NAMESERVER",
    metavar="HOST:PORT",
    help="Address of a nameserver; several separated by commas. By default that of the context, or "
    f"{DEFAULT_NAMESERVER}.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in OutputFormat]),
    envvar="BATON_FORMAT",
    help="What to print. By default that of the context, or table.",
)
@click.option(
    "--context",
    "name",
    default="",
    envvar="BATON_CONTEXT",
    metavar="NAME",
    shell_complete=complete_contexts,
    help="Use this context; see baton context.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="BATON_CONFIG",
    metavar="FILE",
    help=f"File of the contexts. By default {context_file.default_config()}.",
)
@tls_options.tls_option
@tls_options.ca_file_option
@tls_options.cert_file_option
@tls_options.key_file_option
@tls_options.server_name_option
@tls_options.token_file_option
@click.option(
    "--show-completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    callback=_print_completion,
    help="Print the completion script of a shell.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
@click.pass_context
def baton(
    context: click.Context,
    /,
    nameserver: str | None,
    form: str | None,
    name: str,
    file: Path | None,
    **tls: str | bool | None,
) -> None:
    """Command line of BatonMQ, a message broker with one owner per queue at a time."""
    path = file or context_file.default_config()
    repairs = context.invoked_subcommand == "context"
    try:
        chosen = _chosen_context(path, name, lenient=repairs)
    except ContextError as error:
        output = Output(OutputFormat(form or "table"))
        output.failure("BAD_CONTEXT", str(error), "See: baton context list.")
        raise Exit(1) from error
    token = tls_options.token_of_environment()
    if _on_command_line(context, "name"):  # an explicit context wins over environment variables
        if not _on_command_line(context, "nameserver"):
            nameserver = chosen.nameserver or nameserver
        if not _on_command_line(context, "form"):
            form = chosen.format or form
        tls = {key: value if _on_command_line(context, key) else None for key, value in tls.items()}
        token = ""
    output_format = OutputFormat(form or chosen.format or "table")
    context.obj = GlobalOptions(
        nameserver or chosen.nameserver or DEFAULT_NAMESERVER,
        output_format,
        chosen.by or "",
        path,
        None if repairs else _security(tls, token, chosen, output_format),
    )


def _security(
    given: TlsOptions, token: str, chosen: Context, form: OutputFormat
) -> Security | None:
    from batonmq.errors import InvalidArgument  # noqa: PLC0415  not needed for help pages

    try:
        return tls_options.choose_security(given, token, chosen)
    except InvalidArgument as error:
        Output(form).error(error)
        raise Exit(1) from error


def _on_command_line(context: click.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _chosen_context(path: Path, name: str, *, lenient: bool) -> Context:
    """Return the named context, or else the current one, or else an empty one.

    Args:
        lenient: Whether a missing context counts as empty, because the command may repair that.

    Raises:
        ContextError: the file can't be used, or there is no such context.
    """
    known = context_file.read(path)
    wanted = name or known.current
    if not wanted or (lenient and wanted not in known.by_name):
        return Context()
    return known.get(wanted)
