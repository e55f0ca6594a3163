"""Lock managers that leave out a rule; the names in brackets are those of protocol section 17."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._core.queues import GroupQueue
from batonmq_server.lockmgr.candidate import Candidate
from batonmq_server.lockmgr.core import decision as access
from batonmq_server.lockmgr.core import lock_table
from batonmq_server.lockmgr.core.decision import (
    Decision,
    FenceCondition,
    GrantDecision,
    RenewDecision,
)
from batonmq_server.lockmgr.core.lock_entry import (
    LockEntry,
    LockPolicy,
    LockRecord,
    Observation,
    PendingChange,
    Requester,
)
from batonmq_server.lockmgr.core.lock_table import HoldReport, KeepAliveCall, LockTable
from batonmq_server.lockmgr.handover import (
    HandOverExecutor,
    HandOverRefusal,
    QueueRequest,
    Term,
    _FencePassed,
)
from batonmq_server.lockmgr.lock_store import LockWrite, WriteConflict
from batonmq_server.lockmgr.offsets_client import FencedQueue
from batonmq_server.lockmgr.takeover import Takeover
from tests.simulation.background import in_background


def skip_fence(patch: pytest.MonkeyPatch) -> None:
    """[skip_fence] A new owner is written down; offsets does not learn of it."""
    real = HandOverExecutor._fence

    async def fence(
        self: HandOverExecutor,
        wish: QueueRequest,
        grant: GrantDecision,
        pending: PendingChange,
        entry: LockEntry,
    ) -> _FencePassed | HandOverRefusal:
        if not entry.lock.token:
            return await real(self, wish, grant, pending, entry)
        seen = await self._term.offsets.observe(wish.key)
        answer = offsets_pb.Fenced(token=seen.token, committed_offset=seen.committed)
        offsets = self._term.offsets
        unfenced = FencedQueue(answer, offsets.set_of(wish.key.group), 0)
        return _FencePassed("none", FenceCondition.CLOSED_OR_DRAINED, unfenced)

    patch.setattr(HandOverExecutor, "_fence", fence)


def grant_before_persist(patch: pytest.MonkeyPatch) -> None:
    """[persist_after_answer] The grant is answered while its transaction is under way."""

    async def carry_out(
        self: HandOverExecutor, wish: QueueRequest, grant: GrantDecision, pending: PendingChange
    ) -> lockmgr_pb.Grant | HandOverRefusal:
        entry = self._table.get(wish.key)
        assert entry is not None
        passed = await self._fence(wish, grant, pending, entry)
        if isinstance(passed, HandOverRefusal):
            self._table.refused(wish.key)
            return passed
        lock = LockRecord(
            owner=wish.asker.incarnation,
            token=passed.fenced.answer.token,
            acquire_seq=wish.asker.acquire_seq,
            attempt=passed.attempt,
            generation=wish.asker.generation,
        )

        async def persist() -> None:
            outcome = await self._term.store.persist(wish.change(lock, entry.revision))
            if isinstance(outcome, WriteConflict):
                self._not_persisted(wish.key, outcome)
            else:
                self._granted(wish, grant, passed, lock, outcome)

        in_background(persist())
        return self.answer(passed.fenced, lock, newly_acquired=True)

    patch.setattr(HandOverExecutor, "carry_out", carry_out)


def stored_token_on_renewal(patch: pytest.MonkeyPatch) -> None:
    """[renew_stale] The same client asks again: it gets the token that stands in the entry."""

    def decide(
        entry: LockEntry | None,
        asker: Requester,
        seen: Observation,
        now_ms: int,
        policy: LockPolicy,
    ) -> Decision:
        owner = entry.lock.owner if entry is not None else None
        if owner is not None and owner.client_id == asker.incarnation.client_id:
            return RenewDecision()
        return decide(entry, asker, seen, now_ms, policy)

    patch.setattr(lock_table, "decide", decide)


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

    async def take_over(self: Candidate, term: Term) -> Takeover:
        await self._members.ready()
        taking_over = Takeover(term, [])
        await taking_over.begin()
        return taking_over

    patch.setattr(Candidate, "_take_over", take_over)


def renew_while_taken(patch: pytest.MonkeyPatch) -> None:
    """[renew_during_steal, renew_after_fence] A keep-alive counts until etcd has the new owner."""
    real = LockTable._renew

    def renew(
        self: LockTable, call: KeepAliveCall, key: GroupQueue, token: int, now_ms: int
    ) -> HoldReport:
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

    def decide(entry: LockEntry, asker: Requester, seen: Observation) -> Decision:
        if asker.acquire_seq >= entry.lock.acquire_seq:
            return real(entry, asker, seen)
        return GrantDecision(
            (FenceCondition.SAME_HOLDER, FenceCondition.CLOSED_OR_DRAINED), seen.token
        )

    patch.setattr(access, "decide_own", decide)


def grant_without_gate(patch: pytest.MonkeyPatch) -> None:
    """A grant is persisted whatever has become of the group since the asker was admitted."""
    real = QueueRequest.change

    def change(self: QueueRequest, lock: LockRecord, revision: int) -> LockWrite:
        return replace(real(self, lock, revision), gate=None)

    patch.setattr(QueueRequest, "change", change)
