"""`baton message …`: look up messages."""

from __future__ import annotations

import base64

import click

from batonmq._core.dead_letters import DeadLetter
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.cli.arguments import OFFSET, parse_message_queue
from batonmq.cli.command_classes import LazyCommand, LazyGroup, argument
from batonmq.cli.output import Item, printable, wall_time
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.cli.times import parse_unix_ms
from batonmq.errors import InvalidArgument, MessageNotFound, QueueNotFound

commands = LazyGroup(
    "message",
    help="Look up and trace messages; cancel scheduled ones.",
    no_args_is_help=True,
    lazy={
        "cancel": LazyCommand(
            "batonmq.cli.message_cancel:cancel",
            "Cancel a scheduled message that is not delivered yet.",
        ),
        "trace": LazyCommand(
            "batonmq.cli.message_trace:trace",
            "Show what happened to a message, found by id, key, offset or transaction.",
        ),
    },
)


@commands.command()
@argument("message_id", required=False, metavar="[ID]", help="Message id, as in the receipt.")
@click.option("--topic", default="", help="Topic of the message.")
@click.option("--key", default="", help="Show the messages with this key; needs --topic.")
@click.option(
    "--queue",
    default="",
    metavar="[BROKER/]ID",
    help="Queue of the message, such as broker-0/3; needs --topic.",
)
@click.option(
    "--broker", default="", help="Broker of the queue; required if several brokers have the queue."
)
@click.option("--offset", type=OFFSET, help="Offset of the message; needs --queue.")
@click.option(
    "--time",
    default="",
    help="Show the first message stored at or after this time, such as 2026-01-31T08:00:00Z or "
    "Unix milliseconds; needs --queue.",
)
@click.option(
    "--count",
    default=64,
    show_default=True,
    type=click.IntRange(min=1, max=1_000),
    help="Maximum number of messages to show, newest first; needs --key.",
)
@cluster_session
def get(
    session: CommandSession,
    message_id: str | None,
    topic: str,
    key: str,
    queue: str,
    broker: str,
    offset: int | None,
    time: str,
    count: int,
) -> None:
    """Show messages, found by id, key, offset or store time.

    Nothing is consumed: the progress of groups does not change.
    """
    ways = [message_id is not None, bool(key), offset is not None, bool(time)]
    if sum(ways) != 1:
        raise click.UsageError("exactly one of ID, --key, --offset and --time is required")
    if message_id is None and not topic:
        raise click.UsageError("--topic is required")
    if (offset is not None or time) and not queue:
        raise click.UsageError("--queue is required")
    if message_id is not None:
        session.run(_get(session, message_id))
    elif key:
        session.run(_find(session, topic, key, count))
    else:
        session.run(_read(session, parse_message_queue(topic, queue, broker), offset, time))


async def _get(session: CommandSession, message_id: str) -> None:
    async with session.admin() as admin:
        show_message(session, await MessageQueries(admin).message(message_id))


async def _find(session: CommandSession, topic: str, key: str, count: int) -> None:
    async with session.admin() as admin:
        matches = await MessageQueries(admin).with_key(topic, key, count_max=count)
    if not matches.messages:
        raise MessageNotFound(f"topic {topic} has no message with key {key}")
    for one in matches.messages:
        show_message(session, one)
    if matches.more:
        session.output.note("there may be more; see --count")


async def _read(session: CommandSession, wanted: QueueRef, offset: int | None, time: str) -> None:
    async with session.admin() as admin:
        queue = await find_queue(admin, wanted)
        queries = MessageQueries(admin)
        if offset is None:
            offset = await queries.offset_at(queue, parse_unix_ms(time))
        show_message(session, await queries.at_offset(queue, offset))


async def find_queue(admin: Admin, wanted: QueueRef) -> QueueRef:
    """Return the queue with its broker, which may be left out if only one broker has the queue.

    Raises:
        QueueNotFound: the topic has no such queue.
        InvalidArgument: several brokers have a queue of this id.
    """
    detail = await admin.describe_topic(wanted.topic)
    queues = [
        queue
        for queue in detail.topic.queues
        if queue.queue_id == wanted.queue_id and wanted.broker in ("", queue.broker)
    ]
    if not queues:
        name = f"{wanted.broker}/{wanted.queue_id}".lstrip("/")
        raise QueueNotFound(
            f"topic {wanted.topic} has no queue {name}",
            remedy=f"See: baton topic describe {wanted.topic}.",
        )
    if len(queues) > 1:
        brokers = ", ".join(queue.broker for queue in queues)
        raise InvalidArgument(
            f"queue {wanted.queue_id} of topic {wanted.topic} exists on several brokers: {brokers}",
            remedy="Choose one: --broker NAME.",
            facts={"field": "broker"},
        )
    return queues[0]


def show_message(session: CommandSession, message: StoredMessage) -> None:
    """Print one message, as a line of text or of JSON."""
    session.output.line(_item(message), _text(message))


def _item(message: StoredMessage) -> Item:
    """Return the message for JSON; a body that is not UTF-8 is in base64."""
    item = {
        "message_id": message.message_id,
        "topic": message.queue.topic,
        "broker": message.queue.broker,
        "queue_id": message.queue.queue_id,
        "offset": message.offset,
        "born_unix_ms": message.born_unix_ms,
        "store_unix_ms": message.store_unix_ms,
        "tag": message.tag,
        "keys": list(message.keys),
        "properties": dict(message.properties),
    }
    return {**item, **body_of(message)}


def body_of(message: StoredMessage | DeadLetter) -> Item:
    """Return the body for JSON; a body that is not UTF-8 is in base64."""
    try:
        return {"body": message.body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(message.body).decode()}


def _text(message: StoredMessage) -> str:
    """Return the message as text: time, id, queue and offset, tag, keys, body."""
    words = [
        wall_time(message.store_unix_ms),
        message.message_id,
        f"{message.queue}@{message.offset}",
        f"tag={message.tag}" if message.tag else "",
        f"keys={','.join(message.keys)}" if message.keys else "",
        message.body.decode(errors="backslashreplace"),
    ]
    return printable(" ".join(word for word in words if word))
