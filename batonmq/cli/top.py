"""`baton top`: what the cluster does at this moment."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._core.top_board import Board, GroupQueueStatus, Snapshot
from batonmq.admin.admin import Admin
from batonmq.admin.event_watch import EventWatch
from batonmq.cli.command_classes import FloatRange, command
from batonmq.cli.output import OutputFormat
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.cli.top_screen import screen_lines, snapshot_item
from batonmq.errors import BatonError

GROUPS_MAX = 50
"""Groups with progress that is read at the start; that of the others comes with their events."""
FRAMES_PER_S = 2
LIST_INTERVAL_S = 5.0
"""How often topics and groups are listed, to forget those that were deleted."""
_WIDTH_WITHOUT_TERMINAL = 120
_HEIGHT_WITHOUT_TERMINAL = 10_000
_ENTER_SCREEN = "\x1b[?1049h\x1b[?25l"
"""Switch to the alternate screen, and hide the cursor."""
_LEAVE_SCREEN = "\x1b[?25h\x1b[?1049l"
_HOME, _ERASE_LINE, _ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@command("top")
@click.option("--once", is_flag=True, help="Watch for a while, print one screen, and exit.")
@click.option(
    "--seconds",
    default=3.0,
    show_default=True,
    type=FloatRange(min=1.0),
    help="How long to watch with --once.",
)
@cluster_session
def top(session: CommandSession, once: bool, seconds: float) -> None:
    """Show rates, lag, owners, hand-overs and conflicts, live.

    The services send their events once a second. Press q to quit. With --once, or if the output is
    not a terminal, one screen is printed; with --format json, one object.
    """
    single = once or session.output.form is OutputFormat.JSON or not sys.stdout.isatty()
    session.run(_LiveView(session).run(seconds if single else None), endless=not single)


class _LiveView:
    """Reads the events of the cluster, and draws what they say."""

    def __init__(self, session: CommandSession) -> None:
        self._session, self._clock = session, Clock()
        self._watch = EventWatch(session.nameserver, self._take, security=session.security)

    async def run(self, seconds: float | None) -> None:
        """Watch for `seconds` and print one screen; if None, draw until a key ends it."""
        self._board = Board(self._clock.monotonic_ms())
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch.run())
            async with self._session.admin() as admin:
                self._board.begin(*await _initial_state(admin))
                listing = tasks.create_task(self._forget_deleted(admin))
                if seconds is None:
                    await self._draw_until_quit()
                else:
                    await asyncio.sleep(seconds)
                    self._print()
                listing.cancel()
            watching.cancel()

    async def _forget_deleted(self, admin: Admin) -> None:
        while True:
            with suppress(BatonError):  # the next list tells the same
                topics, groups = await admin.list_topics(), await admin.list_groups()
                self._board.retain(
                    [(one.name, one.topic_id) for one in topics], [one.name for one in groups]
                )
            await asyncio.sleep(LIST_INTERVAL_S)

    def _take(self, batch: pb.MetricBatch) -> None:
        now_ms = self._clock.monotonic_ms()
        self._board.note_source(batch.source, batch.dropped_count)
        for event in batch.events:
            self._board.take(event, now_ms)

    def _snapshot(self) -> Snapshot:
        return self._board.snapshot(self._clock.monotonic_ms())

    @property
    def _nodes(self) -> int:
        return len(self._watch.following)

    def _print(self) -> None:
        if self._session.output.form is OutputFormat.JSON:
            self._session.output.detail(snapshot_item(self._snapshot(), self._nodes), (), {})
            return
        width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
        lines = screen_lines(self._snapshot(), self._nodes, width, _HEIGHT_WITHOUT_TERMINAL)
        print("\n".join(lines), flush=True)

    async def _draw_until_quit(self) -> None:
        quit_pressed = asyncio.Event()
        with _key_reader(quit_pressed), _alternate_screen():
            while not quit_pressed.is_set():
                self._draw()
                try:
                    async with timeouts.timeout(1 / FRAMES_PER_S):
                        await quit_pressed.wait()
                except TimeoutError:
                    continue

    def _draw(self) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        lines = screen_lines(self._snapshot(), self._nodes, size.columns, size.lines, styled=True)
        text = f"{_ERASE_LINE}\n".join(lines[: size.lines])
        sys.stdout.write(f"{_HOME}{text}{_ERASE_LINE}{_ERASE_BELOW}")
        sys.stdout.flush()


@contextmanager
def _alternate_screen() -> Iterator[None]:
    """Draw on the terminal's alternate screen; at the end the former content comes back."""
    sys.stdout.write(_ENTER_SCREEN)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE_SCREEN)
        sys.stdout.flush()


@contextmanager
def _key_reader(quit_pressed: asyncio.Event) -> Iterator[None]:
    """Set `quit_pressed` when q is pressed; keys are read one by one, without echo."""
    if not sys.stdin.isatty():
        yield
        return
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if b"q" in os.read(fd, 64).lower():
            quit_pressed.set()

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _initial_state(admin: Admin) -> tuple[list[GroupQueueStatus], dict[str, int]]:
    """Return the status of the groups' queues, and the number of members of each group."""
    groups = await admin.list_groups()
    statuses: list[GroupQueueStatus] = []
    for group in groups[:GROUPS_MAX]:
        try:
            progress = await admin.group_progress(group.name)
        except BatonError:
            continue  # deleted meanwhile, or no service answers: its events tell the rest
        statuses += [
            GroupQueueStatus(
                group=group.name,
                queue=QueueRef(queue.topic, queue.broker, queue.queue_id),
                committed_offset=_or_unknown(queue.committed_offset),
                next_offset=_or_unknown(queue.log_end_offset),
                owner=queue.client_id or "",
            )
            for queue in progress.queues
        ]
    return statuses, {group.name: len(group.members) for group in groups}


def _or_unknown(offset: int | None) -> int:
    return -1 if offset is None else offset
