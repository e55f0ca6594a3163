"""Lock managers that leave out a rule; the names in brackets are those of protocol section 17."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._core.queues import GroupQueue
from batonmq_server.lockmgr.core import access
from batonmq_server.lockmgr.core import table as lock_table
from batonmq_server.lockmgr.core.access import Condition, Decision, Grant, Replay, decide_access
from batonmq_server.lockmgr.core.locks import Asker, Entry, Lock, Observation, Pending, Policy
from batonmq_server.lockmgr.core.table import KeepAlive, LockTable, Report
from batonmq_server.lockmgr.handover import HandOvers, Refusal, Term, Wish, _Passed
from batonmq_server.lockmgr.leader import Leader
from batonmq_server.lockmgr.offsets import Fenced
from batonmq_server.lockmgr.store import Change, Conflict
from batonmq_server.lockmgr.taking_over import TakingOver
from tests.simulation.background import in_background


def skip_fence(patch: pytest.MonkeyPatch) -> None:
    """[skip_fence] A new owner is written down; offsets does not learn of it."""
    real = HandOvers._fence

    async def fence(
        self: HandOvers, wish: Wish, grant: Grant, pending: Pending, entry: Entry
    ) -> _Passed | Refusal:
        if not entry.lock.token:
            return await real(self, wish, grant, pending, entry)
        seen = await self._term.offsets.observe(wish.key)
        answer = offsets_pb.Fenced(token=seen.token, committed_offset=seen.committed)
        offsets = self._term.offsets
        unfenced = Fenced(answer, offsets.set_of(wish.key.group), 0)
        return _Passed("none", Condition.CLOSED_OR_DRAINED, unfenced)

    patch.setattr(HandOvers, "_fence", fence)


def grant_before_persist(patch: pytest.MonkeyPatch) -> None:
    """[persist_after_answer] The grant is answered while its transaction is under way."""

    async def carry_out(
        self: HandOvers, wish: Wish, grant: Grant, pending: Pending
    ) -> lockmgr_pb.Grant | Refusal:
        entry = self._table.get(wish.key)
        assert entry is not None
        passed = await self._fence(wish, grant, pending, entry)
        if isinstance(passed, Refusal):
            self._table.refused(wish.key)
            return passed
        lock = Lock(
            owner=wish.asker.incarnation,
            token=passed.fenced.answer.token,
            acquire_seq=wish.asker.acquire_seq,
            attempt=passed.attempt,
            generation=wish.asker.generation,
        )

        async def persist() -> None:
            outcome = await self._term.store.persist(wish.change(lock, entry.revision))
            if isinstance(outcome, Conflict):
                self._not_persisted(wish.key, outcome)
            else:
                self._granted(wish, grant, passed, lock, outcome)

        in_background(persist())
        return self.answer(passed.fenced, lock, newly_acquired=True)

    patch.setattr(HandOvers, "carry_out", carry_out)


def stored_token_on_renewal(patch: pytest.MonkeyPatch) -> None:
    """[renew_stale] The same client asks again: it gets the token that stands in the entry."""

    def decide(
        entry: Entry | None, asker: Asker, seen: Observation, now_ms: int, policy: Policy
    ) -> Decision:
        owner = entry.lock.owner if entry is not None else None
        if owner is not None and owner.client_id == asker.incarnation.client_id:
            return Replay()
        return decide_access(entry, asker, seen, now_ms, policy)

    patch.setattr(lock_table, "decide_access", decide)


def count_per_contender(patch: pytest.MonkeyPatch) -> None:
    """Every look counts as a slot without change, and every contender may look at any time."""

    def needs_look(self: LockTable, key: GroupQueue, *_: object) -> bool:
        entry = self.get(key)
        return entry is None or entry.pending is None

    def observe(
        self: LockTable, key: GroupQueue, seen: Observation, stamp: int, now_ms: int
    ) -> None:
        entry = self._touch(key)
        if entry.stamp != stamp or entry.pending is not None:
            return
        same, entry.seen, entry.seen_ms = entry.seen == seen, seen, now_ms
        entry.slots = entry.slots + 1 if same else 0

    patch.setattr(
        LockTable, "due_ms", lambda self, key, now_ms: self.get(key).seen_ms + 50 - now_ms
    )
    patch.setattr(LockTable, "needs_look", needs_look)
    patch.setattr(LockTable, "observe", observe)


def forget_the_table(patch: pytest.MonkeyPatch) -> None:
    """[forget_table] A new leader begins with nothing: every queue looks free."""

    async def take_over(self: Leader, term: Term) -> TakingOver:
        await self._members.ready()
        taking_over = TakingOver(term, [])
        await taking_over.begin()
        return taking_over

    patch.setattr(Leader, "_take_over", take_over)


def renew_while_taken(patch: pytest.MonkeyPatch) -> None:
    """[renew_during_steal, renew_after_fence] A keep-alive counts until etcd has the new owner."""
    real = LockTable._renew

    def renew(self: LockTable, call: KeepAlive, key: GroupQueue, token: int, now_ms: int) -> Report:
        entry = self._touch(key)
        pending, phantom = entry.pending, entry.phantom
        entry.pending, entry.phantom = None, False
        report = real(self, call, key, token, now_ms)
        entry.pending, entry.phantom = pending, phantom
        return report

    patch.setattr(LockTable, "_renew", renew)


def old_request(patch: pytest.MonkeyPatch) -> None:
    """[no_acquire_seq] An Acquire of the owner counts however late it comes."""
    real = access.decide_own

    def decide(entry: Entry, asker: Asker, seen: Observation) -> Decision:
        if asker.acquire_seq >= entry.lock.acquire_seq:
            return real(entry, asker, seen)
        return Grant((Condition.SAME_HOLDER, Condition.CLOSED_OR_DRAINED), seen.token)

    patch.setattr(access, "decide_own", decide)


def grant_without_gate(patch: pytest.MonkeyPatch) -> None:
    """A grant is persisted whatever has become of the group since the asker was admitted."""
    real = Wish.change

    def change(self: Wish, lock: Lock, revision: int) -> Change:
        return replace(real(self, lock, revision), gate=None)

    patch.setattr(Wish, "change", change)
