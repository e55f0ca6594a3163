"""Options of commands that change something, and the confirmation before the change."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from typing import Annotated

import click
from click.exceptions import Exit

from batonmq.admin.operation import Operation
from batonmq.cli.session import CommandSession, GlobalOptions


def current_user() -> str:
    """user@host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no variable names it, and no entry of the password file
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def resolve_by(context: typer.Context, by: str) -> str:
    """Who does it: as asked for, or as the context says, or user@host."""
    defaults = context.find_object(GlobalOptions)
    return by or (defaults.by if defaults else "") or current_user()


yes_option = click.option("--yes", "-y", is_flag=True, help="Don't ask before it is done.")
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Tell what would happen and change nothing."
)
reason_option = click.option("--reason", default="", help="Why; it is recorded.")
by_option = click.option(
    "--by",
    default="",
    envvar="BATON_BY",
    callback=resolve_by,
    help="Who does it; by default what the context says, or user@host.",
)
op_id_option = click.option(
    "--op-id",
    default="",
    help="Id of the operation, for repeating the command; by default a new one.",
)


def operation(by: str, reason: str, op_id: str) -> Operation:
    """What is to be recorded, under a new id if there is none."""
    return Operation(by, reason, op_id) if op_id else Operation(by, reason)


def check_can_ask(*, yes: bool) -> None:
    """Refuse a command line that would have to ask where nobody can answer.

    Raises:
        click.UsageError: so it is.
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("nobody is there to be asked: give --yes")


def confirm(session: CommandSession, question: str) -> None:
    """Ask a person before something is done.

    Raises:
        Exit: the answer is no, or Ctrl-C.
    """
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt as error:
        raise Exit(130) from error
    if answer.strip().lower() not in ("y", "yes"):
        session.output.failure("NOT_CONFIRMED", "nothing was changed", "")
        raise Exit(1)
