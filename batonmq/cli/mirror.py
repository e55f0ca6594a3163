"""`baton mirror …`: copy topics to another cluster with the progress of groups, and fail over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import click
from click.exceptions import Exit

from batonmq.admin._queue_mirror import Start
from batonmq.admin.admin import Admin
from batonmq.admin.mirror import Mirror, begin_standby, fail_over
from batonmq.admin.mirror_reports import MirroredQueue, MirrorPlan, MirrorReport, MirrorStatus
from batonmq.cli import context_file, tls_options
from batonmq.cli.change_options import by_option, dry_run_option
from batonmq.cli.command_classes import FloatRange, LazyGroup, argument
from batonmq.cli.context_file import ContextError
from batonmq.cli.output import Columns, Minor, counted
from batonmq.cli.session import CommandSession, cluster_session, global_options
from batonmq.errors import InvalidArgument

commands = LazyGroup(
    "mirror",
    help="Copy topics to another cluster with the progress of groups, and fail over to it.",
    no_args_is_help=True,
)
topics_argument = argument("topics", metavar="TOPIC...", nargs=-1, help="Topics.", required=True)
group_argument = argument("group", metavar="GROUP", help="Group.")
to_option = click.option(
    "--to",
    required=True,
    metavar="CONTEXT",
    help="The other cluster: a context, or HOST:PORT of a nameserver, with the same credentials.",
)
groups_option = click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="GROUP",
    help="Group whose progress is translated; may be repeated.",
)
_NO_OPTIONS = {"cert_file": None, "key_file": None}
_PLAN_COLUMNS: Columns = {
    "TOPICS": "topic_count",
    "NEW-TOPICS": "new_topic_count",
    "QUEUES": "queue_count",
    "MESSAGES": "message_count",
    "NEW-STANDBYS": lambda item: len(item["new_standbys"]),
}
_QUEUE_COLUMNS: Columns = {
    "QUEUE": "source",
    "TARGET": "target",
    "MIRRORED-TO": Minor("mirrored_offset"),
    "END": Minor("end_offset"),
    "LAG": "lag",
    "REMOVED": "removed",
}
_GROUP_COLUMNS: Columns = {
    "GROUP": "name",
    "STATE": "state",
    "LAG": "lag",
    "LAG-AFTER-FAILOVER": "target_lag",
}


@commands.command("run")
@topics_argument
@to_option
@groups_option
@click.option("--once", is_flag=True, help="End when what exists now is copied.")
@click.option(
    "--report",
    "report_s",
    default=10.0,
    type=FloatRange(min=0.1),
    metavar="SECONDS",
    help="Time between two lines of output; 10 by default.",
)
@click.option(
    "--progress",
    "progress_s",
    default=5.0,
    type=FloatRange(min=0.1),
    metavar="SECONDS",
    help="Time between two translations of progress; 5 by default.",
)
@click.option(
    "--include-mirrored",
    is_flag=True,
    help="Also copy messages that other mirrors copied to this cluster, except from the target. "
    "For a new cluster that replaces a lost one.",
)
@click.option(
    "--start",
    type=click.Choice(["first", "end"]),
    help="For a queue of which retention of the target has removed all mirrored messages: first "
    "copies what the source still has, end copies only new messages.",
)
@dry_run_option
@by_option
@cluster_session
def run_(
    session: CommandSession,
    topics: Sequence[str],
    to: str,
    groups: Sequence[str],
    once: bool,
    report_s: float,
    progress_s: float,
    include_mirrored: bool,
    start: Start | None,
    dry_run: bool,
    by: str,
) -> None:
    """Copy topics to another cluster until it is stopped, and translate the progress of groups.

    Each message is copied once, with key, tag, properties, ordering key and time of creation, in
    the order of its queue. What is missing in the target is created: topics, and groups as
    standbys. The command may be killed and started again at any time: it continues where it was.
    Messages that a mirror has brought to this cluster are not copied.
    """
    if dry_run:
        plan = session.run(_plan(session, to, topics, groups))
        _print_plan(session, plan)
        return

    def report(made: MirrorReport) -> None:
        text = (
            f"copied {counted(made.copied_count, 'message')}, {made.rate:.0f} per second; "
            f"lag {made.lag}, removed {made.removed_count}, skipped {made.skipped_count}"
        )
        session.output.line(asdict(made), text)
        for problem in made.problems:
            session.output.note(problem)
        for name in made.groups_in_use:
            session.output.note(
                f"group {name} is in use in the target: its progress is not changed"
            )

    async def run() -> MirrorReport:
        async with _clusters(session, to) as (source, target):
            mirror = Mirror(
                source, target, topics, groups, by=by, include_mirrored=include_mirrored
            )
            return await mirror.run(
                once=once,
                on_report=report,
                report_interval_s=report_s,
                progress_interval_s=progress_s,
                start=start or "",
            )

    made = session.run(run(), endless=not once)
    report(made)
    if made.problems:
        raise Exit(1)


async def _plan(
    session: CommandSession, to: str, topics: Sequence[str], groups: Sequence[str]
) -> MirrorPlan:
    async with _clusters(session, to) as (source, target):
        return await Mirror(source, target, topics, groups).plan()


def _print_plan(session: CommandSession, plan: MirrorPlan) -> None:
    item = {
        **{name: value for name, value in _shallow(plan).items() if name != "problems"},
        "topic_count": len(plan.topics),
        "new_topic_count": len(plan.new_topics),
        "problems": [problem.message for problem in plan.problems],
    }
    session.output.items([item], _PLAN_COLUMNS)
    for name in plan.new_topics:
        session.output.note(f"topic {name} would be created in the target")
    for name in plan.new_standbys:
        session.output.note(f"group {name} would be created in the target, as a standby")
    for name in plan.groups_in_use:
        session.output.note(
            f"group {name} is in use in the target: its progress would not be changed"
        )
    for problem in plan.problems:
        session.output.error(problem)
    if plan.problems:
        raise Exit(1)
    session.output.note("nothing was changed")


@commands.command()
@topics_argument
@to_option
@groups_option
@cluster_session
def status(session: CommandSession, topics: Sequence[str], to: str, groups: Sequence[str]) -> None:
    """Show how far the target is, queue by queue and group by group.

    Both clusters are asked; no mirror needs to run. Exit status 1 if a broker does not answer.
    """
    found = session.run(_status(session, to, topics, groups))
    queues = [_queue_item(one) for one in found.queues]
    listed = [asdict(one) for one in found.groups]
    session.output.detail({"queues": queues, "groups": listed}, queues, _QUEUE_COLUMNS)
    session.output.further_items(listed, _GROUP_COLUMNS)
    session.output.problems(found.problems)


async def _status(
    session: CommandSession, to: str, topics: Sequence[str], groups: Sequence[str]
) -> MirrorStatus:
    async with _clusters(session, to) as (source, target):
        return await Mirror(source, target, topics, groups).status()


@commands.command()
@group_argument
@dry_run_option
@by_option
@cluster_session
def failover(session: CommandSession, group: str, dry_run: bool, by: str) -> None:
    """Make a standby group of this cluster an ordinary one; then start its members.

    From then on no mirror moves its progress. Needs nothing of the other cluster.
    """
    session.run(_failover(session, group, by, dry_run))
    done = "would be" if dry_run else "is"
    session.output.note(f"group {group} {done} an ordinary group: start its members")


async def _failover(session: CommandSession, group: str, by: str, dry_run: bool) -> None:
    async with session.admin() as admin:
        await fail_over(admin, group, by=by, dry_run=dry_run)


@commands.command()
@group_argument
@dry_run_option
@by_option
@cluster_session
def standby(session: CommandSession, group: str, dry_run: bool, by: str) -> None:
    """Make a group of this cluster a standby, so that a mirror can copy its progress to it.

    The group must have no members. It is paused and gets ownership off, until baton mirror
    failover.
    """
    session.run(_standby(session, group, by, dry_run))
    done = "would be" if dry_run else "is"
    session.output.note(f"group {group} {done} a standby")


async def _standby(session: CommandSession, group: str, by: str, dry_run: bool) -> None:
    async with session.admin() as admin:
        await begin_standby(admin, group, by=by, dry_run=dry_run)


@asynccontextmanager
async def _clusters(session: CommandSession, to: str) -> AsyncIterator[tuple[Admin, Admin]]:
    """Return clients of this cluster and of the other one."""
    async with session.admin() as source, _other(session, to) as target:
        yield source, target


def _other(session: CommandSession, to: str) -> Admin:
    """Return a client of the cluster that --to names.

    Raises:
        InvalidArgument: There is no such context.
    """
    if ":" in to:
        return Admin(to, security=session.security)
    options = global_options(click.get_current_context())
    try:
        context = context_file.read(options.config).get(to)
    except ContextError as error:
        raise InvalidArgument(
            f"--to {to}: {error}",
            remedy="Name a context of baton context list, or HOST:PORT of a nameserver.",
            facts={"field": "to"},
        ) from error
    if context.nameserver is None:
        raise InvalidArgument(
            f"context {to} has no nameserver",
            remedy=f"Set it: baton context set {to} --nameserver HOST:PORT.",
            facts={"field": "to"},
        )
    return Admin(context.nameserver, security=tls_options.choose_security(_NO_OPTIONS, "", context))


def _shallow(plan: MirrorPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in MirrorPlan.__dataclass_fields__}


def _queue_item(one: MirroredQueue) -> dict[str, Any]:
    return asdict(one) | {"source": str(one.source), "target": str(one.target)}
