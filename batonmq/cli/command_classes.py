"""Click classes of `baton`: arguments with help texts, and groups that import lazily."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from batonmq.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])


class Argument(click.Argument):
    """A positional argument with a help text, which click's own class has only since 8.5."""

    def __init__(self, *args: Any, help: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.description = help


class FloatRange(click.FloatRange):
    """A range of numbers, without infinity and what is no number."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of a text."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class Command(click.Command):
    """A command with a help page that lists its arguments above its options.

    A value that a function of the library refuses before the command begins is a usage error.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options and arguments."""
        with _usage_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _usage_errors(ctx):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        arguments = [
            (one.metavar or one.human_readable_name, one.description)
            for one in self.params
            if isinstance(one, Argument) and one.description
        ]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        super().format_options(ctx, formatter)


@contextmanager
def _usage_errors(ctx: click.Context) -> Iterator[None]:
    """Turn a value that is not valid into a usage error; in a session it is a failure instead."""
    try:
        yield
    except InvalidArgument as error:
        raise click.UsageError(f"{error.message}. {error.remedy}".rstrip(" ."), ctx) from error


command = partial(click.command, cls=Command)
"""Decorator that makes a `Command` of a function."""


def argument(name: str, **attributes: Any) -> Callable[[F], F]:
    """Return a decorator that adds an `Argument` to a command."""
    return click.argument(name, cls=Argument, **attributes)


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported when it is called.

    Attributes:
        target: The command object, as `module:name`.
        summary: The first line of its help, for the help page of its group.
        hidden: Whether help pages and completion leave it out.
    """

    target: str
    summary: str = ""
    hidden: bool = False

    def load(self) -> click.Command:
        """Import the command."""
        module, _, name = self.target.partition(":")
        loaded = getattr(importlib.import_module(module), name)
        assert isinstance(loaded, click.Command)
        return loaded


class LazyGroup(click.Group):
    """A group that imports the module of a command only when that command is called.

    Help pages and shell completion need the names and summaries alone, so they import nothing.

    Args:
        lazy: The lazy commands by name, beside those that are registered as usual.
    """

    command_class = Command

    def __init__(
        self, *args: Any, lazy: Mapping[str, LazyCommand] | None = None, **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self.lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported if it is lazy; None if there is none of this name."""
        if cmd_name in self.lazy:
            return self.lazy[cmd_name].load()
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and summaries of the commands."""
        rows = self._summaries(ctx)
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands, or the options, that begin with `incomplete`."""
        commands = [
            CompletionItem(name, help=summary)
            for name, summary in self._summaries(ctx)
            if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def _summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return name and summary of each command that is not hidden."""
        rows = []
        for name in self.list_commands(ctx):
            one = self.lazy.get(name) or super().get_command(ctx, name)
            if one is None or one.hidden:
                continue
            summary = one.summary if isinstance(one, LazyCommand) else _summary(one)
            rows.append((name, summary))
        return rows


def _summary(loaded: click.Command) -> str:
    return loaded.get_short_help_str(limit=200)
