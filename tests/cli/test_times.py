"""Goal: times and spans are read as a person means them, or refused.

Method: tables.
"""

from __future__ import annotations

import pytest

from batonmq.cli.times import parse_duration_ms, parse_unix_ms
from batonmq.common.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0s", 0),
        ("1ms", 1),
        ("90s", 90_000),
        ("15m", 900_000),
        ("2h", 7_200_000),
        ("1d12h", 129_600_000),
        ("1h500ms", 3_600_500),
        ("1m30s", 90_000),
    ],
)
def test_spans_add_up(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize("text", ["", "2", "h", "2 h", "-2h", "1.5h", "2h-", "2y"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="no duration"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "unix_ms"),
    [
        ("0", 0),
        ("1385873999007", 1_385_873_999_007),
        ("2013-12-01T04:59:59.007Z", 1_385_873_999_007),
        ("2013-12-01T04:59:59.007", 1_385_873_999_007),
        ("2013-12-01T05:59:59.007+01:00", 1_385_873_999_007),
        ("2013-12-01", 1_385_856_000_000),
    ],
)
def test_times_are_utc_unless_they_say_otherwise(text: str, unix_ms: int) -> None:
    assert parse_unix_ms(text) == unix_ms


@pytest.mark.parametrize("text", ["", "tomorrow", "12:00", "-5"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="no time"):
        parse_unix_ms(text)
