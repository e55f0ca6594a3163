"""`baton produce`: lines become messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from batonmq.cli.lines import read_lines
from batonmq.cli.output import Form, Output
from batonmq.cli.session import FormatOption, NameserverOption, open_session
from batonmq.common.errors import BatonError
from batonmq.core.records import BODY_BYTES_MAX, Message
from batonmq.core.route import QueueId
from batonmq.producer import Pending, Producer, Receipt

_PENDING_MAX = 10_000


def produce(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="Topic to send to.")],
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", exists=True, dir_okay=False, help="Read this, not standard input."),
    ] = None,
    tag: Annotated[str, typer.Option(help="Tag of every message, for filters.")] = "",
    key: Annotated[
        list[str] | None, typer.Option(help="Look-up key of every message; may be repeated.")
    ] = None,
    ordering_key: Annotated[
        str | None, typer.Option(help="Send all to the one queue this key belongs to, in order.")
    ] = None,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Send each line as a message, and say where they are stored.

    With --format json: one receipt per line, in the order of the input.
    """
    session = open_session(context, nameserver, form)
    template = Message(b"", tag, tuple(key or ()))
    sending = _Sending(topic, template, ordering_key, _Summary(session.output))
    session.run(_produce(session.nameserver, file, sending))


class _Summary:
    """What is stored where; messages of others may lie between the offsets."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._offsets: dict[QueueId, list[int]] = {}
        self._durabilities: set[str] = set()
        self._failures: list[BatonError] = []

    def add(self, receipt: Receipt) -> None:
        """Note, and in JSON print, a receipt."""
        self._offsets.setdefault(receipt.queue, []).append(receipt.offset)
        self._durabilities.add(receipt.durability.name)
        if self._output.form is Form.JSON:
            self._output.line(
                {
                    "topic": receipt.queue.topic,
                    "broker": receipt.queue.broker,
                    "queue_id": receipt.queue.queue_id,
                    "offset": receipt.offset,
                    "message_id": receipt.message_id,
                    "store_unix_ms": receipt.store_unix_ms,
                    "durability": receipt.durability.name,
                    "duplicate": receipt.duplicate,
                },
                "",
            )

    def fail(self, failure: BatonError) -> None:
        """Note a message without a receipt."""
        self._failures.append(failure)

    def print(self) -> None:
        """Tell a person what has become of the messages."""
        count = sum(map(len, self._offsets.values()))
        words = [f"{count} message{'' if count == 1 else 's'} stored", *sorted(self._durabilities)]
        self._output.note(" ".join(words))
        if self._output.form is Form.TABLE and self._offsets:
            self._output.items(
                [
                    {
                        "queue": queue,
                        "count": len(offsets),
                        "first_offset": min(offsets),
                        "next_offset": max(offsets) + 1,
                    }
                    for queue, offsets in sorted(self._offsets.items())
                ],
                {
                    "TOPIC": lambda item: item["queue"].topic,
                    "BROKER": lambda item: item["queue"].broker,
                    "QUEUE": lambda item: item["queue"].queue_id,
                    "MESSAGES": "count",
                    "FIRST-OFFSET": "first_offset",
                    "NEXT-OFFSET": "next_offset",
                },
            )

    def raise_failure(self) -> None:
        """Raise the first failure, if there is one."""
        if len(self._failures) > 1:
            self._output.note(f"{len(self._failures)} messages have no receipt; the first one:")
        if self._failures:
            raise self._failures[0]


@dataclass(frozen=True, slots=True)
class _Sending:
    """Lines on their way: one task hands them over, one waits for the receipts."""

    topic: str
    template: Message
    ordering_key: str | None
    summary: _Summary
    pending: asyncio.Queue[Pending | None] = field(default_factory=asyncio.Queue)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PENDING_MAX))

    async def submit(self, producer: Producer, lines: AsyncIterator[bytes]) -> None:
        """Hand over every line, until one is refused."""
        try:
            async for line in lines:
                await self.room.acquire()
                message = replace(self.template, body=line)
                self.pending.put_nowait(
                    await producer.submit(self.topic, message, ordering_key=self.ordering_key)
                )
        except BatonError as error:
            self.summary.fail(error)
        finally:
            self.pending.put_nowait(None)

    async def settle(self, stop: Callable[[], object]) -> None:
        """Wait for the receipts, in order; the first failure calls `stop`."""
        while (pending := await self.pending.get()) is not None:
            try:
                self.summary.add(await pending)
            except BatonError as error:
                self.summary.fail(error)
                stop()
            self.room.release()


async def _produce(nameserver: str, file: Path | None, sending: _Sending) -> None:
    try:
        async with Producer(nameserver) as producer, asyncio.TaskGroup() as tasks:
            submitting = tasks.create_task(
                sending.submit(producer, read_lines(file, BODY_BYTES_MAX))
            )
            await sending.settle(submitting.cancel)
    finally:
        sending.summary.print()
    sending.summary.raise_failure()
