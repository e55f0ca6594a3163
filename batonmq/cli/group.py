"""`baton group …`: consumer groups; the columns are named as those of Kafka's tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal, cast

import click

from batonmq.admin.admin import Strategy
from batonmq.admin.group_lag import group_lags
from batonmq.admin.group_reports import Group, GroupProgress, RefusedClient, Subscription
from batonmq.admin.placement import OffsetsPlacement, locate_group
from batonmq.admin.remote_clients import RemoteClientReport, RemoteClients
from batonmq.cli.arguments import group_argument
from batonmq.cli.change_options import by_option, check_can_ask, confirm, yes_option
from batonmq.cli.command_classes import LazyCommand, LazyGroup
from batonmq.cli.gateway import CLIENT_COLUMNS, MORE_CLIENT_COLUMNS
from batonmq.cli.output import Columns, Minor, counted, described, differences, seconds, wall_time
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import BatonError, GroupNotFound

commands = LazyGroup(
    "group",
    help="Show and change consumer groups, and move their progress.",
    no_args_is_help=True,
    lazy={
        "clone": LazyCommand(
            "batonmq.cli.group_resets:clone",
            "Copy the progress of one group to another, with single acknowledged messages.",
        ),
        "lag": LazyCommand(
            "batonmq.cli.group_lag:lag",
            "Show the lag of a group on each queue, or of all groups, in messages and in seconds.",
        ),
        "move": LazyCommand(
            "batonmq.cli.group_placement:move",
            "Move a group to another offsets set: its progress, tokens and recorded resets.",
        ),
        "outputs": LazyCommand(
            "batonmq.cli.group_outputs:outputs",
            "Show which outputs of the group's transformers storage remembers, by input queue.",
        ),
        "reset": LazyCommand("batonmq.cli.group_resets:reset_offsets", hidden=True),
        "reset-offsets": LazyCommand(
            "batonmq.cli.group_resets:reset_offsets",
            "Move a group's progress back or forward, while its members are running.",
        ),
        "resets": LazyCommand(
            "batonmq.cli.group_resets:resets",
            "List the resets and clones of a group, newest first.",
        ),
        "why-stuck": LazyCommand(
            "batonmq.cli.group_lag:why_stuck",
            "Show for each queue of a group whether its progress is stuck, why, and what to do.",
        ),
    },
)


REMOTE_CLIENTS_SHOWN = 50
"""Remote clients below a table of a group, at most."""
_POLICIES = ("reject", "staged", "staged-latest", "warn")
_STRATEGIES = ("sticky", "average", "average-by-circle", "consistent-hash", "machine-room")


def state(item: Any) -> str:
    """Return the state of a group in one word: the first one that applies."""
    if item["pause"]:
        return "Paused"
    if item["staged"]:
        return "Draining" if item["staged"]["draining"] else "Staged"
    return "Stable" if item["members"] else "Empty"


def unacked(item: Mapping[str, Any]) -> str | int | None:
    """Return the number of messages in flight of a queue, or its bounds, as in `0-16`."""
    most, least = item["unacked_count"], item["unacked_count_min"]
    return most if most == least else f"{least}-{most}"


_COLUMNS: Columns = {
    "GROUP": "name",
    "STATE": state,
    "MEMBERS": lambda item: len(item["members"]),
    "LAG": "lag",
    "LAG-SECONDS": Minor(lambda item: seconds(item["lag_ms"])),
    "GENERATION": Minor("generation"),
    "TOPICS": lambda item: ",".join(s["topic"] for s in item["subscriptions"]),
}
_SETTINGS_COLUMNS: Columns = {
    "GROUP": "name",
    "STATE": state,
    "POLICY": "policy",
    "OWNERSHIP": "ownership",
    "STRATEGY": "strategy",
}
_SETTINGS_MORE: Columns = {
    "MODEL": "model",
    "FROM": "consume_from",
    "ORDER": "order",
    "POLICY": "policy",
    "OWNERSHIP": "ownership",
    "STRATEGY": "strategy",
    "SUBSCRIPTION": "subscription_generation",
}
_MORE_QUEUE_COLUMNS: Columns = {"TOKEN": "token"}
_MEMBER_COLUMNS: Columns = {
    "GROUP": Minor("group"),
    "CONSUMER-ID": Minor(lambda item: f"{item['incarnation_id']:016x}"),
    "HOST": Minor("host"),
    "CLIENT-ID": "client_id",
    "#PARTITIONS": lambda item: len(item["queues"]),
    "#REMOTE": Minor(lambda item: len(item["remote_clients"]) or None),
    "JOINED": Minor(lambda item: wall_time(item["join_unix_ms"])),
    "DIFFERS": Minor(lambda item: "yes" if item["differs"] else "no"),
}
_MORE_MEMBER_COLUMNS: Columns = {
    "ROOM": "room",
    "ASSIGNMENT": lambda item: ",".join(
        f"{q['topic']}/{q['broker']}/{q['queue_id']}" for q in item["queues"]
    ),
}
_QUEUE_COLUMNS: Columns = {
    "GROUP": Minor("group"),
    "TOPIC": "topic",
    "BROKER": "broker",
    "PARTITION": "queue_id",
    "CURRENT-OFFSET": "committed_offset",
    "LOG-END-OFFSET": "log_end_offset",
    "LAG": "lag",
    "UNACKED": unacked,
    "CONSUMER-ID": Minor("consumer_id"),
    "HOST": Minor("host"),
    "CLIENT-ID": "client_id",
    "ASSIGNED": Minor("assigned"),
}


@commands.command("list")
@click.option("--lag/--no-lag", default=True, help="Whether to show the lag of each group.")
@cluster_session
def list_(session: CommandSession, lag: bool) -> None:
    """List the groups with their lag: messages, and the age of the oldest one.

    Lag needs a diagnosis of each group. With many groups, --no-lag is faster.
    """
    session.run(_list(session, lag=lag))


async def _list(session: CommandSession, *, lag: bool) -> None:
    async with session.admin() as admin:
        groups = await admin.list_groups()
        lags = await group_lags(admin, [group.name for group in groups]) if lag else ()
    by_group = {one.group: (one.lag, one.lag_ms) for one in lags}
    items = []
    for group in groups:
        count, age_ms = by_group.get(group.name, (None, None))
        items.append(asdict(group) | {"lag": count, "lag_ms": age_ms})
    session.output.items(items, _COLUMNS, _SETTINGS_MORE)


@commands.command()
@group_argument("name")
@cluster_session
def describe(session: CommandSession, name: str) -> None:
    """Show a group: progress, owner and assigned member of each queue, settings, and placement.

    The placement is the offsets set that keeps the group's progress, or to which it is moving. A
    gateway is a member for its remote clients, which are listed below the queues.
    """
    session.run(_describe(session, name))


async def _describe(session: CommandSession, name: str) -> None:
    async with session.admin() as admin:
        progress = await admin.group_progress(name)
        problems, place = list(progress.problems), None
        try:
            place = await locate_group(admin, name)
        except BatonError as error:
            problems.append(f"placement is unknown: {error.reason}: {error.message}")
        remote = await RemoteClients(admin).clients(name)
    ids = {m.client_id: f"{m.incarnation_id:016x}" for m in progress.group.members}
    queues = [
        asdict(queue) | {"consumer_id": ids.get(queue.client_id or "")} for queue in progress.queues
    ]
    refused = [_refused_item(client) for client in progress.refused]
    item = asdict(progress.group) | {
        "queues": queues,
        "refused": refused,
        "place": asdict(place) if place else None,
        "remote_clients": [asdict(client) for client in remote.clients],
    }
    session.output.detail(item, queues, _QUEUE_COLUMNS, _MORE_QUEUE_COLUMNS)
    _show_remote_clients(session, remote)
    for line in ("", *describe_settings(progress, place)):
        session.output.note(line)
    session.output.problems([*problems, *remote.problems])


@commands.command()
@group_argument("name")
@cluster_session
def members(session: CommandSession, name: str) -> None:
    """List the members of a group, and how many queues are assigned to each.

    A gateway is a member for its remote clients, which are listed below the members.
    """
    session.run(_members(session, name))


async def _members(session: CommandSession, name: str) -> None:
    async with session.admin() as admin:
        group = await admin.describe_group(name)
        remote = await RemoteClients(admin).clients(name)
    items = [
        {"group": name}
        | asdict(member)
        | {
            "queues": [
                {"topic": queue.topic, "broker": queue.broker, "queue_id": queue.queue_id}
                for queue in group.assignments
                if queue.client_id == member.client_id
            ],
            "remote_clients": [asdict(client) for client in remote.behind(member.client_id)],
        }
        for member in group.members
    ]
    session.output.items(items, _MEMBER_COLUMNS, _MORE_MEMBER_COLUMNS)
    _show_remote_clients(session, remote)
    session.output.problems(remote.problems)


@commands.command()
@group_argument("name")
@click.option(
    "--policy",
    type=click.Choice(_POLICIES),
    help="What happens to a member with another subscription.",
)
@click.option(
    "--ownership",
    type=click.Choice(["on", "off"]),
    help="Whether each queue has one owner at a time; changed only while there are no members.",
)
@click.option(
    "--strategy",
    type=click.Choice(_STRATEGIES),
    help="How queues are assigned to members.",
)
@cluster_session
def update(
    session: CommandSession,
    name: str,
    policy: str | None,
    ownership: str | None,
    strategy: str | None,
) -> None:
    """Change the settings of a group; a group that does not exist is created."""
    if (policy, ownership, strategy) == (None, None, None):
        raise click.UsageError("nothing to change: give --policy, --ownership or --strategy")
    session.run(_update(session, name, policy, ownership, strategy))


async def _update(
    session: CommandSession,
    name: str,
    policy: str | None,
    ownership: str | None,
    strategy: str | None,
) -> None:
    async with session.admin() as admin:
        try:
            await admin.describe_group(name)
            created = False
        except GroupNotFound:
            created = True
        group = await admin.update_group(
            name,
            policy=cast(Literal["reject", "staged", "staged_latest", "warn", ""], _value(policy)),
            ownership=cast(Literal["on", "off", ""], _value(ownership)),
            strategy=cast(Strategy, _value(strategy)),
        )
    if created:
        session.output.note(f"group {name} is created")
    _show(session, group)


@commands.command()
@group_argument("name")
@click.option("--reason", required=True, help="Why; it is shown by baton group describe.")
@by_option
@cluster_session
def pause(session: CommandSession, name: str, reason: str, by: str) -> None:
    """Pause the deliveries of a group. Messages in flight are still handled and acknowledged."""
    session.run(_pause(session, name, by, reason))


async def _pause(session: CommandSession, name: str, by: str, reason: str) -> None:
    async with session.admin() as admin:
        _show(session, await admin.pause_group(name, by, reason))


@commands.command()
@group_argument("name")
@click.option("--reason", default="", help="Why; it is recorded.")
@by_option
@cluster_session
def resume(session: CommandSession, name: str, reason: str, by: str) -> None:
    """Resume the deliveries of a paused group."""
    session.run(_resume(session, name, by, reason))


async def _resume(session: CommandSession, name: str, by: str, reason: str) -> None:
    async with session.admin() as admin:
        _show(session, await admin.resume_group(name, by, reason))


@commands.command()
@group_argument("name")
@yes_option
@cluster_session
def delete(session: CommandSession, name: str, yes: bool) -> None:
    """Delete a group that has no members, with its progress and its retry topic, permanently.

    Its dead letters are kept.
    """
    check_can_ask(yes=yes)
    if not yes:
        confirm(session, f"Delete group {name}, its progress and its retry topic?")
    session.run(_delete(session, name))


async def _delete(session: CommandSession, name: str) -> None:
    async with session.admin() as admin:
        count = await admin.delete_group(name)
    item = {"name": name, "deleted": True, "queue_count": count}
    session.output.line(
        item, f"group {name} is deleted, with its progress on {counted(count, 'queue')}"
    )


def describe_settings(progress: GroupProgress, place: OffsetsPlacement | None) -> Iterator[str]:
    """Yield the settings of a group and its unusual states, as lines of text.

    Args:
        place: Placement of the group; None if it is unknown.
    """
    group = progress.group
    order = "" if group.order == "none" else f"ordered by {group.order}, "
    yield (
        f"{group.model}, {order}from {group.consume_from}; policy {group.policy}, "
        f"ownership {group.ownership}, strategy {group.strategy}"
    )
    yield (
        f"generation {group.generation}; subscription {group.subscription_generation}: "
        f"{_expressions(group.subscriptions)}"
    )
    if place and place.from_set:
        yield f"moving from offsets set {place.from_set} to {place.offsets_set}"
    elif place:
        yield f"placed on offsets set {place.offsets_set}"
    if group.pause:
        since, why = wall_time(group.pause.since_unix_ms), group.pause.reason
        yield f"paused by {group.pause.by} since {since}: {why}"
    if group.staged:
        step = "all queues are drained for" if group.staged.draining else "staged:"
        since = wall_time(group.staged.since_unix_ms)
        yield f"since {since} {step} subscription {_expressions(group.staged.subscriptions)}"
    for member in group.members:
        if member.differs:
            yield f"{member.client_id} on {member.host} has another subscription"
    for refused in progress.refused:
        since = wall_time(refused.since_unix_ms)
        yield (
            f"rejected since {since}: {refused.client_id} on {refused.host}: "
            f"{refused.error.reason}: {refused.error.message}"
        )
        yield from (f"  {line}" for line in differences(refused.error))


def _show_remote_clients(session: CommandSession, remote: RemoteClientReport) -> None:
    shown = [asdict(client) for client in remote.clients[:REMOTE_CLIENTS_SHOWN]]
    session.output.further_items(shown, CLIENT_COLUMNS, MORE_CLIENT_COLUMNS)
    if hidden := len(remote.clients) - len(shown):
        session.output.note(f"{counted(hidden, 'more client')}: see baton gateway clients --group")


def _show(session: CommandSession, group: Group) -> None:
    session.output.detail(asdict(group), [asdict(group)], _SETTINGS_COLUMNS)


def _refused_item(refused: RefusedClient) -> dict[str, Any]:
    return {
        "client_id": refused.client_id,
        "incarnation_id": refused.incarnation_id,
        "host": refused.host,
        "since_unix_ms": refused.since_unix_ms,
        "error": described(refused.error),
    }


def _expressions(subscriptions: tuple[Subscription, ...]) -> str:
    return ", ".join(f"{s.topic} {s.expression}" for s in subscriptions) or "none"


def _value(chosen: str | None) -> str:
    return chosen.replace("-", "_") if chosen else ""
