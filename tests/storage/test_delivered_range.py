"""Goal: reported ranges contain exactly the delivered offsets, however pulls were filtered, joined
and split.

Method: Hypothesis generates consecutive pulls; a set of integers is the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq_server.storage.core import delivered_range as delivered
from batonmq_server.storage.core.delivered_range import DeliveredRange, PullDelivery, ReportedRange


def offsets_of(report: ReportedRange) -> list[int]:
    """Return the offsets that the runs describe."""
    if not report.runs:
        return list(range(report.first_offset, report.next_offset))
    offsets: list[int] = []
    at = report.first_offset
    for index, length in enumerate(report.runs):
        if index % 2:
            offsets += range(at, at + length)
        at += length
    assert at == report.next_offset
    return offsets


PULLS = st.lists(
    st.tuples(st.lists(st.booleans(), max_size=30), st.booleans()), min_size=1, max_size=12
)


@given(PULLS, st.integers(0, 5), st.integers(1, 4))
def test_runs_name_the_delivered_offsets(
    pulls: Sequence[tuple[list[bool], bool]], lost_count: int, islands_max: int
) -> None:
    begin = at = 100
    expected: list[int] = []
    ranges: list[DeliveredRange] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivered, "ISLANDS_MAX", islands_max)
        for index, (kept, everything) in enumerate(pulls):
            lost = lost_count if index == 0 else 0
            first = at + lost
            step = PullDelivery(
                first_offset=at,
                next_offset=first + len(kept),
                kept=None if everything else np.flatnonzero(np.array(kept, bool)),
                lost_count=lost,
                redelivered_count=1,
                byte_count=10,
            )
            expected += [first + i for i, one in enumerate(kept) if one or everything]
            at = step.next_offset
            if not ranges or not ranges[-1].extend(step):
                ranges.append(DeliveredRange(step))
        reports = [one for range_ in ranges for one in range_.reports()]
    assert [offset for one in reports for offset in offsets_of(one)] == expected
    assert reports[0].first_offset == begin and reports[-1].next_offset == at
    assert all(a.next_offset == b.first_offset for a, b in pairwise(reports))
    assert sum(one.message_count for one in reports) == len(expected)
    assert sum(one.lost_count for one in reports) == lost_count
    assert sum(one.filtered_count for one in reports) == at - begin - lost_count - len(expected)
    assert sum(one.redelivered_count for one in reports) == len(pulls)
    assert sum(one.byte_count for one in reports) == 10 * len(pulls)
    assert all(len(one.runs) <= 2 * islands_max + 1 for one in reports)


def test_pulls_that_deliver_all_messages_are_one_range_without_runs() -> None:
    first = PullDelivery(first_offset=5, next_offset=7, redelivered_count=1, byte_count=20)
    range_ = DeliveredRange(first)
    assert range_.extend(PullDelivery(first_offset=7, next_offset=9, byte_count=30))
    assert list(range_.reports()) == [
        ReportedRange(
            first_offset=5,
            next_offset=9,
            message_count=4,
            filtered_count=0,
            lost_count=0,
            redelivered_count=1,
            byte_count=50,
            runs=[],
        )
    ]


def test_lost_messages_of_a_whole_range_have_a_run() -> None:
    step = PullDelivery(first_offset=5, next_offset=9, lost_count=3)
    (report,) = DeliveredRange(step).reports()
    assert (report.message_count, report.lost_count, report.runs) == (1, 3, [3, 1, 0])


def test_range_without_a_passing_message_has_a_run() -> None:
    step = PullDelivery(first_offset=5, next_offset=7, kept=np.empty(0, np.int64))
    (report,) = DeliveredRange(step).reports()
    assert (report.message_count, report.filtered_count, report.runs) == (0, 2, [2])


@pytest.mark.parametrize(
    "step",
    [
        PullDelivery(first_offset=8, next_offset=9),
        PullDelivery(first_offset=7, next_offset=9, lost_count=1),
    ],
)
def test_pull_from_another_offset_or_over_lost_messages_begins_a_range(step: PullDelivery) -> None:
    assert not DeliveredRange(PullDelivery(first_offset=5, next_offset=7)).extend(step)
