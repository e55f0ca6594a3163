"""Lines of input as messages: the line is the body, or a JSON object that says everything."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batonmq._core.delays import parse_duration_ms
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq.cli.times import parse_unix_ms
from batonmq.errors import InvalidArgument


class DeliveryTime(TypedDict, total=False):
    """Which messages are delivered later: one of these, or none."""

    deliver_at_unix_ms: int
    delay_ms: int
    delay_level: int


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message, and where and when it goes; the parts an input leaves out are those of another."""

    message: Message
    ordering_key: str | None = None
    queue: QueueRef | None = None
    when: DeliveryTime = field(default_factory=DeliveryTime)


ParseLine = Callable[[int, bytes], OutgoingMessage]
"""From the number of a line, from 1, and the line."""


def from_text(template: OutgoingMessage) -> ParseLine:
    """Lines that are bodies."""
    message = template.message
    return lambda _, line: replace(template, message=replace(message, body=line))


def from_json(topic: str, template: OutgoingMessage) -> ParseLine:
    """Lines that are JSON objects; raises InvalidArgument with the number of a line that is none.

    Args:
        topic: Of the queues that a line may name.
        template: What a line does not say.
    """
    return lambda number, line: _parcel(number, line, topic, template)


class _Line(BaseModel):
    """What a line may say.

    The last ones are ignored: where a message was that a command has printed.
    """

    model_config = ConfigDict(extra="forbid")

    body: str | None = None
    body_base64: str | None = None
    tag: str | None = None
    keys: list[str] | None = None
    properties: dict[str, str] | None = None
    ordering_key: str | None = None
    queue: str | None = Field(default=None, pattern=r"^[^/]+/\d+$")
    delay: str | None = None
    delay_level: int | None = Field(default=None, ge=1)
    deliver_at: str | int | None = None

    topic: object = None
    broker: object = None
    queue_id: object = None
    offset: object = None
    message_id: object = None
    born_unix_ms: object = None
    store_unix_ms: object = None
    redelivered: object = None
    attempts: object = None


def _parcel(number: int, text: bytes, topic: str, template: OutgoingMessage) -> OutgoingMessage:
    try:
        line = _Line.model_validate(json.loads(text))
        return _filled(line, topic, template)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _bad(number, f"{place}: {first['msg']}" if place else "no object") from error
    except InvalidArgument as error:
        raise _bad(number, error.message, error.remedy) from error
    except ValueError as error:  # no UTF-8, no JSON
        raise _bad(number, str(error)) from error


def _filled(line: _Line, topic: str, template: OutgoingMessage) -> OutgoingMessage:
    asked = template.message
    queue = template.queue
    if line.queue is not None:
        broker, _, queue_id = line.queue.rpartition("/")
        queue = QueueRef(topic, broker, int(queue_id))
    return OutgoingMessage(
        Message(
            _body(line),
            asked.tag if line.tag is None else line.tag,
            asked.keys if line.keys is None else tuple(line.keys),
            {**asked.properties, **(line.properties or {})},
        ),
        template.ordering_key if line.ordering_key is None else line.ordering_key,
        queue,
        when(line.delay, line.deliver_at, line.delay_level) or template.when,
    )


def _body(line: _Line) -> bytes:
    if (line.body is None) == (line.body_base64 is None):
        raise InvalidArgument("give one of body and body_base64")
    if line.body is not None:
        return line.body.encode()
    assert line.body_base64 is not None
    try:
        return base64.b64decode(line.body_base64, validate=True)
    except binascii.Error as error:
        raise InvalidArgument(f"body_base64: {error}") from error


def when(delay: str | None, deliver_at: str | int | None, delay_level: int | None) -> DeliveryTime:
    """Return when to deliver, from at most one of the three options.

    Raises:
        InvalidArgument: it is not understood, or there are several.
    """
    if sum(option is not None for option in (delay, deliver_at, delay_level)) > 1:
        raise InvalidArgument("give only one of delay, deliver-at and delay-level")
    if delay is not None:
        return {"delay_ms": parse_duration_ms(delay)}
    if deliver_at is not None:
        return {"deliver_at_unix_ms": parse_unix_ms(str(deliver_at))}
    return {} if delay_level is None else {"delay_level": delay_level}


def parse_properties(pairs: list[str]) -> Mapping[str, str]:
    """Properties from NAME=VALUE.

    Raises:
        InvalidArgument: one is something else.
    """
    properties: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"{pair!r} is no property", remedy="Say NAME=VALUE.")
        properties[name] = value
    return properties


def _bad(number: int, problem: str, remedy: str = "") -> InvalidArgument:
    return InvalidArgument(f"line {number}: {problem}", remedy=remedy, facts={"line": number})
