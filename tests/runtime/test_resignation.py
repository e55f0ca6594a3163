"""Goal: a leader that resigns stops at once, however long its lease.

A leader that continued without reports of its followers would remove them from the in-sync set, and
no node could succeed it.
Method: a real etcd, and a lease that is too long for the test to wait for a part of it.
"""

from __future__ import annotations

from batonmq_server.runtime.etcd.session import EtcdSession
from tests.runtime.test_election import Candidate, campaigning
from tests.support.conditions import until

LEASE_MS = 600_000


async def test_leader_that_resigns_revokes_its_lease_at_once(etcd: EtcdSession) -> None:
    a, b = Candidate(etcd, "a", ttl_ms=LEASE_MS), Candidate(etcd, "b", ttl_ms=LEASE_MS)
    async with campaigning(a):
        await until(lambda: a.leads)
        (term,) = a.terms

        async def revoked() -> bool:
            stored = await etcd.get(a.election.key)
            return stored is None or stored.create_revision > term

        a.election.resign()
        await until(revoked)
        assert a.valid_at_end == [False]
    async with campaigning(b):
        await until(b.election.valid)
