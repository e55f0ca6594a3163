"""Delivery time of a scheduled message: a time, a delay, or one of 18 delay levels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import index

from batonmq.errors import InvalidArgument, LimitExceeded

LEVEL_NAMES = (
    "1s", "5s", "10s", "30s", "1m", "2m", "3m", "4m", "5m",
    "6m", "7m", "8m", "9m", "10m", "20m", "30m", "1h", "2h",
)  # fmt: skip
"""Delays by level; levels count from 1. Source: RocketMQ messageDelayLevel."""
AHEAD_MS_MAX = 40 * 24 * 3_600_000
"""Limit of the time between sending and delivery: 40 days."""
DURATION_MS_MAX = 2**53
"""Limit of a duration that a text names: so many milliseconds are exact in every format."""
_PART = re.compile(r"([0-9]{1,12})(ms|s|m|h|d)")
_ISO = re.compile(r"P([0-9]{1,12}D)?(?:T([0-9]{1,12}H)?([0-9]{1,12}M)?([0-9]{1,12}S)?)?", re.ASCII)
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_duration_ms(text: str) -> int:
    """Return the milliseconds of a duration, such as `1d12h` or `PT36H`.

    Units are ms, s, m, h and d. An ISO 8601 duration in days, hours, minutes and seconds, which
    Kafka's tools take, is accepted too.

    Raises:
        InvalidArgument: The text is not a duration, or the duration is too long.
    """
    iso = _ISO.fullmatch(text)
    plain = "".join(part for part in iso.groups() if part).lower() if iso else text
    parts = _PART.findall(plain)
    if not parts or "".join(number + unit for number, unit in parts) != plain:
        raise InvalidArgument(
            f"{text!r} is not a duration",
            remedy="Use numbers and units, such as 500ms, 10s, 5m, 2h, 7d or 1d12h.",
            facts={"field": "delay"},
        )
    duration_ms = sum(int(number) * _UNITS_MS[unit] for number, unit in parts)
    if duration_ms > DURATION_MS_MAX:
        raise InvalidArgument(
            f"{text!r} is longer than {DURATION_MS_MAX // _UNITS_MS['d']} days",
            facts={"field": "delay", "limit": DURATION_MS_MAX},
        )
    return duration_ms


@dataclass(frozen=True, slots=True)
class DelayLeft:
    """A delay that counts from a moment on, by a monotonic clock.

    It is sent as what is left of it, so the wall clocks of sender and storage may differ.

    Attributes:
        from_ms: Monotonic time from which the delay counts.
    """

    delay_ms: int
    from_ms: int

    def at(self, now_ms: int) -> int:
        """Return what is left at a monotonic time; rounded up, as the clock has milliseconds."""
        return max(0, self.delay_ms - max(0, now_ms - self.from_ms - 1))


LEVELS_MS = tuple(map(parse_duration_ms, LEVEL_NAMES))


def deliver_time(
    now_unix_ms: int,
    *,
    deliver_at_unix_ms: int | None = None,
    delay_ms: int | None = None,
    delay_level: int | None = None,
) -> int:
    """Return the delivery time of a message that is sent now, in Unix milliseconds.

    At most one of the three arguments is given. Without any, and with level 0, the delivery time is
    now. A level above the last one counts as the last one. A time in the past is allowed.

    Raises:
        InvalidArgument: Several arguments are given, or one is negative or not an integer.
        LimitExceeded: The time is more than 40 days ahead.
    """
    given = {
        name: value
        for name, value in (
            ("deliver_at_unix_ms", deliver_at_unix_ms),
            ("delay_ms", delay_ms),
            ("delay_level", delay_level),
        )
        if value is not None
    }
    if len(given) > 1:
        raise InvalidArgument(
            f"{' and '.join(given)} are given together", remedy="Give one of them."
        )
    for name, value in given.items():
        check_integer(name, value)
        if value < (name == "deliver_at_unix_ms"):
            raise InvalidArgument(
                f"{name} must not be negative, got {value}", facts={"field": name}
            )
    if delay_level is not None:
        delay_ms = LEVELS_MS[min(delay_level, len(LEVELS_MS)) - 1] if delay_level else 0
    if deliver_at_unix_ms is None:
        deliver_at_unix_ms = now_unix_ms + (delay_ms or 0)
    return check_deliver_time(deliver_at_unix_ms, now_unix_ms)


def check_integer(name: str, value: int) -> None:
    """Raise InvalidArgument if the value is no integer: `1.5 * 1000` is a float."""
    try:
        index(value)
    except TypeError:
        raise InvalidArgument(
            f"{name} must be an integer, got {value!r:.100}",
            remedy="Round it: int(...).",
            facts={"field": name},
        ) from None


def check_deliver_time(deliver_unix_ms: int, now_unix_ms: int) -> int:
    """Return `deliver_unix_ms` if it is a valid delivery time.

    Raises:
        InvalidArgument: The time is not positive.
        LimitExceeded: The time is more than 40 days ahead.
    """
    if deliver_unix_ms < 1:
        raise InvalidArgument(
            f"deliver_unix_ms must be positive, got {deliver_unix_ms}",
            facts={"field": "deliver_unix_ms"},
        )
    if deliver_unix_ms - now_unix_ms > AHEAD_MS_MAX:
        raise LimitExceeded(
            f"deliver_unix_ms is {deliver_unix_ms - now_unix_ms} ms ahead; "
            f"the limit is {AHEAD_MS_MAX} ms, 40 days",
            remedy="Choose a time within the next 40 days.",
            facts={
                "field": "deliver_unix_ms",
                "limit": AHEAD_MS_MAX,
                "actual": deliver_unix_ms - now_unix_ms,
            },
        )
    return deliver_unix_ms
