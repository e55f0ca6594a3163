"""Sends one message that a person has typed."""

from __future__ import annotations

from collections.abc import Mapping

from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import Receipt
from batonmq.admin.operation import Operation
from batonmq.errors import InvalidArgument
from batonmq_server.console.core.change_plan import ChangePlan, ChangeResult
from batonmq_server.console.core.formats import counted
from batonmq_server.console.viewers import Viewer

_TIMEOUT_MS = 10_000


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
    """Send the message of a form, and return where it is stored."""
    topic = fields.get("topic", "")
    body = body_of(fields)
    settings = ProducerSettings(security=viewer.security, delivery_timeout_ms=_TIMEOUT_MS)
    async with Producer(viewer.nameserver, settings, environment=viewer.environment) as producer:
        receipt: Receipt = await producer.send(
            topic,
            body,
            tag=fields.get("tag", "").strip(),
            keys=fields.get("keys", "").split(),
            properties=properties_of(fields.get("properties", "")),
            ordering_key=fields.get("ordering_key", "").strip() or None,
        )
    return ChangeResult(
        (
            f"The message with {counted(len(body), 'byte')} is stored at {receipt.queue} offset "
            f"{receipt.offset} as {receipt.message_id}.",
        )
    )


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
