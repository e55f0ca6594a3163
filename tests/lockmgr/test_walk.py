"""Goal: no order of messages, losses, repetitions, pauses and crashes breaks a promise: no message
is started twice unflagged, no token has two holders, committed progress never goes back.

Method: seeded random walks of `walk.World`, which has the real rules of the lock manager and of
offsets. Lock tables that break one rule each show that a walk finds such mistakes.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from batonmq._core.queues import GroupQueue
from batonmq_server.lockmgr.core.decision import Decision
from batonmq_server.lockmgr.core.lock_entry import LockRecord, Observation, Requester
from batonmq_server.lockmgr.core.lock_table import LockTable
from tests.lockmgr.walk import Violated, World

SEEDS, STEPS = 120, 1_500
REACHED = [
    "CLOSED_OR_DRAINED",
    "FENCED",
    "FORCED",
    "HELD",
    "IDLE",
    "NOT_ASSIGNED",
    "NOT_OWNER",
    "OK",
    "OLD_REQUEST",
    "ORPHAN",
    "PENDING",
    "SAME_HOLDER",
    "SUBSCRIPTION",
    "SUBSCRIPTION_DRAINING",
    "UNACKED",
    "WANTED",
    "abandoned",
    "closed",
    "crash",
    "fence repeated",
    "fenced",
    "freed",
    "freed by a fence",
    "late fence",
    "late persist",
    "new subscription",
    "overtaken",
    "phantom",
    "released",
    "repeated",
    "started again",
]


class IgnoresSeq(LockTable):
    """Treats a late request of the owner as a new one (story 8)."""

    def decide(self, key: GroupQueue, requester: Requester, now_ms: int) -> Decision | None:
        newest = Requester(requester.incarnation, 1 << 40, requester.generation)
        return super().decide(key, newest, now_ms)


class ForgetsOwners(LockTable):
    """Loads every lock without its owner (story 18)."""

    def load(self, key: GroupQueue, lock: LockRecord, revision: int, now_ms: int) -> None:
        super().load(key, lock.freed(), revision, now_ms)


class UsesStaleObservations(LockTable):
    """Decides by an observation that began before a hand-over and ended after it."""

    def end_observation(
        self, key: GroupQueue, observation: Observation, version: int, now_ms: int
    ) -> None:
        super().end_observation(key, observation, self.begin_observation(key), now_ms)


def walk(seed: int, kind: type[LockTable] = LockTable) -> Counter[str]:
    world = World(Random(seed), kind)
    for _ in range(STEPS):
        world.step()
    return world.seen


def test_random_walks_break_no_promise_and_reach_every_event() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            seen += walk(seed)
        except Violated as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert [corner for corner in REACHED if not seen[corner]] == []
    assert seen["started"] > 10 * SEEDS


@pytest.mark.parametrize("kind", [IgnoresSeq, ForgetsOwners, UsesStaleObservations])
def test_walk_finds_a_lock_table_that_breaks_a_rule(kind: type[LockTable]) -> None:
    with pytest.raises(Violated):
        for seed in range(SEEDS):
            walk(seed, kind)
