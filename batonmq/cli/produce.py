"""`baton produce`: send lines as messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import click

from batonmq._core.delays import LEVEL_NAMES
from batonmq._core.queues import QueueRef
from batonmq._core.records import BODY_BYTES_MAX, Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import PendingReceipt, Receipt
from batonmq._producer.scheduled_sender import PendingSchedule, ScheduleReceipt
from batonmq.cli.arguments import parse_queue, topic_argument
from batonmq.cli.command_classes import command
from batonmq.cli.line_reader import read_lines
from batonmq.cli.outgoing_message import (
    OutgoingMessage,
    ParseLine,
    delivery_time,
    from_json,
    from_text,
    parse_properties,
)
from batonmq.cli.output import Columns, Minor, Output, OutputFormat, counted, wall_time
from batonmq.cli.progress import progress
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.cli.times import parse_rate
from batonmq.errors import BatonError, InvalidArgument

Codec = Literal["none", "lz4", "zstd"]
_PENDING_MAX = 10_000
_STORED_COLUMNS: Columns = {
    "TOPIC": Minor(lambda item: item["queue"].topic),
    "BROKER": lambda item: item["queue"].broker,
    "QUEUE": lambda item: item["queue"].queue_id,
    "MESSAGES": "count",
    "FIRST-OFFSET": "first_offset",
    "NEXT-OFFSET": "next_offset",
}
compression_option = click.option(
    "--compression",
    default="none",
    show_default=True,
    type=click.Choice(get_args(Codec)),
    help="Compress batches: lz4 for speed, zstd for size.",
)
LINE_BYTES_MAX = 2 * BODY_BYTES_MAX
"""Longer than any valid message, even in base64; a longer line is cut, and then rejected."""


@command("produce")
@topic_argument("topic")
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File to read; by default standard input.",
)
@click.option(
    "--jsonl",
    is_flag=True,
    help="Read each line as a JSON object with body or body_base64, and optionally tag, keys, "
    "properties, ordering_key, queue, delay, delay_level and deliver_at, which override the "
    "options.",
)
@click.option("--tag", default="", help="Tag of every message, for filters.")
@click.option("--key", multiple=True, help="Key of every message, for look-ups; may be repeated.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    help="Property of every message; may be repeated.",
)
@click.option("--ordering-key", help="Send all messages in order to the queue of this key.")
@click.option("--queue", default="", metavar="BROKER/ID", help="Send all messages to this queue.")
@click.option("--delay", help="Deliver after this delay, such as 500ms, 10s, 5m or 2h; up to 40d.")
@click.option(
    "--deliver-at", help="Deliver at this time, such as 2026-01-31T08:00:00Z or Unix milliseconds."
)
@click.option(
    "--delay-level",
    type=click.IntRange(min=1, max=18),
    help=f"Deliver after the delay of this level: {' '.join(LEVEL_NAMES)}.",
)
@click.option(
    "--rate", default="", metavar="N/s", help="Maximum number of messages to send per second."
)
@compression_option
@cluster_session
def produce(
    session: CommandSession,
    topic: str,
    file: Path | None,
    jsonl: bool,
    tag: str,
    key: tuple[str, ...],
    properties: tuple[str, ...],
    ordering_key: str | None,
    queue: str,
    delay: str | None,
    deliver_at: str | None,
    delay_level: int | None,
    rate: str,
    compression: Codec,
) -> None:
    """Send each line as a message, and print where it is stored.

    With --format json: one receipt per line, in the order of the input. The receipt of a scheduled
    message has a schedule id, for: baton message cancel.
    """
    place = parse_queue(topic, queue)
    try:
        template = OutgoingMessage(
            Message(b"", tag, tuple(key or ()), parse_properties(properties or [])),
            ordering_key,
            QueueRef(topic, *place) if place else None,
            delivery_time(delay, deliver_at, delay_level),
        )
        per_s = parse_rate(rate) if rate else None
    except InvalidArgument as error:
        raise click.UsageError(f"{error.message}. {error.remedy}".rstrip(" .")) from error
    parse = from_json(topic, template) if jsonl else from_text(template)
    sending = _LineSender(topic, parse, per_s, _ReceiptSummary(session.output))
    settings = ProducerSettings(compression=compression, security=session.security)
    session.run(_produce(session.nameserver, settings, file, sending))


@dataclass(slots=True)
class _StoredOffsets:
    """The messages in one queue; messages of other producers may lie between the offsets."""

    count: int
    first_offset: int
    next_offset: int

    def add(self, offset: int) -> None:
        self.count += 1
        self.first_offset = min(self.first_offset, offset)
        self.next_offset = max(self.next_offset, offset + 1)


class _ReceiptSummary:
    """Where messages are stored; it stays small, as the input may be endless."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._stored: dict[QueueRef, _StoredOffsets] = {}
        self._durabilities: set[str] = set()
        self._scheduled_count = 0
        self._failures: list[BatonError] = []

    def add(self, receipt: Receipt | ScheduleReceipt) -> None:
        """Add a receipt; in JSON, print it."""
        if isinstance(receipt, ScheduleReceipt):
            self._add_schedule(receipt)
            return
        empty = _StoredOffsets(0, receipt.offset, receipt.offset)
        self._stored.setdefault(receipt.queue, empty).add(receipt.offset)
        self._durabilities.add(receipt.durability.name)
        if self._output.form is OutputFormat.JSON:
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

    def _add_schedule(self, receipt: ScheduleReceipt) -> None:
        self._scheduled_count += 1
        self._output.line(
            {
                "topic": receipt.queue.topic,
                "broker": receipt.queue.broker,
                "queue_id": receipt.queue.queue_id,
                "schedule_id": receipt.schedule_id,
                "deliver_unix_ms": receipt.deliver_unix_ms,
                "duplicate": receipt.duplicate,
            },
            f"{receipt.schedule_id} {wall_time(receipt.deliver_unix_ms)}",
        )

    def fail(self, failure: BatonError) -> None:
        """Add the error of a message without a receipt."""
        self._failures.append(failure)

    def print(self) -> None:
        """Print where the messages are stored."""
        if self._scheduled_count:
            self._output.note(f"{counted(self._scheduled_count, 'message')} scheduled")
            return
        count = sum(stored.count for stored in self._stored.values())
        words = [f"{counted(count, 'message')} stored", *sorted(self._durabilities)]
        self._output.note(" ".join(words))
        if self._output.form is not OutputFormat.JSON and self._stored:
            self._output.items(
                [{"queue": queue, **asdict(one)} for queue, one in sorted(self._stored.items())],
                _STORED_COLUMNS,
            )

    def raise_failure(self) -> None:
        """Raise the first error, if there is one."""
        if len(self._failures) > 1:
            self._output.note(f"{len(self._failures)} messages have no receipt; the first error:")
        if self._failures:
            raise self._failures[0]


@dataclass(frozen=True, slots=True)
class _LineSender:
    """Sends lines: one task submits them, another one waits for the receipts."""

    topic: str
    parse: ParseLine
    per_s: float | None
    summary: _ReceiptSummary
    pending: asyncio.Queue[PendingReceipt | PendingSchedule | None] = field(
        default_factory=asyncio.Queue
    )
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PENDING_MAX))

    async def submit(self, producer: Producer, lines: AsyncIterator[bytes]) -> None:
        """Submit every line, until one is rejected."""
        begin_s, number = asyncio.get_running_loop().time(), 0
        try:
            async for line in lines:
                await self.room.acquire()
                parcel = self.parse(number + 1, line)
                await self._wait_for_rate(begin_s, number)
                number += 1
                self.pending.put_nowait(
                    await producer.submit(
                        self.topic,
                        parcel.message,
                        ordering_key=parcel.ordering_key,
                        queue=parcel.queue,
                        **parcel.when,
                    )
                )
        except BatonError as error:
            self.summary.fail(error)
        finally:
            self.pending.put_nowait(None)

    async def _wait_for_rate(self, begin_s: float, number: int) -> None:
        if self.per_s is not None:
            early_s = begin_s + number / self.per_s - asyncio.get_running_loop().time()
            if early_s > 0:
                await asyncio.sleep(early_s)

    async def settle(self, stop: Callable[[], object], report: Callable[[int], None]) -> None:
        """Wait for the receipts in order, and report their number; an error calls `stop`."""
        number = 0
        while (pending := await self.pending.get()) is not None:
            try:
                self.summary.add(await pending)
                report(number := number + 1)
            except BatonError as error:
                self.summary.fail(error)
                stop()
            self.room.release()


async def _produce(
    nameserver: str, settings: ProducerSettings, file: Path | None, sending: _LineSender
) -> None:
    try:
        with progress("messages stored") as report:
            async with Producer(nameserver, settings) as producer, asyncio.TaskGroup() as tasks:
                submitting = tasks.create_task(
                    sending.submit(producer, read_lines(file, LINE_BYTES_MAX))
                )
                await sending.settle(submitting.cancel, report)
    finally:
        sending.summary.print()
    sending.summary.raise_failure()
