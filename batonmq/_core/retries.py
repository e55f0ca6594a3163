"""Retries of messages with failed handlers: in place, through the retry topic, or dead letters.

Attempts count the calls of a handler with a message, in all rounds, from 1. Retries are the
attempts after the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from batonmq._core.delays import LEVELS_MS
from batonmq._core.queues import QueueRef
from batonmq._core.records import KEYS_BYTES_MAX

RETRY_DELAYS_MS = LEVELS_MS[2:]
"""Delay before the first retry, the second, and so on: 10 s to 2 h. Source: RocketMQ."""
_PREFIXES = "%RETRY%", "%DLQ%"
RETRIES_MAX = len(RETRY_DELAYS_MS)
ERROR_CHARACTERS_MAX = 1_000

ORIGIN = "baton.origin"
ORIGIN_ID = "baton.origin_id"
ATTEMPTS = "baton.attempts"
REASON = "baton.reason"
ERROR = "baton.error"
CLIENT = "baton.client"
PROPERTIES = frozenset({ORIGIN, ORIGIN_ID, ATTEMPTS, REASON, ERROR, CLIENT})

Reason = Literal["asked", "failed", "timeout"]


@dataclass(frozen=True, slots=True)
class HandlingFailure:
    """Why the handling of a message failed.

    Attributes:
        reason: `asked`: the handler returned a retry. `failed`: it raised. `timeout`: it took too
            long.
        error: Message of the error, or the reason that the handler gave.
        delay_ms: Delay that the handler asked for; None leaves the delay to the policy.
        refused: Reason of the error, if storage refuses the outputs of the message; else empty.
        final: No retry can help: what follows is what follows the last retry.
    """

    reason: Reason
    error: str = ""
    delay_ms: int | None = None
    refused: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class RetryInPlace:
    """Keep the message and call the handler again after a delay."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class SendBack:
    """Send the message to the retry topic of the group, then acknowledge it."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class SendToDeadLetters:
    """Send the message to the dead letters of the group, then acknowledge it."""


@dataclass(frozen=True, slots=True)
class StopConsumer:
    """Keep the message and stop the consumer."""


@dataclass(frozen=True, slots=True)
class SkipMessage:
    """Log the message and acknowledge it."""


FailureAction = RetryInPlace | SendBack | SendToDeadLetters | SkipMessage | StopConsumer


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Decides what follows a failure.

    Attributes:
        sends_back: Whether retries go through the retry topic; otherwise they are in place.
        retries_max: Largest number of retries; None for no limit.
        exhausted: What follows the failure of the last retry.
        first_ms: Delay before the first retry in place, in milliseconds; doubles with each retry.
        delay_ms_max: Largest delay before a retry in place, in milliseconds.
    """

    sends_back: bool
    retries_max: int | None
    exhausted: Literal["dead_letter", "skip", "stop"]
    first_ms: int
    delay_ms_max: int

    def decide(self, attempts: int, delay_ms: int | None, *, final: bool = False) -> FailureAction:
        """Return what to do after attempt number `attempts` has failed.

        Args:
            delay_ms: Delay that the handler asked for, if any.
            final: Whether no retry can help, however many are left.
        """
        if final or (self.retries_max is not None and attempts > self.retries_max):
            match self.exhausted:
                case "dead_letter":
                    return SendToDeadLetters()
                case "skip":
                    return SkipMessage()
                case "stop":
                    return StopConsumer()
        if self.sends_back:
            by_attempt_ms = RETRY_DELAYS_MS[min(attempts, len(RETRY_DELAYS_MS)) - 1]
            return SendBack(by_attempt_ms if delay_ms is None else delay_ms)
        pause_ms = min(self.first_ms << min(attempts - 1, 30), self.delay_ms_max)
        return RetryInPlace(pause_ms if delay_ms is None else delay_ms)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a message was stored first: its queue, offset and id."""

    queue: QueueRef
    offset: int
    message_id: str


def retry_topic(group: str) -> str:
    """Return the topic of the messages that `group` is to handle again."""
    return f"{_PREFIXES[0]}{group}"


def dead_letter_topic(group: str) -> str:
    """Return the topic of the dead letters of `group`."""
    return f"{_PREFIXES[1]}{group}"


def is_dead_letter_topic(topic: str) -> bool:
    """Return whether a topic keeps the dead letters of a group."""
    return topic.startswith(_PREFIXES[1])


def group_of(topic: str) -> str:
    """Return the group of a retry or dead letter topic; empty for any other topic."""
    for prefix in _PREFIXES:
        if topic.startswith(prefix):
            return topic[len(prefix) :]
    return ""


def properties_of(
    origin: Origin, attempts: int, failure: HandlingFailure, client_id: str
) -> Mapping[str, str]:
    """Return the properties to add to a message that is sent back."""
    queue = origin.queue
    first = failure.error[:ERROR_CHARACTERS_MAX]
    error = "".join(each if each.isprintable() else " " for each in first)
    return {
        ORIGIN: f"{queue.topic}/{queue.broker}/{queue.queue_id}/{origin.offset}",
        ORIGIN_ID: origin.message_id,
        ATTEMPTS: str(attempts),
        REASON: failure.reason,
        ERROR: error,
        CLIENT: client_id,
    }


def with_origin_key(keys: Sequence[str], origin: Origin) -> tuple[str, ...]:
    """Return the keys of a message that is sent back: its own and, if it fits, the origin's id.

    The last key finds the copies of a message in the retry topic and among the dead letters.
    """
    own = without_origin_key(keys, origin)
    longer = (*own, origin.message_id)
    return longer if len(" ".join(longer).encode()) <= KEYS_BYTES_MAX else own


def without_origin_key(keys: Sequence[str], origin: Origin) -> tuple[str, ...]:
    """Inverse of `with_origin_key`."""
    if keys and keys[-1] == origin.message_id:
        return tuple(keys[:-1])
    return tuple(keys)


def origin_of(properties: Mapping[str, str]) -> tuple[Origin, int] | None:
    """Return the origin and the attempts in properties of `properties_of`; None if absent."""
    try:
        topic, broker, queue_id, offset = properties[ORIGIN].split("/")
        queue = QueueRef(topic, broker, int(queue_id))
        return Origin(queue, int(offset), properties[ORIGIN_ID]), int(properties[ATTEMPTS])
    except (KeyError, ValueError):
        return None


def retry_producer_id(queue: QueueRef, topic_id: int, offset: int, reset_epoch: int) -> int:
    """Return the producer id with which a stored message is sent back; equal on all clients.

    Storage drops the repeated batches of a producer id, so it keeps one copy of a message that
    several members send back. After a reset the id is another one.

    Returns:
        63 bits, not 0.
    """
    name = f"{topic_id}/{queue.broker}/{queue.queue_id}/{offset}@{reset_epoch}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1 or 1


def retry_queue(queues: Sequence[QueueRef], broker: str, producer_id: int) -> QueueRef:
    """Return the queue to which a message of `broker` is sent back; equal on all clients.

    Args:
        queues: Queues of the retry or dead letter topic, ascending, at least one.
        producer_id: The message's `retry_producer_id`.
    """
    same_broker = [queue for queue in queues if queue.broker == broker]
    return same_broker[0] if same_broker else queues[producer_id % len(queues)]
