"""`baton message trace`: what happened to a message, in order of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from batonmq._core.message_trace import TraceEvent, TraceEventKind
from batonmq._core.queues import QueueRef
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.admin.message_tracer import (
    GroupTrace,
    MessageCopy,
    MessageTracer,
    TracedInput,
    TraceReport,
)
from batonmq.admin.transactions import TransactionDetail, Transactions
from batonmq.cli.arguments import OFFSET, parse_message_queue
from batonmq.cli.command_classes import argument, command
from batonmq.cli.half_message import is_transaction_id, show_half_message
from batonmq.cli.message import body_of, find_queue
from batonmq.cli.output import Columns, Item, Minor, Prose, counted, wall_time
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import MessageNotFound

_TIME_MAX_MS = 1 << 62
_STATES = {
    "acked": "acknowledged: handled",
    "retry_or_done": "acknowledged: handled, or sent back for a retry, which is shown when it is "
    "due",
    "in_flight": "in flight",
    "maybe_in_flight": "possibly in flight: offsets was restarted since the delivery",
    "waiting": "waiting for delivery",
    "dead": "dead: no more attempts",
    "filtered": "filtered: not delivered",
    "not_subscribed": "the group does not subscribe to the topic",
    "local": "broadcasting: each member keeps its own progress, so the state is unknown here",
    "unknown": "unknown: too many separate acknowledgements to list all",
}
_STEPS = {
    "delivered": "delivered to {client}, under token {token}",
    "maybe_delivered": "possibly delivered to {client}, under token {token}",
    "kept": "still in flight at {client}, or delivered again, under token {token}",
    "acked": "acknowledged under token {token}, by {client}",
    "skipped": "counted as handled by a reset or clone, which replaced token {token}",
    "acked_or_skipped": "acknowledged under token {token}, or skipped by a reset that replaced it",
    "brought_back": "to be delivered again after a reset or clone, which replaced token {token}",
}
_PASSED_OVER = (
    "skipped by the filter under token {token} of {client}, unless the group had another "
    "subscription then"
)


def _time(unix_ms: int | None) -> str:
    return "now" if unix_ms is None else wall_time(unix_ms)


def _until(item: Item) -> str | None:
    until = item["until_unix_ms"]
    return None if until is None else _time(until or None)


_COLUMNS: Columns = {
    "TIME": lambda item: _time(item["unix_ms"]),
    "UNTIL": Minor(_until),
    "GROUP": "group",
    "EVENT": "event",
    "DETAIL": Prose("detail"),
}


@command("trace")
@argument(
    "message_id",
    required=False,
    metavar="[ID]",
    help="Message id, as in the receipt, or id of an open transaction.",
)
@click.option("--topic", default="", help="Topic of the message.")
@click.option("--key", default="", help="Show the newest message with this key; needs --topic.")
@click.option(
    "--queue",
    default="",
    metavar="[BROKER/]ID",
    help="Queue of the message, such as broker-0/3; needs --topic.",
)
@click.option(
    "--broker", default="", help="Broker of the queue; required if several brokers have the queue."
)
@click.option("--offset", type=OFFSET, help="Offset of the message; needs --queue.")
@cluster_session
def trace(
    session: CommandSession,
    message_id: str | None,
    topic: str,
    key: str,
    queue: str,
    broker: str,
    offset: int | None,
) -> None:
    """Show what happened to a message, found by id, key, offset or transaction.

    Shows where it is stored, and for each group whether the filter accepts it, its deliveries with
    owner and token, acknowledgement, retries, dead letter and redrives. An event that is only
    possible is marked as possible. An output of a transformer is shown with its input. A half
    message, which waits for the end of its transaction, is shown with its age and the reason why it
    waits. Nothing is consumed: the progress of groups does not change.
    """
    if sum((message_id is not None, bool(key), offset is not None)) != 1:
        raise click.UsageError("exactly one of ID, --key and --offset is required")
    if message_id is None and not topic:
        raise click.UsageError("--topic is required")
    if offset is not None and not queue:
        raise click.UsageError("--queue is required")
    place = parse_message_queue(topic, queue, broker) if queue else None
    session.run(_trace(session, message_id, (topic, key), place, offset))


async def _trace(
    session: CommandSession,
    message_id: str | None,
    keyed: tuple[str, str],
    place: QueueRef | None,
    offset: int | None,
) -> None:
    async with session.admin() as admin:
        queries = MessageQueries(admin)
        problems: Sequence[str] = ()
        if message_id is not None:
            if await is_transaction_id(admin, message_id):
                show_half_message(session, await Transactions(admin).show(message_id))
                return
            message = await queries.message(message_id)
        elif place is not None and offset is not None:
            message = await queries.at_offset(await find_queue(admin, place), offset)
        else:
            found, _, problems = await Transactions(admin).find(topic=keyed[0], key=keyed[1])
            try:
                message = await _newest(session, queries, *keyed)
            except MessageNotFound:
                if not found:
                    raise
                _note_open(session, found[:-1])
                show_half_message(session, found[-1])
                session.output.problems(problems)
                return
            _note_open(session, found)
        report = await MessageTracer(admin).trace(message)
    events = sorted(_events(report), key=lambda item: item["unix_ms"] or _TIME_MAX_MS)
    session.output.detail(_item(report, events), events, _COLUMNS)
    session.output.problems([*report.problems, *problems])


def _note_open(session: CommandSession, found: Sequence[TransactionDetail]) -> None:
    for one in found[:5]:
        text = f"transaction {one.transaction_id} with this key is open: {one.why_open}"
        session.output.note(text)


async def _newest(
    session: CommandSession, queries: MessageQueries, topic: str, key: str
) -> StoredMessage:
    matches = await queries.with_key(topic, key)
    if not matches.messages:
        raise MessageNotFound(f"topic {topic} has no message with key {key}")
    older = matches.messages[1:]
    if older:
        names = ", ".join(each.message_id for each in older[:5])
        session.output.note(
            f"the newest of {counted(len(older) + 1, 'message')} with this key; others: {names}"
        )
    return matches.messages[0]


def _events(report: TraceReport) -> Iterator[dict[str, Any]]:
    message, origin = report.message, report.origin
    place = f"{origin.queue}@{origin.offset}"
    if report.made_from is not None:
        made_from = report.made_from
        yield _event(message.store_unix_ms, "made", _made(made_from), made_from.group)
    if report.kept:
        yield _event(message.store_unix_ms, "stored", _stored(message))
        scheduled = message.scheduled_unix_ms
        if scheduled is not None:
            text = f"scheduled for delivery at {wall_time(scheduled)}"
            yield _event(message.born_unix_ms, "scheduled", text)
        if message.transaction_id is not None:
            text = f"as a half message of transaction {message.transaction_id}"
            yield _event(message.born_unix_ms, "begun", text)
            yield _event(message.store_unix_ms, *_transaction_end(message))
    else:
        now = "can't be read" if report.kept is None else "is deleted already"
        yield _event(message.born_unix_ms, "born", f"{origin.message_id} {place}, which {now}")
    if not report.groups:
        yield _event(None, "now", "no group subscribes to the topic or has progress on the queue")
    for group in report.groups:
        yield from _group_events(group)


def _made(made_from: TracedInput) -> str:
    """Return from which input a transformer has made the message."""
    queue, number = made_from.queue, made_from.number
    place = f"{queue}" if queue.topic else f"a deleted topic/{queue.broker}/{queue.queue_id}"
    what = "as the dead letter" if number is None else f"as output {number}"
    message_id = made_from.message_id or "which is deleted already"
    return f"{what} of {place}@{made_from.offset}, {message_id}"


def _transaction_end(message: StoredMessage) -> tuple[str, str]:
    """Return event and detail of the end of the message's transaction."""
    reason = message.properties.get("baton.transaction_reason")
    if reason is None:
        return "committed", "the message got its offset then, and became visible"
    topic = message.properties.get("baton.transaction_topic")
    group = message.properties.get("baton.transaction_group")
    return "discarded", f"{reason}; it was for topic {topic}, from producer group {group}"


def _group_events(group: GroupTrace) -> Iterator[dict[str, Any]]:
    name = group.group
    if group.expression is not None and group.passes is not None:
        first = group.copies[0].store_unix_ms if group.copies else None
        event = "passes" if group.passes else "filtered"
        yield _event(first, event, f"by {group.expression!r}, the current subscription", name)
    for copy in group.copies:
        filtered = group.passes is False and copy.kind == "original"
        yield from _skipped_by_filter(copy, name) if filtered else _copy_events(copy, name)
    last = group.copies[-1] if group.copies else None
    detail = _STATES[group.state]
    if group.state in ("in_flight", "maybe_in_flight") and last is not None:
        detail += f" at {last.owner} under token {last.token}"
    elif last is not None and last.owner is not None:
        detail += f"; {last.queue} is owned by {last.owner} under token {last.token}"
    if not group.recorded and group.model != "broadcasting":
        detail += "; the group has no ownership, so its deliveries are not recorded"
    yield _event(None, "now", detail, name)


def _copy_events(copy: MessageCopy, group: str) -> Iterator[dict[str, Any]]:
    place = f"as {copy.message_id} {copy.queue}@{copy.offset}"
    error = f": {copy.error}" if copy.error else ""
    failed = f"attempt {copy.attempts} {copy.reason} at {copy.client_id}{error}; {place}"
    if copy.kind == "retry":
        yield _event(copy.store_unix_ms, "retry", failed, group)
    elif copy.kind == "dead":
        yield _event(copy.store_unix_ms, "dead", failed, group)
    elif copy.kind == "redriven":
        text = f"by {copy.redriven_by}, replay {copy.replay_id}; {place}"
        yield _event(copy.store_unix_ms, "redriven", text, group)
    if copy.trace is None:
        return
    if copy.trace.handled_before and copy.kind != "dead":
        yield _event(copy.store_unix_ms, "acked", "before the recorded owners of the queue", group)
    for step in copy.trace.events if copy.kind != "dead" else ():
        yield _step_event(step, group)


def _skipped_by_filter(copy: MessageCopy, group: str) -> Iterator[dict[str, Any]]:
    """Yield the deliveries that offsets assumes, although the filter skipped the message."""
    for step in copy.trace.events if copy.trace is not None else ():
        if step.what in (
            TraceEventKind.DELIVERED,
            TraceEventKind.MAYBE_DELIVERED,
            TraceEventKind.KEPT,
        ):
            yield _step_event(step, group, "passed_over", _PASSED_OVER)


def _step_event(
    step: TraceEvent, group: str, event: str = "", template: str = ""
) -> dict[str, Any]:
    detail = (template or _STEPS[step.what.value]).format(client=step.client_id, token=step.token)
    item = _event(step.begin_unix_ms, event or step.what.value, detail, group)
    exact = step.begin_unix_ms == step.end_unix_ms
    item["until_unix_ms"] = None if exact else step.end_unix_ms
    return item


def _event(unix_ms: int | None, event: str, detail: str, group: str = "") -> dict[str, Any]:
    """Return one event.

    `until_unix_ms` is None if the time is exact, and 0 if the event may be of any time since then.
    """
    return {
        "unix_ms": unix_ms,
        "until_unix_ms": None,
        "group": group or None,
        "event": event,
        "detail": detail,
    }


def _stored(message: StoredMessage) -> str:
    batch = f", one of {message.batch_count} in its batch" if message.batch_count > 1 else ""
    producer = "by the schedule" if message.scheduled_unix_ms is not None else "no producer id"
    if message.transaction_id is not None:
        producer = "by its transaction"
    if message.producer_id > 0:
        producer = (
            f"producer {message.producer_id:x} epoch {message.producer_epoch} "
            f"sequence {message.sequence}"
        )
    marks = [
        f"tag {message.tag}" if message.tag else "",
        f"keys {','.join(message.keys)}" if message.keys else "",
    ]
    return ", ".join(
        each
        for each in (
            f"{message.message_id} {message.queue}@{message.offset}",
            f"{counted(message.record_bytes, 'byte')}{batch}",
            producer,
            *marks,
            f"on the disk of {message.queue.broker}",
        )
        if each
    )


def _item(report: TraceReport, events: list[dict[str, Any]]) -> Item:
    message = report.message
    return {
        "message_id": report.origin.message_id,
        "topic": report.origin.queue.topic,
        "broker": report.origin.queue.broker,
        "queue_id": report.origin.queue.queue_id,
        "offset": report.origin.offset,
        "kept": report.kept,
        "born_unix_ms": message.born_unix_ms,
        "store_unix_ms": message.store_unix_ms if report.kept else None,
        "scheduled_unix_ms": message.scheduled_unix_ms,
        "transaction_id": message.transaction_id,
        "producer_id": message.producer_id,
        "producer_epoch": message.producer_epoch,
        "sequence": message.sequence,
        "record_bytes": message.record_bytes,
        "batch_count": message.batch_count,
        "tag": message.tag,
        "keys": list(message.keys),
        "properties": dict(message.properties),
        "made_from": None if report.made_from is None else asdict(report.made_from),
        "groups": [asdict(group) for group in report.groups],
        "events": events,
        "problems": list(report.problems),
        **body_of(message),
    }
