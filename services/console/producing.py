"""Sends one message that a person has typed: once, also if the browser sends its form again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

from batonmq._common.aio import without_group
from batonmq._core.records import Message
from batonmq._producer.once_sender import OnceMessage, OnceSender
from batonmq.admin.operation import Operation
from batonmq.errors import InvalidArgument
from batonmq_server.console.core.change_plan import ChangePlan, ChangeResult
from batonmq_server.console.core.formats import counted
from batonmq_server.console.viewers import Viewer

_TIMEOUT_MS = 10_000
_FIELDS = ("topic", "body", "form", "tag", "keys", "ordering_key", "properties")


async def plan_produce(viewer: Viewer, fields: Mapping[str, str]) -> ChangePlan:
    """Return the plan to send a message to the topic of a form."""
    detail = await viewer.admin.describe_topic(fields.get("topic", ""))
    return ChangePlan(
        f"Send a message to {detail.topic.name}",
        ("Every group that subscribes to the topic gets it.",),
        "Send the message",
        (("topic", detail.topic.name),),
        warning="A message that is sent can't be taken back.",
    )


async def produce(viewer: Viewer, fields: Mapping[str, str], operation: Operation) -> ChangeResult:
    """Send the message of a form, unless the same form was sent before; return where it is."""
    body = body_of(fields)
    message = Message(
        body,
        fields.get("tag", "").strip(),
        tuple(fields.get("keys", "").split()),
        properties_of(fields.get("properties", "")),
    )
    sending = OnceMessage(
        topic=fields.get("topic", ""),
        message=message,
        once=once_id(fields, operation.op_id),
        ordering_key=fields.get("ordering_key", "").strip() or None,
    )
    async with _sender(viewer) as sender:
        stored = await sender.send(sending, _TIMEOUT_MS)
    place = f"at {stored.queue} offset {stored.offset} as {stored.message_id}"
    if stored.duplicate:
        sentences = (
            f"This form was sent before: its message is stored {place}, and was not sent again.",
            "Load the form again to send another message with the same content.",
        )
        return ChangeResult(sentences)
    return ChangeResult((f"The message with {counted(len(body), 'byte')} is stored {place}.",))


def once_id(fields: Mapping[str, str], op_id: str) -> int:
    """Return the producer id of the message of a form: equal if the form is sent again unchanged.

    Returns:
        63 bits, not 0.
    """
    text = json.dumps([op_id, *(fields.get(name, "") for name in _FIELDS)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1 or 1


@asynccontextmanager
async def _sender(viewer: Viewer) -> AsyncIterator[OnceSender]:
    with without_group():
        async with asyncio.TaskGroup() as tasks:
            started: list[asyncio.Task[None]] = []

            def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                started.append(tasks.create_task(work))
                return started[-1]

            try:
                yield OnceSender(viewer.admin.directory, viewer.environment, spawn)
            finally:
                for task in started:
                    task.cancel()


def body_of(fields: Mapping[str, str]) -> bytes:
    """Return the body of a form: text, or bytes in hex.

    Raises:
        InvalidArgument: The text is not hex.
    """
    text = fields.get("body", "")
    if fields.get("form") != "hex":
        return text.replace("\r\n", "\n").encode()
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidArgument(
            "the body is not hex: use pairs of 0-9 and a-f", facts={"field": "body"}
        ) from error


def properties_of(text: str) -> dict[str, str]:
    """Return the properties in lines NAME=VALUE.

    Raises:
        InvalidArgument: A line has another form.
    """
    properties = {}
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise InvalidArgument(
                f"property {number} must be NAME=VALUE, got {line[:60]!r}",
                facts={"field": "properties"},
            )
        properties[name.strip()] = value.strip()
    return properties
