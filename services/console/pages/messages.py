"""Pages of messages: search in a topic, and one message with its body and its trace."""

from __future__ import annotations

from typing import Any

from batonmq._core.queues import QueueRef
from batonmq.admin.access import Role
from batonmq.admin.message_queries import MessageQueries
from batonmq.admin.message_tracer import MessageTracer
from batonmq.errors import InvalidArgument
from batonmq_server.console import message_search
from batonmq_server.console.core.change_plan import unix_ms_of
from batonmq_server.console.core.message_view import body_view, message_row
from batonmq_server.console.core.trace_view import trace_lines
from batonmq_server.console.visit import PageSpec, Visit


async def _search(visit: Visit) -> dict[str, Any]:
    admin, topic = visit.viewer.admin, visit.names["topic"]
    detail = await admin.describe_topic(topic)
    expression, key = _expression(visit), visit.text("key")
    queue, from_time = visit.text("queue"), visit.text("from")
    chosen = _queue_of(topic, queue) if queue else None
    from_unix_ms = unix_ms_of(from_time) if from_time else 0
    if key:
        found = await message_search.by_key(admin, topic, key)
    elif chosen is not None:
        offset = visit.number("offset", 0)
        if from_unix_ms:
            offset = await MessageQueries(admin).offset_at(chosen, from_unix_ms)
        elif not visit.text("offset") and not visit.text("filter"):
            extents, _ = await admin.extents([chosen])
            offset = max(0, extents.get(chosen, (0, 0))[1] - message_search.SHOWN_MAX)
        found = await message_search.in_queue(admin, chosen, offset, expression)
    else:
        found = await message_search.newest(admin, detail.queues, expression, from_unix_ms)
    may_produce = visit.console.settings.changes and await visit.viewer.may(
        Role.PRODUCE, f"topic:{topic}"
    )
    return {
        "topic": detail.topic,
        "queues": [f"{one.queue.broker}/{one.queue.queue_id}" for one in detail.queues],
        "found": found,
        "rows": [message_row(message) for message in found.messages],
        "chosen": queue,
        "may_produce": may_produce,
        "problems": (*detail.problems, *found.notes),
    }


async def _message(visit: Visit) -> dict[str, Any]:
    admin = visit.viewer.admin
    message = await MessageQueries(admin).message(visit.names["id"])
    report = await MessageTracer(admin).trace(message)
    return {
        "message": message,
        "body": body_view(message.body),
        "report": report,
        "lines": trace_lines(report),
    }


async def _find(visit: Visit) -> dict[str, Any]:
    """Show the message with the id of the search form."""
    return await _message(
        Visit(visit.console, visit.viewer, visit.path, {"id": visit.text("id")}, visit.query)
    )


def _expression(visit: Visit) -> str:
    """Return the filter of the form: tags, or a condition after `sql:`."""
    return visit.text("filter") or "*"


def _queue_of(topic: str, text: str) -> QueueRef:
    broker, slash, queue_id = text.rpartition("/")
    if not slash or not (queue_id.isascii() and queue_id.isdecimal() and len(queue_id) <= 9):
        raise InvalidArgument(
            f"{text[:60]!r} is not a queue", remedy="Use BROKER/ID.", facts={"field": "queue"}
        )
    return QueueRef(topic, broker, int(queue_id))


PAGES = (
    PageSpec("/topics/{topic}/messages", "messages.html", "topics", _search, live=False),
    PageSpec("/messages", "message.html", "topics", _find, live=False),
    PageSpec("/messages/{id}", "message.html", "topics", _message, live=False),
)
