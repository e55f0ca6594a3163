"""Goal: times and rates are parsed as documented, or rejected.

Method: tables.
"""

from __future__ import annotations

import pytest

from batonmq.cli.consume import StartPosition, parse_start
from batonmq.cli.mqadmin import iso_time
from batonmq.cli.times import parse_rate, parse_unix_ms
from batonmq.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "unix_ms"),
    [
        ("0", 0),
        ("1385873999007", 1_385_873_999_007),
        ("2013-12-01T04:59:59.007Z", 1_385_873_999_007),
        ("2013-12-01T04:59:59.007", 1_385_873_999_007),
        ("2013-12-01T05:59:59.007+01:00", 1_385_873_999_007),
        ("2013-12-01", 1_385_856_000_000),
        ("20131201", 1_385_856_000_000),
    ],
)
def test_times_without_a_zone_are_utc(text: str, unix_ms: int) -> None:
    assert parse_unix_ms(text) == unix_ms


@pytest.mark.parametrize("text", ["", "tomorrow", "12:00", "-5", "2026", "202601", "9" * 16])
def test_invalid_time_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a time"):
        parse_unix_ms(text)


def test_rates_are_per_second() -> None:
    assert [parse_rate(text) for text in ("100", "100/s", "0.5/s")] == [100, 100, 0.5]
    for text in ("", "0", "0/s", "-1", "5/m", "fast"):
        with pytest.raises(InvalidArgument, match="not a rate"):
            parse_rate(text)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("first", StartPosition("first")),
        ("last", StartPosition("last")),
        ("timestamp", StartPosition("timestamp")),
        ("2h", StartPosition("timestamp", 10_000_000_000 - 7_200_000)),
        ("1385873999007", StartPosition("timestamp", 1_385_873_999_007)),
        ("2013-12-01T04:59:59.007Z", StartPosition("timestamp", 1_385_873_999_007)),
    ],
)
def test_start_is_a_name_a_duration_or_a_time(text: str, start: StartPosition) -> None:
    assert parse_start(text, 10_000_000_000) == start


def test_times_in_the_form_of_rocketmq_are_converted() -> None:
    assert iso_time("2026-01-31#08:00:00:007") == "2026-01-31T08:00:00.007"
    assert iso_time("1385873999007") == "1385873999007"
