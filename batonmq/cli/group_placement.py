"""`baton group move` and `baton cluster spread-groups`: which offsets set keeps which group."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import click

from batonmq.admin.admin import Admin
from batonmq.admin.placement import Move, locate_group, move_group
from batonmq.cli.arguments import group_argument
from batonmq.cli.change_options import dry_run_option
from batonmq.cli.output import Columns, counted
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session
from batonmq.errors import BatonError

ARRIVED_WITHIN_S = 30.0
_LOOK_S = 0.1
_COLUMNS: Columns = {
    "GROUP": "group",
    "FROM": "from_set",
    "TO": "to_set",
    "MOVE": "move",
    "STATE": "state",
}


@click.command("move")
@group_argument("name")
@click.option(
    "--to",
    default="",
    metavar="SET",
    help="Offsets set that is to keep it; by default the one a new group would get.",
)
@dry_run_option
@cluster_session
def move(session: CommandSession, name: str, to: str, dry_run: bool) -> None:
    """Have another offsets set keep a group: progress, tokens, recorded resets, all of it.

    Members go on with what they have in hand; commits and pulls wait until the group has arrived, a
    moment if both sets are up. The exit status is 1 if it has not arrived after 30 s: the move goes
    on.
    """
    session.run(_move(session, [name], to, dry_run=dry_run))


@click.command("spread-groups")
@dry_run_option
@cluster_session
def spread_groups(session: CommandSession, dry_run: bool) -> None:
    """Move the groups that a new offsets set would have been given, one after the other.

    With one set more, about the share of them that it should have moves there, and no other does.
    Also of groups that were moved by hand.
    """
    session.run(_move(session, None, "", dry_run=dry_run))


async def _move(
    session: CommandSession, names: list[str] | None, to_set: str, *, dry_run: bool
) -> None:
    moves: list[Move] = []
    problems: list[str] = []
    states: dict[str, str] = {}
    async with session.admin() as admin:
        groups = names or [group.name for group in await admin.list_groups()]
        for name in groups:
            try:
                found = await move_group(admin, name, to_set, dry_run=dry_run)
                moves += [found] if names or not found.stays else []
                states[name] = await _outcome(admin, found, dry_run=dry_run)
            except BatonError as error:
                if names:
                    raise
                problems.append(f"{name}: {error.reason}: {error.message}")
    problems += [f"{name} has not arrived yet" for name in states if states[name] == "moving"]
    items = [
        {
            "group": found.group,
            "from_set": found.before.offsets_set,
            "to_set": found.after.offsets_set,
            "move": found.after.move,
            "state": states[found.group],
            "place": asdict(found.after),
        }
        for found in moves
    ]
    session.output.items(items, _COLUMNS)
    if names is None:
        stay = len(groups) - len(moves) - len(problems)
        session.output.note(f"{counted(max(stay, 0), 'group')} stay where they are")
    session.output.problems(problems)


async def _outcome(admin: Admin, move: Move, *, dry_run: bool) -> str:
    """What became of a move, once that is known."""
    if move.stays:
        return "stays"
    if dry_run:
        return "would move"
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ARRIVED_WITHIN_S
    while loop.time() < deadline:
        place = await locate_group(admin, move.group)
        if place.move > move.after.move or not place.from_set:
            return "moved"
        await asyncio.sleep(_LOOK_S)
    return "moving"
