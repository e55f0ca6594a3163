"""Numbers, times and sizes as text that people read and copy."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

UNKNOWN = "-"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000))


def count(number: int | None) -> str:
    """Return a number with separators, such as `1,234`."""
    return UNKNOWN if number is None else f"{number:,}"


def size(number: int | None) -> str:
    """Return a number of bytes, such as `1.2 MiB`."""
    if number is None:
        return UNKNOWN
    value, unit = float(number), 0
    while value >= 1024 and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{number} B" if unit == 0 else f"{value:.1f} {_SIZES[unit]}"


def span(milliseconds: int | None) -> str:
    """Return a time span, such as `850 ms`, `4.2 s`, `12 min` or `3 h 5 min`."""
    if milliseconds is None:
        return UNKNOWN
    if milliseconds < 1_000:
        return f"{milliseconds} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1_000:.1f} s"
    for (unit, length), (lower, lower_length) in pairwise(_SPANS):
        if milliseconds >= length:
            whole, rest = divmod(milliseconds, length)
            part = rest // lower_length
            return f"{whole} {unit} {part} {lower}" if part and whole < 10 else f"{whole} {unit}"
    return f"{milliseconds / 1_000:.1f} s"


def rate(per_s: float | None) -> str:
    """Return a rate per second, such as `0.5`, `12` or `1,234`."""
    if per_s is None:
        return UNKNOWN
    return f"{per_s:,.1f}" if 0 < per_s < 10 else f"{per_s:,.0f}"


def time(unix_ms: int | None) -> str:
    """Return a time in UTC with milliseconds, such as `2026-01-31 08:00:00.250`."""
    if not unix_ms:
        return UNKNOWN
    stamp = datetime.fromtimestamp(unix_ms // 1000, UTC)
    return f"{stamp:%Y-%m-%d %H:%M:%S}.{unix_ms % 1000:03d}"


def clock_time(unix_ms: int) -> str:
    """Return the time of day in UTC, such as `08:00:00`."""
    return f"{datetime.fromtimestamp(unix_ms // 1000, UTC):%H:%M:%S}"


def percent(value: float | None) -> str:
    """Return a percentage, such as `42 %`."""
    return UNKNOWN if value is None else f"{value:.0f} %"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 queue` or `3 queues`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
