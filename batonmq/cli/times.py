"""Times and rates as people type them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from batonmq.errors import InvalidArgument

_DIGITS_OF_A_DATE = range(4, 9)
_DIGITS_MAX = 15


def parse_unix_ms(text: str) -> int:
    """A time as a person gives it, in Unix milliseconds; UTC unless it says otherwise.

    Digits are Unix milliseconds unless they may be meant as a date: `20260131` is that day, and
    `2026`, of which no day is known, is refused.

    Raises:
        InvalidArgument: it is none.
    """
    if text.isdecimal() and len(text) <= _DIGITS_MAX and len(text) not in _DIGITS_OF_A_DATE:
        return int(text)
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidArgument(
            f"{text!r} is no time",
            remedy="Use a form such as 2026-01-31T08:00:00Z, or Unix milliseconds.",
            facts={"field": "time"},
        ) from error
    stamp = stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
    return round(stamp.timestamp() * 1000)


def parse_rate(text: str) -> float:
    """A number of things a second, such as 100, 100/s or 0.5/s.

    Raises:
        InvalidArgument: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(/s)?", text)
    if not found or float(found[1]) == 0:
        raise InvalidArgument(
            f"{text!r} is no rate",
            remedy="Use a number of things a second, such as 100/s.",
            facts={"field": "rate"},
        )
    return float(found[1])
