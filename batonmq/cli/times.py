"""Times and spans as people type them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from batonmq.common.errors import InvalidArgument

_UNIT_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


def parse_unix_ms(text: str) -> int:
    """A time as a person gives it, in Unix milliseconds; UTC unless it says otherwise.

    Raises:
        InvalidArgument: it is none.
    """
    if text.isdecimal():
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


def parse_duration_ms(text: str) -> int:
    """A span as a person gives it, such as 90s, 2h or 1d12h, in milliseconds.

    Raises:
        InvalidArgument: it is none.
    """
    if not re.fullmatch(r"(\d+(d|h|ms|m|s))+", text):
        raise InvalidArgument(
            f"{text!r} is no duration",
            remedy="Use numbers with d, h, m, s or ms, such as 2h or 1d12h.",
            facts={"field": "duration"},
        )
    parts = re.findall(r"(\d+)(d|h|ms|m|s)", text)
    return sum(int(number) * _UNIT_MS[unit] for number, unit in parts)
