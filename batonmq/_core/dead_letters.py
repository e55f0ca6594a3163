"""Dead letters, and their copies when they are redriven.

A copy has the content and the origin of the message. Its attempts count from 1 again; the former
attempts are in other properties, so that traces can show them. This module has no I/O and no clock.
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
    """A message in the dead letter topic of a group.

    Attributes:
        message_id: Id of the dead letter, which is stored at `queue` and `offset`.
        dead_unix_ms: Time at which the dead letter was stored.
        origin: Where the message was stored first; None if BatonMQ did not send the dead letter.
        reason: Why the last attempt failed: `asked`, `failed` or `timeout`; empty if unknown.
        error: Error of the last attempt.
        attempts: Number of attempts since the message was sent, or redriven last.
        former_attempts: Number of attempts before that.
        client_id: Client of the last attempt.
        keys: Index keys from its producer.
        properties: Properties from its producer.
        redriven: Whether the dead letter was redriven.
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
    """Selects the dead letters that meet all criteria that are given.

    Attributes:
        cause: Why the last attempt failed: `asked`, `failed` or `timeout`.
        since_unix_ms: Earliest time at which the dead letter was stored.
        tag: The tag.
        key: One of the index keys.
        expression: A subscription expression: tags joined by `||`, or `sql: <condition>`.

    Raises:
        BadExpression: The expression can't be parsed.
    """

    cause: str = ""
    since_unix_ms: int = 0
    tag: str = ""
    key: str = ""
    expression: str = "*"

    def __post_init__(self) -> None:
        parse_filter(self.expression)

    def accepts(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter meets the criteria."""
        return (
            self.cause in ("", letter.reason)
            and letter.dead_unix_ms >= self.since_unix_ms
            and self.tag in ("", letter.tag)
            and (not self.key or self.key in letter.keys)
            and parse_filter(self.expression).accepts(letter.tag, letter.keys, letter.properties)
        )


def dead_letter(
    location: tuple[str, QueueRef, int],
    times: tuple[int, int],
    message: Message,
    *,
    redriven: bool,
) -> DeadLetter:
    """Return the dead letter in a stored message.

    Args:
        location: Id, queue and offset of the stored message.
        times: Times of its creation and of its storage, in Unix milliseconds.
    """
    message_id, queue, offset = location
    properties = message.properties
    origin_attempts = origin_of(properties)
    origin, attempts = origin_attempts if origin_attempts else (None, 0)
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
    """Return the producer id with which a replay sends a dead letter again.

    A repeated replay uses the same id, so storage keeps one copy.

    Args:
        replay_id: Id of the replay; empty for the one copy that all replays share.

    Returns:
        63 bits, not 0.
    """
    name = f"redrive/{replay_id}/{message_id}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1 or 1


def copy_of(letter: DeadLetter, replay_id: str, by: str, reason: str, *, to_topic: bool) -> Message:
    """Return the message to send for a redriven dead letter.

    Args:
        replay_id: Id of the replay.
        by: Operator that started the replay.
        reason: Reason that the operator gave.
        to_topic: Send it as a new message to all groups of its first topic. Otherwise its own group
            gets it again, as it was at first. Both have properties with the history.
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


def destination(letter: DeadLetter, queues: Sequence[QueueRef], producer_id: int) -> QueueRef:
    """Return the queue for the copy: the first queue of the message, one of its broker, or any.

    Args:
        queues: Queues of one topic that take messages, ascending, at least one.
        producer_id: The copy's `redrive_producer_id`, so that a repetition gets the same queue.
    """
    if letter.origin is not None and letter.origin.queue in queues:
        return letter.origin.queue
    same_broker = [queue for queue in queues if queue.broker == letter.queue.broker]
    candidates = same_broker or queues
    return candidates[producer_id % len(candidates)]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() else 0
