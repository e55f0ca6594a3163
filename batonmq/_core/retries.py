"""What becomes of a message that was not handled: again, sent back for later, or dead.

Attempts count how often a message was handed to a handler, over all rounds, from 1; retries are
the attempts after the first.
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
"""Wait so long before the first retry, the second, ...: 10 s to 2 h. Source: RocketMQ."""
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
    """Why a message was not handled.

    Attributes:
        reason: `asked`: the handler returned so. `failed`: it raised. `timeout`: it took too long.
        delay_ms: What the handler asked for; None leaves it to the policy.
    """

    reason: Reason
    error: str = ""
    delay_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RetryInPlace:
    """Keep the message and hand it to the handler again."""

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
    """Keep the message and end the consumer."""


@dataclass(frozen=True, slots=True)
class SkipMessage:
    """Log the message and acknowledge it."""


FailureAction = RetryInPlace | SendBack | SendToDeadLetters | SkipMessage | StopConsumer


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How failures are met.

    Attributes:
        sends_back: Whether retries go through the retry topic; else the message stays in hand.
        retries_max: More retries there are not; None for no limit.
        exhausted: What follows the last one.
        first_ms: Wait so long before the first retry of a message in hand; doubles.
        delay_ms_max: The longest such wait.
    """

    sends_back: bool
    retries_max: int | None
    exhausted: Literal["dead_letter", "skip", "stop"]
    first_ms: int
    delay_ms_max: int

    def decide(self, attempts: int, delay_ms: int | None) -> FailureAction:
        """What to do after attempt number `attempts` has failed.

        Args:
            delay_ms: What the handler asked for, if it did.
        """
        if self.retries_max is not None and attempts > self.retries_max:
            match self.exhausted:
                case "dead_letter":
                    return SendToDeadLetters()
                case "skip":
                    return SkipMessage()
                case "stop":
                    return StopConsumer()
        if self.sends_back:
            rung = RETRY_DELAYS_MS[min(attempts, len(RETRY_DELAYS_MS)) - 1]
            return SendBack(rung if delay_ms is None else delay_ms)
        pause_ms = min(self.first_ms << min(attempts - 1, 30), self.delay_ms_max)
        return RetryInPlace(pause_ms if delay_ms is None else delay_ms)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a message was when it was handed out the first time."""

    queue: QueueRef
    offset: int
    message_id: str


def retry_topic(group: str) -> str:
    """Topic of the messages that wait to be handled by `group` again."""
    return f"{_PREFIXES[0]}{group}"


def dead_letter_topic(group: str) -> str:
    """Topic of the messages that `group` has given up."""
    return f"{_PREFIXES[1]}{group}"


def group_of(topic: str) -> str:
    """The group whose retry or dead letter topic this is; empty if it is another topic."""
    for prefix in _PREFIXES:
        if topic.startswith(prefix):
            return topic[len(prefix) :]
    return ""


def properties_of(
    origin: Origin, attempts: int, failure: HandlingFailure, client_id: str
) -> Mapping[str, str]:
    """What travels with a message that is sent back, beside what its producer attached."""
    queue = origin.queue
    shown = failure.error[:ERROR_CHARACTERS_MAX]
    error = "".join(each if each.isprintable() else " " for each in shown)
    return {
        ORIGIN: f"{queue.topic}/{queue.broker}/{queue.queue_id}/{origin.offset}",
        ORIGIN_ID: origin.message_id,
        ATTEMPTS: str(attempts),
        REASON: failure.reason,
        ERROR: error,
        CLIENT: client_id,
    }


def with_origin_key(keys: Sequence[str], origin: Origin) -> tuple[str, ...]:
    """Keys of a message that is sent back: its own and, if there is room, the origin's id.

    By that key the copies of a message are found in the retry topic and among the dead letters.
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
    """Inverse of `properties_of`: the origin, and the attempts so far; None without them."""
    try:
        topic, broker, queue_id, offset = properties[ORIGIN].split("/")
        queue = QueueRef(topic, broker, int(queue_id))
        return Origin(queue, int(offset), properties[ORIGIN_ID]), int(properties[ATTEMPTS])
    except (KeyError, ValueError):
        return None


def retry_producer_id(queue: QueueRef, topic_id: int, offset: int, reset_epoch: int) -> int:
    """Producer id under which one stored message is sent back: every client comes to the same.

    So storage, which knows a producer's batches again, keeps one copy of what several members of
    the group send. A message that a reset has brought back is another one.

    Returns:
        63 bits, not 0.
    """
    name = f"{topic_id}/{queue.broker}/{queue.queue_id}/{offset}@{reset_epoch}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1 or 1


def retry_queue(queues: Sequence[QueueRef], broker: str, once: int) -> QueueRef:
    """The queue that takes a message of `broker` back: every client comes to the same.

    Args:
        queues: Of the retry or dead letter topic, ascending, at least one.
        once: The message's `retry_producer_id`.
    """
    beside = [queue for queue in queues if queue.broker == broker]
    return beside[0] if beside else queues[once % len(queues)]
