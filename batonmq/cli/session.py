"""What every command shares: its options, and the way a coroutine becomes an exit status.

0: done. 1: failed or refused, and standard error says why. 2: the command line is wrong.
130: interrupted. 141: nobody reads the output any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
from click.exceptions import Exit

from batonmq._common.aio import interruptible
from batonmq._connection.security import Security
from batonmq._connection.tls_probe import find_tls_failure
from batonmq.admin.admin import Admin
from batonmq.cli.output import Output, OutputFormat
from batonmq.errors import BatonError, Unreachable

DEFAULT_NAMESERVER = "127.0.0.1:9876"
Value = TypeVar("Value")

nameserver_option = click.option(
    "--nameserver",
    metavar="HOST:PORT",
    help="Address of a nameserver; several separated by commas.",
)
# TODO names/defaults {('form', 'None'), ('form', 'None) -> None:')}
format_option = click.option(
    "--format", "form", type=click.Choice(["table", "json", "wide"]), help="What to print."
)


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """What the options in front of the command say, or else the context; those behind it win.

    Attributes:
        by: Who is recorded with changes; empty for user@host.
        config: File of the contexts.
        security: How to use TLS; None for none.
    """

    nameserver: str
    form: OutputFormat
    by: str = ""
    config: Path = Path()
    security: Security | None = None


@dataclass(frozen=True, slots=True)
class CommandSession:
    """The shared options of one command."""

    nameserver: str
    output: Output
    security: Security | None = None

    def admin(self) -> Admin:
        """What asks the cluster and changes it; to be made where it is used."""
        return Admin(self.nameserver, security=self.security)

    def run(self, main: Coroutine[Any, Any, Value], *, endless: bool = False) -> Value:
        """What `main` returns. SIGINT, SIGTERM and SIGHUP cancel it, so that it ends in good order.

        Args:
            endless: Being interrupted is how the command ends: status 0 and not 130.
        """
        try:
            try:
                return asyncio.run(interruptible(main))
            except BaseExceptionGroup as group:
                raise _first_of(group) from group
        except BatonError as error:
            self.output.error(self._explained(error))
            raise Exit(1) from error
        except BrokenPipeError as error:  # such as `| head`: as if SIGPIPE had ended it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Exit(128 + signal.SIGPIPE) from error
        except OSError as error:
            self.output.failure("SYSTEM_ERROR", str(error), "")
            raise Exit(1) from error
        except asyncio.CancelledError as error:
            raise Exit(0 if endless else 130) from error

    def _explained(self, error: BatonError) -> BatonError:
        """The error, or what TLS has to do with it."""
        addresses = self.nameserver.split(",") if isinstance(error, Unreachable) else []
        for address in addresses:
            found = find_tls_failure(address.strip(), self.security)
            if found is not None:
                return Unreachable(f"{address}: {found.reason}", remedy=found.remedy)
        return error


def open_session(
    context: typer.Context, nameserver: str | None, form: OutputFormat | None
) -> CommandSession:
    """The session of a command.

    Args:
        nameserver: The command's own option.
        form: The command's own option.
    """
    defaults = context.find_object(GlobalOptions)
    assert defaults is not None
    address = nameserver or defaults.nameserver
    for part in filter(None, map(str.strip, address.split(","))):
        if ":" not in part:
            raise click.UsageError(f"{part!r} has no port: give HOST:PORT", param_hint="nameserver")
    return CommandSession(address, Output(form or defaults.form), defaults.security)


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that a person can do most with."""
    leaves = [
        _first_of(error) if isinstance(error, BaseExceptionGroup) else error
        for error in group.exceptions
    ]
    return next((leaf for leaf in leaves if isinstance(leaf, BatonError)), leaves[0])
