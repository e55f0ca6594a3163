"""Leases of one queue: single rules, then a state machine against a naive model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonmq_server.gateway.core.client_connections import Reception
from batonmq_server.gateway.core.message_leases import (
    RENEW_MS_MAX,
    LeaseState,
    LeaseTerms,
    QueueLeases,
)

TERMS = LeaseTerms("client", 1_000)
RENEWED = LeaseTerms("client", 1_000, renewed=True)


def alive(_: LeaseTerms) -> bool:
    return True


def dead(_: LeaseTerms) -> bool:
    return False


def leases_of(*offsets: int, attempts_max: int = 3, message_group: str = "") -> QueueLeases:
    leases = QueueLeases(attempts_max, count(1))
    for offset in offsets:
        leases.add(offset, 0, message_group)
    return leases


def test_message_whose_lease_expired_is_leased_again_with_the_next_attempt() -> None:
    leases = leases_of(7)
    (first,) = leases.lease(10, 0, TERMS)
    serial = first.serial
    assert leases.lease(10, 999, TERMS) == []
    assert leases.expire(999, alive) == []
    assert leases.lease(10, 999, TERMS) == []
    leases.expire(1_000, alive)
    (again,) = leases.lease(10, 1_000, TERMS)
    assert (again.offset, again.attempt) == (7, 2)
    assert leases.find(7, serial, 1_000) is None


def test_lease_is_not_found_once_its_time_is_over_even_before_it_was_expired() -> None:
    leases = leases_of(7)
    (lease,) = leases.lease(1, 0, TERMS)
    assert leases.find(7, lease.serial, 999) is lease
    assert leases.find(7, lease.serial, 1_000) is None
    assert not leases.begin_end(7, lease.serial, 1_000)


def test_ended_and_changed_leases_leave_no_expiries_behind() -> None:
    """Hours may pass before they are due: a busy queue would keep millions."""
    leases, hold = leases_of(), LeaseTerms("client", 12 * 3_600_000)
    leases.add(0, 0)
    (held,) = leases.lease(1, 0, hold)
    for offset in range(1, 5_000):
        leases.add(offset, 0)
        (lease,) = leases.lease(1, offset, hold)
        assert leases.begin_end(offset, lease.serial, offset)
        leases.end(offset)
        assert leases.change(0, held.serial, offset, hold.hold_ms) is held
    assert len(leases._expiries) < 2_000
    expiry_ms = leases.next_expiry_ms()
    assert expiry_ms is not None
    assert expiry_ms <= held.expires_ms
    assert leases.expire(held.expires_ms, alive) == []
    assert leases.ready_count == 1


def test_message_whose_attempts_are_used_up_is_exhausted_once() -> None:
    leases = leases_of(7, attempts_max=2)
    for now_ms in (0, 1_000):
        assert leases.expire(now_ms, alive) == []
        assert len(leases.lease(1, now_ms, TERMS)) == 1
    (exhausted,) = leases.expire(2_000, alive)
    assert (exhausted.offset, exhausted.attempt) == (7, 2)
    assert leases.expire(9_000, alive) == []
    assert leases.lease(1, 9_000, TERMS) == []
    leases.end(7)
    assert len(leases) == 0


def test_renewed_lease_lasts_as_long_as_its_client_lives_and_at_most_three_hours() -> None:
    leases = leases_of(7)
    (lease,) = leases.lease(1, 0, RENEWED)
    serial = lease.serial
    leases.expire(1_000, alive)
    assert leases.find(7, serial, 1_500) is lease
    leases.expire(RENEW_MS_MAX, alive)
    assert lease.state is LeaseState.READY
    (lease,) = leases.lease(1, RENEW_MS_MAX, RENEWED)
    leases.expire(RENEW_MS_MAX + 1_000, dead)
    assert lease.state is LeaseState.READY


def test_changed_lease_has_a_new_number_and_the_old_one_is_invalid() -> None:
    leases = leases_of(7)
    (lease,) = leases.lease(1, 0, RENEWED)
    old = lease.serial
    assert leases.change(7, old, 10, 50) is lease
    assert leases.find(7, old, 20) is None
    assert leases.find(7, lease.serial, 20) is lease
    leases.expire(60, alive)
    assert lease.state is LeaseState.READY, "a changed lease is not renewed"


def test_lease_changed_to_nothing_gives_the_message_back_at_once() -> None:
    leases = leases_of(7)
    (lease,) = leases.lease(1, 0, TERMS)
    leases.change(7, lease.serial, 10, 0)
    leases.expire(10, alive)
    assert [one.attempt for one in leases.lease(1, 10, TERMS)] == [2]


def test_delivery_that_did_not_reach_its_client_does_not_count() -> None:
    leases = leases_of(7)
    (lease,) = leases.lease(1, 0, TERMS)
    leases.undo(7, lease.serial)
    assert [one.attempt for one in leases.lease(1, 10, TERMS)] == [1]


def test_lapsed_lease_expires_at_once_and_its_attempt_counts() -> None:
    leases = leases_of(7)
    (lease,) = leases.lease(1, 0, RENEWED)
    serial = lease.serial
    leases.lapse(7, serial + 1, 10)
    assert leases.find(7, serial, 10) is lease, "another delivery"
    leases.lapse(7, serial, 10)
    assert leases.find(7, serial, 10) is None
    leases.expire(10, alive)
    assert [one.attempt for one in leases.lease(1, 10, TERMS)] == [2]


def test_message_that_has_used_half_of_its_attempts_is_leased_alone() -> None:
    """Its client may be unable to read it, and then uses no message of the same answer."""
    leases = leases_of(1, 2, 3, attempts_max=4)
    for now_ms in (0, 1_000):
        assert [one.offset for one in leases.lease(2, now_ms, TERMS)] == [1, 2]
        leases.expire(now_ms + 1_000, alive)
    leases.add(0, 0)
    assert [one.offset for one in leases.lease(9, 2_000, TERMS)] == [0]
    assert leases.lease(9, 2_000, TERMS, with_others=True) == []
    alone = [leases.lease(9, 2_000, TERMS) for _ in range(3)]
    assert [[(one.offset, one.attempt) for one in leased] for leased in alone] == [
        [(1, 3)],
        [(2, 3)],
        [(3, 1)],
    ]


def test_message_with_one_attempt_is_leased_with_others() -> None:
    leases = leases_of(1, 2, attempts_max=1)
    assert [one.offset for one in leases.lease(9, 0, TERMS)] == [1, 2]


def test_message_group_waits_while_its_first_message_is_in_flight_and_others_go_on() -> None:
    leases = leases_of(1, 2, message_group="a")
    leases.add(3, 0, "b")
    leases.add(4, 0)
    first = leases.lease(10, 0, TERMS)
    assert [one.offset for one in first] == [1, 3, 4]
    assert leases.begin_end(1, first[0].serial, 10)
    assert leases.lease(10, 10, TERMS) == [], "the outcome of 1 is not durable yet"
    leases.end(1)
    assert [one.offset for one in leases.lease(10, 10, TERMS)] == [2]


def test_message_group_starts_again_with_the_message_whose_lease_expired() -> None:
    leases = leases_of(1, 2, message_group="a")
    leases.lease(10, 0, TERMS)
    leases.expire(1_000, alive)
    assert [one.offset for one in leases.lease(10, 1_000, TERMS)] == [1]


def test_termination_of_a_client_ends_its_renewals_soon() -> None:
    leases = leases_of(1, 2)
    (mine,) = leases.lease(1, 0, RENEWED)
    (other,) = leases.lease(1, 0, LeaseTerms("other", 1_000, renewed=True))
    leases.expire_soon("client", 100)
    leases.expire(100, alive)
    assert (mine.state, other.state) == (LeaseState.READY, LeaseState.LEASED)


def test_answer_has_arrived_once_one_of_its_handles_is_used() -> None:
    leases = leases_of(1, 2, 3)
    for offset in (1, 2):
        reception = Reception("connection")
        (lease,) = leases.lease(
            1, 0, LeaseTerms("client", 1_000, renewed=True, reception=reception)
        )
        serial = lease.serial
        assert not leases.begin_end(offset, serial + 1, 10)
        assert not reception.arrived
        if offset == 1:
            assert leases.begin_end(offset, serial, 10)
        else:
            assert leases.change(offset, serial, 10, 500) is not None
        assert reception.arrived


def test_leases_know_what_each_client_holds_and_since_when() -> None:
    leases = leases_of(1, 2, 3)
    leases.lease(1, 10, TERMS)
    leases.lease(1, 20, LeaseTerms("other", 1_000))
    leases.lease(1, 30, TERMS)
    assert {name: list(held) for name, held in leases.leased.items()} == {
        "client": [1, 3],
        "other": [2],
    }
    assert leases.oldest_lease_ms() == 10
    (again,) = [one for one in leases.messages("other")]
    leases.undo(2, again.serial)
    assert "other" not in leases.leased
    leases.expire(1_010, alive)
    assert leases.oldest_lease_ms() == 30


def test_withdrawal_leaves_only_what_clients_hold() -> None:
    leases = leases_of(1, 2, message_group="a")
    leases.lease(1, 0, TERMS)
    leases.add(5, 0)
    assert leases.withdraw() == [2, 5]
    assert [leases.get(offset) is None for offset in (1, 2, 5)] == [False, True, True]
    leases.expire(1_000, alive)
    assert leases.withdraw() == [1]
    assert len(leases) == 0


@dataclass
class Modelled:
    """A message in the naive model: a list that is scanned for every question."""

    offset: int
    group: str
    attempt: int = 0
    serial: int = 0
    expires_ms: int = 0
    state: str = "ready"
    client: str = ""
    begin_ms: int = 0


class LeaseMachine(RuleBasedStateMachine):
    """The leases and the model take the same steps, and agree on every outcome."""

    attempts_max = 3

    def __init__(self) -> None:
        super().__init__()
        self.leases = QueueLeases(self.attempts_max, count(1))
        self.model: list[Modelled] = []
        self.now_ms = self.next_offset = 0
        self.serials: list[tuple[int, int]] = []

    def of(self, offset: int) -> Modelled | None:
        return next((one for one in self.model if one.offset == offset), None)

    def holds(self, offset: int, serial: int) -> Modelled | None:
        one = self.of(offset)
        held = one is not None and one.state == "leased" and one.serial == serial
        return one if held and one is not None and self.now_ms < one.expires_ms else None

    def may_be_leased(self, one: Modelled) -> bool:
        earlier = [two for two in self.model if two.group == one.group and two.offset < one.offset]
        return one.state == "ready" and not (one.group and earlier)

    @rule(group=st.sampled_from(["", "", "a", "b"]))
    def add(self, group: str) -> None:
        self.leases.add(self.next_offset, 0, group)
        self.model.append(Modelled(self.next_offset, group))
        self.next_offset += 1

    @rule(count_max=st.integers(1, 4), hold_ms=st.integers(0, 50), client=st.sampled_from("xy"))
    def lease(self, count_max: int, hold_ms: int, client: str) -> None:
        wanted = [one for one in self.model if self.may_be_leased(one)][:count_max]
        half = self.attempts_max // 2
        failed = [n for n, one in enumerate(wanted) if one.attempt and one.attempt >= half]
        if failed:
            wanted = wanted[: max(failed[0], 1)]
        got = self.leases.lease(count_max, self.now_ms, LeaseTerms(client, hold_ms))
        assert [one.offset for one in got] == [one.offset for one in wanted]
        for one, lease in zip(wanted, got, strict=True):
            one.state, one.serial = "leased", lease.serial
            one.client, one.begin_ms = client, self.now_ms
            one.attempt, one.expires_ms = one.attempt + 1, self.now_ms + hold_ms
            assert lease.attempt == one.attempt
            self.serials.append((one.offset, lease.serial))

    @precondition(lambda self: self.serials)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        offset, serial = data.draw(st.sampled_from(self.serials))
        one = self.holds(offset, serial)
        assert self.leases.begin_end(offset, serial, self.now_ms) == (one is not None)
        if one is not None:
            one.state = "ending"

    @precondition(lambda self: any(one.state == "ending" for one in self.model))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ending = [one for one in self.model if one.state == "ending"]
        one = data.draw(st.sampled_from(ending))
        self.leases.end(one.offset)
        self.model.remove(one)

    @precondition(lambda self: self.serials)
    @rule(data=st.data(), hold_ms=st.integers(0, 50))
    def change(self, data: st.DataObject, hold_ms: int) -> None:
        offset, serial = data.draw(st.sampled_from(self.serials))
        one = self.holds(offset, serial)
        lease = self.leases.change(offset, serial, self.now_ms, hold_ms)
        assert (lease is None) == (one is None)
        if one is not None and lease is not None:
            one.serial, one.expires_ms = lease.serial, self.now_ms + hold_ms
            self.serials.append((offset, lease.serial))

    @precondition(lambda self: self.serials)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        offset, serial = data.draw(st.sampled_from(self.serials))
        one = self.of(offset)
        self.leases.undo(offset, serial)
        if one is not None and one.state == "leased" and one.serial == serial:
            one.state, one.attempt = "ready", one.attempt - 1

    @precondition(lambda self: self.serials)
    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        offset, serial = data.draw(st.sampled_from(self.serials))
        one = self.holds(offset, serial)
        self.leases.lapse(offset, serial, self.now_ms)
        if one is not None:
            one.expires_ms = self.now_ms

    @rule(passed_ms=st.integers(0, 40))
    def expire(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        exhausted = [one.offset for one in self.leases.expire(self.now_ms, alive)]
        expected = []
        for one in self.model:
            if one.state == "leased" and one.expires_ms <= self.now_ms:
                one.state = "ending" if one.attempt >= self.attempts_max else "ready"
                if one.state == "ending":
                    expected.append(one.offset)
        assert sorted(exhausted) == expected

    @rule()
    def withdraw(self) -> None:
        idle = [one for one in self.model if one.state == "ready"]
        assert self.leases.withdraw() == [one.offset for one in idle]
        self.model = [one for one in self.model if one.state != "ready"]

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.leases) == len(self.model)
        assert self.leases.leased_count == sum(one.state == "leased" for one in self.model)
        assert self.leases.ready_count == sum(self.may_be_leased(one) for one in self.model)

    @invariant()
    def holders_agree(self) -> None:
        held: dict[str, set[int]] = {}
        for one in self.model:
            if one.state == "leased":
                held.setdefault(one.client, set()).add(one.offset)
        assert {name: set(offsets) for name, offsets in self.leases.leased.items()} == held
        begins = [one.begin_ms for one in self.model if one.state == "leased"]
        assert self.leases.oldest_lease_ms() == min(begins, default=None)

    @invariant()
    def message_group_has_one_message_in_flight(self) -> None:
        busy = [one.group for one in self.model if one.group and one.state != "ready"]
        assert len(busy) == len(set(busy))

    @invariant()
    def expired_lease_is_noticed(self) -> None:
        due = [one.expires_ms for one in self.model if one.state == "leased"]
        next_ms = self.leases.next_expiry_ms()
        assert not due or (next_ms is not None and next_ms <= min(due))


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
