"""`baton topic move` and `baton cluster remove-broker`: queues of brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from batonmq._core.delays import parse_duration_ms
from batonmq.admin.admin import Admin
from batonmq.admin.queue_moves import (
    BrokerRemovalStep,
    RemovalObstacle,
    TopicMove,
    cancel_removal,
    move_queues,
    remove_broker,
    spread_queues,
)
from batonmq.cli.arguments import topic_argument
from batonmq.cli.change_options import by_option, dry_run_option
from batonmq.cli.command_classes import argument, command
from batonmq.cli.output import Columns, counted, wall_time
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import NoQuorum, NotServing, Unreachable

_POLL_S, _POLL_S_MAX = 0.5, 5.0
"""Time between two steps; it doubles up to the maximum, as a step may read much."""
_MOVE_COLUMNS: Columns = {
    "BROKER": "broker",
    "QUEUES-BEFORE": "before_count",
    "QUEUES": "queue_count",
    "RETIRING": "retiring_count",
    "STATE": "state",
}
_REMOVE_COLUMNS: Columns = {
    "TOPIC": "topic",
    "HELD": "kind",
    "GROUP": "group",
    "QUEUE": lambda item: item["queue_id"] if item["kind"] in ("unread", "dead_letters") else "",
    "COUNT": lambda item: item["count"] or "",
    "UNTIL": lambda item: wall_time(item["last_unix_ms"]) if item["last_unix_ms"] else "",
    "WHY": "message",
}


@command("move")
@topic_argument("name")
@click.option("--from", "source", default="", metavar="BROKER", help="Broker that loses queues.")
@click.option(
    "--to", "target", default="", metavar="BROKER", help="Broker that gets as many queues."
)
@click.option(
    "--queues",
    type=click.IntRange(min=1, max=1_024),
    help="How many queues; by default all that accept messages.",
)
@click.option("--spread", is_flag=True, help="Spread the queues evenly over all brokers instead.")
@by_option
@dry_run_option
@cluster_session
def move(
    session: CommandSession,
    name: str,
    source: str,
    target: str,
    queues: int | None,
    spread: bool,
    by: str,
    dry_run: bool,
) -> None:
    """Move queues of a topic to another broker, or spread them evenly.

    No message is copied: the new queues take messages at once; the old ones take none, and are
    removed when every group has read them. See progress with `baton topic describe`.
    """
    if spread == bool(source or target) or (not spread and not (source and target)):
        raise click.UsageError("give --from and --to, or --spread")
    if spread and queues:
        raise click.UsageError("--queues goes with --from and --to")
    by = "" if dry_run else by

    async def change(admin: Admin) -> TopicMove:
        if spread:
            return await spread_queues(admin, name, by=by)
        return await move_queues(admin, name, source, target, queues or 0, by=by)

    async def run() -> None:
        async with session.admin() as admin:
            _print_move(session, await change(admin), done=bool(by))

    session.run(run())


def _print_move(session: CommandSession, moved: TopicMove, *, done: bool) -> None:
    before, after = moved.before, moved.topic
    items = []
    for broker in sorted(before.queue_counts.keys() | after.queue_counts.keys()):
        had, has = before.writable_counts.get(broker, 0), after.writable_counts.get(broker, 0)
        state = "unchanged" if had == has else "moved" if done else "would move"
        retiring = after.queue_counts.get(broker, 0) - has
        items.append(
            {
                "broker": broker,
                "before_count": had,
                "queue_count": has,
                "retiring_count": retiring,
                "state": state,
            }
        )
    session.output.items(items, _MOVE_COLUMNS)
    text = f"{counted(moved.moved_count, 'queue')} {'moved' if done else 'would move'}"
    if moved.moved_count and done:
        text += f"; see when the old ones are removed: baton topic describe {after.name}"
    session.output.note(text)


@command("remove-broker")
@argument("broker", metavar="BROKER", help="Broker; see baton cluster status.")
@click.option(
    "--wait",
    default="30s",
    metavar="TIME",
    callback=lambda _context, _parameter, value: parse_duration_ms(value),
    help="How long to wait until the broker holds nothing; 30s by default.",
)
@click.option("--cancel", is_flag=True, help="End the removal; moved queues stay where they are.")
@by_option
@dry_run_option
@cluster_session
def remove(
    session: CommandSession, broker: str, wait: int, cancel: bool, by: str, dry_run: bool
) -> None:
    """Remove a broker for good: move its queues to the others, and wait until it holds nothing.

    Messages stay on it until every group has read them; delayed messages, until they are delivered;
    transactions, until they end. When it holds nothing, stop its processes, and repeat the command:
    it removes the records of the broker. Exit status 1 if it still holds something.
    """
    by = "" if dry_run else by
    if cancel:
        session.run(_cancel(session, broker, by))
    else:
        session.run(_remove(session, broker, by, wait / 1000))


async def _cancel(session: CommandSession, broker: str, by: str) -> None:
    async with session.admin() as admin:
        await cancel_removal(admin, broker, by=by)
    state = "cancelled" if by else "would be cancelled"
    session.output.line(
        {"broker": broker, "state": state},
        f"the removal of {broker} {'is' if by else 'would be'} cancelled; give it queues with "
        "`baton topic move TOPIC --spread`",
    )


async def _remove(session: CommandSession, broker: str, by: str, wait_s: float) -> None:
    moves: list[dict[str, Any]] = []
    async with session.admin() as admin:
        step = await _steps(admin, broker, by, wait_s, moves)
    state = _state(step, done=bool(by))
    item = {
        "broker": broker,
        "state": state,
        "moves": moves,
        "obstacles": [asdict(one) for one in step.obstacles],
        "nodes_up": list(step.nodes_up),
    }
    session.output.detail(item, [asdict(one) for one in step.obstacles], _REMOVE_COLUMNS)
    verb = "moved" if by else "would move"
    for one in moves:
        to = ", ".join(f"{count} to {name}" for name, count in one["to"].items())
        session.output.note(
            f"topic {one['topic']}: {counted(one['queue_count'], 'queue')} {verb}, {to}"
        )
    session.output.note(_text(broker, state, step))
    if by and step.obstacles:
        session.output.problems([_problem(broker, step.obstacles)])
    if by and state == "empty" and not step.nodes_up:
        session.output.problems([f"the records of {broker} are not removed: repeat the command"])


async def _steps(
    admin: Admin, broker: str, by: str, wait_s: float, moves: list[dict[str, Any]]
) -> BrokerRemovalStep:
    """Repeat the step until the broker is empty, or forgotten once its nodes are down.

    Args:
        by: Empty for a dry run, which is one step.
        moves: Gets what the steps have moved.

    Raises:
        BatonError: the last step failed; before the end of the time, only without retry advice.
    """
    clock = asyncio.get_running_loop()
    deadline_s, pause_s = clock.time() + wait_s, _POLL_S
    while True:
        try:
            step = await remove_broker(admin, broker, by=by)
        except (NoQuorum, NotServing, Unreachable):
            if not by or clock.time() > deadline_s:
                raise
        else:
            moves += [asdict(one) for one in step.moves]
            forgotten = step.removal is not None and step.removal.forgotten_unix_ms
            done = not step.obstacles and (step.nodes_up or forgotten)
            if not by or done or clock.time() > deadline_s:
                return step
        await asyncio.sleep(min(pause_s, max(0.0, deadline_s - clock.time())))
        pause_s = min(2 * pause_s, _POLL_S_MAX)


def _state(step: BrokerRemovalStep, *, done: bool) -> str:
    if step.removal is not None and step.removal.forgotten_unix_ms:
        return "removed"
    if not done:
        return "would be removed"
    if step.obstacles:
        return "being removed"
    return "empty"


def _text(broker: str, state: str, step: BrokerRemovalStep) -> str:
    if state == "removed":
        return f"{broker} is removed; use another name for a new broker"
    if state == "empty":
        if not step.nodes_up:
            return f"{broker} holds nothing that is needed, and no node of it is up"
        nodes = ", ".join(step.nodes_up)
        return (
            f"{broker} holds nothing that is needed: stop its processes ({nodes}), and repeat the "
            "command to remove its records"
        )
    return f"{broker} {state}: it holds {counted(len(step.obstacles), 'thing')}"


def _problem(broker: str, obstacles: Sequence[RemovalObstacle]) -> str:
    first = obstacles[0]
    more = f", and {len(obstacles) - 1} more" if len(obstacles) > 1 else ""
    return (
        f"{broker} still holds something that is needed: {first.message}{more}. It takes no new "
        f"queues; repeat the command, or cancel: baton cluster remove-broker {broker} --cancel"
    )
