"""Arguments and options that name a topic, a group or a queue."""

from __future__ import annotations

from functools import partial

import click

from batonmq._core.queues import QueueRef
from batonmq.cli.command_classes import argument
from batonmq.cli.completion import complete_groups, complete_topics

QUEUE_ID_MAX, OFFSET_MAX = 2**32 - 1, 2**63 - 1
"""Limits of the fields of requests; a greater number can't be sent."""
QUEUE_ID, OFFSET = click.IntRange(0, QUEUE_ID_MAX), click.IntRange(0, OFFSET_MAX)
topic_argument = partial(
    argument, metavar="TOPIC", shell_complete=complete_topics, help="Name of the topic."
)
group_argument = partial(
    argument, metavar="GROUP", shell_complete=complete_groups, help="Name of the group."
)
topic_option = click.option(
    "--topic", default="", shell_complete=complete_topics, help="Only this topic."
)
queue_option = click.option(
    "--queue", default="", metavar="BROKER/ID", help="Only this queue; needs --topic."
)


def parse_queue(topic: str, text: str) -> tuple[str, int] | None:
    """Return broker and queue id of `BROKER/ID`; None for an empty text.

    Raises:
        click.UsageError: the text names no queue, or the topic is missing.
    """
    if not text:
        return None
    if not topic:
        raise click.UsageError("--topic is required with --queue")
    broker, _, queue_id = text.rpartition("/")
    if not broker or not is_queue_id(queue_id):
        raise click.UsageError(f"--queue must be BROKER/ID, such as broker-0/3, got {text!r}")
    return broker, int(queue_id)


def parse_message_queue(topic: str, text: str, broker: str) -> QueueRef:
    """Return the queue of `BROKER/ID`, or of `ID` and the value of --broker, which may be empty.

    Raises:
        click.UsageError: the text names no queue, or another broker than --broker.
    """
    named, _, queue_id = text.rpartition("/")
    if not is_queue_id(queue_id) or text.startswith("/"):
        raise click.UsageError(f"--queue must be BROKER/ID or ID, such as broker-0/3, got {text!r}")
    if named and broker and named != broker:
        raise click.UsageError(f"--queue names broker {named}, and --broker {broker}: give one")
    return QueueRef(topic, named or broker, int(queue_id))


def is_queue_id(text: str) -> bool:
    """Return whether a text is the id of a queue."""
    return text.isdecimal() and len(text) <= len(str(QUEUE_ID_MAX)) and int(text) <= QUEUE_ID_MAX
