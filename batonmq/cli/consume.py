"""`baton consume`: print messages as lines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from dataclasses import dataclass, replace
from typing import cast

import click

from batonmq._common.clock import Clock
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ORDERS, ConsumerSettings, MessageOrder
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.delays import parse_duration_ms
from batonmq._core.queues import QueueRef
from batonmq._core.retries import retry_topic
from batonmq._core.start_offset import ConsumeFrom
from batonmq._core.subscription import parse_filter
from batonmq.admin.admin import Admin
from batonmq.cli.arguments import topic_argument
from batonmq.cli.command_classes import command
from batonmq.cli.completion import complete_groups
from batonmq.cli.output import Item, printable, wall_time
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.cli.times import parse_unix_ms
from batonmq.errors import GroupNotFound, InvalidArgument, Unreachable

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class StartPosition:
    """The first message of a group without progress.

    Attributes:
        unix_ms: Time for `timestamp`, in Unix milliseconds; 0 for half an hour ago.
    """

    place: ConsumeFrom
    unix_ms: int = 0


FIRST = StartPosition("first")


def parse_start(text: str, now_unix_ms: int) -> StartPosition:
    """Return the start of a text: first, last, timestamp, a time, or a duration before now.

    Raises:
        InvalidArgument: the text is none of these.
    """
    if text == "first":
        return FIRST
    if text == "last":
        return StartPosition("last")
    if text == "timestamp":
        return StartPosition("timestamp")
    if text[:1].isdecimal() and text[-1:].isalpha() and not text.endswith("Z"):
        return StartPosition("timestamp", now_unix_ms - parse_duration_ms(text))
    return StartPosition("timestamp", parse_unix_ms(text))


@command("consume")
@topic_argument("topic")
@click.option(
    "--group",
    required=True,
    shell_complete=complete_groups,
    help="Consumer group; its progress is stored.",
)
@click.option(
    "--from",
    "start",
    default="",
    metavar="first|last|TIME|SPAN",
    help="Where the group starts on a queue without progress; by default as its members, and first "
    "for a new group. TIME is such as 2026-01-31T08:00:00Z or Unix milliseconds, SPAN a duration "
    "before now such as 2h.",
)
@click.option(
    "--filter",
    "expression",
    default="*",
    show_default=True,
    help="* for all, tags joined by ||, or a condition such as: sql: a > 5 AND b = 'x'",
)
@click.option(
    "--order",
    type=click.Choice(tuple(ORDERS)),
    help="In which order the members of the group handle messages: all members must have the same. "
    "By default as the members, and none for a new group. This command handles one message at a "
    "time in any case.",
)
@click.option("--count", type=click.IntRange(min=1), help="Stop after this number of messages.")
@click.option(
    "--follow", is_flag=True, help="Wait for new messages at the end of the queues, until Ctrl-C."
)
@click.option("--reply", help="Reply to each request with this text, before the next message.")
@cluster_session
def consume(
    session: CommandSession,
    topic: str,
    group: str,
    start: str,
    expression: str,
    order: MessageOrder | None,
    count: int | None,
    follow: bool,
    reply: str | None,
) -> None:
    """Print messages as a member of a group, and acknowledge each after it is printed.

    Stops when the group has handled the messages that were stored at the start, or after --count;
    with --follow it does not stop by itself. It leaves the group gracefully, also on Ctrl-C and
    SIGTERM: its queues are released at once, and printed messages are not delivered again.
    """
    try:
        begin = parse_start(start, Clock().unix_ms()) if start else None
    except InvalidArgument as error:
        raise click.UsageError(f"{error.message}. {error.remedy}") from error
    reading = _TopicReader(session, group, topic, expression, begin, order, count, reply)
    session.run(reading.run(follow=follow), endless=follow)


@dataclass(frozen=True, slots=True)
class _TopicReader:
    session: CommandSession
    group: str
    topic: str
    expression: str
    start: StartPosition | None
    order: MessageOrder | None
    count: int | None
    reply: str | None

    async def run(self, *, follow: bool) -> None:
        """Print until the count, the end of the queues, or a signal."""
        wanted = {
            self.topic: parse_filter(self.expression).canonical()
        }  # checked before the first request
        async with self.session.admin() as admin:
            settings = await self._settings(admin)
            consumer = Consumer(self.session.nameserver, self.group, wanted, settings)
            ends = await self._ends(admin)
            async with consumer, asyncio.TaskGroup() as tasks:
                if not follow:
                    looking = tasks.create_task(self._stop_at(ends, admin, consumer))
                await self._print(consumer)
                if not follow:
                    looking.cancel()

    async def _print(self, consumer: Consumer) -> None:
        number = 0
        async for message in consumer:
            self.session.output.line(_item(message), _text(message))
            if self.reply is not None and message.is_request:
                consumer.reply(message, self.reply.encode())
            number += 1
            if number == self.count:
                consumer.stop()

    async def _settings(self, admin: Admin) -> ConsumerSettings:
        """Return the settings that all members share, as the group has them if it exists.

        A new group gets no retry topic just because a user looks at messages.
        """
        start = self.start or FIRST
        settings = ConsumerSettings(
            consume_from=start.place,
            start_unix_ms=start.unix_ms,
            commit_interval_ms=500,
            order=self.order or "none",
            send_back=False,
            security=self.session.security,
        )
        try:
            group = await admin.describe_group(self.group)
        except GroupNotFound:
            return settings
        if not group.subscriptions:
            return settings
        if self.start is None:
            usual = cast(ConsumeFrom, group.consume_from)
            settings = replace(settings, consume_from=usual)
        order = self.order or cast(MessageOrder, group.order)
        sends_back = retry_topic(self.group) in {s.topic for s in group.subscriptions}
        return replace(settings, order=order, send_back=sends_back and order == "none")

    async def _ends(self, admin: Admin) -> dict[QueueRef, int]:
        """Return the next offset of every queue of the topic."""
        detail = await admin.describe_topic(self.topic)
        for problem in detail.problems:
            raise Unreachable(problem)
        return {extent.queue: extent.next_offset or 0 for extent in detail.queues}

    async def _stop_at(self, ends: dict[QueueRef, int], admin: Admin, consumer: Consumer) -> None:
        """Stop the consumer when its group has committed all offsets below `ends`."""
        while True:
            with contextlib.suppress(Unreachable):  # tried again
                progress = await admin.group_progress(self.group)
                offsets = {
                    QueueRef(q.topic, q.broker, q.queue_id): q.committed_offset
                    for q in progress.queues
                }
                if all((offsets.get(queue) or 0) >= end for queue, end in ends.items()):
                    return consumer.stop()
            await asyncio.sleep(_POLL_S)


def _item(message: ReceivedMessage) -> Item:
    """Return the message for JSON; a body that is not UTF-8 is in base64."""
    item = {
        "topic": message.topic,
        "broker": message.broker,
        "queue_id": message.queue_id,
        "offset": message.offset,
        "store_unix_ms": message.store_unix_ms,
        "tag": message.tag,
        "keys": list(message.keys),
        "ordering_key": message.ordering_key,
        "properties": dict(message.properties),
        "redelivered": message.redelivered,
    }
    try:
        return item | {"body": message.body.decode()}
    except UnicodeDecodeError:
        return item | {"body_base64": base64.b64encode(message.body).decode()}


def _text(message: ReceivedMessage) -> str:
    """Return the message as text: time, queue and offset, tag, keys, body."""
    words = [
        wall_time(message.store_unix_ms),
        f"{message.broker}/{message.queue_id}@{message.offset}",
        f"tag={message.tag}" if message.tag else "",
        f"keys={','.join(message.keys)}" if message.keys else "",
        "" if message.ordering_key is None else f"ordering_key={message.ordering_key}",
        "redelivered" if message.redelivered else "",
        message.body.decode(errors="backslashreplace"),
    ]
    return printable(" ".join(word for word in words if word))
