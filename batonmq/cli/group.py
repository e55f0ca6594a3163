"""`baton group …`: the columns are named as Kafka's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, Literal, cast

import click

from batonmq.admin.admin import Strategy
from batonmq.admin.group_reports import Group, GroupProgress, RefusedClient, Subscription
from batonmq.admin.placement import Place, locate_group
from batonmq.cli.arguments import group_argument
from batonmq.cli.change_options import by_option, yes_option, check_can_ask, confirm
from batonmq.cli.output import Columns, counted, described, differences, wall_time
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session
from batonmq.errors import BatonError, GroupNotFound

app = click.Group(
    help="Look at consumer groups, change them, move their progress.", no_args_is_help=True
)


class Policy(StrEnum):
    """What happens to another subscription than the group's, as people type it."""

    REJECT = "reject"
    STAGED = "staged"
    STAGED_LATEST = "staged-latest"
    WARN = "warn"


class Ownership(StrEnum):
    """Whether queues are owned."""

    ON = "on"
    OFF = "off"


class Dealing(StrEnum):
    """How queues are dealt out, as people type it."""

    STICKY = "sticky"
    AVERAGE = "average"
    AVERAGE_BY_CIRCLE = "average-by-circle"
    CONSISTENT_HASH = "consistent-hash"
    MACHINE_ROOM = "machine-room"


def state(item: Any) -> str:
    """A group's state in a word: the first that is true."""
    if item["pause"]:
        return "Paused"
    if item["staged"]:
        return "Draining" if item["staged"]["draining"] else "Staged"
    return "Stable" if item["members"] else "Empty"


_COLUMNS: Columns = {
    "GROUP": "name",
    "STATE": state,
    "MEMBERS": lambda item: len(item["members"]),
    "GENERATION": "generation",
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
    "ORDERLY": lambda item: "yes" if item["orderly"] else "no",
    "POLICY": "policy",
    "OWNERSHIP": "ownership",
    "STRATEGY": "strategy",
    "SUBSCRIPTION": "subscription_generation",
}
_MORE_QUEUE_COLUMNS: Columns = {"TOKEN": "token"}
_MEMBER_COLUMNS: Columns = {
    "GROUP": "group",
    "CONSUMER-ID": lambda item: f"{item['incarnation_id']:016x}",
    "HOST": "host",
    "CLIENT-ID": "client_id",
    "#PARTITIONS": lambda item: len(item["queues"]),
    "JOINED": lambda item: wall_time(item["join_unix_ms"]),
    "DIFFERS": lambda item: "yes" if item["differs"] else "no",
}
_MORE_MEMBER_COLUMNS: Columns = {
    "ROOM": "room",
    "ASSIGNMENT": lambda item: ",".join(
        f"{q['topic']}/{q['broker']}/{q['queue_id']}" for q in item["queues"]
    ),
}
_QUEUE_COLUMNS: Columns = {
    "GROUP": "group",
    "TOPIC": "topic",
    "BROKER": "broker",
    "PARTITION": "queue_id",
    "CURRENT-OFFSET": "committed_offset",
    "LOG-END-OFFSET": "log_end_offset",
    "LAG": "lag",
    "UNACKED": "unacked_count",
    "CONSUMER-ID": "consumer_id",
    "HOST": "host",
    "CLIENT-ID": "client_id",
    "ASSIGNED": "assigned",
}


@app.command("list")
@cluster_session
def list_(session: CommandSession) -> None:
    """List the groups."""
    session.run(_list(session))


async def _list(session: CommandSession) -> None:
    async with session.admin() as admin:
        groups = await admin.list_groups()
    session.output.items([asdict(group) for group in groups], _COLUMNS, _SETTINGS_MORE)


@app.command()
@group_argument("name")
@cluster_session
def describe(session: CommandSession, name: str) -> None:
    """Show how far a group is on every queue, who owns it and who should, its settings, its place.

    The place is the offsets set that keeps its progress, or to which it is on its way.
    """
    session.run(_describe(session, name))


async def _describe(session: CommandSession, name: str) -> None:
    async with session.admin() as admin:
        progress = await admin.group_progress(name)
        problems, place = list(progress.problems), None
        try:
            place = await locate_group(admin, name)
        except BatonError as error:
            problems.append(f"which offsets set keeps it: {error.reason}: {error.message}")
    ids = {m.client_id: f"{m.incarnation_id:016x}" for m in progress.group.members}
    queues = [
        asdict(queue) | {"consumer_id": ids.get(queue.client_id or "")} for queue in progress.queues
    ]
    refused = [_refused_item(client) for client in progress.refused]
    item = asdict(progress.group) | {
        "queues": queues,
        "refused": refused,
        "place": asdict(place) if place else None,
    }
    session.output.detail(item, queues, _QUEUE_COLUMNS, _MORE_QUEUE_COLUMNS)
    for line in ("", *about(progress, place)):
        session.output.note(line)
    session.output.problems(problems)


@app.command()
@group_argument("name")
@cluster_session
def members(session: CommandSession, name: str) -> None:
    """List the members of a group, and how many queues each is dealt."""
    session.run(_members(session, name))


async def _members(session: CommandSession, name: str) -> None:
    async with session.admin() as admin:
        group = await admin.describe_group(name)
    items = [
        {"group": name}
        | asdict(member)
        | {
            "queues": [
                {"topic": dealt.topic, "broker": dealt.broker, "queue_id": dealt.queue_id}
                for dealt in group.assignments
                if dealt.client_id == member.client_id
            ]
        }
        for member in group.members
    ]
    session.output.items(items, _MEMBER_COLUMNS, _MORE_MEMBER_COLUMNS)


@app.command()
@group_argument("name")
@click.option(
    "--policy",
    type=click.Choice(["reject", "staged", "staged-latest", "warn"]),
    help="What happens to a member that asks for another subscription.",
)
@click.option(
    "--ownership",
    type=click.Choice(["on", "off"]),
    help="Whether one member at a time owns a queue; changed without members only.",
)
@click.option(
    "--strategy",
    type=click.Choice(
        ["sticky", "average", "average-by-circle", "consistent-hash", "machine-room"]
    ),
    help="How queues are dealt out.",
)
@cluster_session
def update(
    session: CommandSession,
    name: str,
    policy: str | None,
    ownership: str | None,
    strategy: str | None,
) -> None:
    """Change the settings of a group; one that nobody has joined yet is created."""
    if (policy, ownership, strategy) == (None, None, None):
        raise click.UsageError("nothing to change: give --policy, --ownership or --strategy")
    session.run(_update(session, name, policy, ownership, strategy))


async def _update(
    session: CommandSession,
    name: str,
    policy: Policy | None,
    ownership: Ownership | None,
    strategy: Dealing | None,
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
        session.output.note(f"group {name} is new")
    _show(session, group)


@app.command()
@group_argument("name")
@click.option("--reason", required=True, help="Why; it is shown to whoever wonders.")
@by_option
@cluster_session
def pause(session: CommandSession, name: str, reason: str, by: str) -> None:
    """Stop the deliveries of a group. What was delivered is still handled and acknowledged."""
    session.run(_pause(session, name, by, reason))


async def _pause(session: CommandSession, name: str, by: str, reason: str) -> None:
    async with session.admin() as admin:
        _show(session, await admin.pause_group(name, by, reason))


@app.command()
@group_argument("name")
@click.option("--reason", default="", help="Why.")
@by_option
@cluster_session
def resume(session: CommandSession, name: str, reason: str, by: str) -> None:
    """Let the deliveries of a paused group go on."""
    session.run(_resume(session, name, by, reason))


async def _resume(session: CommandSession, name: str, by: str, reason: str) -> None:
    async with session.admin() as admin:
        _show(session, await admin.resume_group(name, by, reason))


@app.command()
@group_argument("name")
@yes_option
@cluster_session
def delete(session: CommandSession, name: str, yes: bool) -> None:
    """Delete a group without members, its progress and its retry topic. There is no way back.

    Its dead letters stay.
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


def about(progress: GroupProgress, place: Place | None) -> Iterator[str]:
    """Settings of a group, and what is unusual about it at this time; for people.

    Args:
        place: None if it is not known.
    """
    group = progress.group
    order = "orderly, " if group.orderly else ""
    yield (
        f"{group.model}, {order}from {group.consume_from}; policy {group.policy}, "
        f"ownership {group.ownership}, strategy {group.strategy}"
    )
    yield (
        f"generation {group.generation}; subscription {group.subscription_generation}: "
        f"{_expressions(group.subscriptions)}"
    )
    if place and place.from_set:
        yield f"on its way from offsets set {place.from_set} to {place.offsets_set}"
    elif place:
        yield f"kept by offsets set {place.offsets_set}"
    if group.pause:
        since, why = wall_time(group.pause.since_unix_ms), group.pause.reason
        yield f"paused by {group.pause.by} since {since}: {why}"
    if group.staged:
        step = "all queues are given back for" if group.staged.draining else "waits:"
        since = wall_time(group.staged.since_unix_ms)
        yield f"since {since} {step} subscription {_expressions(group.staged.subscriptions)}"
    for member in group.members:
        if member.differs:
            yield f"{member.client_id} on {member.host} asks for another subscription"
    for refused in progress.refused:
        since = wall_time(refused.since_unix_ms)
        yield (
            f"refused since {since}: {refused.client_id} on {refused.host}: "
            f"{refused.error.reason}: {refused.error.message}"
        )
        yield from (f"  {line}" for line in differences(refused.error))


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


def _value(chosen: StrEnum | None) -> str:
    return chosen.value.replace("-", "_") if chosen else ""
