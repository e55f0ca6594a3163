"""What a handler may say of a message. Nothing said, `None`, means that it is handled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from batonmq._core.delays import AHEAD_MS_MAX
from batonmq._core.retries import HandlingFailure
from batonmq.errors import InvalidArgument

DELAY_MS_MAX: Final = AHEAD_MS_MAX - 24 * 3_600_000
"""A day less than storage keeps messages for later: its clock is another one."""

SUCCESS: Final = None
"""The message is handled; as good as returning nothing."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The message is to be handled again, as if the handler had raised.

    Attributes:
        delay_ms: When, up to 39 days; None leaves it to the ladder of delays.
        reason: For people; travels with the message.

    Raises:
        InvalidArgument: `delay_ms` is no such number.
    """

    delay_ms: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        _check_delay(self.delay_ms)


@dataclass(frozen=True, slots=True)
class Suspend:
    """The queue is to wait, and begin again with this message.

    Where queues are not handled in order the message alone waits, as with `RetryLater`.

    Attributes:
        delay_ms: How long, up to 39 days; None: `retry_first_ms` of the settings, growing to
            `retry_ms_max`.

    Raises:
        InvalidArgument: `delay_ms` is no such number.
    """

    delay_ms: int | None = None

    def __post_init__(self) -> None:
        _check_delay(self.delay_ms)


class MessageFailed(Exception):
    """A message was handled in vain as often as is allowed, and the settings say to stop then."""


def failure_of(result: object) -> HandlingFailure | None:
    """What a handler's result says; None for success: any value but the two above."""
    match result:
        case RetryLater(delay_ms=delay_ms, reason=reason):
            return HandlingFailure("asked", reason, delay_ms)
        case Suspend(delay_ms=delay_ms):
            return HandlingFailure("asked", "suspended", delay_ms)
    return None


def _check_delay(delay_ms: int | None) -> None:
    """Here, in the handler, as later nobody could be told."""
    if delay_ms is None or (isinstance(delay_ms, int) and 0 <= delay_ms <= DELAY_MS_MAX):
        return
    raise InvalidArgument(
        f"delay_ms is {delay_ms!r}: not a number of milliseconds up to {DELAY_MS_MAX}, 39 days",
        facts={"field": "delay_ms"},
    )
