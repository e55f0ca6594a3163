"""`baton bench …`: the speed of a running cluster, as seen from this machine."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, Literal, get_args

import click

from batonmq._core.records import BODY_BYTES_MAX
from batonmq._producer.producer_settings import Durability, ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.cli.benchmark import (
    SIZE_BYTES_MIN,
    Bench,
    BenchLoad,
    BenchResult,
    ReportProgress,
    temporary_topic,
)
from batonmq.cli.command_classes import FloatRange, LazyGroup
from batonmq.cli.completion import complete_topics
from batonmq.cli.output import Columns, Item
from batonmq.cli.produce import Codec, compression_option
from batonmq.cli.progress import progress
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.cli.times import parse_rate
from batonmq.errors import InvalidArgument

commands = LazyGroup("bench", help="Measure the speed of a running cluster.", no_args_is_help=True)

HandlerKind = Literal["batch", "single"]
_DURABILITIES = {"fsynced": Durability.FSYNCED, "memory": Durability.MEMORY}
_TOPIC_OPTIONS = (
    click.option(
        "--topic",
        default="",
        shell_complete=complete_topics,
        help="Use this topic, and keep it; by default a new topic, which is deleted at the end.",
    ),
    click.option(
        "--queues",
        default=8,
        show_default=True,
        type=click.IntRange(min=1, max=1_024),
        help="Number of queues of a new topic.",
    ),
    click.option("--keep", is_flag=True, help="Do not delete the new topic."),
    click.option(
        "--size",
        default=100,
        show_default=True,
        type=click.IntRange(min=SIZE_BYTES_MIN, max=BODY_BYTES_MAX),
        help="Size of a message body, in bytes.",
    ),
)
_LOAD_OPTIONS = (
    click.option(
        "--count",
        type=click.IntRange(min=1),
        help="Number of messages to send, instead of a time.",
    ),
    click.option(
        "--seconds",
        default=10.0,
        show_default=True,
        type=FloatRange(min=0.1),
        help="How long to send.",
    ),
    click.option(
        "--batch",
        default=2_000,
        show_default=True,
        type=click.IntRange(min=1, max=65_535),
        help="Maximum number of messages in a batch.",
    ),
    click.option(
        "--linger",
        default=0,
        show_default=True,
        type=click.IntRange(min=0),
        metavar="MS",
        help="How long a batch waits for more messages, in ms.",
    ),
    click.option(
        "--producers",
        default=1,
        show_default=True,
        type=click.IntRange(min=1, max=64),
        help="Number of producers in this process.",
    ),
    click.option(
        "--senders",
        default=1_000,
        show_default=True,
        type=click.IntRange(min=1, max=100_000),
        help="Maximum number of messages that wait for a receipt.",
    ),
    click.option(
        "--durability",
        default="fsynced",
        show_default=True,
        type=click.Choice(list(_DURABILITIES)),
        help="Durability that a receipt guarantees.",
    ),
    compression_option,
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


@dataclass(frozen=True, slots=True)
class _BenchTopic:
    """The topic that is measured: an existing one, or a new one if `name` is empty."""

    session: CommandSession
    name: str
    queues: int
    keep: bool

    @asynccontextmanager
    async def open(self, admin: Admin, name: str) -> AsyncIterator[str]:
        """Yield the existing topic, or a new one called `name`."""
        if self.name:
            yield self.name
            return
        async with temporary_topic(admin, name, self.queues, keep=self.keep) as topic:
            yield topic


def topic_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the topic, and pass a `_BenchTopic` and the size of a body."""

    @wraps(function)
    def run(
        session: CommandSession, topic: str, queues: int, keep: bool, size: int, **options: Any
    ) -> None:
        function(_BenchTopic(session, topic, queues, keep), size, **options)

    return _decorated(run, _TOPIC_OPTIONS)


def load_options(rate: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of the topic and the load, and passes both.

    Args:
        rate: The default of --rate.
    """
    rate_option = click.option(
        "--rate",
        default=rate,
        show_default=bool(rate),
        metavar="N/s",
        help="Messages to send per second. The latency of a message then counts from the time "
        "when it was due, not from when it was sent.",
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(topic: _BenchTopic, size: int, **options: Any) -> None:
            function(topic, _load(size, **options))

        return topic_options(_decorated(run, (*_LOAD_OPTIONS, rate_option)))

    return decorate


def _decorated(
    function: Callable[..., None], decorators: tuple[Callable[..., Any], ...]
) -> Callable[..., None]:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


@commands.command()
@cluster_session
@load_options(rate="")
def produce(topic: _BenchTopic, load: BenchLoad) -> None:
    """Measure sending: messages per second, and the time until the receipt."""
    topic.session.run(_measure(topic, "produce", load, lambda bench, _: bench.produce(load)))


@commands.command("end-to-end")
@cluster_session
@load_options(rate="1000/s")
def end_to_end(topic: _BenchTopic, load: BenchLoad) -> None:
    """Measure the time from the producer to the handler of a consumer, both in this process.

    Exit status 1 if a stored message did not arrive.
    """
    topic.session.run(
        _measure(topic, "end-to-end", load, lambda bench, group: bench.end_to_end(group, load))
    )


@commands.command()
@click.option(
    "--count",
    default=100_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of messages to receive.",
)
@click.option(
    "--handler",
    default="batch",
    show_default=True,
    type=click.Choice(get_args(HandlerKind)),
    help="Whether the handler gets a batch of messages per call, or a single one.",
)
@cluster_session
@topic_options
def consume(topic: _BenchTopic, size: int, count: int, handler: HandlerKind) -> None:
    """Measure receiving with a handler that does nothing.

    A new topic is filled first, which is not measured. With --topic the stored messages are read
    from the first one on, by a new group.
    """
    topic.session.run(_consume(topic, size, count, handler))


async def _measure(
    bench_topic: _BenchTopic,
    what: str,
    load: BenchLoad,
    measure: Callable[[Bench, str], Awaitable[BenchResult]],
) -> None:
    name, session = f"bench-{secrets.token_hex(4)}", bench_topic.session
    total = load.count or (round(load.per_s * load.seconds) if load.per_s else None)
    async with session.admin() as admin, bench_topic.open(admin, name) as topic:
        with progress("messages", total) as report:
            measured = await measure(_bench(session, admin, topic, report), name)
    settings = _settings_item(load.settings)
    _show(session, what, topic, measured, asdict(load) | {"settings": settings})


async def _consume(bench_topic: _BenchTopic, size: int, count: int, handler: HandlerKind) -> None:
    name, session = f"bench-{secrets.token_hex(4)}", bench_topic.session
    async with session.admin() as admin, bench_topic.open(admin, name) as topic:
        if not bench_topic.name:
            with progress("messages written", count) as report:
                filling = _bench(session, admin, topic, report)
                await filling.produce(BenchLoad(size_bytes=size, count=count))
        detail = await admin.describe_topic(topic)
        session.output.problems(detail.problems)
        stored = sum((q.next_offset or 0) - (q.first_offset or 0) for q in detail.queues)
        if not stored:
            raise InvalidArgument(f"topic {topic} is empty", facts={"field": "topic"})
        with progress("messages read", min(count, stored)) as report:
            bench = _bench(session, admin, topic, report)
            measured = await bench.consume(name, min(count, stored), size, handler)
    _show(session, "consume", topic, measured, {"handler": handler})


def _bench(session: CommandSession, admin: Admin, topic: str, report: ReportProgress) -> Bench:
    return Bench(admin, session.nameserver, topic, report, security=session.security)


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
        problems.append(f"{measured.missing_count} messages were stored but did not arrive")
    if measured.repeated_count:
        problems.append(f"{measured.repeated_count} messages arrived more than once")
    session.output.problems(problems)


def _load(
    size: int,
    count: int | None,
    seconds: float,
    rate: str,
    producers: int,
    senders: int,
    batch: int,
    linger: int,
    durability: str,
    compression: Codec,
) -> BenchLoad:
    try:
        per_s = parse_rate(rate) if rate else None
    except InvalidArgument as error:
        raise click.UsageError(f"--rate: {error.message}. {error.remedy}") from error
    return BenchLoad(
        size_bytes=size,
        count=count,
        seconds=seconds,
        per_s=per_s,
        producers=producers,
        senders=senders,
        settings=ProducerSettings(
            durability=_DURABILITIES[durability],
            linger_ms=linger,
            batch_messages_max=batch,
            compression=compression,
        ),
    )


def _settings_item(settings: ProducerSettings) -> Item:
    return {
        "durability": settings.durability.name,
        "linger_ms": settings.linger_ms,
        "batch_messages_max": settings.batch_messages_max,
        "compression": settings.compression,
    }


def _latency(item: Item, name: str) -> str | None:
    latency = item["latency_ms"]
    return None if latency is None else f"{latency[name]:.2f}"
