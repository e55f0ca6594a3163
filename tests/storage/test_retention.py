"""Goal: retention removes the oldest segments, no more than needed, and never protected ones.

Method: decisions are tested with plain values, disk states with the numbers of the watermarks; then
properties over arbitrary logs.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from batonmq.errors import DataLoss
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.core.floors import QueueFloor, decode, encode
from batonmq_server.storage.core.retention import (
    SEGMENTS_PER_ROUND,
    CleaningTime,
    DiskState,
    DiskUsage,
    Retention,
    RetentionPolicy,
    SealedSegment,
)

SIZE = 100
HOUR_MS = 3_600_000
NOW = 1_000 * HOUR_MS


def policy(age_ms_max: int = 48 * HOUR_MS, log_bytes_max: int = 0) -> RetentionPolicy:
    return RetentionPolicy(age_ms_max=age_ms_max, hours=frozenset({4}), log_bytes_max=log_bytes_max)


def log_of(count: int) -> list[SealedSegment]:
    return [SealedSegment(n * SIZE, (n + 1) * SIZE) for n in range(count)]


def removed(
    retention: Retention,
    ages_h: list[int],
    *,
    hour: int = 4,
    log_bytes: int | None = None,
    held_from: float = math.inf,
) -> int:
    """Return how many of the segments, oldest first with these ages, are removed."""
    sealed = log_of(len(ages_h))
    size = SIZE * (len(ages_h) + 1) if log_bytes is None else log_bytes
    keep_from = retention.keep_from(
        sealed,
        size,
        CleaningTime(NOW, hour),
        lambda segment: NOW - ages_h[segment.first_position // SIZE] * HOUR_MS,
        lambda: held_from,
    )
    return keep_from // SIZE


def at(percent: float, *, total: int = 1_000, **settings: int) -> Retention:
    """Return a Retention that has observed this disk usage."""
    retention = Retention(policy(**settings), SIZE)
    observe(retention, percent, total=total)
    return retention


def observe(
    retention: Retention, percent: float, *, total: int = 1_000, now_ms: int = 0
) -> DiskState:
    used = round(total * percent / 100)
    return retention.observe(DiskUsage(used, total - used), 0, now_ms)


def test_topic_with_a_longer_retention_holds_the_log() -> None:
    for held_from, count in ((0, 0), (SIZE - 1, 0), (SIZE, 1), (3 * SIZE, 2), (math.inf, 2)):
        assert removed(at(50), [60, 50, 47], held_from=held_from) == count


def test_limits_of_size_and_disk_are_stronger_than_a_hold() -> None:
    assert removed(at(50, log_bytes_max=3 * SIZE), [60, 50, 47], held_from=0) == 1
    assert removed(at(95), [60, 50, 47], held_from=0) > 0


def test_expired_segments_are_removed_at_the_set_hour() -> None:
    assert removed(at(50), [60, 50, 49, 47, 10]) == 3
    assert removed(at(50), [60, 50, 49], hour=5) == 0


def test_segment_of_exactly_the_retention_time_is_removed() -> None:
    assert removed(at(50), [48]) == 1


def test_young_segment_protects_the_older_ones_after_it() -> None:
    assert removed(at(50), [60, 10, 60]) == 1


def test_no_segment_expires_without_a_retention_time() -> None:
    assert removed(at(80, age_ms_max=0), [10_000]) == 0


def test_log_is_cut_to_its_maximum_size_at_any_hour() -> None:
    assert removed(at(50, log_bytes_max=400), [0] * 5, hour=12) == 2
    assert removed(at(50, log_bytes_max=600), [0] * 5, hour=12) == 0


@pytest.mark.parametrize(
    ("percent", "state"),
    [
        (0, DiskState.OK),
        (69.9, DiskState.OK),
        (70, DiskState.WARN),
        (75, DiskState.CLEAN),
        (85, DiskState.CLEAN_FORCIBLY),
        (89.9, DiskState.CLEAN_FORCIBLY),
        (90, DiskState.FULL),
        (100, DiskState.FULL),
    ],
)
def test_states_begin_at_their_watermarks(percent: float, state: DiskState) -> None:
    assert at(percent).state is state


def test_expired_segments_are_removed_at_any_hour_from_state_clean_on() -> None:
    assert removed(at(74.9), [60, 10], hour=12) == 0
    assert removed(at(75), [60, 10], hour=12) == 1


def test_forced_cleaning_removes_just_enough() -> None:
    assert removed(at(84.9), [0] * 5, hour=12) == 0
    assert removed(at(85), [0] * 5, hour=12) == 1, "85 % itself is too much"
    assert removed(at(94.8), [0] * 5, hour=12) == 1
    assert removed(at(95.0), [0] * 5, hour=12) == 2


def test_writes_stop_at_the_last_watermark_and_resume_below_the_one_before() -> None:
    retention = at(89.9)
    rejected = [
        retention.rejection() is not None
        for percent in (90, 86, 85, 84.9, 89.9, 90.1)
        if observe(retention, percent)
    ]
    assert rejected == [True, True, True, False, False, True]


def test_rejection_has_numbers_and_a_remedy() -> None:
    rejection = at(92.5).rejection()
    assert rejection is not None
    assert rejection.facts == {"used_percent": "92.5", "limit_percent": "90", "free_bytes": "75"}
    assert "below 85 %" in rejection.remedy
    assert rejection.retry_after_ms > 0


def test_writes_are_rejected_until_a_segment_fits() -> None:
    retention = at(50, total=150)
    retention.record_no_space()
    assert retention.rejection() is not None
    assert removed(retention, [0] * 5, hour=12) == 1, "room is made for one"
    assert observe(retention, 40, total=150) is DiskState.FULL
    assert observe(retention, 30, total=150) is DiskState.OK
    assert retention.rejection() is None


@pytest.mark.parametrize(
    ("used", "free", "has_room"),
    [
        (0, 0, False),
        (8_500, 1_500, False),
        (839, 161, False),
        (8_000, 2_000, True),
        (0, 199, False),
    ],
)
def test_disk_has_room_for_a_leader_if_it_takes_writes_for_a_while(
    used: int, free: int, has_room: bool
) -> None:
    retention = Retention(policy(), SIZE)
    retention.observe(DiskUsage(used, free), 0, 0)
    assert retention.has_room == has_room


def test_round_removes_a_bounded_number_of_segments() -> None:
    assert removed(at(50), [60] * (SEGMENTS_PER_ROUND + 5)) == SEGMENTS_PER_ROUND


def test_seconds_until_full_follow_the_rate_of_the_last_minutes() -> None:
    retention = at(10, total=100_000)
    for second in range(1, 61):
        observe(retention, 10 + second * 0.1, total=100_000, now_ms=second * 1_000)
    assert retention.seconds_until_full == pytest.approx((90 - 16) / 0.1, rel=0.01)
    for second in range(61, 400):
        observe(retention, 16, total=100_000, now_ms=second * 1_000)
    assert retention.seconds_until_full == math.inf
    observe(retention, 95, total=100_000, now_ms=400_000)
    assert retention.seconds_until_full == 0


def test_allocated_but_unwritten_space_does_not_count_as_growth() -> None:
    retention = Retention(policy(), SIZE)
    for second in range(100):
        retention.observe(
            DiskUsage(500 + 100 * (second >= 20), 400), 100 * (second >= 20), 1_000 * second
        )
    assert retention.seconds_until_full == math.inf


def test_disk_of_no_size_is_not_full() -> None:
    assert Retention(policy(), SIZE).observe(DiskUsage(0, 0), 0, 0) is DiskState.OK


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 100), max_size=30).map(lambda ages: sorted(ages, reverse=True)),
    st.integers(0, 23),
    st.floats(0, 100),
    st.integers(0, 4_000),
)
def test_each_removed_segment_had_a_reason(
    ages_h: list[int], hour: int, percent: float, log_bytes_max: int
) -> None:
    if not ages_h:
        return
    retention = at(percent, total=3_000, log_bytes_max=log_bytes_max)
    count = removed(retention, ages_h, hour=hour)
    size_before_last = SIZE * (len(ages_h) + 1) - SIZE * (count - 1)
    used_before_last = retention.usage.used_bytes - SIZE * (count - 1)
    if count:
        assert (
            (ages_h[count - 1] >= 48 and (hour == 4 or percent >= 74.9))
            or 0 < log_bytes_max < size_before_last
            or used_before_last >= 0.85 * 3_000
        )
    if count < min(len(ages_h), SEGMENTS_PER_ROUND):
        assert not (ages_h[count] >= 48 and hour == 4)
        assert not 0 < log_bytes_max < size_before_last - SIZE
        assert used_before_last - SIZE < 0.85 * 3_000


FLOORS = [
    QueueFloor("orders", 7, 3, 1 << 40),
    QueueFloor("a" * 127, 1 << 50, 65_535, 1),
    QueueFloor("b", 1, 0, 9),
]


def test_floors_are_decoded_as_they_were_encoded() -> None:
    assert decode(encode(FLOORS)) == FLOORS
    assert decode(encode([])) == []
    assert decode(b"") == []


def test_bytes_of_floors_do_not_change() -> None:
    assert encode([QueueFloor("ab", 7, 3, 258)]).hex() == (
        "42544e4f" "0001" "0000" "00000001"
        "02" "6162" "0000000000000007" "00000003" "0000000000000102" "4e366154"
    )  # fmt: skip


def test_damaged_floors_are_rejected() -> None:
    raw = encode(FLOORS)
    for at_ in range(len(raw)):
        with pytest.raises(DataLoss):
            decode(raw[:at_] + bytes((raw[at_] ^ 1,)) + raw[at_ + 1 :])
        if at_:
            with pytest.raises(DataLoss):
                decode(raw[:at_])


def settings_with(**values: object) -> StorageSettings:
    return StorageSettings(cluster="c", etcd="127.0.0.1:1", **values)  # type: ignore[arg-type]


def test_settings_become_the_policy() -> None:
    chosen = settings_with(retention_ms=5, retention_hours="4,16", retention_bytes=7)
    assert chosen.retention_policy() == RetentionPolicy(
        age_ms_max=5, hours=frozenset({4, 16}), log_bytes_max=7
    )
    default = settings_with().retention_policy()
    assert (default.age_ms_max, default.hours) == (48 * HOUR_MS, frozenset({4}))
    assert settings_with(retention_hours="any").retention_policy().hours == frozenset(range(24))


@pytest.mark.parametrize(
    "values",
    [
        {"retention_hours": "24"},
        {"retention_hours": ""},
        {"retention_hours": "4;5"},
        {"disk_warn_percent": 75},
        {"disk_full_percent": 80},
        {"disk_full_percent": 101},
    ],
)
def test_invalid_settings_are_rejected(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        settings_with(**values)
