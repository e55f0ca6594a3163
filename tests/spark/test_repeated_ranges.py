"""Goal: every repeated delivery is found, with the right cause.

Method: histories written by hand for each cause; random histories against a model that keeps the
last delivery of each single message; random filters against their expanded offsets.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq._core.ranges import normalize
from batonspark.repeated_ranges import (
    BUGS,
    HARMLESS,
    CommitEvent,
    DeliveryEvent,
    OwnerChange,
    QueueHistory,
    RepeatCause,
    ResetEvent,
    repeated_ranges,
    undelivered_commits,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "spark.md"
A = DeliveryEvent(1_000, 1, "a", 0, 10)
B = DeliveryEvent(60_000, 2, "b", 4, 12)


def causes(*deliveries: DeliveryEvent, **history: object) -> dict[str, tuple[int, int]]:
    ranges = list(repeated_ranges(QueueHistory(deliveries, **history)))  # type: ignore[arg-type]
    assert len({one.cause for one in ranges}) == len(ranges)
    return {str(one.cause): (one.first_offset, one.next_offset) for one in ranges}


def passed(manner: str, *, stolen: bool = False) -> list[OwnerChange]:
    granted = OwnerChange(50_000, 2, "b", previous_client_id="a", stolen=stolen)
    handed = OwnerChange(50_000, 2, "b", 1, "a", manner)
    return [granted, handed] if manner else [granted]


def test_single_delivery_is_not_a_repeat() -> None:
    assert (
        causes(A, DeliveryEvent(2_000, 1, "a", 10, 20), DeliveryEvent(3_000, 2, "b", 20, 30)) == {}
    )


def test_manner_of_the_hand_over_is_the_cause() -> None:
    for manner, cause in {
        "LEASE_EXPIRED": "crash",
        "DRAIN_TIMED_OUT": "timeout",
        "UNFINISHED": "unfinished",
        "FORCED": "forced",
    }.items():
        assert causes(A, B, passings=passed(manner)) == {cause: (4, 10)}


HANDED = DeliveryEvent(10_000, 1, "remote-1", 0, 10)
AGAIN = DeliveryEvent(45_000, 1, "remote-2", 4, 6)


def test_message_that_a_gateway_hands_out_again_under_its_token_had_a_lease_that_ended() -> None:
    (found,) = repeated_ranges(QueueHistory([A], hand_outs=[HANDED, AGAIN]))
    assert (found.cause, found.first_offset, found.next_offset) == (RepeatCause.LEASE, 4, 6)
    assert (found.previous_client_id, found.client_id) == ("remote-1", "remote-2")
    assert found.cause not in HARMLESS | BUGS


def test_message_that_a_gateway_hands_out_after_its_acknowledgement_is_a_bug() -> None:
    commits = [CommitEvent(30_000, 1, 5, 10)]
    assert causes(A, hand_outs=[HANDED, AGAIN], commits=commits) == {
        "acked": (4, 5),
        "lease": (5, 6),
    }
    late = [CommitEvent(44_000, 1, 10, 10)]
    assert causes(A, hand_outs=[HANDED, AGAIN], commits=late) == {"lease": (4, 6)}, (
        "clocks are apart: the commit may be later"
    )


def test_hand_outs_after_a_reset_are_explained_by_it() -> None:
    resets = [ResetEvent(40_000, 0, "ops", "again")]
    commits = [CommitEvent(30_000, 1, 10, 10)]
    found = causes(A, hand_outs=[HANDED, AGAIN], commits=commits, resets=resets)
    assert found == {"reset": (4, 6)}


def test_hand_outs_under_another_token_are_repeats_of_the_owner_only() -> None:
    other = DeliveryEvent(70_000, 2, "remote-2", 4, 12)
    ranges = [
        one.cause
        for one in repeated_ranges(
            QueueHistory([A, B], passings=passed("LEASE_EXPIRED"), hand_outs=[HANDED, other])
        )
    ]
    assert ranges == [RepeatCause.CRASH]


def test_repeat_names_both_owners_and_their_tokens() -> None:
    (one,) = repeated_ranges(QueueHistory([A, B], passed("LEASE_EXPIRED")))
    assert (one.previous_client_id, one.previous_token, one.previous_unix_ms) == ("a", 1, 1_000)
    assert (one.client_id, one.token, one.unix_ms, one.count) == ("b", 2, 60_000, 6)


def test_grant_alone_distinguishes_a_crash_from_a_reacquired_queue() -> None:
    assert causes(A, B, passings=passed("", stolen=True)) == {"crash": (4, 10)}
    again = [OwnerChange(50_000, 2, "a", previous_client_id="a")]
    assert causes(A, DeliveryEvent(60_000, 2, "a", 4, 12), passings=again) == {
        "reacquired": (4, 10)
    }


def test_queue_released_by_an_operator_and_granted_later_was_forced() -> None:
    taken = [OwnerChange(40_000, 2, "", previous_client_id="a", manner="FORCED")]
    granted = [OwnerChange(50_000, 3, "b")]
    later = DeliveryEvent(60_000, 3, "b", 4, 12)
    assert causes(A, later, passings=[*granted, *taken]) == {"forced": (4, 10)}


def test_unstarted_messages_of_a_graceful_hand_over_are_returned() -> None:
    commits = [CommitEvent(49_000, 1, 4, 4)]
    assert causes(A, B, passings=passed("GRACEFUL"), commits=commits) == {"returned": (4, 10)}


def test_message_marked_as_started_after_a_graceful_hand_over_is_a_bug() -> None:
    flagged = DeliveryEvent(60_000, 2, "b", 4, 12, redelivered_count=1)
    assert causes(A, flagged, passings=passed("GRACEFUL")) == {"graceful": (4, 10)}


def test_redelivery_mark_after_a_graceful_hand_over_is_a_bug_without_a_known_first_delivery() -> (
    None
):
    flagged = DeliveryEvent(60_000, 2, "b", 10, 12, redelivered_count=1)
    assert causes(A, flagged, passings=passed("GRACEFUL")) == {"graceful": (10, 12)}
    assert causes(A, flagged, passings=passed("LEASE_EXPIRED")) == {}


def test_redelivered_acked_message_is_a_bug_for_every_manner() -> None:
    commits = [CommitEvent(49_000, 1, 7, 10)]
    for manner, cause in {"GRACEFUL": "returned", "LEASE_EXPIRED": "crash"}.items():
        causes_found = causes(A, B, passings=passed(manner), commits=commits)
        assert causes_found == {"acked": (4, 7), cause: (7, 10)}


def test_delivered_acked_message_is_a_bug_without_a_known_first_delivery() -> None:
    commits = [CommitEvent(500, 1, 7, 10), CommitEvent(61_000, 2, 12, 12)]
    assert causes(B, commits=commits) == {"acked": (4, 7)}
    assert causes(B, commits=commits, resets=[ResetEvent(55_000, 5)]) == {"acked": (4, 5)}
    assert causes(DeliveryEvent(2_000, 1, "a", 4, 12), commits=commits) == {}


def test_reset_explains_repeats_behind_its_target() -> None:
    commits = [CommitEvent(49_000, 1, 10, 10)]
    resets = [ResetEvent(55_000, 6, "joe", "test")]
    passings = passed("UNFINISHED")
    causes_found = causes(A, B, passings=passings, commits=commits, resets=resets)
    assert causes_found == {"reset": (6, 10), "acked": (4, 6)}
    late = [ResetEvent(90_000, 0)]
    assert causes(A, B, passings=passings, commits=commits, resets=late) == {"acked": (4, 10)}


def test_second_pull_of_the_same_owner_is_repeated() -> None:
    assert causes(A, DeliveryEvent(2_000, 1, "a", 5, 15)) == {"repeated": (5, 10)}


def test_repeats_of_a_queue_without_owner_are_unowned() -> None:
    one, other = DeliveryEvent(1_000, 0, "a", 0, 5), DeliveryEvent(2_000, 0, "b", 0, 5)
    assert causes(one, other) == {"unowned": (0, 5)}


def test_first_delivery_in_a_retry_topic_is_a_retry_and_the_next_a_repeat() -> None:
    ranges = list(repeated_ranges(QueueHistory([A, B], passed("LEASE_EXPIRED"), is_retry=True)))
    counts: Counter[str] = Counter()
    for one in ranges:
        counts[one.cause] += one.count
    assert counts == {"retry": 12, "crash": 6}


def test_unknown_end_of_an_ownership_leaves_the_cause_unknown() -> None:
    assert causes(A, B) == {"unknown": (4, 10)}


def test_filtered_offsets_are_not_repeats() -> None:
    one = DeliveryEvent(1_000, 1, "a", 0, 10, runs=[2, 3, 1, 2, 2])
    assert list(one.islands()) == [(2, 5), (6, 8)]
    other = DeliveryEvent(60_000, 2, "b", 0, 10, runs=[4, 3, 3])
    ranges = list(repeated_ranges(QueueHistory([one, other], passed("LEASE_EXPIRED"))))
    assert [(r.first_offset, r.next_offset) for r in ranges] == [(4, 5), (6, 7)]


def test_progress_without_deliveries_is_uncovered() -> None:
    history = QueueHistory(
        [DeliveryEvent(1_000, 1, "a", 0, 10), DeliveryEvent(3_000, 1, "a", 15, 20)],
        commits=[CommitEvent(1_500, 1, 5, 10), CommitEvent(4_000, 1, 20, 20)],
    )
    assert undelivered_commits(history) == [(10, 15)]
    assert undelivered_commits(QueueHistory(history.deliveries, commits=history.commits[:1])) == []


def test_progress_reset_by_an_operator_needs_no_deliveries() -> None:
    commits = [
        CommitEvent(1_000, 1, 5, 5),
        CommitEvent(9_000, 3, 105, 105),
        CommitEvent(9_500, 3, 110, 110),
    ]
    history = QueueHistory(
        [DeliveryEvent(9_200, 3, "a", 100, 110)], (), commits, [ResetEvent(5_000, 100)]
    )
    assert undelivered_commits(history) == []


def test_latest_progress_may_be_ahead_of_the_delivery_events() -> None:
    commits = [CommitEvent(1_000, 1, 5, 5), CommitEvent(9_000, 1, 50, 50)]
    assert undelivered_commits(QueueHistory([], (), commits)) == [(5, 50)]
    assert undelivered_commits(QueueHistory([], (), commits, settled_unix_ms=8_000)) == []


@st.composite
def deliveries(draw: st.DrawFn) -> list[DeliveryEvent]:
    """Draw deliveries in the order of their tokens and of time."""
    drawn, token = [], 1
    for place in range(draw(st.integers(0, 12))):
        token += draw(st.integers(0, 1))
        first, size = draw(st.integers(0, 30)), draw(st.integers(1, 15))
        runs: list[int] = []
        if draw(st.booleans()):
            kept = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            runs = _runs(kept)
        drawn.append(DeliveryEvent(place * 10_000, token, f"c{token}", first, first + size, runs))
    return drawn


def _runs(kept: list[bool]) -> list[int]:
    if all(kept):
        return []
    runs, state = [0], False
    for one in kept:
        if one != state:
            runs.append(0)
            state = one
        runs[-1] += 1
    return runs


@settings(deadline=None)
@given(deliveries())
def test_ranges_give_the_same_repeats_as_single_messages(history: list[DeliveryEvent]) -> None:
    last: dict[int, DeliveryEvent] = {}
    expected: Counter[tuple[int, int, int]] = Counter()
    for delivery in history:
        for first, next_ in delivery.islands():
            for offset in range(first, next_):
                if offset in last:
                    expected[offset, last[offset].token, delivery.token] += 1
                last[offset] = delivery
    passings = [OwnerChange(0, token, f"c{token}", stolen=True) for token in range(1, 15)]
    counts: Counter[tuple[int, int, int]] = Counter()
    for one in repeated_ranges(QueueHistory(history, passings)):
        assert one.cause == (
            RepeatCause.REPEATED if one.previous_token == one.token else RepeatCause.CRASH
        )
        for offset in range(one.first_offset, one.next_offset):
            counts[offset, one.previous_token, one.token] += 1
    assert counts == expected


@settings(deadline=None)
@given(deliveries(), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 45)), max_size=8))
def test_redelivered_acked_messages_are_always_found(
    history: list[DeliveryEvent], acks: list[tuple[int, int]]
) -> None:
    commits = [CommitEvent(0, token, offset, offset) for token, offset in acks]
    last: dict[int, int] = {}
    expected: list[tuple[int, int]] = []
    for delivery in history:
        for first, next_ in delivery.islands():
            for offset in range(first, next_):
                before = last.get(offset, 0)
                if any(before <= t < delivery.token and offset < c for t, c in acks):
                    expected.append((offset, offset + 1))
                last[offset] = delivery.token
    bugs = [
        one
        for one in repeated_ranges(QueueHistory(history, (), commits))
        if one.cause is RepeatCause.ACKED
    ]
    assert normalize([(one.first_offset, one.next_offset) for one in bugs]) == normalize(expected)
    assert sum(one.count for one in bugs) == len(expected)


def test_reference_page_describes_every_cause() -> None:
    text = PAGE.read_text()
    assert [cause for cause in RepeatCause if f"| `{cause}` |" not in text] == []
