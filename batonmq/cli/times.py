"""Times and rates on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from batonmq.errors import InvalidArgument

_DIGITS_OF_A_DATE = range(4, 9)
_DIGITS_MAX = 15


def parse_unix_ms(text: str) -> int:
    """Return a time in Unix milliseconds; a time without a zone is in UTC.

    Digits are Unix milliseconds unless they can be read as a date: `20260131` is that day, and
    `2026`, which names no day, is rejected.

    Raises:
        InvalidArgument: the text is not a time.
    """
    if text.isdecimal() and len(text) <= _DIGITS_MAX and len(text) not in _DIGITS_OF_A_DATE:
        return int(text)
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidArgument(
            f"{text!r} is not a time",
            remedy="Use a form such as 2026-01-31T08:00:00Z, or Unix milliseconds.",
            facts={"field": "time"},
        ) from error
    stamp = stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
    return round(stamp.timestamp() * 1000)


def parse_rate(text: str) -> float:
    """Return a rate per second, from a text such as 100, 100/s or 0.5/s.

    Raises:
        InvalidArgument: the text is not a rate, or the rate is 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(/s)?", text)
    if not match or float(match[1]) == 0:
        raise InvalidArgument(
            f"{text!r} is not a rate",
            remedy="Use a number per second, such as 100/s.",
            facts={"field": "rate"},
        )
    return float(match[1])
