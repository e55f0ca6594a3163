"""Topics, groups and queues as people type them, and the options that narrow a command down."""

from __future__ import annotations

from typing import Annotated

from functools import partial

import click

from batonmq.cli.completion import groups_that_begin, topics_that_begin

topic_argument = partial(
    argument, metavar="TOPIC", shell_complete=topics_that_begin, help="Name of the topic."
)
group_argument = partial(
    argument, metavar="GROUP", shell_complete=groups_that_begin, help="Name of the group."
)
topic_option = click.option(
    "--topic", default="", shell_complete=topics_that_begin, help="Only this topic."
)
queue_option = click.option(
    "--queue", default="", metavar="BROKER/ID", help="With --topic: only this queue."
)


def parse_queue(topic: str, text: str) -> tuple[str, int] | None:
    """Broker and queue id; None for an empty text.

    Raises:
        click.UsageError: it names no queue, or the topic is missing.
    """
    if not text:
        return None
    if not topic:
        raise click.UsageError("--topic is missing")
    broker, _, queue_id = text.rpartition("/")
    if not broker or not queue_id.isdecimal():
        raise click.UsageError(f"{text!r} is no queue: say BROKER/ID, such as broker-0/3")
    return broker, int(queue_id)
