"""`baton bench …`: how fast this cluster is, from here."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Annotated, Literal

import click

from batonmq._core.records import BODY_BYTES_MAX
from batonmq._producer.settings import Durability, ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.cli.benchmark import SIZE_BYTES_MIN, Bench, BenchLoad, BenchResult, Told, own_topic
from batonmq.cli.completion import topics_that_begin
from batonmq.cli.output import Columns, Item
from batonmq.cli.produce import Compressed, compression_option
from batonmq.cli.progress import progress
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session
from batonmq.cli.times import parse_rate
from batonmq.errors import InvalidArgument

app = click.Group(help="Measure how fast a running cluster is.", no_args_is_help=True)

topic_option = click.option(
    "--topic",
    default="",
    shell_complete=topics_that_begin,
    help="Use this topic, and leave it as it is; by default a new one, deleted in the end.",
)
queues_option = click.option(
    "--queues",
    default=8,
    show_default=True,
    type=click.IntRange(min=1, max=1_024),
    help="Queues of a new topic.",
)
keep_option = click.option("--keep", is_flag=True, help="Do not delete the new topic.")
size_option = click.option(
    "--size",
    default=100,
    show_default=True,
    type=click.IntRange(min=SIZE_BYTES_MIN, max=BODY_BYTES_MAX),
    help="Bytes of a body.",
)
count_option = click.option(
    "--count", type=click.IntRange(min=1), help="So many messages, not for so long."
)
seconds_option = click.option(
    "--seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Send for so long.",
)
# TODO names/defaults {('rate', '""'), ('rate', '"1000/s"')}
rate_option = click.option(
    "--rate",
    default="",
    metavar="N/s",
    help="Send so many a second. A latency then counts from when a message was to leave.",
)
batch_option = click.option(
    "--batch",
    default=1_000,
    show_default=True,
    type=click.IntRange(min=1, max=65_535),
    help="Messages of a batch, at most.",
)
linger_option = click.option(
    "--linger",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="MS",
    help="Wait so long for more messages of a batch.",
)
producers_option = click.option(
    "--producers",
    default=1,
    show_default=True,
    type=click.IntRange(min=1, max=64),
    help="Producers in this process.",
)
senders_option = click.option(
    "--senders",
    default=1_000,
    show_default=True,
    type=click.IntRange(min=1, max=100_000),
    help="Messages under way at once, at most.",
)


class Safety(StrEnum):
    """What a receipt has to mean, as people type it."""

    FSYNCED = "fsynced"
    MEMORY = "memory"


class Handling(StrEnum):
    """How many messages a handler gets at once."""

    BATCH = "batch"
    SINGLE = "single"


durability_option = click.option(
    "--durability",
    default="fsynced",
    show_default=True,
    type=click.Choice(["fsynced", "memory"]),
    help="What a receipt has to mean.",
)
_COLUMNS: Columns = {
    "BENCH": "bench",
    "MESSAGES": "count",
    "BYTES": "size_bytes",
    "SECONDS": lambda item: f"{item['seconds']:.2f}",
    "MSG/S": lambda item: f"{item['per_s']:,.0f}",
    "MB/S": lambda item: f"{item['bytes_per_s'] / 1e6:.2f}",
    "P50-MS": lambda item: _latency(item, "p50"),
    "P95-MS": lambda item: _latency(item, "p95"),
    "P99-MS": lambda item: _latency(item, "p99"),
    "P99.9-MS": lambda item: _latency(item, "p99.9"),
    "MAX-MS": lambda item: _latency(item, "max"),
}


@app.command()
@topic_option
@queues_option
@keep_option
@size_option
@count_option
@seconds_option
@rate_option
@batch_option
@linger_option
@producers_option
@senders_option
@durability_option
@compression_option
@cluster_session
def produce(
    session: CommandSession,
    topic: str,
    queues: int,
    keep: bool,
    size: int,
    count: int | None,
    seconds: float,
    rate: str,
    batch: int,
    linger: int,
    producers: int,
    senders: int,
    durability: str,
    compression: str,
) -> None:
    """Measure sending: how many messages a second, and how long until the receipt."""
    place = _Place(session, topic, queues, keep)
    load = _load(size, count, seconds, rate, producers, senders)
    load = replace(load, settings=_settings(batch, linger, durability, compression))
    session.run(_measure(place, "produce", load, lambda bench, _: bench.produce(load)))


@app.command("end-to-end")
@topic_option
@queues_option
@keep_option
@size_option
@count_option
@seconds_option
@rate_option
@batch_option
@linger_option
@producers_option
@senders_option
@durability_option
@compression_option
@cluster_session
def end_to_end(
    session: CommandSession,
    topic: str,
    queues: int,
    keep: bool,
    size: int,
    count: int | None,
    seconds: float,
    rate: str,
    batch: int,
    linger: int,
    producers: int,
    senders: int,
    durability: str,
    compression: str,
) -> None:
    """Measure the way from the producer to the handler of a consumer, both in this process.

    The exit status is 1 if a message that was stored did not arrive.
    """
    place = _Place(session, topic, queues, keep)
    load = _load(size, count, seconds, rate, producers, senders)
    load = replace(load, settings=_settings(batch, linger, durability, compression))
    session.run(
        _measure(place, "end-to-end", load, lambda bench, group: bench.end_to_end(group, load))
    )


@app.command()
@topic_option
@queues_option
@keep_option
@size_option
@click.option(
    "--count",
    default=100_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Messages to receive.",
)
@click.option(
    "--handler",
    default="batch",
    show_default=True,
    type=click.Choice(["batch", "single"]),
    help="Whether the handler gets many messages at once, or one.",
)
@cluster_session
def consume(
    session: CommandSession,
    topic: str,
    queues: int,
    keep: bool,
    size: int,
    count: int,
    handler: str,
) -> None:
    """Measure receiving with a handler that does nothing.

    A new topic is filled first, which is not measured. With --topic, what is there is read, from
    the first message on, by a group of its own.
    """
    session.run(_consume(_Place(session, topic, queues, keep), size, count, handler.value))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where it is measured."""

    session: CommandSession
    topic: str
    queues: int
    keep: bool

    @asynccontextmanager
    async def open(self, admin: Admin, name: str) -> AsyncIterator[str]:
        """The topic that was asked for, or one of this name."""
        if self.topic:
            yield self.topic
            return
        async with own_topic(admin, name, self.queues, keep=self.keep) as topic:
            yield topic


async def _measure(
    place: _Place,
    what: str,
    load: BenchLoad,
    measure: Callable[[Bench, str], Awaitable[BenchResult]],
) -> None:
    name, session = f"bench-{secrets.token_hex(4)}", place.session
    total = load.count or (round(load.per_s * load.seconds) if load.per_s else None)
    async with session.admin() as admin, place.open(admin, name) as topic:
        with progress("messages", total) as told:
            measured = await measure(_bench(session, admin, topic, told), name)
    _show(session, what, topic, measured, asdict(load) | {"settings": _told(load.settings)})


async def _consume(place: _Place, size: int, count: int, form: Literal["batch", "single"]) -> None:
    name, session = f"bench-{secrets.token_hex(4)}", place.session
    async with session.admin() as admin, place.open(admin, name) as topic:
        if not place.topic:
            with progress("messages written", count) as told:
                filling = _bench(session, admin, topic, told)
                await filling.produce(BenchLoad(size_bytes=size, count=count))
        detail = await admin.describe_topic(topic)
        session.output.problems(detail.problems)
        there = sum((q.next_offset or 0) - (q.first_offset or 0) for q in detail.queues)
        if not there:
            raise InvalidArgument(f"topic {topic} holds no message", facts={"field": "topic"})
        with progress("messages read", min(count, there)) as told:
            bench = _bench(session, admin, topic, told)
            measured = await bench.consume(name, min(count, there), size, form)
    _show(session, "consume", topic, measured, {"handler": form})


def _bench(session: CommandSession, admin: Admin, topic: str, told: Told) -> Bench:
    return Bench(admin, session.nameserver, topic, told, security=session.security)


def _show(
    session: CommandSession, what: str, topic: str, measured: BenchResult, load: Item
) -> None:
    item = (
        {"bench": what, "topic": topic}
        | asdict(measured)
        | {"per_s": measured.per_s, "bytes_per_s": measured.bytes_per_s, "load": load}
    )
    session.output.detail(item, [item], _COLUMNS)
    problems = [f"{count} messages failed: {why}" for why, count in measured.failures.items()]
    if measured.missing_count:
        problems.append(f"{measured.missing_count} messages were stored and did not arrive")
    if measured.repeated_count:
        problems.append(f"{measured.repeated_count} messages arrived again")
    session.output.problems(problems)


def _load(
    size: int, count: int | None, seconds: float, rate: str, producers: int, senders: int
) -> BenchLoad:
    try:
        per_s = parse_rate(rate) if rate else None
    except InvalidArgument as error:
        raise click.UsageError(f"{error.message}. {error.remedy}") from error
    return BenchLoad(
        size_bytes=size,
        count=count,
        seconds=seconds,
        per_s=per_s,
        producers=producers,
        senders=senders,
    )


def _settings(
    batch: int, linger: int, durability: Safety, compression: Compressed
) -> ProducerSettings:
    return ProducerSettings(
        durability=Durability[durability.name],
        linger_ms=linger,
        batch_messages_max=batch,
        compression=compression.value,
    )


def _told(settings: ProducerSettings) -> Item:
    return {
        "durability": settings.durability.name,
        "linger_ms": settings.linger_ms,
        "batch_messages_max": settings.batch_messages_max,
        "compression": settings.compression,
    }


def _latency(item: Item, name: str) -> str | None:
    latency = item["latency_ms"]
    return None if latency is None else f"{latency[name]:.2f}"
