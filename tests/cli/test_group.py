"""Goal: unusual states of groups and locks are described in words.

Method: hand-made reports, and their descriptions.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from batonmq.admin.group_reports import (
    Group,
    GroupProgress,
    Member,
    Pause,
    QueueDiagnosis,
    RefusedClient,
    StagedSubscriptions,
    Subscription,
)
from batonmq.admin.locks import Denial, LockDetail
from batonmq.admin.placement import OffsetsPlacement
from batonmq.admin.reports import Lock
from batonmq.cli import group_lag, lock, output
from batonmq.cli.group import describe_settings, state
from batonmq.errors import Difference, Held, SubscriptionConflict

GROUP = Group(
    name="g",
    generation=7,
    members=(),
    subscriptions=(Subscription("s", "*"), Subscription("t", "A||B")),
    subscription_generation=2,
    model="clustering",
    consume_from="last",
    order="none",
    policy="staged",
    ownership="on",
    strategy="sticky",
    assignments=(),
    staged=None,
    pause=None,
)
MEMBER = Member("c1", 1, "h1", 0)
PAUSE = Pause("me@h", "a flood", 0)
STAGED = StagedSubscriptions((Subscription("t", "A"),), draining=False, since_unix_ms=0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "Empty"),
        ({"members": (MEMBER,)}, "Stable"),
        ({"members": (MEMBER,), "staged": STAGED}, "Staged"),
        ({"members": (MEMBER,), "staged": replace(STAGED, draining=True)}, "Draining"),
        ({"members": (MEMBER,), "staged": STAGED, "pause": PAUSE}, "Paused"),
    ],
)
def test_state_is_the_first_one_that_applies(changes: dict[str, object], word: str) -> None:
    assert state(asdict(replace(GROUP, **changes))) == word  # type: ignore[arg-type]


def test_stable_group_is_described_in_three_lines() -> None:
    assert list(
        describe_settings(GroupProgress(GROUP, (), (), ()), OffsetsPlacement("offsets", 2, ""))
    ) == [
        "clustering, from last; policy staged, ownership on, strategy sticky",
        "generation 7; subscription 2: s *, t A||B",
        "placed on offsets set offsets",
    ]


def test_moving_group_is_described_with_both_sets() -> None:
    lines = list(
        describe_settings(
            GroupProgress(GROUP, (), (), ()), OffsetsPlacement("offsets-b", 1, "offsets")
        )
    )
    assert lines[2:] == ["moving from offsets set offsets to offsets-b"]


def test_unusual_states_are_described_with_name_and_time() -> None:
    difference = Difference("t", "expression", "c9", "C", "c1", "A||B")
    error = SubscriptionConflict("no", differences=(difference,))
    group = replace(
        GROUP, members=(replace(MEMBER, differs=True),), pause=PAUSE, staged=STAGED, order="queue"
    )
    refused = RefusedClient("c9", 9, "h9", 0, error)
    lines = list(describe_settings(GroupProgress(group, (), (refused,), ()), None))
    since = "1970-01-01T00:00:00.000Z"
    assert lines[0].startswith("clustering, ordered by queue, from last;")
    assert lines[2:] == [
        f"paused by me@h since {since}: a flood",
        f"since {since} staged: subscription t A",
        "c1 on h1 has another subscription",
        f"rejected since {since}: c9 on h9: SUBSCRIPTION_CONFLICT: no",
        "  t expression: c9 has 'C', c1 has 'A||B'",
    ]


DIAGNOSIS = QueueDiagnosis("g", "t", "b", 0, "MOVING", "m", "", {}, 3, 1_500, 5, 8, "c1", 0)


def test_total_lag_counts_queues_with_a_known_lag() -> None:
    away = replace(DIAGNOSIS, queue_id=1, lag=None, lag_ms=None)
    late = replace(DIAGNOSIS, queue_id=2, lag=4, lag_ms=90_001)
    assert group_lag.total([DIAGNOSIS, away, late]) == {
        "lag": 7,
        "lag_ms": 90_001,
        "unknown_count": 1,
    }
    assert group_lag.total([]) == {"lag": 0, "lag_ms": 0, "unknown_count": 0}


def test_lag_in_seconds_is_exact_to_the_millisecond() -> None:
    assert [output.seconds(ms) for ms in (0, 1, 90_001, None)] == [
        "0.000",
        "0.001",
        "90.001",
        None,
    ]


def test_lock_description_has_the_fields_that_the_table_omits() -> None:
    held = Lock("g", "t", "b", 0, "pending", "c1", 1, 5, 0, 0, (), 1, 1)
    denial = Denial("c2", Held("held by c1"), 3_000)
    detail = LockDetail(held, 9, 12_000, "persist", "a1", 6, owner_evicted=True, denials=(denial,))
    assert list(lock.describe_lock(detail)) == [
        "lease of c1 expires in 12s",
        "c1 is not a member of the group any more",
        "hand-over in progress: persist, attempt a1",
        "offsets has token 6",
        "the term of the lock manager is 9",
        "denied 3s ago: c2: HELD: held by c1",
    ]
    over = replace(detail, lease_left_ms=0)
    assert next(lock.describe_lock(over)) == "lease of c1 has expired"
    unknown = Lock("g", "t", "b", 99, "free", None, None, 0, 0, 0, (), 0, 0)
    never = LockDetail(unknown, 9, 0, "", "", None, owner_evicted=False, denials=())
    assert list(lock.describe_lock(never)) == [
        "this queue has never had an owner; check the names with baton lock list",
        "the term of the lock manager is 9",
    ]
