"""`baton group move` and `baton cluster spread-groups`: the placement of groups on offsets sets."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict

import click

from batonmq.admin.admin import Admin
from batonmq.admin.placement import GroupMove, locate_group, move_group
from batonmq.cli.arguments import group_argument
from batonmq.cli.change_options import dry_run_option
from batonmq.cli.command_classes import command
from batonmq.cli.output import Columns, counted
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import BatonError

MOVE_TIMEOUT_S = 30.0
_POLL_S = 0.1
_COLUMNS: Columns = {
    "GROUP": "group",
    "FROM": "from_set",
    "TO": "to_set",
    "MOVE": "move",
    "STATE": "state",
}


@command("move")
@group_argument("name")
@click.option(
    "--to",
    default="",
    metavar="SET",
    help="Target offsets set; by default the set that a new group would get.",
)
@dry_run_option
@cluster_session
def move(session: CommandSession, name: str, to: str, dry_run: bool) -> None:
    """Move a group to another offsets set: its progress, tokens and recorded resets.

    Members keep handling messages in flight; their commits and pulls wait until the move is done,
    which takes a moment if both sets are up. Exit status 1 if it is not done after 30 s; the move
    continues.
    """
    session.run(_move(session, [name], to, dry_run=dry_run))


@command("spread-groups")
@dry_run_option
@cluster_session
def spread_groups(session: CommandSession, dry_run: bool) -> None:
    """Move each group to the offsets set that a new group of its name would get, one by one.

    After a set was added, about an even share of the groups moves to it. A group that
    `baton group move` placed elsewhere moves back.
    """
    session.run(_move(session, None, "", dry_run=dry_run))


async def _move(
    session: CommandSession, names: list[str] | None, to_set: str, *, dry_run: bool
) -> None:
    moves: list[GroupMove] = []
    problems: list[str] = []
    states: dict[str, str] = {}
    async with session.admin() as admin:
        groups = names or [group.name for group in await admin.list_groups()]
        for name in groups:
            try:
                moved = await move_group(admin, name, to_set, dry_run=dry_run)
                moves += [moved] if names or not moved.stays else []
                states[name] = await _outcome(admin, moved, dry_run=dry_run)
            except BatonError as error:
                if names:
                    raise
                problems.append(f"{name}: {error.reason}: {error.message}")
    problems += [
        f"the move of {name} is not done yet" for name in states if states[name] == "moving"
    ]
    items = [
        {
            "group": moved.group,
            "from_set": moved.before.offsets_set,
            "to_set": moved.after.offsets_set,
            "move": moved.after.move,
            "state": states[moved.group],
            "place": asdict(moved.after),
        }
        for moved in moves
    ]
    session.output.items(items, _COLUMNS)
    if names is None:
        stay = len(groups) - len(moves) - len(problems)
        session.output.note(f"{counted(max(stay, 0), 'group')} not moved")
    session.output.problems(problems)


async def _outcome(admin: Admin, move: GroupMove, *, dry_run: bool) -> str:
    """Return the outcome of a move: stays, would move, moved, or moving after a timeout."""
    if move.stays:
        return "stays"
    if dry_run:
        return "would move"
    loop = asyncio.get_running_loop()
    deadline = loop.time() + MOVE_TIMEOUT_S
    while loop.time() < deadline:
        with suppress(BatonError):  # asked again: the move is decided, and continues
            place = await locate_group(admin, move.group)
            if place.move > move.after.move or not place.from_set:
                return "moved"
        await asyncio.sleep(_POLL_S)
    return "moving"
