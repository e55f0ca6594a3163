"""Dead letters, and what becomes of one that is sent again.

A copy keeps what the message was and where it came from. Its attempts count from 1 again; what was
before stands beside, so that the story can be told. Pure: no wire, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._core.retries import (
    ATTEMPTS,
    CLIENT,
    ERROR,
    ORIGIN,
    ORIGIN_ID,
    PROPERTIES,
    REASON,
    Origin,
    origin_of,
    with_origin_key,
    without_origin_key,
)
from batonmq._core.subscription import parse_filter

DEAD_LETTER_PREFIX = "%DLQ%"
REDRIVE_ID = "baton.redrive_id"
REDRIVEN_FROM = "baton.redriven_from"
REDRIVEN_BY = "baton.redriven_by"
REDRIVE_REASON = "baton.redrive_reason"
FORMER_ATTEMPTS = "baton.former_attempts"
HISTORY = frozenset({REDRIVE_ID, REDRIVEN_FROM, REDRIVEN_BY, REDRIVE_REASON, FORMER_ATTEMPTS})


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group has given up, as it lies among the dead letters.

    Attributes:
        message_id: Of the dead letter; `queue` and `offset` are its place.
        dead_unix_ms: When it was stored there.
        origin: Where the message was at first; None if it was put here by somebody else.
        reason: Why the last attempt failed: `asked`, `failed` or `timeout`; empty if unknown.
        error: What it said.
        attempts: How often it was handed to a handler since it was sent, or redriven last.
        former_attempts: And how often before that.
        client_id: Who had it at last.
        keys: Index keys that its producer gave it; `properties` likewise.
        redriven: Whether it was sent again since.
    """

    group: str
    message_id: str
    queue: QueueRef
    offset: int
    born_unix_ms: int
    dead_unix_ms: int
    origin: Origin | None
    reason: str
    error: str
    attempts: int
    former_attempts: int
    client_id: str
    tag: str
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    body: bytes
    redriven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """Which dead letters are meant: those for which everything holds that is given.

    Attributes:
        cause: `asked`, `failed` or `timeout`: why the last attempt failed.
        since_unix_ms: Dead since then.
        tag: With this tag.
        key: With this index key.
        expression: As of a subscription: tags joined by `||`, or `sql: <condition>`.

    Raises:
        BadExpression: the expression means nothing.
    """

    cause: str = ""
    since_unix_ms: int = 0
    tag: str = ""
    key: str = ""
    expression: str = "*"

    def __post_init__(self) -> None:
        parse_filter(self.expression)

    def accepts(self, letter: DeadLetter) -> bool:
        """Whether a dead letter is meant."""
        return (
            self.cause in ("", letter.reason)
            and letter.dead_unix_ms >= self.since_unix_ms
            and self.tag in ("", letter.tag)
            and (not self.key or self.key in letter.keys)
            and parse_filter(self.expression).accepts(letter.tag, letter.keys, letter.properties)
        )


def dead_letter(
    place: tuple[str, QueueRef, int],
    times: tuple[int, int],
    message: Message,
    *,
    redriven: bool,
) -> DeadLetter:
    """The dead letter that a stored message is.

    Args:
        place: Its id, queue and offset.
        times: When it was born, and stored here.
    """
    message_id, queue, offset = place
    properties = message.properties
    found = origin_of(properties)
    origin, attempts = found if found else (None, 0)
    return DeadLetter(
        group=queue.topic.removeprefix(DEAD_LETTER_PREFIX),
        message_id=message_id,
        queue=queue,
        offset=offset,
        born_unix_ms=times[0],
        dead_unix_ms=times[1],
        origin=origin,
        reason=properties.get(REASON, ""),
        error=properties.get(ERROR, ""),
        attempts=attempts,
        former_attempts=_number(properties.get(FORMER_ATTEMPTS, "")),
        client_id=properties.get(CLIENT, ""),
        tag=message.tag,
        keys=without_origin_key(message.keys, origin) if origin else tuple(message.keys),
        properties={k: v for k, v in properties.items() if k not in PROPERTIES | HISTORY},
        body=message.body,
        redriven=redriven,
    )


def redrive_producer_id(replay_id: str, message_id: str) -> int:
    """Producer id under which one dead letter is sent again by a replay.

    Whoever repeats the replay comes to the same, so storage keeps one copy.

    Returns:
        63 bits, not 0.
    """
    name = f"redrive/{replay_id}/{message_id}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1 or 1


def copy_of(letter: DeadLetter, replay_id: str, by: str, reason: str, *, to_topic: bool) -> Message:
    """What is sent again.

    Args:
        to_topic: To everybody who reads the topic it came from: as a new message, with its history
            beside. Otherwise to its group alone, to which it looks as it did the first time, but
            for the properties with its history.
    """
    origin = letter.origin or Origin(letter.queue, letter.offset, letter.message_id)
    history = {
        REDRIVE_ID: replay_id,
        REDRIVEN_FROM: letter.message_id,
        REDRIVEN_BY: by,
        REDRIVE_REASON: "".join(each if each.isprintable() else " " for each in reason),
        FORMER_ATTEMPTS: str(letter.former_attempts + letter.attempts),
    }
    if not to_topic:
        queue = origin.queue
        history |= {
            ORIGIN: f"{queue.topic}/{queue.broker}/{queue.queue_id}/{origin.offset}",
            ORIGIN_ID: origin.message_id,
            ATTEMPTS: "0",
            REASON: letter.reason,
            ERROR: letter.error,
            CLIENT: letter.client_id,
        }
    return Message(
        letter.body,
        letter.tag,
        with_origin_key(letter.keys, origin),
        {**letter.properties, **history},
    )


def destination(letter: DeadLetter, queues: Sequence[QueueRef], once: int) -> QueueRef:
    """The queue that takes the copy: the one it came from, or one beside it, or any.

    Args:
        queues: That take messages, ascending, at least one; all of one topic.
        once: The copy's `redrive_producer_id`: every repetition comes to the same queue.
    """
    if letter.origin is not None and letter.origin.queue in queues:
        return letter.origin.queue
    beside = [queue for queue in queues if queue.broker == letter.queue.broker]
    return (beside or queues)[once % len(beside or queues)]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() else 0
