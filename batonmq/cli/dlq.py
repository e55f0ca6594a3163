"""`baton dlq …`: show, export and redrive the dead letters of groups."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from batonmq._common.clock import Clock
from batonmq._core.delays import parse_duration_ms
from batonmq.admin.dead_letters import (
    Criteria,
    DeadLetter,
    DeadLetters,
    RedriveOptions,
    RedriveResult,
)
from batonmq.cli.arguments import group_argument
from batonmq.cli.change_options import by_option, operation, reason_option
from batonmq.cli.command_classes import FloatRange, LazyGroup
from batonmq.cli.group_resets import execute_option
from batonmq.cli.message import body_of
from batonmq.cli.output import Columns, Item, Minor, Prose, counted, described, printable, wall_time
from batonmq.cli.output_file import replaced
from batonmq.cli.progress import progress
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.cli.times import parse_unix_ms
from batonmq.errors import BadExpression, InvalidArgument, LimitExceeded

commands = LazyGroup("dlq", help="Show dead letters, and send them again.", no_args_is_help=True)

_PLAN_ROWS = 20
_CAUSES = ("asked", "failed", "timeout")


def _origin(item: Item) -> str | None:
    if item["origin_topic"] is None:
        return None
    keys = ("origin_topic", "origin_broker", "origin_queue_id")
    return "/".join(str(item[key]) for key in keys) + f"@{item['origin_offset']}"


def _attempts(item: Item) -> str:
    former = item["former_attempts"]
    return f"{item['attempts']}" + (f" (+{former})" if former else "")


def _time(unix_ms: int | None) -> str | None:
    return None if unix_ms is None else wall_time(unix_ms)


_GROUPS: Columns = {
    "GROUP": "group",
    "DEAD": "count",
    "REDRIVEN": "redriven_count",
    "OLDEST": lambda item: _time(item["oldest_unix_ms"]),
    "NEWEST": lambda item: _time(item["newest_unix_ms"]),
}
_LETTERS: Columns = {
    "DIED": lambda item: wall_time(item["dead_unix_ms"]),
    "ID": "message_id",
    "ORIGIN": _origin,
    "CAUSE": Minor("cause"),
    "ATTEMPTS": _attempts,
    "CLIENT": Minor("client_id"),
    "REDRIVEN": lambda item: "yes" if item["redriven"] else "no",
    "ERROR": Prose("error"),
}
_MORE: Columns = {
    "TAG": "tag",
    "KEYS": lambda item: ",".join(item["keys"]),
    "ORIGIN-ID": "origin_id",
    "BODY": lambda item: item.get("body", "(not text)"),
}

cause_option = click.option(
    "--cause",
    default="",
    help="Only dead letters with this cause, the end of the last attempt: asked (the handler "
    "requested it), failed (the handler raised) or timeout.",
)
since_option = click.option(
    "--since",
    default="",
    help="Only messages that became dead letters since this time, such as 2026-01-31T08:00:00Z, or "
    "within this time span, such as 2h.",
)
tag_option = click.option("--tag", default="", help="Only dead letters with this tag.")
key_option = click.option("--key", default="", help="Only dead letters with this key.")
sql_option = click.option(
    "--sql",
    default="",
    metavar="CONDITION",
    help="Only messages with properties that meet this condition, such as \"region = 'EU'\".",
)


@commands.command("list")
@cluster_session
def list_groups(session: CommandSession) -> None:
    """List the groups with dead letters, and how many of these were redriven."""
    session.run(_list(session))


@commands.command()
@group_argument("group")
@cause_option
@since_option
@tag_option
@key_option
@sql_option
@click.option(
    "--limit",
    default=100,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum number of dead letters to show, oldest first.",
)
@cluster_session
def show(
    session: CommandSession,
    group: str,
    cause: str,
    since: str,
    tag: str,
    key: str,
    sql: str,
    limit: int,
) -> None:
    """Show the dead letters of a group: origin, cause, number of attempts, client and error.

    Nothing is consumed.
    """
    session.run(_show(session, group, _criteria(cause, since, tag, key, sql), limit))


@commands.command()
@group_argument("group")
@cause_option
@since_option
@tag_option
@key_option
@sql_option
@click.option(
    "--to-topic",
    is_flag=True,
    help="Send them to their original topics, and so to every group of these. By default only "
    "this group gets them, because the other groups handled them.",
)
@click.option("--again", is_flag=True, help="Include dead letters that were redriven before.")
@click.option(
    "--rate", type=FloatRange(min=0.01), help="Maximum number of messages to send per second."
)
@click.option(
    "--replay-id",
    default="",
    metavar="ID",
    help="Id of the redrive: no dead letter is sent twice under the same id, so a redrive can be "
    "repeated. By default a new id.",
)
@execute_option
@reason_option
@by_option
@cluster_session
def redrive(
    session: CommandSession,
    group: str,
    cause: str,
    since: str,
    tag: str,
    key: str,
    sql: str,
    to_topic: bool,
    again: bool,
    rate: float | None,
    replay_id: str,
    execute: bool,
    reason: str,
    by: str,
) -> None:
    """Send the dead letters of a group again.

    Prints a plan; --execute carries it out. Attempts count from 1 again; a message keeps its origin
    and the number of its former attempts. The dead letter itself stays, marked as redriven, and
    later redrives skip it.
    """
    if execute and not reason:
        raise click.UsageError("--reason is required with --execute")
    order = RedriveOptions(
        operation=operation(by, reason, replay_id),
        to_topic=to_topic,
        again=again,
        resumed=bool(replay_id),
        per_s=rate,
    )
    criteria = _criteria(cause, since, tag, key, sql)
    run = _execute if execute else _plan
    session.run(run(session, group, criteria, order))


@commands.command()
@group_argument("group")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write: one JSON object per line.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@cause_option
@since_option
@tag_option
@key_option
@sql_option
@cluster_session
def export(
    session: CommandSession,
    group: str,
    out: Path,
    force: bool,
    cause: str,
    since: str,
    tag: str,
    key: str,
    sql: str,
) -> None:
    """Write the dead letters of a group to a file; a body that is not UTF-8 is in base64.

    If the command fails, no file is written, and an existing one stays as it is.
    """
    if out.is_file() and not force:
        raise click.UsageError(f"--out: {out} exists; overwrite it with --force")
    session.run(_export(session, group, _criteria(cause, since, tag, key, sql), out))


async def _list(session: CommandSession) -> None:
    async with session.admin() as admin:
        summaries = await DeadLetters(admin).groups()
    session.output.items([asdict(one) for one in summaries.groups], _GROUPS)
    session.output.problems(summaries.problems)


async def _show(session: CommandSession, group: str, criteria: Criteria, limit: int) -> None:
    items, more = list[Item](), False
    async with (
        session.admin() as admin,
        aclosing(DeadLetters(admin).read(group, criteria)) as letters,
    ):
        async for letter in letters:
            more = len(items) == limit
            if more:
                break
            items.append(_item(letter))
    session.output.items(items, _LETTERS, _MORE)
    if more:
        session.output.note("there are more; see --limit")


async def _plan(
    session: CommandSession, group: str, criteria: Criteria, order: RedriveOptions
) -> None:
    output, rows, causes, passed = session.output, list[Item](), Counter[str](), 0
    async with session.admin() as admin:
        with progress("dead letters read") as seen:
            async for letter in DeadLetters(admin).read(group, criteria):
                fresh = order.again or not letter.redriven
                causes[letter.reason or "unknown"] += fresh
                passed += not fresh
                if fresh and len(rows) < _PLAN_ROWS:
                    rows.append(_item(letter))
                seen(causes.total() + passed)
    goal = "their original topics" if order.to_topic else f"group {group} only"
    count = causes.total()
    item = {
        "group": group,
        "to": "topic" if order.to_topic else "group",
        "count": count,
        "passed_over_count": passed,
        "causes": dict(causes),
        "letters": rows,
    }
    output.detail(item, rows, _LETTERS, _MORE)
    if count > len(rows):
        output.note(f"… and {count - len(rows)} more")
    summary = ", ".join(f"{number} {cause}" for cause, number in causes.most_common() if number)
    output.note("")
    output.note(
        f"{counted(count, 'dead letter')} would go to {goal}" + f" ({summary})" * bool(summary)
    )
    if passed:
        output.note(f"{passed} skipped, because they were redriven before; see --again")
    output.note("nothing was changed; do it with --execute --reason WHY")


async def _execute(
    session: CommandSession, group: str, criteria: Criteria, order: RedriveOptions
) -> None:
    output, outcomes, replay_id = session.output, Counter[str](), order.operation.op_id
    print(
        f"replay {replay_id}: if it is interrupted, continue it with --replay-id {replay_id}",
        file=sys.stderr,
    )
    async with session.admin() as admin:
        run: AsyncIterator[RedriveResult] = DeadLetters(admin).redrive(group, order, criteria)
        with progress("dead letters sent") as sent:
            async for one in run:
                outcomes[one.outcome] += 1
                sent(outcomes.total())
                output.line(_result(one, replay_id), _result_text(one))
    summary = ", ".join(
        f"{count} {outcome.replace('_', ' ')}" for outcome, count in outcomes.items()
    )
    output.note(f"{summary or 'no dead letters'}; replay {replay_id}")
    if outcomes["refused"]:
        output.problems([f"{counted(outcomes['refused'], 'dead letter')} rejected"])


async def _export(session: CommandSession, group: str, criteria: Criteria, out: Path) -> None:
    count = 0
    async with session.admin() as admin:
        with replaced(out) as file, progress("dead letters written") as written:
            async for letter in DeadLetters(admin).read(group, criteria):
                file.write(json.dumps(_item(letter)) + "\n")
                count += 1
                written(count)
    item = {"group": group, "count": count, "out": str(out)}
    session.output.line(item, f"{counted(count, 'dead letter')} written to {out}")


def _criteria(cause: str, since: str, tag: str, key: str, sql: str) -> Criteria:
    if cause and cause not in _CAUSES:
        raise click.UsageError(f"--cause must be one of {', '.join(_CAUSES)}")
    try:
        since_unix_ms = _since(since)
    except InvalidArgument as error:
        raise click.UsageError(f"--since: {error.message}") from error
    expression = f"sql: {sql}" if sql else "*"
    try:
        return Criteria(
            cause=cause, since_unix_ms=since_unix_ms, tag=tag, key=key, expression=expression
        )
    except (BadExpression, LimitExceeded) as error:
        raise click.UsageError(f"--sql: {error.message}") from error


def _since(text: str) -> int:
    if not text:
        return 0
    if text[-1] in "dhms":
        return Clock().unix_ms() - parse_duration_ms(text)
    return parse_unix_ms(text)


def _item(letter: DeadLetter) -> dict[str, Any]:
    """Return the dead letter for JSON; a body that is not UTF-8 is in base64."""
    origin = letter.origin
    item = {
        "message_id": letter.message_id,
        "group": letter.group,
        "topic": letter.queue.topic,
        "broker": letter.queue.broker,
        "queue_id": letter.queue.queue_id,
        "offset": letter.offset,
        "dead_unix_ms": letter.dead_unix_ms,
        "born_unix_ms": letter.born_unix_ms,
        "cause": letter.reason,
        "error": letter.error,
        "attempts": letter.attempts,
        "former_attempts": letter.former_attempts,
        "client_id": letter.client_id,
        "origin_id": origin.message_id if origin else None,
        "origin_topic": origin.queue.topic if origin else None,
        "origin_broker": origin.queue.broker if origin else None,
        "origin_queue_id": origin.queue.queue_id if origin else None,
        "origin_offset": origin.offset if origin else None,
        "redriven": letter.redriven,
        "tag": letter.tag,
        "keys": list(letter.keys),
        "properties": dict(letter.properties),
    }
    return {**item, **body_of(letter)}


def _result(one: RedriveResult, replay_id: str) -> Item:
    queue = one.queue
    return {
        "replay_id": replay_id,
        "message_id": one.letter.message_id,
        "outcome": one.outcome,
        "copy_id": one.message_id or None,
        "copy_topic": queue.topic if queue else None,
        "copy_broker": queue.broker if queue else None,
        "copy_queue_id": queue.queue_id if queue else None,
        "copy_offset": one.offset,
        "error": described(one.error) if one.error else None,
    }


def _result_text(one: RedriveResult) -> str:
    words = [one.outcome.replace("_", " "), one.letter.message_id]
    if one.queue is not None:
        words.append(f"as {one.message_id} {one.queue}@{one.offset}")
    if one.error is not None:
        words.append(f"{one.error.reason}: {one.error.message}")
    return printable(" ".join(words))
