"""`baton group reset-offsets`, `resets` and `clone`: progress is moved, and what was moved is told.

A plan is what is told by default: only `--execute` moves something.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import click

from batonmq._common.clock import Clock
from batonmq._core.delays import parse_duration_ms
from batonmq._core.queues import QueueRef
from batonmq._core.reset_targets import ResetTarget, ShiftBy, ToEarliest, ToLatest, ToOffset, ToTime
from batonmq.admin.operation import Operation
from batonmq.admin.resets import Done, Plan, Resets, Scope
from batonmq.cli.arguments import group_argument, queue_option, topic_option, parse_queue
from batonmq.cli.change_options import (
    by_option,
    dry_run_option,
    op_id_option,
    reason_option,
    operation,
)
from batonmq.cli.completion import groups_that_begin
from batonmq.cli.output import Columns, counted, wall_time
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session
from batonmq.cli.times import parse_unix_ms
from batonmq.errors import InvalidArgument

_WAYS = (
    "--to-offset, --to-datetime, --by-duration, --to-earliest, --to-latest, --to-current, "
    "--shift-by, --from-file and --undo"
)
execute_option = click.option(
    "--execute", is_flag=True, help="Do it; without, only the plan is shown."
)
_STEP_COLUMNS: Columns = {
    "GROUP": "group",
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
    "KIND": "kind",
    "TIME": lambda item: wall_time(item["unix_ms"]),
    "BY": "by",
    "QUEUES": lambda item: len(item["steps"]),
    "REPLAYED": lambda item: sum(step["replayed_count"] for step in item["steps"]),
    "SKIPPED": lambda item: sum(step["skipped_count"] for step in item["steps"]),
    "UNDOES": "undone_op_id",
    "REASON": "reason",
}


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Where to go, as typed; one of them is set."""

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
        """How many are set."""
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
        """The same as a target; not of a file.

        Raises:
            InvalidArgument: a time or duration is none.
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


@click.command("reset-offsets")
@group_argument("group")
@topic_option
@click.option("--all-topics", is_flag=True, help="All topics, as without --topic.")
@queue_option
@click.option("--to-offset", type=click.IntRange(min=0), help="To this offset.")
@click.option(
    "--to-datetime",
    default="",
    help="To the first message stored at or after this time, such as "
    "2026-01-31T08:00:00Z or Unix milliseconds.",
)
@click.option(
    "--by-duration", default="", help="To the first message that is not older, such as 2h or PT2H."
)
@click.option("--to-earliest", is_flag=True, help="To the first message that is kept.")
@click.option("--to-latest", is_flag=True, help="After the last message.")
@click.option(
    "--to-current", is_flag=True, help="Where it is: what is acknowledged beyond comes again."
)
@click.option("--shift-by", type=int, help="So many messages on; negative for back.")
@click.option(
    "--from-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="To the offsets of a file that --export has made.",
)
@click.option(
    "--undo",
    default="",
    metavar="OP_ID",
    help="Bring back what this operation has moved; see baton group resets.",
)
@click.option(
    "--export",
    is_flag=True,
    help="Print the plan as lines of TOPIC,BROKER,QUEUE,OFFSET, and no more.",
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
    """Move a group's progress back or forth, while its members are at work.

    Shows a plan; with --execute it is carried out, recorded, and can be undone. What goes back is
    delivered again, flagged as redelivered where it was handled; what is skipped counts as handled.
    Owners go on from the new place at once.
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
        raise click.UsageError(f"give exactly one of {_WAYS}")
    if all_topics and topic:
        raise click.UsageError("--topic and --all-topics contradict each other")
    if (undo or from_file) and (topic or queue):
        raise click.UsageError("--undo and --from-file name their queues themselves")
    if export and (execute or undo):
        raise click.UsageError("--export prints a plan: leave out --execute and --undo")
    scope = Scope(topic, parse_queue(topic, queue))
    how = _how(by, reason or (f"undo of {undo}" if undo else ""), op_id, execute, dry_run)
    if undo:
        _carry_out(
            session,
            how,
            lambda resets, dry: resets.undo(group, undo, how.operation, dry_run=dry),
        )
        return
    plan = session.run(_plan(session, group, wanted, scope, op_id))
    if export:
        _export(plan)
        return
    _carry_out(
        session,
        how,
        lambda resets, dry: resets.reset(plan, how.operation, dry_run=dry),
        plan.notes,
    )


@click.command("clone")
@argument(
    "from_group", metavar="FROM", shell_complete=groups_that_begin, help="Group to take it from."
)
@argument("to_group", metavar="TO", shell_complete=groups_that_begin, help="Group that gets it.")
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
    """Give one group the progress of another, single acknowledged messages included.

    Messages that wait in the retry topic of FROM are acknowledged for it, so TO does not get them.
    Shows a plan; with --execute it is carried out, recorded, and can be undone.
    """
    how = _how(by, reason, op_id, execute, dry_run)
    _carry_out(
        open_session(context, nameserver, form),
        how,
        lambda resets, dry: resets.clone(
            from_group, to_group, how.operation, topic=topic, dry_run=dry
        ),
    )


@click.command("resets")
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
class _How:
    operation: Operation
    execute: bool


def _how(by: str, reason: str, op_id: str, execute: bool, dry_run: bool) -> _How:
    if execute and dry_run:
        raise click.UsageError("--execute and --dry-run contradict each other")
    if execute and not reason:
        raise click.UsageError("--reason is missing")
    return _How(operation(by, reason or "plan", op_id), execute)


async def _plan(
    session: CommandSession, group: str, wanted: TargetOptions, scope: Scope, op_id: str
) -> Plan:
    async with session.admin() as admin:
        if wanted.from_file is not None:
            with wanted.from_file.open(newline="") as lines:
                offsets = parse_offsets(lines)
            return await Resets(admin).plan_offsets(group, offsets, op_id)
        target = wanted.target(Clock().unix_ms())
        return await Resets(admin).plan(group, target, scope, op_id)


def parse_offsets(lines: Iterable[str]) -> dict[QueueRef, int]:
    """Offsets by queue, from lines of TOPIC,BROKER,QUEUE,OFFSET.

    Raises:
        InvalidArgument: a line is something else; it is named.
    """
    offsets: dict[QueueRef, int] = {}
    for number, fields in enumerate(csv.reader(lines), 1):
        if not fields:
            continue
        if len(fields) != 4 or not (fields[2].isdecimal() and fields[3].isdecimal()):
            raise InvalidArgument(
                f"line {number}: {','.join(fields)!r} is no TOPIC,BROKER,QUEUE,OFFSET",
                facts={"field": "from_file", "line": number},
            )
        queue = QueueRef(fields[0], fields[1], int(fields[2]))
        if queue in offsets:
            raise InvalidArgument(
                f"line {number}: {queue} has an offset already",
                facts={"field": "from_file", "line": number},
            )
        offsets[queue] = int(fields[3])
    return offsets


def _export(plan: Plan) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for queue, offset in plan.offsets:
        writer.writerow((queue.topic, queue.broker, queue.queue_id, offset))
    for note in plan.notes:
        print(note, file=sys.stderr)


def _carry_out(
    session: CommandSession,
    how: _How,
    work: Callable[[Resets, bool], Awaitable[Done]],
    notes: tuple[str, ...] = (),
) -> None:
    """Do `work(resets, dry_run)` and tell what it did, or would do."""

    async def once() -> Done:
        async with session.admin() as admin:
            return await work(Resets(admin), not how.execute)

    _tell(session, how, session.run(once()), notes)


def _tell(session: CommandSession, how: _How, done: Done, notes: tuple[str, ...]) -> None:
    steps = [asdict(step) for step in done.steps]
    item = {
        "op_id": how.operation.op_id if how.execute else None,
        "executed": how.execute,
        "steps": steps,
        "notes": notes,
    }
    session.output.detail(item, steps, _STEP_COLUMNS, _MORE_STEP_COLUMNS)
    session.output.note("")
    for note in notes:
        session.output.note(note)
    if how.execute and done.steps:
        group = done.steps[0].group
        op_id = how.operation.op_id
        session.output.note(
            f"undo it with: baton group reset-offsets {group} --undo {op_id} --execute"
        )
    elif not how.execute:
        session.output.note(planned(done))
    session.output.problems(done.problems)


def planned(expected: Done) -> str:
    """What a plan amounts to, for people."""
    replayed = sum(step.replayed_count for step in expected.steps)
    skipped = sum(step.skipped_count for step in expected.steps)
    return (
        f"a plan for {counted(len(expected.steps), 'queue')}, nothing was changed: "
        f"{counted(replayed, 'message')} would be delivered again, {skipped} skipped; "
        "do it with --execute --reason WHY"
    )
