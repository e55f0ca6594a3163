"""Queues as people type them, and the options that narrow a command down to some."""

from __future__ import annotations

from typing import Annotated

import typer

TopicOption = Annotated[str, typer.Option(help="Only this topic.", show_default=False)]
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
