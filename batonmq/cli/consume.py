"""`baton consume`: messages become lines."""

from __future__ import annotations

import base64
from enum import StrEnum
from typing import Annotated

import typer

from batonmq.cli.output import Item, printable, wall_time
from batonmq.cli.session import FormatOption, NameserverOption, Session, open_session
from batonmq.consumer import Consumer
from batonmq.consuming.message import ReceivedMessage


class Start(StrEnum):
    """Where a group without progress starts."""

    FIRST = "first"
    LAST = "last"


def consume(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="Topic to read.")],
    *,
    group: Annotated[str, typer.Option(help="Consumer group; its progress is kept.")],
    start: Annotated[
        Start, typer.Option("--from", help="Where the group starts if it has no progress.")
    ] = Start.LAST,
    expression: Annotated[
        str, typer.Option("--filter", help="Tags joined by ||, or * for all.")
    ] = "*",
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many messages.", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on at the end of the queues, until Ctrl-C.")
    ] = False,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Print messages as a member of a group, and acknowledge each once it is printed.

    Ends when the group has handled what was in the queues at the start; with --count earlier;
    with --follow never by itself. Leaves the group in good order, also on Ctrl-C.
    """
