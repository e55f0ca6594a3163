"""`baton top`: what the cluster does at this moment."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import click
from rich.console import Console
from rich.live import Live

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._core.top_board import Board, GroupQueueStatus
from batonmq.admin.admin import Admin
from batonmq.admin.event_watch import EventWatch
from batonmq.cli.output import OutputFormat
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session
from batonmq.cli.top_screen import Frame, item_of
from batonmq.errors import BatonError

GROUPS_MAX = 50
"""Groups that are asked for their progress at the start; of others events tell."""
FRAMES_PER_S = 2


@click.command("top")
@click.option("--once", is_flag=True, help="Look for a while, print one frame, and end.")
@click.option(
    "--seconds",
    default=3.0,
    show_default=True,
    type=click.FloatRange(min=1.0),
    help="How long to look with --once.",
)
@cluster_session
def top(session: CommandSession, once: bool, seconds: float) -> None:
    """Show live what the cluster does: rates, lag, owners, hand-overs, conflicts; q ends.

    It is told by the services themselves, once a second. With --once, or if the output is no
    terminal, one frame is printed; with --format json as one object.
    """
    still = once or session.output.form is OutputFormat.JSON or not sys.stdout.isatty()
    session.run(_Top(session).run(seconds if still else None), endless=not still)


class _Top:
    def __init__(self, session: CommandSession) -> None:
        self._session, self._clock = session, Clock()
        self._watch = EventWatch(session.nameserver, self._take, security=session.security)

    async def run(self, seconds: float | None) -> None:
        """Look, for so long or until a key ends it."""
        self._board = Board(self._clock.monotonic_ms())
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch.run())
            async with self._session.admin() as admin:
                self._board.begin(*await _standings(admin))
            if seconds is None:
                await self._show()
            else:
                await asyncio.sleep(seconds)
                self._print()
            watching.cancel()

    def _take(self, batch: pb.MetricBatch) -> None:
        now_ms = self._clock.monotonic_ms()
        self._board.heard(batch.source, batch.dropped_count)
        for event in batch.events:
            self._board.take(event, now_ms)

    def _frame(self) -> Frame:
        return Frame(self._board.snapshot(self._clock.monotonic_ms()), len(self._watch.following))

    def _print(self) -> None:
        if self._session.output.form is OutputFormat.JSON:
            snapshot = self._board.snapshot(self._clock.monotonic_ms())
            item = item_of(snapshot, len(self._watch.following))
            self._session.output.detail(item, (), {})
        else:
            Console(height=None if sys.stdout.isatty() else 10_000).print(self._frame())

    async def _show(self) -> None:
        ended = asyncio.Event()
        with _keys(ended), Live(self._frame(), screen=True, auto_refresh=False) as live:
            while not ended.is_set():
                live.update(self._frame(), refresh=True)
                try:
                    async with asyncio.timeout(1 / FRAMES_PER_S):
                        await ended.wait()
                except TimeoutError:
                    continue


@contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """Set `ended` on `q`, while keys come one by one and are not shown."""
    if not sys.stdin.isatty():
        yield
        return
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if b"q" in os.read(fd, 64).lower():
            ended.set()

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _standings(admin: Admin) -> tuple[list[GroupQueueStatus], dict[str, int]]:
    """Where the queues of the groups stand, and how many members they have."""
    groups = await admin.list_groups()
    found: list[GroupQueueStatus] = []
    for group in groups[:GROUPS_MAX]:
        try:
            progress = await admin.group_progress(group.name)
        except BatonError:
            continue  # deleted meanwhile, or nobody answers: then events tell
        found += [
            GroupQueueStatus(
                group=group.name,
                place=QueueRef(queue.topic, queue.broker, queue.queue_id),
                committed_offset=_or_unknown(queue.committed_offset),
                next_offset=_or_unknown(queue.log_end_offset),
                owner=queue.client_id or "",
            )
            for queue in progress.queues
        ]
    return found, {group.name: len(group.members) for group in groups}


def _or_unknown(offset: int | None) -> int:
    return -1 if offset is None else offset
