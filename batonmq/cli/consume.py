"""`baton consume`: messages become lines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from batonmq.admin import Admin
from batonmq.cli.output import Item, printable, wall_time
from batonmq.cli.session import FormatOption, NameserverOption, Session, open_session
from batonmq.common.errors import GroupNotFound, Unreachable
from batonmq.consumer import Consumer
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.session import ConsumerSettings
from batonmq.core.route import QueueId

_LOOK_S = 0.2


class Start(StrEnum):
    """Where a group without progress starts."""

    FIRST = "first"
    LAST = "last"
    TIMESTAMP = "timestamp"


def consume(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="Topic to read.")],
    *,
    group: Annotated[str, typer.Option(help="Consumer group; its progress is kept.")],
    start: Annotated[
        Start | None,
        typer.Option(
            "--from",
            help="Where the group starts on a queue without progress; by default where its "
            "members do, and first for a new group; timestamp is half an hour ago.",
            show_default=False,
        ),
    ] = None,
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
    session = open_session(context, nameserver, form)
    reading = _Reading(session, group, topic, expression, start, count)
    session.run(reading.run(follow=follow), endless=follow)


@dataclass(frozen=True, slots=True)
class _Reading:
    session: Session
    group: str
    topic: str
    expression: str
    start: Start | None
    count: int | None

    async def run(self, *, follow: bool) -> None:
        """Print until the count, the end or a signal."""
        wanted = {self.topic: self.expression}
        async with Admin(self.session.nameserver) as admin:
            start = self.start or await self._usual_start(admin)
            settings = ConsumerSettings(consume_from=start.value, commit_interval_ms=500)
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
            number += 1
            if number == self.count:
                consumer.stop()

    async def _usual_start(self, admin: Admin) -> Start:
        try:
            group = await admin.describe_group(self.group)
        except GroupNotFound:
            return Start.FIRST
        return Start(group.consume_from) if group.subscriptions else Start.FIRST

    async def _ends(self, admin: Admin) -> dict[QueueId, int]:
        """The next offset of every queue of the topic."""
        detail = await admin.describe_topic(self.topic)
        for problem in detail.problems:
            raise Unreachable(problem)
        return {extent.queue: extent.next_offset or 0 for extent in detail.queues}

    async def _stop_at(self, ends: dict[QueueId, int], admin: Admin, consumer: Consumer) -> None:
        """Stop the consumer once its group has handled everything below `ends`."""
        while True:
            with contextlib.suppress(Unreachable):  # looked at again
                progress = await admin.group_progress(self.group)
                offsets = {
                    QueueId(q.topic, q.broker, q.queue_id): q.committed_offset
                    for q in progress.queues
                }
                if all((offsets.get(queue) or 0) >= end for queue, end in ends.items()):
                    return consumer.stop()
            await asyncio.sleep(_LOOK_S)


def _item(message: ReceivedMessage) -> Item:
    """The message for a program; a body that is not UTF-8 stands as base64."""
    item = {
        "topic": message.topic,
        "broker": message.broker,
        "queue_id": message.queue_id,
        "offset": message.offset,
        "store_unix_ms": message.store_unix_ms,
        "tag": message.tag,
        "keys": list(message.keys),
        "properties": dict(message.properties),
        "redelivered": message.redelivered,
    }
    try:
        return item | {"body": message.body.decode()}
    except UnicodeDecodeError:
        return item | {"body_base64": base64.b64encode(message.body).decode()}


def _text(message: ReceivedMessage) -> str:
    """The message for a person: time, place, marks, body."""
    words = [
        wall_time(message.store_unix_ms),
        f"{message.broker}/{message.queue_id}@{message.offset}",
        f"tag={message.tag}" if message.tag else "",
        f"keys={','.join(message.keys)}" if message.keys else "",
        "redelivered" if message.redelivered else "",
        message.body.decode(errors="backslashreplace"),
    ]
    return printable(" ".join(word for word in words if word))
