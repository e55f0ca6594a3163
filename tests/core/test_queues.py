"""Incarnations and the owner numbers of their identities.

Goal: an owner number that is not known matches every one; two known ones match if they are equal
(protocol section 3).
Method: pairs of incarnations, in both orders.
"""

from __future__ import annotations

import pytest

from batonmq._core.queues import Incarnation

UNKNOWN, OWNED, STOLEN = Incarnation("a", 1), Incarnation("a", 1, 11), Incarnation("a", 1, 12)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (UNKNOWN, UNKNOWN, True),
        (UNKNOWN, OWNED, True),
        (OWNED, OWNED, True),
        (OWNED, STOLEN, False),
        (OWNED, Incarnation("a", 2, 11), False),
        (OWNED, Incarnation("b", 1, 11), False),
        (UNKNOWN, Incarnation("a", 2), False),
    ],
)
def test_incarnations_match_unless_ids_or_known_owners_differ(
    one: Incarnation, other: Incarnation, same: bool
) -> None:
    assert one.matches(other) is other.matches(one) is same


def test_no_incarnation_matches_the_absence_of_one() -> None:
    assert not UNKNOWN.matches(None)


def test_known_owner_replaces_an_unknown_one_and_no_other() -> None:
    assert UNKNOWN.known_as(OWNED) == OWNED
    assert OWNED.known_as(UNKNOWN) == OWNED
    assert STOLEN.known_as(OWNED) == STOLEN
    assert UNKNOWN.known_as(Incarnation("b", 1, 11)) == UNKNOWN
