"""The lease of a queue, as its owner measures it.

Goal: the own deadline passes before the lease expires at the lock manager, is extended by accepted
calls, and never moves back under one grant (protocol section 8).
Method: the pure core with plain values.
"""

from __future__ import annotations

from batonmq._core.owner_lease import DEADLINE_MARGIN_MS, OwnerLease


def granted(sent_ms: int, lease_ms: int = 30_000) -> OwnerLease:
    lease = OwnerLease()
    lease.begin(sent_ms, lease_ms)
    return lease


def test_deadline_has_passed_before_the_first_grant() -> None:
    assert OwnerLease().has_passed(0)


def test_deadline_is_the_lease_from_sending_less_the_margin() -> None:
    lease = granted(1_000)
    assert not lease.has_passed(1_000 + 30_000 - DEADLINE_MARGIN_MS - 1)
    assert lease.has_passed(1_000 + 30_000 - DEADLINE_MARGIN_MS)


def test_accepted_call_extends_the_deadline() -> None:
    lease = granted(1_000)
    lease.renew(6_000)
    assert lease.deadline_ms == 33_000


def test_late_answer_to_an_earlier_call_does_not_shorten_the_deadline() -> None:
    lease = granted(1_000)
    lease.renew(6_000)
    lease.renew(2_000)
    assert lease.deadline_ms == 33_000


def test_new_lease_length_applies_from_the_call_that_has_it() -> None:
    lease = granted(1_000)
    lease.renew(6_000, 40_000)
    assert lease.deadline_ms == 43_000
    lease.renew(7_000)
    assert lease.deadline_ms == 44_000


def test_new_grant_voids_an_earlier_deadline() -> None:
    lease = granted(1_000)
    lease.begin(2_000, 10_000)
    assert lease.deadline_ms == 9_000


def test_deadline_is_near_within_half_a_lease() -> None:
    lease = granted(0)
    assert not lease.is_near(11_999)
    assert lease.is_near(12_000)
