"""Options and the confirmation of commands that change something."""

from __future__ import annotations

import getpass
import os
import socket
import sys

import click
from click.exceptions import Exit

from batonmq.admin.operation import Operation
from batonmq.cli.global_options import GlobalOptions
from batonmq.cli.session import CommandSession


def current_user() -> str:
    """Return user@host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # neither a variable nor the password file names the user
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def resolve_by(context: click.Context, by: str) -> str:
    """Return the name to record: that of the option, else of the context, else user@host."""
    defaults = context.find_object(GlobalOptions)
    return by or (defaults.by if defaults else "") or current_user()


yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print what would happen, and change nothing."
)
reason_option = click.option("--reason", default="", help="Why; it is recorded.")
by_option = click.option(
    "--by",
    default="",
    envvar="BATON_BY",
    callback=lambda context, _, by: resolve_by(context, by),
    help="Name to record with the change; by default that of the context, or user@host.",
)
op_id_option = click.option(
    "--op-id",
    default="",
    help="Id of the operation: repeating a command with the same id changes nothing more. By "
    "default a new id.",
)


def operation(by: str, reason: str, op_id: str) -> Operation:
    """Return the operation to record, under a new id if none is given."""
    return Operation(by, reason, op_id) if op_id else Operation(by, reason)


def check_can_ask(*, yes: bool) -> None:
    """Check that the user can be asked for confirmation, unless --yes is given.

    Raises:
        click.UsageError: standard input is not a terminal.
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(
            "standard input is not a terminal, so confirmation can't be asked for: give --yes"
        )


def confirm(session: CommandSession, question: str) -> None:
    """Ask the user for confirmation; return if the answer is yes.

    Raises:
        Exit: the answer is no.
    """
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if answer.strip().lower() not in ("y", "yes"):
        session.output.failure("NOT_CONFIRMED", "nothing was changed", "")
        raise Exit(1)
