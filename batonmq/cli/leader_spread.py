"""`baton cluster spread-leaders`: leaders of replica sets, evenly over the hosts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batonmq.admin.leader_spread import LeaderMove, move_leader, plan_leader_spread
from batonmq.cli.change_options import by_option, dry_run_option
from batonmq.cli.command_classes import command
from batonmq.cli.output import Columns, counted
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import BatonError

_COLUMNS: Columns = {
    "SERVICE": "service",
    "SET": "replica_set",
    "FROM": "from_node",
    "TO": "to_node",
    "FROM-HOST": "from_host",
    "TO-HOST": "to_host",
    "STATE": "state",
}


@command("spread-leaders")
@by_option
@dry_run_option
@cluster_session
def spread_leaders(session: CommandSession, by: str, dry_run: bool) -> None:
    """Move leaders of storage and offsets so that each host has about as many, one by one.

    The new leader is in sync, up and not drained. Producers and consumers continue. Useful after
    maintenance: a restarted node does not lead again by itself. Exit status 1 if a set did not
    move.
    """
    session.run(_spread(session, "" if dry_run else by))


async def _spread(session: CommandSession, by: str) -> None:
    items: list[dict[str, Any]] = []
    problems: list[str] = []
    async with session.admin() as admin:
        moves: list[LeaderMove] = []
        for service in ("storage", "offsets"):
            planned, unanswered = await plan_leader_spread(admin, service)
            moves += planned
            problems += unanswered
        for move in moves:
            state = "would move"
            if by:
                try:
                    leader = await move_leader(admin, move.service, move.to_node, by=by)
                    state = "moved" if leader == move.to_node else f"led by {leader}"
                except BatonError as error:
                    state = "not moved"
                    problems.append(f"{move.replica_set}: {error.reason}: {error.message}")
            if state.startswith("led by"):
                problems.append(
                    f"{move.replica_set} is {state} and not by {move.to_node}; see `baton cluster "
                    "replication`, and repeat the command"
                )
            items.append(asdict(move) | {"state": state})
    session.output.items(items, _COLUMNS)
    if not items:
        session.output.note("the leaders are spread evenly")
    else:
        done = sum(item["state"] == "moved" for item in items)
        session.output.note(f"{done} of {counted(len(items), 'leader')} moved")
    session.output.problems(problems)
