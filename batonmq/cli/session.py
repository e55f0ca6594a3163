"""What all commands share: common options, and how a coroutine becomes an exit status.

0: done. 1: failed or rejected; standard error says why. 2: the command line is wrong.
130: interrupted. 141: standard output was closed by its reader.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
from click.exceptions import Exit

from batonmq._common.aio import interruptible
from batonmq._connection.security import Security
from batonmq._connection.tls_probe import accepts_connections, find_tls_failure
from batonmq.admin.admin import Admin
from batonmq.cli.global_options import GlobalOptions
from batonmq.cli.output import Output, OutputFormat
from batonmq.errors import BatonError, Unreachable

P = ParamSpec("P")
Value = TypeVar("Value")

nameserver_option = click.option(
    "--nameserver",
    metavar="HOST:PORT",
    help="Address of a nameserver; several separated by commas.",
)
format_option = click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in OutputFormat]),
    help="What to print.",
)


@dataclass(frozen=True, slots=True)
class CommandSession:
    """The cluster and the output of one command."""

    nameserver: str
    output: Output
    security: Security | None = None

    def admin(self) -> Admin:
        """Return a new client for queries and changes; enter it with `async with`."""
        return Admin(self.nameserver, security=self.security)

    def run(self, main: Coroutine[Any, Any, Value], *, endless: bool = False) -> Value:
        """Run `main` and return its result. SIGINT, SIGTERM and SIGHUP cancel it.

        Args:
            endless: Whether an interrupt is the regular end of the command: status 0, not 130.

        Raises:
            Exit: `main` failed or was interrupted; the error is printed.
        """
        try:
            try:
                return asyncio.run(interruptible(main))
            except BaseExceptionGroup as group:
                raise _most_useful(group) from group
        except BatonError as error:
            self.output.error(self._explain(error))
            raise Exit(1) from error
        except BrokenPipeError as error:  # such as `| head`: the status of a death by SIGPIPE
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Exit(128 + signal.SIGPIPE) from error
        except OSError as error:
            self.output.failure("SYSTEM_ERROR", str(error), "")
            raise Exit(1) from error
        except asyncio.CancelledError as error:
            raise Exit(0 if endless else 130) from error

    def _explain(self, error: BatonError) -> BatonError:
        """Return the error; if no nameserver can be reached, an error that says why instead."""
        if not isinstance(error, Unreachable):
            return error
        addresses = [address.strip() for address in self.nameserver.split(",")]
        for address in addresses:
            failure = find_tls_failure(address, self.security)
            if failure is not None:
                return Unreachable(f"{address}: {failure.reason}", remedy=failure.remedy)
        if not any(accepts_connections(address) for address in addresses):
            return Unreachable(
                f"no nameserver accepts connections at {self.nameserver}",
                remedy="Start the cluster, or give the address of a nameserver: --nameserver, "
                "the variable BATON_NAMESERVER, or a context (baton context set).",
            )
        return error


def cluster_session(
    function: Callable[Concatenate[CommandSession, P], None],
) -> Callable[..., None]:
    """Add --nameserver and --format to a command, and pass a session as its first argument."""

    @wraps(function)
    def run(nameserver: str | None, form: str | None, **options: Any) -> None:
        function(open_session(click.get_current_context(), nameserver, form), **options)  # type: ignore[call-arg]

    return nameserver_option(format_option(run))


def local_session(function: Callable[Concatenate[CommandSession, P], None]) -> Callable[..., None]:
    """Add --format to a command, and pass a session as its first argument."""

    @wraps(function)
    def run(form: str | None, **options: Any) -> None:
        function(open_session(click.get_current_context(), None, form), **options)  # type: ignore[call-arg]

    return format_option(run)


def open_session(
    context: click.Context, nameserver: str | None, form: str | None
) -> CommandSession:
    """Return the session of a command.

    Args:
        nameserver: The option after the command; None for that before it.
        form: The option after the command; None for that before it.

    Raises:
        click.UsageError: the address of a nameserver has no port.
    """
    defaults = global_options(context)
    address = nameserver or defaults.nameserver
    for part in filter(None, map(str.strip, address.split(","))):
        if ":" not in part:
            raise click.UsageError(f"nameserver must be HOST:PORT, got {part!r}")
    output = Output(OutputFormat(form) if form else defaults.form)
    return CommandSession(address, output, defaults.security)


def global_options(context: click.Context) -> GlobalOptions:
    """Return the values of the options before the command."""
    options = context.find_object(GlobalOptions)
    assert options is not None
    return options


def _most_useful(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error of a group that tells the user most: a `BatonError` if there is one."""
    leaves = [
        _most_useful(error) if isinstance(error, BaseExceptionGroup) else error
        for error in group.exceptions
    ]
    return next((leaf for leaf in leaves if isinstance(leaf, BatonError)), leaves[0])
