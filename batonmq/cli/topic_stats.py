"""`baton topic stats`: what the queues of a topic hold, their disk use, and how fast they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from batonmq._common.clock import Clock
from batonmq.admin.topic_stats import QueueStats, TopicStats
from batonmq.cli.arguments import topic_argument
from batonmq.cli.command_classes import FloatRange, command
from batonmq.cli.output import Columns, Minor, counted, duration, wall_time
from batonmq.cli.session import CommandSession, cluster_session

_COLUMNS: Columns = {
    "TOPIC": Minor("topic"),
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "FIRST-OFFSET": Minor("first_offset"),
    "NEXT-OFFSET": "next_offset",
    "MESSAGES": "count",
    "BYTES": "stored_bytes",
    "LAST-STORED": lambda item: (
        item["last_store_unix_ms"] and wall_time(item["last_store_unix_ms"])
    ),
    "MSG/S": lambda item: None if item["per_s"] is None else f"{item['per_s']:.1f}",
}
_MORE_COLUMNS: Columns = {
    "IDLE": lambda item: None if item["idle_ms"] is None else duration(item["idle_ms"]),
}


@command("stats")
@topic_argument("topic")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C, with rates.")
@click.option(
    "--interval",
    default=2.0,
    show_default=True,
    type=FloatRange(min=0.1, max=3_600),
    help="Seconds between two outputs; needs --watch.",
)
@cluster_session
def stats(session: CommandSession, topic: str, watch: bool, interval: float) -> None:
    """Show what the queues of a topic hold, their disk use, last store time and growth.

    BYTES counts the batches of a queue in the log of the leader; each follower has as many.
    """
    session.run(_stats(session, topic, interval if watch else None), endless=watch)


async def _stats(session: CommandSession, topic: str, interval_s: float | None) -> None:
    async with session.admin() as admin:
        stats = TopicStats(admin, topic)
        while True:
            queues, problems = await stats.look()
            now_unix_ms = Clock().unix_ms()
            items = [_item(queue, now_unix_ms) for queue in queues]
            session.output.items(items, _COLUMNS, _MORE_COLUMNS)
            session.output.note(_total(topic, queues))
            if interval_s is None:
                session.output.problems(problems)
                return
            session.output.note("")
            await asyncio.sleep(interval_s)


def _total(topic: str, queues: Sequence[QueueStats]) -> str:
    sizes = [queue.stored_bytes for queue in queues if queue.stored_bytes is not None]
    total = f"{topic}: {sum(sizes):,} bytes in {counted(len(sizes), 'queue')}"
    missing = len(queues) - len(sizes)
    return f"{total}; {counted(missing, 'queue')} not counted" if missing else total


def _item(stats: QueueStats, now_unix_ms: int) -> dict[str, Any]:
    last = stats.last_store_unix_ms
    return asdict(stats.queue) | {
        "first_offset": stats.first_offset,
        "next_offset": stats.next_offset,
        "count": stats.count,
        "last_store_unix_ms": last,
        "idle_ms": None if last is None else max(now_unix_ms - last, 0),
        "stored_bytes": stats.stored_bytes,
        "per_s": stats.per_s,
    }
