"""`baton message …`."""

from __future__ import annotations

import base64
from typing import Annotated

import click

from batonmq._core.dead_letters import DeadLetter
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.query import Queries, StoredMessage
from batonmq.cli.output import Item, printable, wall_time
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session
from batonmq.cli.times import parse_unix_ms
from batonmq.errors import InvalidArgument, MessageNotFound, QueueNotFound

app = click.Group(help="Look messages up; cancel scheduled ones.", no_args_is_help=True)


@app.command()
@argument("message_id", required=False, metavar="[ID]", help="Id of a receipt.")
@click.option("--topic", default="", help="Topic to look in.")
@click.option("--key", default="", help="With --topic: messages that carry this key.")
@click.option("--queue", type=click.IntRange(min=0), help="With --topic: a queue of it.")
@click.option("--broker", default="", help="With --queue: its broker, if the topic has several.")
@click.option("--offset", type=click.IntRange(min=0), help="With --queue: an offset.")
@click.option(
    "--time",
    default="",
    help="With --queue: the first message stored at or after this time, such as "
    "2026-01-31T08:00:00Z or Unix milliseconds.",
)
@click.option(
    "--count",
    default=64,
    show_default=True,
    type=click.IntRange(min=1, max=1_000),
    help="With --key: at most so many, newest first.",
)
@cluster_session
def get(
    session: CommandSession,
    message_id: str | None,
    topic: str,
    key: str,
    queue: int | None,
    broker: str,
    offset: int | None,
    time: str,
    count: int,
) -> None:
    """Show a message by its id, by a key, or by its place: ID, --key, --offset or --time.

    Nothing is consumed: no group moves.
    """
    ways = [message_id is not None, bool(key), offset is not None, bool(time)]
    if sum(ways) != 1:
        raise click.UsageError("give exactly one of ID, --key, --offset and --time")
    if message_id is None and not topic:
        raise click.UsageError("--topic is missing")
    if (offset is not None or time) and queue is None:
        raise click.UsageError("--queue is missing")
    if message_id is not None:
        session.run(_get(session, message_id))
    elif key:
        session.run(_find(session, topic, key, count))
    else:
        assert queue is not None
        session.run(_read(session, QueueRef(topic, broker, queue), offset, time))


async def _get(session: CommandSession, message_id: str) -> None:
    async with session.admin() as admin:
        _show(session, await Queries(admin).message(message_id))


async def _find(session: CommandSession, topic: str, key: str, count: int) -> None:
    async with session.admin() as admin:
        found = await Queries(admin).with_key(topic, key, count_max=count)
    if not found.messages:
        raise MessageNotFound(f"no message of topic {topic} has the key {key}")
    for one in found.messages:
        _show(session, one)
    if found.more:
        session.output.note("there may be more: see --count")


async def _read(session: CommandSession, asked: QueueRef, offset: int | None, time: str) -> None:
    async with session.admin() as admin:
        queue = await find_queue(admin, asked)
        queries = Queries(admin)
        if offset is None:
            offset = await queries.offset_at(queue, parse_unix_ms(time))
        _show(session, await queries.at_offset(queue, offset))


async def find_queue(admin: Admin, asked: QueueRef) -> QueueRef:
    """`asked` with its broker, if that can't be but one."""
    detail = await admin.describe_topic(asked.topic)
    queues = [
        queue
        for queue in detail.topic.queues
        if queue.queue_id == asked.queue_id and asked.broker in ("", queue.broker)
    ]
    if not queues:
        place = f"{asked.broker}/{asked.queue_id}".lstrip("/")
        raise QueueNotFound(
            f"topic {asked.topic} has no queue {place}",
            remedy=f"Name one of `baton topic describe {asked.topic}`.",
        )
    if len(queues) > 1:
        brokers = ", ".join(queue.broker for queue in queues)
        raise InvalidArgument(
            f"queue {asked.queue_id} of topic {asked.topic} is on several brokers: {brokers}",
            remedy="Say which: --broker NAME.",
            facts={"field": "broker"},
        )
    return queues[0]


def _show(session: CommandSession, message: StoredMessage) -> None:
    session.output.line(_item(message), _text(message))


def _item(message: StoredMessage) -> Item:
    """The message for a program; a body that is not UTF-8 stands as base64."""
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
    """The body for a program; one that is not UTF-8 stands as base64."""
    try:
        return {"body": message.body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(message.body).decode()}


def _text(message: StoredMessage) -> str:
    """The message for a person: time, id, place, marks, body."""
    words = [
        wall_time(message.store_unix_ms),
        message.message_id,
        f"{message.queue}@{message.offset}",
        f"tag={message.tag}" if message.tag else "",
        f"keys={','.join(message.keys)}" if message.keys else "",
        message.body.decode(errors="backslashreplace"),
    ]
    return printable(" ".join(word for word in words if word))
