"""The results that a handler may return for a message; None means that it is handled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from batonmq._core.delays import AHEAD_MS_MAX
from batonmq._core.requests import Reply
from batonmq._core.retries import HandlingFailure
from batonmq.errors import InvalidArgument

DELAY_MS_MAX: Final = AHEAD_MS_MAX - 24 * 3_600_000
"""One day less than the longest delay that storage accepts, as its clock may differ."""

SUCCESS: Final = None
"""The message is handled; the same as returning None."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Handle the message again later, as if the handler had raised.

    Attributes:
        delay_ms: Delay, up to 39 days; None for the next of the group's retry delays.
        reason: Text for people; it is stored with the message.

    Raises:
        InvalidArgument: `delay_ms` is not a number from 0 to 39 days.
    """

    delay_ms: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        _check_delay(self.delay_ms)


@dataclass(frozen=True, slots=True)
class Suspend:
    """Handle the message again later, as with `RetryLater`.

    If `order` is `queue`, its queue waits for it; if `order` is `key`, its ordering key does.

    Attributes:
        delay_ms: Delay, up to 39 days; None for the next retry delay: with an `order`,
            `retry_first_ms` of the settings, doubled with each failure up to `retry_ms_max`.

    Raises:
        InvalidArgument: `delay_ms` is not a number from 0 to 39 days.
    """

    delay_ms: int | None = None

    def __post_init__(self) -> None:
        _check_delay(self.delay_ms)


class MessageFailed(Exception):
    """A message failed as often as `retries_max` allows, and `exhausted` is `stop`."""


class BadBody(Exception):
    """The body of a message is not what its handler expects, and no retry can change that.

    A handler that raises it for one message gets no retry: the message becomes a dead letter at
    once, or is treated as `exhausted` says. For a batch of several messages it is an error like any
    other, because it does not say which message it means.
    """


def failure_of(result: object) -> HandlingFailure | None:
    """Return the failure that a result means; any value but the two above is a success: None."""
    match result:
        case RetryLater(delay_ms=delay_ms, reason=reason):
            return HandlingFailure("asked", _text_of(reason), delay_ms)
        case Suspend(delay_ms=delay_ms):
            return HandlingFailure("asked", "suspended", delay_ms)
    return None


def failure_by(error: BaseException, message_count: int) -> HandlingFailure:
    """Return the failure of each of the messages with which a handler has raised."""
    final = message_count == 1 and isinstance(error, BadBody)
    return HandlingFailure("failed", f"{type(error).__name__}: {_text_of(error)}", final=final)


def reply_of(result: object) -> Reply | None:
    """Return the reply that a result means: a `Reply`, or its body as bytes; else None.

    Raises:
        LimitExceeded: The body is too long.
    """
    if isinstance(result, Reply):
        return result
    return Reply(result) if isinstance(result, bytes) else None


def _text_of(reason: object) -> str:
    """Return the text of an error or a reason, which an application may give as any object."""
    try:
        return str(reason)
    except Exception as error:  # noqa: BLE001  as of a __str__ that returns a number
        return f"<its text raised {type(error).__name__}>"


def _check_delay(delay_ms: int | None) -> None:
    """Raise in the handler, where the application sees the error."""
    if delay_ms is None or (isinstance(delay_ms, int) and 0 <= delay_ms <= DELAY_MS_MAX):
        return
    raise InvalidArgument(
        f"delay_ms must be from 0 to {DELAY_MS_MAX} (39 days), got {delay_ms!r}",
        facts={"field": "delay_ms"},
    )
