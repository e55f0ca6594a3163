"""Messages from lines of input: a line is the body, or a JSON object with all fields."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from batonmq._core.delays import parse_duration_ms
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq.cli.arguments import is_queue_id
from batonmq.cli.times import parse_unix_ms
from batonmq.errors import InvalidArgument


class DeliveryTime(TypedDict, total=False):
    """When a message is delivered: one of these keys, or none for at once."""

    deliver_at_unix_ms: int
    delay_ms: int
    delay_level: int


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message, its queue or ordering key, and its delivery time."""

    message: Message
    ordering_key: str | None = None
    queue: QueueRef | None = None
    when: DeliveryTime = field(default_factory=DeliveryTime)


ParseLine = Callable[[int, bytes], OutgoingMessage]
"""Takes the number of a line, counted from 1, and the line."""


def from_text(template: OutgoingMessage) -> ParseLine:
    """Return a parser of lines that are bodies; all else comes from the template."""
    message = template.message
    return lambda _, line: replace(template, message=replace(message, body=line))


def from_json(topic: str, template: OutgoingMessage) -> ParseLine:
    """Return a parser of lines that are JSON objects.

    The parser raises InvalidArgument with the number of a line that is not valid.

    Args:
        topic: Topic of the queues that a line may name.
        template: Source of the fields that a line leaves out.
    """
    return lambda number, line: _parse(number, line, topic, template)


_IGNORED = frozenset(
    {
        "topic",
        "broker",
        "queue_id",
        "offset",
        "message_id",
        "born_unix_ms",
        "store_unix_ms",
        "redelivered",
        "attempts",
    }
)
"""Keys that `baton consume` prints: the output of a command can be sent again as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The keys of a line; None for a key that is not there."""

    body: str | None = None
    body_base64: str | None = None
    tag: str | None = None
    keys: list[str] | None = None
    properties: dict[str, str] | None = None
    ordering_key: str | None = None
    queue: str | None = None
    delay: str | None = None
    delay_level: int | None = None
    deliver_at: str | int | None = None


def _is_string(value: object) -> bool:
    return isinstance(value, str)


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "keys": (
        lambda value: isinstance(value, list) and all(map(_is_string, value)),
        "a list of strings",
    ),
    "properties": (lambda value: isinstance(value, dict), "an object of strings"),
    "queue": (
        lambda value: (
            _is_string(value)
            and (found := re.fullmatch(r"[^/]+/(\d+)", value)) is not None
            and is_queue_id(found[1])
        ),
        "BROKER/ID, such as broker-0/3",
    ),
    "delay_level": (lambda value: type(value) is int and value >= 1, "a positive integer"),
    "deliver_at": (
        lambda value: _is_string(value) or type(value) is int,
        "a string or an integer",
    ),
}
"""For each key, a check of its value and the expected form. Values of other keys are strings."""


def _check(key: str, value: object) -> None:
    """Raise InvalidArgument if the value is not allowed for the key."""
    is_allowed, expected = _CHECKS.get(key, (_is_string, "a string"))
    if not is_allowed(value):
        raise InvalidArgument(f"{key}: must be {expected}, got {_short(value)}")
    if isinstance(value, dict):
        for name, text in value.items():
            _check(f"{key}.{name}", text)


def _read_line(text: bytes) -> _Line:
    """Return the keys of a line.

    Raises:
        InvalidArgument: a key is unknown, or a value is not allowed.
        ValueError: the line is not UTF-8 or not JSON.
    """
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise InvalidArgument(f"the line must be a JSON object, got {_short(parsed)}")
    values = {key: value for key, value in parsed.items() if key not in _IGNORED}
    unknown = sorted(values.keys() - set(_Line.__slots__))
    if unknown:
        raise InvalidArgument(f"{unknown[0]}: unknown key; known: {', '.join(_Line.__slots__)}")
    for key, value in values.items():
        if value is not None:
            _check(key, value)
    return _Line(**values)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(number: int, text: bytes, topic: str, template: OutgoingMessage) -> OutgoingMessage:
    try:
        return _merge(_read_line(text), topic, template)
    except InvalidArgument as error:
        raise _line_error(number, error.message, error.remedy) from error
    except ValueError as error:
        raise _line_error(number, str(error)) from error
    except RecursionError as error:
        raise _line_error(number, "its values are nested too deep") from error


def _merge(line: _Line, topic: str, template: OutgoingMessage) -> OutgoingMessage:
    """Return the message of a line; the template provides what the line leaves out."""
    default = template.message
    queue = template.queue
    if line.queue is not None:
        broker, _, queue_id = line.queue.rpartition("/")
        queue = QueueRef(topic, broker, int(queue_id))
    return OutgoingMessage(
        Message(
            _body(line),
            default.tag if line.tag is None else line.tag,
            default.keys if line.keys is None else tuple(line.keys),
            {**default.properties, **(line.properties or {})},
        ),
        template.ordering_key if line.ordering_key is None else line.ordering_key,
        queue,
        delivery_time(line.delay, line.deliver_at, line.delay_level) or template.when,
    )


def _body(line: _Line) -> bytes:
    if (line.body is None) == (line.body_base64 is None):
        raise InvalidArgument("exactly one of body and body_base64 is required")
    if line.body is not None:
        return line.body.encode()
    assert line.body_base64 is not None
    try:
        return base64.b64decode(line.body_base64, validate=True)
    except binascii.Error as error:
        raise InvalidArgument(f"body_base64: {error}") from error


def delivery_time(
    delay: str | None, deliver_at: str | int | None, delay_level: int | None
) -> DeliveryTime:
    """Return when to deliver a message, from at most one of the three options.

    Raises:
        InvalidArgument: a value is not valid, or several options are given.
    """
    if sum(option is not None for option in (delay, deliver_at, delay_level)) > 1:
        raise InvalidArgument("only one of delay, deliver-at and delay-level may be given")
    if delay is not None:
        return {"delay_ms": parse_duration_ms(delay)}
    if deliver_at is not None:
        return {"deliver_at_unix_ms": parse_unix_ms(str(deliver_at))}
    return {} if delay_level is None else {"delay_level": delay_level}


def parse_properties(pairs: Sequence[str]) -> Mapping[str, str]:
    """Return properties from texts of the form NAME=VALUE.

    Raises:
        InvalidArgument: a text has another form.
    """
    properties: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"property must be NAME=VALUE, got {pair!r}")
        properties[name] = value
    return properties


def _line_error(number: int, problem: str, remedy: str = "") -> InvalidArgument:
    return InvalidArgument(f"line {number}: {problem}", remedy=remedy, facts={"line": number})
