"""`baton topic peek`: messages of a topic, read beside all groups."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Sequence

import click

from batonmq._common.clock import Clock
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.admin.reports import QueueExtent
from batonmq.cli.arguments import parse_message_queue, topic_argument
from batonmq.cli.command_classes import command
from batonmq.cli.consume import StartPosition, parse_start
from batonmq.cli.message import find_queue, show_message
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import InvalidArgument, OffsetOutOfRange

_AT_ONCE = 8
_START = StartPosition("last")


@command("peek")
@topic_argument("topic")
@click.option(
    "--queue",
    default="",
    metavar="[BROKER/]ID",
    help="Only this queue, such as broker-0/3.",
)
@click.option(
    "--from",
    "start",
    default="",
    metavar="first|TIME|SPAN",
    help="Show the first messages from here on, not the newest ones. TIME is such as "
    "2026-01-31T08:00:00Z or Unix milliseconds, SPAN a duration before now such as 2h.",
)
@click.option(
    "--count",
    default=10,
    show_default=True,
    type=click.IntRange(min=1, max=1_000),
    help="Maximum number of messages to show.",
)
@cluster_session
def peek(session: CommandSession, topic: str, queue: str, start: str, count: int) -> None:
    """Show the newest messages of a topic, or the first ones from a position on.

    Nothing is consumed: no group is needed, and the progress of groups does not change. Messages
    of several queues are ordered by the time at which they were stored.
    """
    try:
        begin = parse_start(start, Clock().unix_ms()) if start else None
    except InvalidArgument as error:
        raise click.UsageError(f"{error.message}. {error.remedy}") from error
    if begin == _START:
        raise click.UsageError("--from last shows no message; the default shows the newest ones")
    session.run(_peek(session, topic, queue, begin, count))


async def _peek(
    session: CommandSession, topic: str, queue: str, start: StartPosition | None, count: int
) -> None:
    async with session.admin() as admin:
        if queue:
            wanted = {await find_queue(admin, parse_message_queue(topic, queue, ""))}
        detail = await admin.describe_topic(topic)
        extents = [one for one in detail.queues if not queue or one.queue in wanted]
        room = asyncio.Semaphore(_AT_ONCE)

        async def read(extent: QueueExtent) -> Sequence[StoredMessage]:
            async with room:
                return await _read(MessageQueries(admin), extent, start, count)

        async with asyncio.TaskGroup() as tasks:
            reading = [
                tasks.create_task(read(extent))
                for extent in extents
                if extent.first_offset is not None
            ]
    for message in choose((task.result() for task in reading), count, newest=start is None):
        show_message(session, message)
    session.output.problems(detail.problems)


def choose(
    queues: Iterable[Sequence[StoredMessage]], count: int, *, newest: bool
) -> list[StoredMessage]:
    """Return the newest or the oldest messages of several queues, the oldest first."""
    merged = list(heapq.merge(*queues, key=lambda message: message.store_unix_ms))
    return merged[-count:] if newest else merged[:count]


async def _read(
    queries: MessageQueries, extent: QueueExtent, start: StartPosition | None, count: int
) -> list[StoredMessage]:
    """Return up to `count` messages of one queue, ascending by offset."""
    first, end = extent.first_offset or 0, extent.next_offset or 0
    if start is None:
        offset = max(first, end - count)
    elif start.place == "first":
        offset = first
    else:
        offset = await queries.offset_at(extent.queue, start.unix_ms)
    messages: list[StoredMessage] = []
    while offset < end and len(messages) < count:
        try:
            page = await queries.page(extent.queue, offset, count - len(messages))
        except OffsetOutOfRange:  # retention has removed the rest of it since it was described
            return messages
        messages.extend(page.messages)
        if page.next_offset <= offset:
            break
        offset = page.next_offset
    return messages
