"""`baton message trace`: the story of a message, in order of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import click

from batonmq._core.message_trace import TraceEvent, TraceEventKind
from batonmq._core.queues import QueueRef
from batonmq.admin.query import Queries, StoredMessage
from batonmq.admin.trace import Copy, GroupTrace, Trace, Tracer
from batonmq.cli.message import body_of, find_queue
from batonmq.cli.output import Columns, Item, counted, wall_time
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session
from batonmq.errors import MessageNotFound

_ENDLESS_MS = 1 << 62
_STATES = {
    "acked": "acknowledged: handled",
    "retry_or_done": "acknowledged: handled, or sent back and waiting for its next attempt, which "
    "shows when its time has come",
    "in_hand": "in hand",
    "maybe_in_hand": "perhaps in hand: offsets was restarted since",
    "waiting": "waits to be delivered",
    "dead": "dead: given up",
    "filtered": "filtered: not delivered",
    "not_subscribed": "the group does not subscribe to the topic",
    "local": "broadcasting: each member keeps its own progress, nothing is known here",
    "unknown": "not known: too many separate acknowledgements to tell all",
}
_STEPS = {
    "delivered": "delivered to {client}, under token {token}",
    "maybe_delivered": "perhaps delivered to {client}, under token {token}",
    "kept": "still in hand of {client}, or delivered again, under token {token}",
    "acked": "acknowledged under token {token}, by {client}",
    "skipped": "a reset or clone counts it as handled, and ended token {token}",
    "acked_or_skipped": "acknowledged under token {token}, or skipped by the reset that ended it",
    "brought_back": "a reset or clone has it delivered again, and ended token {token}",
}
_PASSED_OVER = (
    "passed over with token {token}, of {client}; delivered only if the subscription was another "
    "one then"
)


def _time(unix_ms: int | None) -> str:
    return "now" if unix_ms is None else wall_time(unix_ms)


def _until(item: Item) -> str | None:
    until = item["until_unix_ms"]
    return None if until is None else _time(until or None)


_COLUMNS: Columns = {
    "TIME": lambda item: _time(item["unix_ms"]),
    "UNTIL": _until,
    "GROUP": "group",
    "EVENT": "event",
    "DETAIL": "detail",
}


@click.command("trace")
@argument("message_id", required=False, metavar="[ID]", help="Id of a receipt.")
@click.option("--topic", default="", help="Topic to look in.")
@click.option("--key", default="", help="With --topic: the newest message that carries this key.")
@click.option("--queue", type=click.IntRange(min=0), help="With --topic: a queue of it.")
@click.option("--broker", default="", help="With --queue: its broker, if the topic has several.")
@click.option("--offset", type=click.IntRange(min=0), help="With --queue: an offset.")
@cluster_session
def trace(
    session: CommandSession,
    message_id: str | None,
    topic: str,
    key: str,
    queue: int | None,
    broker: str,
    offset: int | None,
) -> None:
    """Tell what became of a message, by its id, by a key, or by its place.

    Where it is stored; for each group whether it passes the filter, who had it under which token
    and when, whether it is acknowledged, its retries, whether it is dead or was sent again. What is
    only possible is told as such. Nothing is consumed: no group moves.
    """
    if sum((message_id is not None, bool(key), offset is not None)) != 1:
        raise click.UsageError("give exactly one of ID, --key and --offset")
    if message_id is None and not topic:
        raise click.UsageError("--topic is missing")
    if offset is not None and queue is None:
        raise click.UsageError("--queue is missing")
    place = None if queue is None else QueueRef(topic, broker, queue)
    session.run(_trace(session, message_id, (topic, key), place, offset))


async def _trace(
    session: CommandSession,
    message_id: str | None,
    keyed: tuple[str, str],
    place: QueueRef | None,
    offset: int | None,
) -> None:
    async with session.admin() as admin:
        queries = Queries(admin)
        if message_id is not None:
            message = await queries.message(message_id)
        elif place is not None and offset is not None:
            message = await queries.at_offset(await find_queue(admin, place), offset)
        else:
            message = await _newest(session, queries, *keyed)
        found = await Tracer(admin).trace(message)
    events = sorted(_events(found), key=lambda item: item["unix_ms"] or _ENDLESS_MS)
    session.output.detail(_item(found, events), events, _COLUMNS)
    session.output.problems(found.problems)


async def _newest(session: CommandSession, queries: Queries, topic: str, key: str) -> StoredMessage:
    found = await queries.with_key(topic, key)
    if not found.messages:
        raise MessageNotFound(f"no message of topic {topic} has the key {key}")
    older = found.messages[1:]
    if older:
        names = ", ".join(each.message_id for each in older[:5])
        session.output.note(f"the newest of {counted(len(older) + 1, 'message')}; others: {names}")
    return found.messages[0]


def _events(found: Trace) -> Iterator[dict[str, Any]]:
    message, origin = found.message, found.origin
    place = f"{origin.queue}@{origin.offset}"
    if found.kept:
        yield _event(message.store_unix_ms, "stored", _stored(message))
        scheduled = message.scheduled_unix_ms
        if scheduled is not None:
            asked = f"sent for later: to be delivered at {wall_time(scheduled)}"
            yield _event(message.born_unix_ms, "scheduled", asked)
    else:
        yield _event(
            message.born_unix_ms, "born", f"{origin.message_id} {place}, which is no longer kept"
        )
    if not found.groups:
        yield _event(None, "now", "no group subscribes to the topic or has progress on the queue")
    for group in found.groups:
        yield from _group_events(group)


def _group_events(group: GroupTrace) -> Iterator[dict[str, Any]]:
    name = group.group
    if group.expression is not None and group.passes is not None:
        first = group.copies[0].store_unix_ms if group.copies else None
        event = "passes" if group.passes else "filtered"
        yield _event(first, event, f"by {group.expression!r}, the present subscription", name)
    for copy in group.copies:
        filtered = group.passes is False and copy.kind == "original"
        yield from _passed_over(copy, name) if filtered else _copy_events(copy, name)
    last = group.copies[-1] if group.copies else None
    detail = _STATES[group.state]
    if group.state in ("in_hand", "maybe_in_hand") and last is not None:
        detail += f" of {last.owner} under token {last.token}"
    elif last is not None and last.owner is not None:
        detail += f"; {last.queue} is held by {last.owner} under token {last.token}"
    if not group.recorded and group.model != "broadcasting":
        detail += "; queues of the group are not owned: deliveries are not recorded"
    yield _event(None, "now", detail, name)


def _copy_events(copy: Copy, group: str) -> Iterator[dict[str, Any]]:
    place = f"as {copy.message_id} {copy.queue}@{copy.offset}"
    error = f": {copy.error}" if copy.error else ""
    failed = f"attempt {copy.attempts} {copy.reason} at {copy.client_id}{error}; {place}"
    if copy.kind == "retry":
        yield _event(copy.store_unix_ms, "retry", failed, group)
    elif copy.kind == "dead":
        yield _event(copy.store_unix_ms, "dead", failed, group)
    elif copy.kind == "redriven":
        who = f"by {copy.redriven_by}, replay {copy.replay_id}; {place}"
        yield _event(copy.store_unix_ms, "redriven", who, group)
    if copy.trace is None:
        return
    if copy.trace.before and copy.kind != "dead":
        yield _event(
            copy.store_unix_ms, "acked", "before what is recorded of who held the queue", group
        )
    for step in copy.trace.steps if copy.kind != "dead" else ():
        yield _step_event(step, group)


def _passed_over(copy: Copy, group: str) -> Iterator[dict[str, Any]]:
    """What is known by offsets alone is no delivery, if the filter keeps the message back."""
    for step in copy.trace.steps if copy.trace is not None else ():
        if step.what in (
            TraceEventKind.DELIVERED,
            TraceEventKind.MAYBE_DELIVERED,
            TraceEventKind.KEPT,
        ):
            yield _step_event(step, group, "passed_over", _PASSED_OVER)


def _step_event(step: TraceEvent, group: str, event: str = "", told: str = "") -> dict[str, Any]:
    detail = (told or _STEPS[step.what.value]).format(client=step.client_id, token=step.token)
    item = _event(step.begin_unix_ms, event or step.what.value, detail, group)
    exact = step.begin_unix_ms == step.end_unix_ms
    item["until_unix_ms"] = None if exact else step.end_unix_ms
    return item


def _event(unix_ms: int | None, event: str, detail: str, group: str = "") -> dict[str, Any]:
    """One line of the story.

    `until_unix_ms` is None if the time is exact, 0 if it may have been any since.
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
    producer = "by the schedule" if message.producer_id < 0 else "no producer id"
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


def _item(found: Trace, events: list[dict[str, Any]]) -> Item:
    message = found.message
    return {
        "message_id": found.origin.message_id,
        "topic": found.origin.queue.topic,
        "broker": found.origin.queue.broker,
        "queue_id": found.origin.queue.queue_id,
        "offset": found.origin.offset,
        "kept": found.kept,
        "born_unix_ms": message.born_unix_ms,
        "store_unix_ms": message.store_unix_ms if found.kept else None,
        "scheduled_unix_ms": message.scheduled_unix_ms,
        "producer_id": message.producer_id,
        "producer_epoch": message.producer_epoch,
        "sequence": message.sequence,
        "record_bytes": message.record_bytes,
        "batch_count": message.batch_count,
        "tag": message.tag,
        "keys": list(message.keys),
        "properties": dict(message.properties),
        "groups": [asdict(group) for group in found.groups],
        "events": events,
        "problems": list(found.problems),
        **body_of(message),
    }
