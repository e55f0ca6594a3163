"""Times as people type them."""

from __future__ import annotations

from datetime import UTC, datetime

from batonmq.common.errors import InvalidArgument


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
