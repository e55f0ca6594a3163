"""What BatonMQ needs to know of a message of Kombu: its tag, its key, and its times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from batonmq._core.records import KEYS_BYTES_MAX, check_tag
from batonmq.errors import InvalidArgument

EXPIRES_UNIX_MS = "kombu.expires_unix_ms"
"""Property: the message is dropped when it would be delivered after this time."""
_TIME = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class TaskMessage:
    """Arguments of a send.

    Attributes:
        tag: Name of the task, if it can be a tag.
        keys: Id of the task.
        at_unix_ms: When it is delivered; None for at once.
    """

    tag: str
    keys: tuple[str, ...]
    properties: dict[str, str]
    at_unix_ms: int | None


def task_message(message: Mapping[str, Any], now_unix_ms: int) -> TaskMessage:
    """Return the arguments of a send for a message of Kombu.

    Raises:
        InvalidArgument: It has a priority: messages of a queue have an order already.
    """
    headers, properties = message.get("headers") or {}, message.get("properties") or {}
    if properties.get("priority"):
        raise InvalidArgument(
            f"a message has priority {properties['priority']}, but a queue is a log: its messages "
            "are delivered in the order in which they were stored",
            remedy="Send urgent tasks to a queue of their own, with workers of its own.",
            facts={"field": "priority"},
        )
    tag = str(headers.get("task") or "")
    key = str(headers.get("id") or properties.get("correlation_id") or "")
    usable = key and not any(sign.isspace() for sign in key) and len(key.encode()) <= KEYS_BYTES_MAX
    kept: dict[str, str] = {}
    if properties.get("expiration") is not None:
        kept[EXPIRES_UNIX_MS] = str(now_unix_ms + int(properties["expiration"]))
    return TaskMessage(
        tag="" if check_tag(tag) else tag,
        keys=(key,) if usable else (),
        properties=kept,
        at_unix_ms=_time_of(headers.get("eta")),
    )


def is_expired(properties: Mapping[str, str], now_unix_ms: int) -> bool:
    """Return whether a stored message is to be dropped; any program may have sent it."""
    text = properties.get(EXPIRES_UNIX_MS, "")
    return _TIME.fullmatch(text) is not None and int(text) <= now_unix_ms


def _time_of(eta: object) -> int | None:
    """Return the time of an `eta` header in Unix milliseconds; None without one.

    A time that can't be read is left to the worker, which reports it.
    """
    if not eta:
        return None
    try:
        when = eta if isinstance(eta, datetime) else datetime.fromisoformat(str(eta))
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return int(when.timestamp() * 1000)
