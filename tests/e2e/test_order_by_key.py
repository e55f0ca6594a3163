"""Goal: messages of an ordering key are handled in order, by one member at a time, through kills.

Method: a real cluster; members are processes that log the start and the end of each handler call.
One is killed with `kill -9` in the middle, one joins and one leaves. The logs are a ledger by key:
no two calls of a key overlap, and each begins after those of all earlier messages have ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from batonmq.admin.admin import Admin
from tests.e2e.worker_group import WorkerHandling, send, started_again, worker_group
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TOPIC, QUEUES, KEYS, MESSAGES = "numbers", 4, 40, 6_000
LEASE_MS = 10_000
Ledger = Mapping[int, Sequence[WorkerHandling]]


def by_key(handlings: Iterable[WorkerHandling]) -> Ledger:
    """Return the handler calls by key, in the order of their start."""
    ledger: dict[int, list[WorkerHandling]] = defaultdict(list)
    for handling in sorted(handlings, key=lambda one: one.start_us):
        ledger[handling.number % KEYS].append(handling)
    return ledger


def overlaps(ledger: Ledger, killed: str) -> list[tuple[WorkerHandling, WorkerHandling]]:
    """Return consecutive calls of a key that overlap; the killed member's calls end by the kill."""
    return [
        (earlier, later)
        for calls in ledger.values()
        for earlier, later in pairwise(calls)
        if (earlier.done_us is None and earlier.client_id != killed)
        or (earlier.done_us is not None and later.start_us < earlier.done_us)
    ]


def overtakings(ledger: Ledger) -> list[tuple[WorkerHandling, int]]:
    """Return calls that began before an earlier message of the key was handled, with its number."""
    found = []
    for key, calls in ledger.items():
        numbers = range(key, MESSAGES, KEYS)
        for call in calls:
            done = {one.number for one in calls if (one.done_us or call.start_us) < call.start_us}
            missing = [number for number in numbers if number < call.number and number not in done]
            found += [(call, missing[0])] if missing else []
    return found


@pytest.mark.long
async def test_order_of_a_key_survives_kill_9_and_hand_overs(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "lockmgr": {"lock_lease_ms": LEASE_MS},
        "nameserver": {"member_lease_ms": LEASE_MS, "heartbeat_interval_ms": 2_000},
    }
    options: dict[str, Any] = {"by_key": 1, "parallel": 16, "handle_ms": 10, "slow_below": KEYS}
    async with local_cluster(tmp_path / "cluster", **settings) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        async with worker_group(cluster.nameserver, TOPIC, tmp_path) as workers:
            victim = await workers.join("victim", **options)
            await until(lambda: len(victim.owned) == QUEUES, timeout_s=60)
            await send(cluster.nameserver, TOPIC, range(MESSAGES), key_count=KEYS)
            await until(lambda: len(workers.done()) > MESSAGES // 8, timeout_s=60)
            joining = await workers.join("joining", **options)
            await until(lambda: len(joining.owned) == QUEUES // 2, timeout_s=60)
            await until(lambda: len(joining.done()) > MESSAGES // 8, timeout_s=60)
            victim.kill()
            await victim.process.ended()
            third = await workers.join("third", **options)
            await until(third.done, timeout_s=60)
            assert await joining.leave() == 0
            await until(lambda: workers.done() == set(range(MESSAGES)), timeout_s=90)
            handlings = workers.handlings()
            assert await third.leave() == 0
    ledger = by_key(handlings)
    assert len(ledger) == KEYS
    assert {one.client_id for one in handlings} == {"victim", "joining", "third"}
    assert overlaps(ledger, "victim") == []
    assert overtakings(ledger) == []
    assert all(later.redelivered for _, later in started_again(handlings))
    at_once = max(
        sum(one.start_us < at <= (one.done_us or at) for one in handlings)
        for at in [one.start_us for one in handlings[:: MESSAGES // 100]]
    )
    assert at_once > QUEUES, "keys of a queue were not handled side by side"
