"""What a handler may say of a message. Nothing said, `None`, means that it is handled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from batonmq.core.retries import Failure

SUCCESS: Final = None
"""The message is handled; as good as returning nothing."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The message is to be handled again, as if the handler had raised.

    Attributes:
        delay_ms: When; None leaves it to the ladder of delays.
        reason: For people; travels with the message.
    """

    delay_ms: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Suspend:
    """The queue is to wait, and begin again with this message.

    Where queues are not handled in order the message alone waits, as with `RetryLater`.

    Attributes:
        delay_ms: How long; None: `retry_first_ms` of the settings, growing to `retry_ms_max`.
    """

    delay_ms: int | None = None


class MessageFailed(Exception):
    """A message was handled in vain as often as is allowed, and the settings say to stop then."""


def failure_of(result: object) -> Failure | None:
    """What a handler's result says; None for success: any value but the two above."""
    match result:
        case RetryLater(delay_ms=delay_ms, reason=reason):
            return Failure("asked", reason, delay_ms)
        case Suspend(delay_ms=delay_ms):
            return Failure("asked", "suspended", delay_ms)
    return None
