"""Leader election under an etcd lease.

Goal: one leader at a time, with rising terms; a leader that resigns is replaced at once, a silent
one within its lease; a leader that can't reach etcd stops in time by itself.
Method: a real etcd; leases of a minute where nothing may wait for a lease to expire; a clock set by
the test where exact times matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batonmq._common.clock import Clock
from batonmq_server.local.etcd import EtcdProcess
from batonmq_server.runtime import election
from batonmq_server.runtime.election import SAFETY_MS, Election
from batonmq_server.runtime.etcd.session import EtcdSession, Put
from tests.runtime.etcd_compaction import compact
from tests.runtime.etcd_proxies import two_proxies
from tests.support.clock import MovableClock
from tests.support.conditions import until

LONG_MS = 60_000
SHORT_MS = 10_000
"""A leader refreshes its lease after a tenth of it."""


class SetClock(Clock):
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.now_ms


class Candidate:
    """A candidate that records its leaderships."""

    def __init__(self, session: EtcdSession, name: str, ttl_ms: int = LONG_MS) -> None:
        self.election = Election(session, "lockmgr", name, ttl_ms=ttl_ms)
        self.terms: list[int] = []
        self.leads = False
        self.valid_at_end: list[bool] = []

    async def lead(self, term: int) -> None:
        self.terms.append(term)
        self.leads = True
        try:
            await asyncio.Event().wait()
        finally:
            self.leads = False
            self.valid_at_end.append(self.election.valid())


@asynccontextmanager
async def campaigning(*candidates: Candidate) -> AsyncIterator[list[asyncio.Task[None]]]:
    """All of them campaign until the block ends."""
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(c.election.run(c.lead)) for c in candidates]
        yield loops
        for loop in loops:
            loop.cancel()


async def end_lease_of(etcd: EtcdSession, key: str) -> None:
    stored = await etcd.get(key)
    assert stored is not None
    await etcd.attach(stored.lease_id).revoke()


async def test_leader_is_valid_and_its_term_is_the_create_revision(etcd: EtcdSession) -> None:
    a = Candidate(etcd, "a")
    assert not a.election.valid()
    async with campaigning(a):
        await until(lambda: a.leads)
        stored = await etcd.get("elections/lockmgr")
        assert stored is not None
        assert stored.value == b"a"
        assert a.terms == [a.election.term] == [stored.create_revision]
        assert a.election.valid()


async def test_other_candidate_leads_at_once_when_the_leader_stops(etcd: EtcdSession) -> None:
    a, b = Candidate(etcd, "a"), Candidate(etcd, "b")
    async with campaigning(a) as (loop_a,):
        await until(lambda: a.leads)
        async with campaigning(b):
            loop_a.cancel()
            await until(lambda: b.leads)  # long before the lease of a minute ends
            assert not a.leads
            assert b.terms[0] > a.terms[0]
            assert not a.election.valid()
            assert b.election.valid()


async def test_two_candidates_never_lead_at_once_through_many_changes(etcd: EtcdSession) -> None:
    candidates = [Candidate(etcd, name) for name in "abc"]
    leading: list[int] = []

    async def lead(term: int) -> None:
        assert not leading, "two leaders at once"
        leading.append(term)
        try:
            await asyncio.Event().wait()
        finally:
            leading.remove(term)

    terms: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(c.election.run(lead)) for c in candidates]
        for _ in range(6):
            await until(lambda: leading and leading[0] not in terms)
            terms.append(leading[0])
            (at,) = [i for i, c in enumerate(candidates) if c.election.term == leading[0]]
            loops[at].cancel()
            loops[at] = tasks.create_task(candidates[at].election.run(lead))
        for loop in loops:
            loop.cancel()
    assert terms == sorted(terms)


async def test_leader_whose_lease_is_revoked_stops_leading(etcd: EtcdSession) -> None:
    a = Candidate(etcd, "a", SHORT_MS)
    async with campaigning(a):
        await until(lambda: a.leads)
        await end_lease_of(etcd, a.election.key)
        await until(lambda: len(a.terms) == 2)
        assert a.terms[1] > a.terms[0]
        assert a.valid_at_end == [False], "the leader is not valid during its cleanup"


async def test_leader_that_resigns_is_invalid_at_once_and_is_replaced(
    etcd: EtcdSession,
) -> None:
    a, b = Candidate(etcd, "a", ttl_ms=SHORT_MS), Candidate(etcd, "b", ttl_ms=SHORT_MS)
    async with campaigning(a):
        await until(lambda: a.leads)
        async with campaigning(b):
            a.election.resign()
            assert not a.election.valid()
            await until(lambda: len(a.terms) + len(b.terms) == 2)
            assert a.valid_at_end == [False]
            await until(lambda: a.election.valid() or b.election.valid())


async def test_leader_stays_when_a_member_of_etcd_stops_responding(
    etcd_endpoint: str, cluster: str
) -> None:
    async with (
        two_proxies(etcd_endpoint) as proxies,
        EtcdSession(proxies.endpoint, cluster, Clock()) as session,
    ):
        a = Candidate(session, "a", SHORT_MS)
        async with campaigning(a):
            await until(lambda: a.leads)
            first = proxies.stick_the_used(session)
            await until(lambda: proxies.another_answers(first))
            assert a.election.valid()
            first.free()
            second = proxies.stick_the_used(session)
            await until(lambda: proxies.another_answers(second))
            assert a.election.valid()
            assert len(a.terms) == 1


async def test_silent_leader_is_replaced_when_its_lease_expires(etcd: EtcdSession) -> None:
    """The key in etcd is that of a process killed just after its election."""
    clock = Clock()
    begin_ms = clock.monotonic_ms()
    lease = await etcd.lease(2_000)
    await etcd.put("elections/lockmgr", b"dead", lease)
    b = Candidate(etcd, "b", LONG_MS)
    async with campaigning(b):
        await until(lambda: b.leads)
    assert clock.monotonic_ms() - begin_ms >= 1_000, "not before its lease expired"


async def test_error_of_the_leader_ends_the_leadership_and_is_passed_on(
    etcd: EtcdSession,
) -> None:
    election = Election(etcd, "lockmgr", "a", ttl_ms=LONG_MS)

    async def lead(term: int) -> None:
        raise ValueError("on purpose")

    with pytest.raises(ExceptionGroup) as raised:
        await election.run(lead)
    assert raised.group_contains(ValueError, match="on purpose")
    assert await etcd.get(election.key) is None
    assert not election.valid()


# ---- conditions


async def test_condition_holds_in_its_term_only(etcd: EtcdSession) -> None:
    a, b = Candidate(etcd, "a"), Candidate(etcd, "b")
    async with campaigning(a) as (loop_a,):
        await until(lambda: a.leads)
        condition = a.election.compare()
        assert await etcd.txn(compare=[condition], put=[Put("x", b"")]) is not None
        async with campaigning(b):
            loop_a.cancel()
            await until(lambda: b.leads)
            assert await etcd.txn(compare=[condition], put=[Put("x", b"")]) is None
            assert await etcd.txn(compare=[b.election.compare()], put=[Put("x", b"")]) is not None


async def test_condition_of_a_follower_never_holds(etcd: EtcdSession) -> None:
    """Also without a leader: the condition must not mean that the key is missing."""
    a = Candidate(etcd, "a")
    write = [Put("x", b"")]
    assert await etcd.txn(compare=[a.election.compare()], put=write) is None
    async with campaigning(a):
        await until(lambda: a.leads)
    assert await etcd.get(a.election.key) is None
    assert await etcd.txn(compare=[a.election.compare()], put=write) is None


# ---- time


async def test_leader_is_valid_until_a_second_before_its_lease_expires(
    etcd_endpoint: str, cluster: str
) -> None:
    clock = SetClock()
    async with EtcdSession(etcd_endpoint, cluster, clock) as session:
        a = Candidate(session, "a", LONG_MS)
        async with campaigning(a):
            await until(lambda: a.leads)
            clock.now_ms += LONG_MS - SAFETY_MS - 1
            assert a.election.valid()
            clock.now_ms += 1
            assert not a.election.valid()


@pytest.mark.long
@pytest.mark.e2e
async def test_leader_without_etcd_stops_by_itself(tmp_path: Path) -> None:
    async with (
        EtcdProcess(tmp_path) as process,
        EtcdSession(process.endpoint, "c", Clock()) as session,
    ):
        a = Candidate(session, "a", SHORT_MS)
        async with campaigning(a):
            await until(lambda: a.leads)
            process.child.kill_now()
            await until(lambda: not a.election.valid())
            await until(lambda: not a.leads)


async def test_restarted_leader_ends_the_lease_of_its_killed_process(etcd: EtcdSession) -> None:
    lease = await etcd.lease(LONG_MS)
    await etcd.put("elections/lockmgr", b"a", lease)
    again, other = Candidate(etcd, "a"), Candidate(etcd, "b")
    async with campaigning(other):
        async with campaigning(again):
            await until(lambda: again.leads or other.leads)
        await until(lambda: other.leads)


async def test_leader_stops_at_once_when_its_lease_is_ended(etcd: EtcdSession) -> None:
    """A refresh would show it after two minutes, which is longer than the test waits."""
    a = Candidate(etcd, "a", ttl_ms=600_000)
    async with campaigning(a):
        await until(lambda: a.leads)
        await end_lease_of(etcd, a.election.key)
        await until(lambda: a.valid_at_end == [False])
        await until(lambda: len(a.terms) == 2)


async def test_leader_without_cpu_time_stays_leader_if_its_lease_has_not_expired(
    etcd_endpoint: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election, "RENEWALS", 100)  # the next one is due soon
    clock = MovableClock()
    async with EtcdSession(etcd_endpoint, cluster, clock) as session:
        a = Candidate(session, "a", ttl_ms=8_000)
        async with campaigning(a):
            await until(lambda: a.leads)
            clock.ahead_ms += 8_000 - SAFETY_MS
            assert not a.election.valid(), "the leader is not valid before it has renewed its lease"
            await until(lambda: a.election.valid() or len(a.valid_at_end) == 1)
            assert a.valid_at_end == []
            assert len(a.terms) == 1


# ---- waiting


class NotingSession(EtcdSession):
    """A session that records the start revisions of watches."""

    watched: list[int]

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Any]:
        self.watched.append(revision)
        async for answer in super().watch(prefix, revision):
            yield answer


async def test_candidate_waits_for_an_old_leader_after_a_compaction(
    etcd: EtcdSession, etcd_endpoint: str, cluster: str
) -> None:
    """The revision of the leader's key may be gone: watching from there would fail at once."""
    a = Candidate(etcd, "a")
    async with campaigning(a), NotingSession(etcd_endpoint, cluster, Clock()) as session:
        await until(lambda: a.leads)
        for _ in range(3):
            revision = await etcd.put("x", b"")
        await compact(etcd_endpoint, revision)
        session.watched = []
        b = Candidate(session, "b")
        async with campaigning(b):
            await until(lambda: session.watched)
            assert session.watched[0] > revision
            await end_lease_of(etcd, a.election.key)
            await until(lambda: b.leads or len(a.terms) == 2)
