"""Goal: levels, delays and times give the same delivery time, and invalid values are rejected.

Method: plain values; the table of levels is RocketMQ's.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._core.delays import (
    AHEAD_MS_MAX,
    LEVELS_MS,
    check_deliver_time,
    deliver_time,
    parse_duration_ms,
)
from batonmq.errors import InvalidArgument, LimitExceeded

NOW = 1_700_000_000_000
SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def test_levels_are_those_of_rocketmq() -> None:
    expected = (
        SECOND, 5 * SECOND, 10 * SECOND, 30 * SECOND,
        *(n * MINUTE for n in range(1, 11)),
        20 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR,
    )  # fmt: skip
    assert expected == LEVELS_MS


def test_time_delay_and_level_give_a_delivery_time() -> None:
    assert deliver_time(NOW) == NOW
    assert deliver_time(NOW, deliver_at_unix_ms=NOW + 7) == NOW + 7
    assert deliver_time(NOW, deliver_at_unix_ms=1) == 1
    assert deliver_time(NOW, delay_ms=0) == NOW
    assert deliver_time(NOW, delay_ms=1_500) == NOW + 1_500
    assert deliver_time(NOW, delay_level=0) == NOW
    assert deliver_time(NOW, delay_level=3) == NOW + 10 * SECOND
    assert deliver_time(NOW, delay_level=18) == NOW + 2 * HOUR
    assert deliver_time(NOW, delay_level=99) == NOW + 2 * HOUR


@pytest.mark.parametrize(
    "values",
    [
        {"delay_ms": -1},
        {"delay_level": -1},
        {"deliver_at_unix_ms": 0},
        {"delay_ms": 1, "delay_level": 1},
        {"deliver_at_unix_ms": NOW, "delay_ms": 0},
    ],
)
def test_contradicting_or_negative_values_are_rejected(values: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        deliver_time(NOW, **values)


@pytest.mark.parametrize("name", ["deliver_at_unix_ms", "delay_ms", "delay_level"])
def test_value_that_is_no_integer_is_rejected(name: str) -> None:
    values: dict[str, Any] = {name: 2.0}
    with pytest.raises(InvalidArgument, match=f"{name} must be an integer, got 2.0") as refused:
        deliver_time(NOW, **values)
    assert refused.value.facts == {"field": name}


def test_delay_of_more_than_40_days_is_rejected() -> None:
    assert check_deliver_time(NOW + AHEAD_MS_MAX, NOW) == NOW + AHEAD_MS_MAX
    with pytest.raises(LimitExceeded) as refused:
        check_deliver_time(NOW + AHEAD_MS_MAX + 1, NOW)
    assert "40 days" in refused.value.remedy
    assert refused.value.facts["limit"] == str(40 * 24 * HOUR)
    assert refused.value.facts["actual"] == str(40 * 24 * HOUR + 1)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0s", 0),
        ("500ms", 500),
        ("10s", 10_000),
        ("5m", 5 * MINUTE),
        ("2h", 2 * HOUR),
        ("40d", AHEAD_MS_MAX),
        ("1d12h", 36 * HOUR),
        ("1h500ms", HOUR + 500),
        ("P1DT12H", 36 * HOUR),
        ("PT1H5M2S", HOUR + 5 * MINUTE + 2_000),
        ("P2D", 48 * HOUR),
    ],
)
def test_durations_are_parsed(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(
    "text", ["", "5", "s", "-5s", "1.5s", "5 s", "5w", "5S", "٣s", "2h-", "1h 5m"]
)
def test_other_texts_are_rejected_as_durations(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_duration_ms(text)


@pytest.mark.parametrize("text", ["P", "PT", "P5M", "PT5", "P1H", "pt5m", "P-1D", "PT1.5S"])
def test_iso_durations_are_whole_days_hours_minutes_and_seconds(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_duration_ms(text)
