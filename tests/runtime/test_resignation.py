"""Goal: who resigns leads no moment longer, however long its lease: a leader that went on, and
heard of no follower any more, would let out of its set whoever could follow it.

Method: a real etcd, and a lease so long that nobody could wait for a part of it.
"""

from __future__ import annotations

from batonmq_server.runtime.etcd.session import EtcdSession
from tests.runtime.test_election import Candidate, campaigning
from tests.support.waiting import until

LEASE_MS = 600_000


async def test_who_resigns_gives_its_lease_back_at_once(etcd: EtcdSession) -> None:
    a, b = Candidate(etcd, "a", ttl_ms=LEASE_MS), Candidate(etcd, "b", ttl_ms=LEASE_MS)
    async with campaigning(a):
        await until(lambda: a.leads)
        a.election.resign()
        await until(lambda: a.valid_at_end == [False])
    async with campaigning(b):
        await until(b.election.valid)
