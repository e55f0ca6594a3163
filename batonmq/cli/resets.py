"""`baton group reset`, `resets` and `clone`: progress is moved, and what was moved is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from batonmq.admin import Admin
from batonmq.cli.changes import (
    ByOption,
    DryRunOption,
    OpIdOption,
    ReasonOption,
    YesOption,
    check_can_ask,
    confirm,
    operation,
)
from batonmq.cli.output import Columns, counted, wall_time
from batonmq.cli.places import QueueOption, TopicOption, parse_queue
from batonmq.cli.session import FormatOption, NameserverOption, Session, open_session
from batonmq.cli.times import parse_duration_ms, parse_unix_ms
from batonmq.common.clock import Clock
from batonmq.core.targets import ShiftBy, Target, ToEarliest, ToLatest, ToOffset, ToTime
from batonmq.operation import Operation
from batonmq.resets import Done, Plan, Resets, Scope

_WAYS = "--to-offset, --to-time, --by-duration, --to-earliest, --to-latest, --shift and --undo"
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
class Wanted:
    """Where to go, as typed; one of them is set."""

    to_offset: int | None = None
    to_time: str = ""
    by_duration: str = ""
    to_earliest: bool = False
    to_latest: bool = False
    shift: int | None = None

    @property
    def count(self) -> int:
        """How many are set."""
        optional = (self.to_offset is not None, self.shift is not None)
        return sum((bool(self.to_time), bool(self.by_duration), *optional, *self._ends))

    @property
    def _ends(self) -> tuple[bool, bool]:
        return self.to_earliest, self.to_latest

    def target(self, now_unix_ms: int) -> Target:
        """The same as a target.

        Raises:
            InvalidArgument: a time or duration is none.
        """
        if self.to_offset is not None:
            return ToOffset(self.to_offset)
        if self.shift is not None:
            return ShiftBy(self.shift)
        if self.to_time:
            return ToTime(parse_unix_ms(self.to_time))
        if self.by_duration:
            return ToTime(now_unix_ms - parse_duration_ms(self.by_duration))
        return ToEarliest() if self.to_earliest else ToLatest()


def reset(
    context: typer.Context,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")],
    *,
    topic: TopicOption = "",
    queue: QueueOption = "",
    to_offset: Annotated[
        int | None, typer.Option(min=0, help="To this offset.", show_default=False)
    ] = None,
    to_time: Annotated[
        str,
        typer.Option(
            help="To the first message stored at or after this time, such as "
            "2026-01-31T08:00:00Z or Unix milliseconds.",
            show_default=False,
        ),
    ] = "",
    by_duration: Annotated[
        str,
        typer.Option(
            help="To the first message that is not older, such as 2h.", show_default=False
        ),
    ] = "",
    to_earliest: Annotated[
        bool, typer.Option("--to-earliest", help="To the first message that is kept.")
    ] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="After the last message.")] = False,
    shift: Annotated[
        int | None,
        typer.Option(help="So many messages on; negative for back.", show_default=False),
    ] = None,
    undo: Annotated[
        str,
        typer.Option(
            metavar="OP_ID",
            help="Bring back what this operation has moved; see baton group resets.",
            show_default=False,
        ),
    ] = "",
    reason: ReasonOption = "",
    by: ByOption = "",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    op_id: OpIdOption = "",
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Move a group's progress back or forth, while its members are at work.

    What goes back is delivered again, flagged as redelivered where it was handled; what is
    skipped counts as handled. Owners go on from the new place at once.
    """
    wanted = Wanted(to_offset, to_time, by_duration, to_earliest, to_latest, shift)
    if wanted.count + bool(undo) != 1:
        raise typer.BadParameter(f"give exactly one of {_WAYS}")
    if undo and (topic or queue):
        raise typer.BadParameter("--undo brings back all queues: leave out --topic and --queue")
    scope = Scope(topic, parse_queue(topic, queue))
    how = _how(by, reason or (f"undo of {undo}" if undo else ""), op_id, dry_run, yes)
    session = open_session(context, nameserver, form)
    if undo:
        _carry_out(
            session,
            how,
            lambda resets, dry: resets.undo(group, undo, how.operation, dry_run=dry),
        )
        return
    plan = session.run(_plan(session, group, wanted, scope, op_id))
    _carry_out(
        session,
        how,
        lambda resets, dry: resets.reset(plan, how.operation, dry_run=dry),
        plan.notes,
    )


def clone(
    context: typer.Context,
    from_group: Annotated[str, typer.Argument(metavar="FROM", help="Group to take it from.")],
    to_group: Annotated[str, typer.Argument(metavar="TO", help="Group that gets it.")],
    *,
    topic: TopicOption = "",
    reason: ReasonOption = "",
    by: ByOption = "",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    op_id: OpIdOption = "",
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Give one group the progress of another, single acknowledged messages included."""
    how = _how(by, reason, op_id, dry_run, yes)
    _carry_out(
        open_session(context, nameserver, form),
        how,
        lambda resets, dry: resets.clone(
            from_group, to_group, how.operation, topic=topic, dry_run=dry
        ),
    )


def resets(
    context: typer.Context,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")],
    *,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """List the resets and clones of a group, newest first."""
    session = open_session(context, nameserver, form)
    session.run(_list(session, group))


async def _list(session: Session, group: str) -> None:
    async with Admin(session.nameserver) as admin:
        history = await Resets(admin).history(group)
    session.output.items([asdict(recorded) for recorded in history], _COLUMNS)


@dataclass(frozen=True, slots=True)
class _How:
    operation: Operation
    dry_run: bool
    yes: bool


def _how(by: str, reason: str, op_id: str, dry_run: bool, yes: bool) -> _How:
    if not reason and not dry_run:
        raise typer.BadParameter("--reason is missing")
    check_can_ask(yes=yes or dry_run)
    return _How(operation(by, reason or "dry run", op_id), dry_run, yes)


async def _plan(session: Session, group: str, wanted: Wanted, scope: Scope, op_id: str) -> Plan:
    target = wanted.target(Clock().unix_ms())
    async with Admin(session.nameserver) as admin:
        return await Resets(admin).plan(group, target, scope, op_id)


def _carry_out(
    session: Session,
    how: _How,
    work: Callable[[Resets, bool], Awaitable[Done]],
    notes: tuple[str, ...] = (),
) -> None:
    """Do `work(resets, dry_run)` and tell what it did; before that, unless told not to, ask."""

    async def once(dry_run: bool) -> Done:
        async with Admin(session.nameserver) as admin:
            return await work(Resets(admin), dry_run)

    if not (how.dry_run or how.yes):
        expected = session.run(once(dry_run=True))
        session.output.problems(expected.problems)
        confirm(session, question(expected))
    done = session.run(once(dry_run=how.dry_run))
    _tell(session, how, done, notes)


def question(expected: Done) -> str:
    """What a person is asked before `expected` is done."""
    replayed = sum(step.replayed_count for step in expected.steps)
    skipped = sum(step.skipped_count for step in expected.steps)
    groups = ", ".join(sorted({step.group for step in expected.steps}))
    return (
        f"Move group {groups} on {counted(len(expected.steps), 'queue')}? "
        f"To be delivered again: {replayed}; to be skipped: {skipped}."
    )


def _tell(session: Session, how: _How, done: Done, notes: tuple[str, ...]) -> None:
    steps = [asdict(step) for step in done.steps]
    item = {
        "op_id": None if how.dry_run else how.operation.op_id,
        "dry_run": how.dry_run,
        "steps": steps,
        "notes": notes,
    }
    session.output.detail(item, steps, _STEP_COLUMNS)
    session.output.note("")
    for note in notes:
        session.output.note(note)
    if how.dry_run:
        session.output.note("dry run: nothing was changed")
    elif done.steps:
        group = done.steps[0].group
        session.output.note(f"undo it with: baton group reset {group} --undo {how.operation.op_id}")
    session.output.problems(done.problems)
