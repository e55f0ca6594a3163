"""`baton topic …`: create, list, describe, change and delete topics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click

from batonmq._core.delays import parse_duration_ms
from batonmq._core.names import is_system_topic
from batonmq.admin.queue_moves import RemovalObstacle, removal_obstacles
from batonmq.admin.reports import Compaction, MessageType, Topic, TopicPurge
from batonmq.cli.arguments import topic_argument
from batonmq.cli.change_options import check_can_ask, confirm, yes_option
from batonmq.cli.command_classes import FloatRange, LazyCommand, LazyGroup
from batonmq.cli.output import Columns, Minor, counted, duration, wall_time
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.cli.sizes import parse_bytes, size_text
from batonmq.errors import BatonError, InvalidArgument, PermissionDenied, TopicNotFound

if TYPE_CHECKING:
    from batonmq.admin.admin import Admin

F = TypeVar("F", bound=Callable[..., Any])

commands = LazyGroup(
    "topic",
    help="Create, list, describe, change and delete topics.",
    no_args_is_help=True,
    lazy={
        "move": LazyCommand(
            "batonmq.cli.queue_moves:move",
            "Move queues of a topic to another broker, or spread them evenly.",
        ),
        "peek": LazyCommand(
            "batonmq.cli.topic_peek:peek",
            "Show the newest messages of a topic, or the first ones from a position on.",
        ),
        "stats": LazyCommand(
            "batonmq.cli.topic_stats:stats",
            "Show what the queues of a topic hold, their disk use, last store time and growth.",
        ),
    },
)
_PERMISSIONS: Mapping[str, Literal["read_write", "read", "write"]] = {
    "rw": "read_write",
    "r": "read",
    "w": "write",
}
_COLUMNS: Columns = {
    "TOPIC": "name",
    "QUEUES": "queue_count",
    "PERMISSION": "permission",
    "BROKERS": lambda item: ",".join(item["queue_counts"]),
    "CREATED": Minor(lambda item: wall_time(item["create_unix_ms"])),
}
_MORE_COLUMNS: Columns = {
    "ID": "topic_id",
    "WRITABLE": lambda item: sum(item["writable_counts"].values()),
    "TYPE": "message_type",
    "RETENTION": lambda item: (
        "compacted"
        if item["compaction"]
        else _retention_text(item["retention_ms"], item["retention_bytes"])
    ),
    "INHERITED": lambda item: "yes" if item["inherited"] else "no",
}
_QUEUE_COLUMNS: Columns = {
    "TOPIC": Minor("topic"),
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "FIRST-OFFSET": "first_offset",
    "NEXT-OFFSET": "next_offset",
    "MESSAGES": "count",
}


def _retention_options(command: F) -> F:
    """Add the options of retention: TIME and SIZE as text, None if they are not given."""
    command = click.option(
        "--retention-bytes",
        metavar="SIZE",
        help="Maximum size of each queue, such as 1GiB; `default` for unlimited.",
    )(command)
    return click.option(
        "--retention",
        metavar="TIME",
        help="Retention time of its messages, such as 7d; `default` for that of the broker.",
    )(command)


def _compaction_options(command: F) -> F:
    """Add the settings of a compacted topic as one argument `compaction`; empty without any."""
    options = (
        click.option(
            "--tombstone-retention",
            metavar="TIME",
            help="How long a compacted topic keeps a message with an empty body after the messages "
            "that it deletes are gone, such as 7d; 1d by default.",
        ),
        click.option(
            "--min-lag",
            metavar="TIME",
            help="Remove the older of two messages of a key only when both are older than this, "
            "such as 10m; 0s by default.",
        ),
        click.option(
            "--dirty-ratio",
            type=FloatRange(min=0.01, max=0.99),
            help="Compact a queue when this share of its bytes is newer than the last compaction; "
            "0.5 by default.",
        ),
    )

    @wraps(command)
    def wrapped(
        *args: Any,
        tombstone_retention: str | None,
        min_lag: str | None,
        dirty_ratio: float | None,
        **kwargs: Any,
    ) -> Any:
        given = Compaction(
            None if tombstone_retention is None else parse_duration_ms(tombstone_retention),
            None if min_lag is None else parse_duration_ms(min_lag),
            None if dirty_ratio is None else round(100 * dirty_ratio),
        )
        return command(*args, compaction=None if given == Compaction() else given, **kwargs)

    changed: Any = wrapped
    for option in options:
        changed = option(changed)
    return cast(F, changed)


def _parsed_retention(text: str | None, parse: Callable[[str], int]) -> int | None:
    """Return the value of an option of retention; 0 for `default`, None if it is not given.

    Raises:
        InvalidArgument: it is not a time or size, or is zero.
    """
    if text is None or text == "default":
        return None if text is None else 0
    if not (value := parse(text)):
        raise InvalidArgument(
            f"a retention of {text} is not possible: no message would be kept",
            remedy="Use default to remove the limit of the topic.",
            facts={"field": "retention"},
        )
    return value


def _retention_text(retention_ms: int, retention_bytes: int) -> str:
    parts = [duration(retention_ms)] if retention_ms else []
    parts += [size_text(retention_bytes)] if retention_bytes else []
    return ",".join(parts) or "default"


def _compaction_text(topic: Topic) -> str:
    settings = topic.compaction
    assert settings is not None
    return (
        f"tombstones stay {duration(settings.tombstone_retention_ms or 0)}, messages of at least "
        f"{duration(settings.min_lag_ms or 0)} are compared, a queue is compacted from "
        f"{settings.dirty_percent} % of new bytes on"
    )


@commands.command()
@topic_argument("name")
@click.option(
    "--queues",
    default=8,
    show_default=True,
    type=click.IntRange(min=1, max=1_024),
    help="Number of queues, spread evenly over the brokers.",
)
@click.option(
    "--type",
    "message_type",
    default="any",
    show_default=True,
    type=click.Choice(["any", "normal", "fifo", "delay", "transaction"]),
    help="Which messages clients of RocketMQ 5 may send, at the gateway.",
)
@click.option(
    "--compact",
    is_flag=True,
    help="Keep the newest message of each ordering key, and no other. Can't be changed later.",
)
@_compaction_options
@_retention_options
@cluster_session
def create(
    session: CommandSession,
    name: str,
    queues: int,
    message_type: MessageType,
    retention: str | None,
    retention_bytes: str | None,
    compact: bool,
    compaction: Compaction | None,
) -> None:
    """Create a topic. An existing topic with the same number of queues is not an error."""
    if compaction is not None and not compact:
        raise click.UsageError(
            "--tombstone-retention, --min-lag and --dirty-ratio are for a compacted topic: give "
            "--compact too"
        )
    settings = compaction or (Compaction() if compact else None)
    session.run(
        _create(session, name, queues, message_type, (retention, retention_bytes), settings)
    )


async def _create(
    session: CommandSession,
    name: str,
    queues: int,
    message_type: MessageType,
    limits: tuple[str | None, str | None],
    compaction: Compaction | None,
) -> None:
    async with session.admin() as admin:
        done = await admin.create_topic(
            name,
            queues,
            message_type=message_type,
            retention_ms=_parsed_retention(limits[0], parse_duration_ms),
            retention_bytes=_parsed_retention(limits[1], parse_bytes),
            compaction=compaction,
        )
    if not done.created:
        session.output.note(f"topic {name} exists already")
    item = _item(done.topic) | {"created": done.created}
    session.output.detail(item, [item], _COLUMNS, _MORE_COLUMNS)


@commands.command("list")
@click.option("--all", "all_", is_flag=True, help="Include the topics of the system.")
@cluster_session
def list_(session: CommandSession, all_: bool) -> None:
    """List the topics."""
    session.run(_list(session, all_=all_))


async def _list(session: CommandSession, *, all_: bool) -> None:
    async with session.admin() as admin:
        topics = [one for one in await admin.list_topics() if all_ or not is_system_topic(one.name)]
    session.output.items([_item(topic) for topic in topics], _COLUMNS, _MORE_COLUMNS)


@commands.command()
@topic_argument("name")
@cluster_session
def describe(session: CommandSession, name: str) -> None:
    """Show the queues of a topic and the messages they hold."""
    session.run(_describe(session, name))


async def _describe(session: CommandSession, name: str) -> None:
    async with session.admin() as admin:
        detail = await admin.describe_topic(name)
        problems = list(detail.problems)
        obstacles = await _obstacles(admin, detail.topic, problems)
    queues = [
        asdict(extent.queue)
        | {
            "first_offset": extent.first_offset,
            "next_offset": extent.next_offset,
            "count": extent.count,
        }
        for extent in detail.queues
    ]
    item = _item(detail.topic) | {
        "queues": queues,
        "obstacles": [asdict(one) for one in obstacles],
    }
    session.output.detail(item, queues, _QUEUE_COLUMNS)
    if detail.topic.queue_counts != detail.topic.writable_counts:
        session.output.note(_retiring_text(detail.topic))
        for one in obstacles:
            due = f" (until {wall_time(one.last_unix_ms)})" if one.last_unix_ms else ""
            session.output.note(f"  waits: {one.message}{due}")
    if (kind := detail.topic.message_type) != "any":
        session.output.note(f"clients of RocketMQ 5 may send messages of type {kind} only")
    if (topic := detail.topic).retention_ms:
        session.output.note(f"messages are kept for {duration(topic.retention_ms)}")
    if topic.retention_bytes:
        session.output.note(f"each queue keeps its newest {size_text(topic.retention_bytes)}")
    if topic.compaction is not None:
        session.output.note(f"the newest message of each key is kept: {_compaction_text(topic)}")
    session.output.problems(problems)


async def _obstacles(
    admin: Admin, topic: Topic, problems: list[str]
) -> tuple[RemovalObstacle, ...]:
    """Return what retiring queues of the topic wait for; add an error to `problems`."""
    if topic.queue_counts == topic.writable_counts:
        return ()
    try:
        return await removal_obstacles(admin, topic.name)
    except PermissionDenied:  # groups of others are not shown to every user of a topic
        return ()
    except BatonError as error:
        problems.append(f"not known what the retiring queues wait for: {error.message}")
        return ()


def _retiring_text(topic: Topic) -> str:
    """Return which queues are retiring, by broker."""
    parts = [
        f"{broker} {writable}-{count - 1}"
        for broker, count in topic.queue_counts.items()
        if (writable := topic.writable_counts[broker]) < count
    ]
    return (
        f"retiring queues, which accept no messages and are deleted when they are not needed: "
        f"{', '.join(parts)}"
    )


@commands.command()
@topic_argument("name")
@click.option(
    "--queues",
    type=click.IntRange(min=1, max=1_024),
    help="Total number of queues. Added queues exist at once; removed queues are deleted after "
    "every group has read them.",
)
@click.option(
    "--permission",
    type=click.Choice(list(_PERMISSIONS)),
    help="Allowed operations: rw read and write, r read, w write.",
)
@click.option(
    "--inherited/--no-inherited",
    default=None,
    help="Whether topics that are created on demand may copy their settings from this one.",
)
@_compaction_options
@_retention_options
@cluster_session
def update(
    session: CommandSession,
    name: str,
    queues: int | None,
    permission: str | None,
    inherited: bool | None,
    retention: str | None,
    retention_bytes: str | None,
    compaction: Compaction | None,
) -> None:
    """Change the number of queues of a topic, its permission, retention, compaction or inheritance.

    A shorter retention removes messages within about a minute; a group that has not read them
    skips them.
    """
    if (queues, permission, inherited, retention, retention_bytes, compaction) == (None,) * 6:
        raise click.UsageError(
            "nothing to change: give --queues, --permission, --retention, --retention-bytes, "
            "--tombstone-retention, --min-lag, --dirty-ratio or --inherited"
        )

    async def change(admin: Admin) -> Topic:
        return await admin.update_topic(
            name,
            queue_count=queues or 0,
            permission=_PERMISSIONS[permission] if permission is not None else "",
            inherited=inherited,
            retention_ms=_parsed_retention(retention, parse_duration_ms),
            retention_bytes=_parsed_retention(retention_bytes, parse_bytes),
            compaction=compaction,
        )

    session.run(_update(session, change))


async def _update(session: CommandSession, change: Callable[[Admin], Awaitable[Topic]]) -> None:
    async with session.admin() as admin:
        topic = await change(admin)
    if topic.queue_counts != topic.writable_counts:
        session.output.note(
            "the last queues accept no messages, and are deleted after every group has read them"
        )
    session.output.detail(_item(topic), [_item(topic)], _COLUMNS, _MORE_COLUMNS)


_BYTES_STAY = (
    "the bytes of its messages stay on the disks of the brokers until retention removes the log "
    "segments that contain them; --purge removes those without other messages at once"
)


@commands.command()
@topic_argument("name")
@click.option(
    "--purge",
    is_flag=True,
    help="Also remove the log segments that contain only messages of deleted topics, on all "
    "brokers. For a topic that is deleted already, only this.",
)
@yes_option
@cluster_session
def delete(session: CommandSession, name: str, purge: bool, yes: bool) -> None:
    """Delete a topic: its messages can't be read any more.

    Their bytes stay on the disks of the brokers until retention removes the log segments that
    contain them, or until --purge removes those without other messages.
    """
    check_can_ask(yes=yes)
    if not yes:
        confirm(session, f"Delete topic {name}? Its messages can't be read any more.")
    session.run(_delete(session, name, purge=purge))


async def _delete(session: CommandSession, name: str, *, purge: bool) -> None:
    item: dict[str, Any] = {"name": name, "deleted": True}
    text = f"topic {name} is deleted"
    failure: BatonError | None = None
    async with session.admin() as admin:
        try:
            await admin.delete_topic(name)
        except TopicNotFound:
            if not purge:
                raise
            item["deleted"], text = False, f"topic {name} was deleted before"
        if not purge:
            session.output.note(_BYTES_STAY)
        else:
            item["purged"] = []
            nodes = (await admin.cluster()).nodes
            for broker in sorted({one.replica_set for one in nodes if one.service == "storage"}):
                try:
                    purge_result = await admin.purge_topic(name, broker)
                except BatonError as error:
                    failure = error
                    session.output.note(
                        f"{broker} is not purged: {error.message}; repeat the command"
                    )
                else:
                    item["purged"].append(asdict(purge_result))
                    session.output.note(_purge_text(purge_result))
    session.output.line(item, text)
    if failure is not None:
        raise failure


def _purge_text(purged: TopicPurge) -> str:
    freed = (
        f"{purged.broker}: {purged.purged_bytes:,} bytes freed in "
        f"{counted(purged.purged_segments, 'segment')}"
    )
    if not purged.remaining_segments:
        return freed
    until = (
        f"expire at {wall_time(purged.expiry_unix_ms)} at the latest"
        if purged.expiry_unix_ms
        else "never expire by age"
    )
    return (
        f"{freed}; {purged.remaining_bytes:,} bytes remain in "
        f"{counted(purged.remaining_segments, 'segment')} with messages of other topics, which "
        f"{until}"
    )


def _item(topic: Topic) -> dict[str, Any]:
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "create_unix_ms": topic.create_unix_ms,
        "queue_count": topic.queue_count,
        "queue_counts": dict(topic.queue_counts),
        "writable_counts": dict(topic.writable_counts),
        "permission": topic.permission,
        "inherited": topic.inherited,
        "message_type": topic.message_type,
        "retention_ms": topic.retention_ms,
        "retention_bytes": topic.retention_bytes,
        "compaction": None if topic.compaction is None else asdict(topic.compaction),
    }
