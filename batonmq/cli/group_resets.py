"""`baton group reset-offsets`, `baton group resets` and `baton group clone`.

They change the progress of a group. By default they print a plan; only `--execute` changes it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from batonmq._common.clock import Clock
from batonmq._core.delays import parse_duration_ms
from batonmq._core.queues import QueueRef
from batonmq._core.reset_targets import ResetTarget, ShiftBy, ToEarliest, ToLatest, ToOffset, ToTime
from batonmq.admin.operation import Operation
from batonmq.admin.resets import ResetPlan, ResetResult, Resets, ResetScope
from batonmq.cli.arguments import (
    OFFSET_MAX,
    group_argument,
    is_queue_id,
    parse_queue,
    queue_option,
    topic_option,
)
from batonmq.cli.change_options import (
    by_option,
    dry_run_option,
    op_id_option,
    operation,
    reason_option,
)
from batonmq.cli.command_classes import argument, command
from batonmq.cli.completion import complete_groups
from batonmq.cli.output import Columns, Minor, Prose, counted, wall_time
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.cli.times import parse_unix_ms
from batonmq.errors import InvalidArgument

_OPTIONS = (
    "--to-offset, --to-datetime, --by-duration, --to-earliest, --to-latest, --to-current, "
    "--shift-by, --from-file and --undo"
)
execute_option = click.option(
    "--execute", is_flag=True, help="Do it; otherwise only the plan is printed."
)
_STEP_COLUMNS: Columns = {
    "GROUP": Minor("group"),
    "TOPIC": "topic",
    "BROKER": "broker",
    "PARTITION": "queue_id",
    "FROM": "from_offset",
    "TO": "to_offset",
    "REPLAYED": "replayed_count",
    "SKIPPED": "skipped_count",
}
_MORE_STEP_COLUMNS: Columns = {"EPOCH": "reset_epoch", "TOKEN": "token"}
_COLUMNS: Columns = {
    "OP-ID": "op_id",
    "KIND": Minor("kind"),
    "TIME": lambda item: wall_time(item["unix_ms"]),
    "BY": Minor("by"),
    "QUEUES": lambda item: len(item["steps"]),
    "REPLAYED": lambda item: sum(step["replayed_count"] for step in item["steps"]),
    "SKIPPED": lambda item: sum(step["skipped_count"] for step in item["steps"]),
    "UNDOES": Minor("undone_op_id"),
    "REASON": Prose("reason"),
}


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The options that name the new progress; exactly one of them is given."""

    to_offset: int | None = None
    to_datetime: str = ""
    by_duration: str = ""
    to_earliest: bool = False
    to_latest: bool = False
    to_current: bool = False
    shift_by: int | None = None
    from_file: Path | None = None

    @property
    def count(self) -> int:
        """Number of options that are given."""
        optional = (self.to_offset, self.shift_by, self.from_file)
        return sum(
            (
                bool(self.to_datetime),
                bool(self.by_duration),
                self.to_earliest,
                self.to_latest,
                self.to_current,
                *(value is not None for value in optional),
            )
        )

    def target(self, now_unix_ms: int) -> ResetTarget:
        """Return the target of the option that is given, which must not be a file.

        Raises:
            InvalidArgument: a time or duration is not valid.
        """
        if self.to_offset is not None:
            return ToOffset(self.to_offset)
        if self.shift_by is not None or self.to_current:
            return ShiftBy(self.shift_by or 0)
        if self.to_datetime:
            return ToTime(parse_unix_ms(self.to_datetime))
        if self.by_duration:
            return ToTime(now_unix_ms - parse_duration_ms(self.by_duration))
        return ToEarliest() if self.to_earliest else ToLatest()


@command("reset-offsets")
@group_argument("group")
@topic_option
@click.option("--all-topics", is_flag=True, help="All topics; the default without --topic.")
@queue_option
@click.option("--to-offset", type=click.IntRange(min=0), help="Move to this offset.")
@click.option(
    "--to-datetime",
    default="",
    help="Move to the first message stored at or after this time, such as "
    "2026-01-31T08:00:00Z or Unix milliseconds.",
)
@click.option(
    "--by-duration",
    default="",
    help="Move to the first message that is younger than this, such as 2h or PT2H.",
)
@click.option("--to-earliest", is_flag=True, help="Move to the first stored message.")
@click.option(
    "--to-latest",
    is_flag=True,
    help="Move to the end of the queue: the next new message is delivered.",
)
@click.option(
    "--to-current",
    is_flag=True,
    help="Keep the committed offset; messages acknowledged beyond it are delivered again.",
)
@click.option("--shift-by", type=int, help="Move by this number of messages; negative moves back.")
@click.option(
    "--from-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Move to the offsets in a file that --export printed.",
)
@click.option(
    "--undo",
    default="",
    metavar="OP_ID",
    help="Undo this operation; see baton group resets.",
)
@click.option(
    "--export",
    is_flag=True,
    help="Only print the plan, as lines TOPIC,BROKER,QUEUE,OFFSET.",
)
@execute_option
@dry_run_option
@reason_option
@by_option
@op_id_option
@cluster_session
def reset_offsets(
    session: CommandSession,
    group: str,
    topic: str,
    all_topics: bool,
    queue: str,
    to_offset: int | None,
    to_datetime: str,
    by_duration: str,
    to_earliest: bool,
    to_latest: bool,
    to_current: bool,
    shift_by: int | None,
    from_file: Path | None,
    undo: str,
    export: bool,
    execute: bool,
    dry_run: bool,
    reason: str,
    by: str,
    op_id: str,
) -> None:
    """Move a group's progress back or forward, while its members are running.

    Prints a plan; --execute carries it out and records it, so that it can be undone. After a move
    back, messages are delivered again, flagged as redelivered if they were handled; after a move
    forward, skipped messages count as handled. Owners continue from the new progress at once.
    """
    wanted = TargetOptions(
        to_offset,
        to_datetime,
        by_duration,
        to_earliest,
        to_latest,
        to_current,
        shift_by,
        from_file,
    )
    if wanted.count + bool(undo) != 1:
        raise click.UsageError(f"exactly one of {_OPTIONS} is required")
    if all_topics and topic:
        raise click.UsageError("--topic and --all-topics exclude each other")
    if (undo or from_file) and (topic or queue):
        raise click.UsageError("--topic and --queue can't be combined with --undo or --from-file")
    if export and (execute or undo):
        raise click.UsageError("--export can't be combined with --execute or --undo")
    scope = ResetScope(topic, parse_queue(topic, queue))
    execution = _execution(
        by, reason or (f"undo of {undo}" if undo else ""), op_id, execute, dry_run
    )
    if undo:
        _carry_out(
            session,
            execution,
            lambda resets, dry: resets.undo(group, undo, execution.operation, dry_run=dry),
        )
        return
    plan = session.run(_plan(session, group, wanted, scope, op_id))
    if export:
        _export(plan)
        return
    _carry_out(
        session,
        execution,
        lambda resets, dry: resets.reset(plan, execution.operation, dry_run=dry),
        plan.notes,
    )


@command("clone")
@argument(
    "from_group",
    metavar="FROM",
    shell_complete=complete_groups,
    help="Group to copy the progress from.",
)
@argument(
    "to_group", metavar="TO", shell_complete=complete_groups, help="Group that gets the progress."
)
@topic_option
@execute_option
@dry_run_option
@reason_option
@by_option
@op_id_option
@cluster_session
def clone(
    session: CommandSession,
    from_group: str,
    to_group: str,
    topic: str,
    execute: bool,
    dry_run: bool,
    reason: str,
    by: str,
    op_id: str,
) -> None:
    """Copy the progress of one group to another, with single acknowledged messages.

    Messages in the retry topic of FROM count as acknowledged, so TO does not get them. Prints a
    plan; --execute carries it out and records it, so that it can be undone.
    """
    execution = _execution(by, reason, op_id, execute, dry_run)
    _carry_out(
        session,
        execution,
        lambda resets, dry: resets.clone(
            from_group, to_group, execution.operation, topic=topic, dry_run=dry
        ),
    )


@command("resets")
@group_argument("group")
@cluster_session
def resets(session: CommandSession, group: str) -> None:
    """List the resets and clones of a group, newest first."""
    session.run(_list(session, group))


async def _list(session: CommandSession, group: str) -> None:
    async with session.admin() as admin:
        history = await Resets(admin).history(group)
    session.output.items([asdict(recorded) for recorded in history], _COLUMNS)


@dataclass(frozen=True, slots=True)
class _Execution:
    operation: Operation
    execute: bool


def _execution(by: str, reason: str, op_id: str, execute: bool, dry_run: bool) -> _Execution:
    if execute and dry_run:
        raise click.UsageError("--execute and --dry-run exclude each other")
    if execute and not reason:
        raise click.UsageError("--reason is required with --execute")
    return _Execution(operation(by, reason or "plan", op_id), execute)


async def _plan(
    session: CommandSession, group: str, wanted: TargetOptions, scope: ResetScope, op_id: str
) -> ResetPlan:
    async with session.admin() as admin:
        if wanted.from_file is not None:
            with wanted.from_file.open(newline="") as lines:
                offsets = parse_offsets(lines)
            return await Resets(admin).plan_offsets(group, offsets, op_id)
        target = wanted.target(Clock().unix_ms())
        return await Resets(admin).plan(group, target, scope, op_id)


def parse_offsets(lines: Iterable[str]) -> dict[QueueRef, int]:
    """Return the offsets by queue, from lines TOPIC,BROKER,QUEUE,OFFSET.

    Raises:
        InvalidArgument: a line has another form; the message has its number.
    """
    offsets: dict[QueueRef, int] = {}
    for number, fields in enumerate(_rows(lines), 1):
        if not fields:
            continue
        if len(fields) != 4 or not (is_queue_id(fields[2]) and _is_offset(fields[3])):
            raise InvalidArgument(
                f"line {number}: must be TOPIC,BROKER,QUEUE,OFFSET, got {','.join(fields)!r}",
                facts={"field": "from_file", "line": number},
            )
        queue = QueueRef(fields[0], fields[1], int(fields[2]))
        if queue in offsets:
            raise InvalidArgument(
                f"line {number}: {queue} is listed twice",
                facts={"field": "from_file", "line": number},
            )
        offsets[queue] = int(fields[3])
    return offsets


def _rows(lines: Iterable[str]) -> Iterator[list[str]]:
    try:
        yield from csv.reader(lines)
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"it is no file of lines TOPIC,BROKER,QUEUE,OFFSET: {error}",
            facts={"field": "from_file"},
        ) from error


def _is_offset(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(OFFSET_MAX)) and int(text) <= OFFSET_MAX


def _export(plan: ResetPlan) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for queue, offset in plan.offsets:
        writer.writerow((queue.topic, queue.broker, queue.queue_id, offset))
    for note in plan.notes:
        print(note, file=sys.stderr)


def _carry_out(
    session: CommandSession,
    execution: _Execution,
    work: Callable[[Resets, bool], Awaitable[ResetResult]],
    notes: tuple[str, ...] = (),
) -> None:
    """Run `work(resets, dry_run)`, and print what it changed or would change."""

    async def once() -> ResetResult:
        async with session.admin() as admin:
            return await work(Resets(admin), not execution.execute)

    _print_result(session, execution, session.run(once()), notes)


def _print_result(
    session: CommandSession, execution: _Execution, done: ResetResult, notes: tuple[str, ...]
) -> None:
    steps = [asdict(step) for step in done.steps]
    item = {
        "op_id": execution.operation.op_id if execution.execute else None,
        "executed": execution.execute,
        "steps": steps,
        "notes": notes,
    }
    session.output.detail(item, steps, _STEP_COLUMNS, _MORE_STEP_COLUMNS)
    session.output.note("")
    for note in notes:
        session.output.note(note)
    if execution.execute and done.steps:
        group = done.steps[0].group
        op_id = execution.operation.op_id
        session.output.note(
            f"undo it with: baton group reset-offsets {group} --undo {op_id} --execute"
        )
    elif not execution.execute:
        session.output.note(plan_summary(done))
    session.output.problems(done.problems)


def plan_summary(expected: ResetResult) -> str:
    """Return a plan's summary as text."""
    replayed = sum(step.replayed_count for step in expected.steps)
    skipped = sum(step.skipped_count for step in expected.steps)
    return (
        f"plan for {counted(len(expected.steps), 'queue')}, nothing was changed: "
        f"{counted(replayed, 'message')} would be delivered again, {skipped} skipped; "
        "do it with --execute --reason WHY"
    )
