"""`baton group why-stuck` and `baton group lag`: diagnosis and lag of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from click.exceptions import Exit

from batonmq.admin.group_lag import GroupLag, group_lags
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq.cli.arguments import group_argument, parse_queue, queue_option, topic_option
from batonmq.cli.command_classes import command
from batonmq.cli.output import Columns, Minor, Prose, counted, seconds
from batonmq.cli.session import CommandSession, cluster_session

_WHY_COLUMNS: Columns = {
    "QUEUE": lambda item: f"{item['topic']}/{item['broker']}/{item['queue_id']}",
    "LAG": "lag",
    "REASON": "reason",
    "EXPLANATION": Prose("message"),
    "REMEDY": Prose("remedy"),
}
_WHY_MORE: Columns = {
    "LAG-SECONDS": lambda item: seconds(item["lag_ms"]),
    "CURRENT-OFFSET": Minor("committed_offset"),
    "LOG-END-OFFSET": Minor("log_end_offset"),
    "CLIENT-ID": "client_id",
    "EVIDENCE": lambda item: " ".join(f"{k}={v}" for k, v in item["evidence"].items()),
}
_LAG_COLUMNS: Columns = {
    "GROUP": Minor("group"),
    "TOPIC": "topic",
    "BROKER": "broker",
    "PARTITION": "queue_id",
    "CURRENT-OFFSET": Minor("committed_offset"),
    "LOG-END-OFFSET": Minor("log_end_offset"),
    "LAG": "lag",
    "LAG-SECONDS": lambda item: seconds(item["lag_ms"]),
    "CLIENT-ID": "client_id",
}
_ALL_COLUMNS: Columns = {
    "GROUP": "group",
    "LAG": "lag",
    "LAG-SECONDS": lambda item: seconds(item["lag_ms"]),
    "QUEUES": Minor("queue_count"),
    "STUCK": "stuck_count",
    "VERDICT": "verdict",
}
_ALL_MORE: Columns = {"EXPLANATION": Prose("message"), "REMEDY": Prose("remedy")}


@command("why-stuck")
@group_argument("group")
@topic_option
@queue_option
@click.option("--check", is_flag=True, help="Exit status 1 if a queue is stuck.")
@cluster_session
def why_stuck(session: CommandSession, group: str, topic: str, queue: str, check: bool) -> None:
    """Show for each queue of a group whether its progress is stuck, why, and what to do."""
    place = parse_queue(topic, queue)
    diagnoses = session.run(_diagnose(session, group, topic, place))
    session.output.items([_item(diagnosis) for diagnosis in diagnoses], _WHY_COLUMNS, _WHY_MORE)
    if check and any(diagnosis.stuck for diagnosis in diagnoses):
        raise Exit(1)


@command("lag")
@group_argument(
    "group",
    required=False,
    default="",
    metavar="[GROUP]",
    help="Name of the group; by default all groups.",
)
@topic_option
@queue_option
@cluster_session
def lag(session: CommandSession, group: str, topic: str, queue: str) -> None:
    """Show the lag of a group on each queue, or of all groups, in messages and in seconds.

    The seconds are the age of the oldest unacknowledged message since it was stored. Without GROUP
    each group has a verdict: the reason of baton group why-stuck for the stuck queue that has
    waited longest.
    """
    if not group:
        if topic or queue:
            raise click.UsageError("GROUP is required with --topic and --queue")
        session.run(_all(session))
        return
    place = parse_queue(topic, queue)
    diagnoses = session.run(_diagnose(session, group, topic, place))
    queues, whole = [_item(diagnosis) for diagnosis in diagnoses], total(diagnoses)
    session.output.detail({"group": group} | whole | {"queues": queues}, queues, _LAG_COLUMNS)
    session.output.note("")
    count, unknown = whole["lag"], whole["unknown_count"]
    session.output.note(
        f"lag: {counted(count, 'message')}, the oldest {seconds(whole['lag_ms'])} s old"
    )
    if unknown:
        session.output.note(
            f"unknown for {counted(unknown, 'queue')}; see: baton group why-stuck {group}"
        )


async def _all(session: CommandSession) -> None:
    async with session.admin() as admin:
        names = [group.name for group in await admin.list_groups()]
        lags = await group_lags(admin, names)
    session.output.items([_lag_item(one) for one in lags], _ALL_COLUMNS, _ALL_MORE)
    stuck = [one.group for one in lags if one.stuck]
    session.output.note("")
    session.output.note(f"stuck: {len(stuck)} of {counted(len(lags), 'group')}")
    if stuck:
        session.output.note(f"see: baton group why-stuck {stuck[0]}")


def total(diagnoses: Sequence[QueueDiagnosis]) -> dict[str, int]:
    """Return the total lag, the age of the oldest message, and how many queues are unknown."""
    return {
        "lag": sum(d.lag for d in diagnoses if d.lag is not None),
        "lag_ms": max((d.lag_ms for d in diagnoses if d.lag_ms is not None), default=0),
        "unknown_count": sum(d.lag is None or d.lag_ms is None for d in diagnoses),
    }


async def _diagnose(
    session: CommandSession, group: str, topic: str, place: tuple[str, int] | None
) -> tuple[QueueDiagnosis, ...]:
    broker, queue_id = place or ("", None)
    async with session.admin() as admin:
        return await admin.why_stuck(group, topic, broker, queue_id)


def _lag_item(lag: GroupLag) -> dict[str, Any]:
    return asdict(lag) | {"stuck": lag.stuck}


def _item(diagnosis: QueueDiagnosis) -> dict[str, Any]:
    return asdict(diagnosis) | {"stuck": diagnosis.stuck}
