"""Topics, groups and queues as people type them, and the options that narrow a command down."""

from __future__ import annotations

from typing import Annotated

import typer

from batonmq.cli.completion import groups_that_begin, topics_that_begin

TopicArgument = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="Name of the topic.", autocompletion=topics_that_begin),
]
GroupArgument = Annotated[
    str,
    typer.Argument(metavar="GROUP", help="Name of the group.", autocompletion=groups_that_begin),
]
TopicOption = Annotated[
    str,
    typer.Option(help="Only this topic.", show_default=False, autocompletion=topics_that_begin),
]
QueueOption = Annotated[
    str,
    typer.Option(metavar="BROKER/ID", help="With --topic: only this queue.", show_default=False),
]


def parse_queue(topic: str, text: str) -> tuple[str, int] | None:
    """Broker and queue id; None for an empty text.

    Raises:
        typer.BadParameter: it names no queue, or the topic is missing.
    """
    if not text:
        return None
    if not topic:
        raise typer.BadParameter("--topic is missing")
    broker, _, queue_id = text.rpartition("/")
    if not broker or not queue_id.isdecimal():
        raise typer.BadParameter(f"{text!r} is no queue: say BROKER/ID, such as broker-0/3")
    return broker, int(queue_id)
