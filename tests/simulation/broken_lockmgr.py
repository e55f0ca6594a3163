"""Lock managers that leave out a rule; the names in brackets are those of protocol section 17."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._core.queues import GroupQueue
from batonmq.errors import OldRequest
from batonmq_server.lockmgr.candidate import Candidate
from batonmq_server.lockmgr.core import decision as decision_table
from batonmq_server.lockmgr.core import lock_table
from batonmq_server.lockmgr.core.decision import (
    TABLE,
    Action,
    Decision,
    FenceCondition,
    GrantDecision,
    RenewDecision,
    deciding_rows,
)
from batonmq_server.lockmgr.core.decision import decide as real_decide
from batonmq_server.lockmgr.core.lock_entry import (
    LockEntry,
    LockPolicy,
    LockRecord,
    Observation,
    PendingChange,
    Requester,
)
from batonmq_server.lockmgr.core.lock_table import HoldReport, KeepAliveCall, LockTable
from batonmq_server.lockmgr.group_membership import GroupMembership
from batonmq_server.lockmgr.handover_executor import (
    HandOverExecutor,
    HandOverRefusal,
    _PassedFence,
)
from batonmq_server.lockmgr.lock_store import LockWrite, WriteConflict
from batonmq_server.lockmgr.offsets_client import FencedQueue
from batonmq_server.lockmgr.queue_requests import QueueRequest
from batonmq_server.lockmgr.takeover import Takeover
from batonmq_server.lockmgr.term import Term
from tests.simulation.background import in_background


def skip_fence(patch: pytest.MonkeyPatch) -> None:
    """[skip_fence] A new owner is persisted without a fence at offsets."""
    real = HandOverExecutor._fence

    async def fence(
        self: HandOverExecutor,
        request: QueueRequest,
        decision: GrantDecision,
        pending: PendingChange,
        entry: LockEntry,
    ) -> _PassedFence | HandOverRefusal:
        if not entry.lock.token:
            return await real(self, request, decision, pending, entry)
        observation = await self._term.offsets.observe(request.key)
        answer = offsets_pb.Fenced(token=observation.token, committed_offset=observation.committed)
        unfenced = FencedQueue(answer, self._term.offsets.set_of(request.key.group), 0)
        return _PassedFence("none", FenceCondition.CLOSED_OR_DRAINED, unfenced)

    patch.setattr(HandOverExecutor, "_fence", fence)


def grant_before_persist(patch: pytest.MonkeyPatch) -> None:
    """[persist_after_answer] The grant is sent before its transaction is confirmed."""

    async def hand_over(
        self: HandOverExecutor,
        request: QueueRequest,
        decision: GrantDecision,
        pending: PendingChange,
    ) -> lockmgr_pb.Grant | HandOverRefusal:
        entry = self._table.get(request.key)
        assert entry is not None
        passed = await self._fence(request, decision, pending, entry)
        if isinstance(passed, HandOverRefusal):
            self._table.end_unchanged(request.key)
            return passed
        lock = LockRecord(
            owner=request.requester.incarnation,
            token=passed.fenced.answer.token,
            acquire_seq=request.requester.acquire_seq,
            attempt=passed.attempt,
            generation=request.requester.generation,
        )

        async def persist() -> None:
            result = await self._term.store.persist(request.write(lock, entry.revision))
            if isinstance(result, WriteConflict):
                self._not_persisted(request.key, result)
            else:
                self._granted(request, decision, passed, lock, result)

        in_background(persist())
        return self._grant(passed.fenced, lock, newly_acquired=True)

    patch.setattr(HandOverExecutor, "hand_over", hand_over)


def stored_token_on_renewal(patch: pytest.MonkeyPatch) -> None:
    """[renew_stale] A new request of the same client gets the stored token, without a fence."""

    def decide(
        entry: LockEntry | None,
        requester: Requester,
        observation: Observation,
        now_ms: int,
        policy: LockPolicy,
    ) -> Decision:
        owner = entry.lock.owner if entry is not None else None
        if owner is not None and owner.client_id == requester.incarnation.client_id:
            return RenewDecision()
        return real_decide(entry, requester, observation, now_ms, policy)

    patch.setattr(lock_table, "decide", decide)


def count_per_contender(patch: pytest.MonkeyPatch) -> None:
    """Every observation counts as a slot, and every requester may observe at any time."""

    def needs_observation(self: LockTable, key: GroupQueue, *_: object) -> bool:
        entry = self.get(key)
        return entry is None or entry.pending is None

    def end_observation(
        self: LockTable, key: GroupQueue, observation: Observation, version: int, now_ms: int
    ) -> None:
        entry = self._get_or_add(key)
        if entry.version != version or entry.pending is not None:
            return
        same = entry.observation == observation
        entry.observation, entry.observed_ms = observation, now_ms
        entry.quiet_slots = entry.quiet_slots + 1 if same else 0

    patch.setattr(
        LockTable, "due_ms", lambda self, key, now_ms: self.get(key).observed_ms + 50 - now_ms
    )
    patch.setattr(LockTable, "needs_observation", needs_observation)
    patch.setattr(LockTable, "end_observation", end_observation)


def forget_the_table(patch: pytest.MonkeyPatch) -> None:
    """[forget_table] A new leader loads no lock: every queue counts as free."""

    async def take_over(self: Candidate, term: Term) -> Takeover:
        await self._members.ready()
        takeover = Takeover(term, [])
        await takeover.begin()
        return takeover

    patch.setattr(Candidate, "_take_over", take_over)


def renew_while_taken(patch: pytest.MonkeyPatch) -> None:
    """[renew_during_steal, renew_after_fence] Keep-alives renew until etcd has the new owner."""
    real = LockTable._renew

    def renew(
        self: LockTable, call: KeepAliveCall, key: GroupQueue, token: int, now_ms: int
    ) -> HoldReport:
        entry = self._get_or_add(key)
        pending, phantom = entry.pending, entry.phantom
        entry.pending, entry.phantom = None, False
        report = real(self, call, key, token, now_ms)
        entry.pending, entry.phantom = pending, phantom
        return report

    patch.setattr(LockTable, "_renew", renew)


def old_request(patch: pytest.MonkeyPatch) -> None:
    """[no_acquire_seq] An older request of the owner is granted like a new one."""
    conditions = (FenceCondition.SAME_HOLDER, FenceCondition.CLOSED_OR_DRAINED)
    rows = tuple(
        replace(row, action=Action.GRANT, result=conditions) if row.result is OldRequest else row
        for row in TABLE
    )
    patch.setattr(decision_table, "ROWS", deciding_rows(rows))


def grant_without_gate(patch: pytest.MonkeyPatch) -> None:
    """A grant is persisted even if the group has changed since the requester was admitted."""
    real = QueueRequest.write

    def write(self: QueueRequest, lock: LockRecord, revision: int) -> LockWrite:
        return replace(real(self, lock, revision), gate=None)

    patch.setattr(QueueRequest, "write", write)


def grant_unassigned(patch: pytest.MonkeyPatch) -> None:
    """A member gets a queue that the group's record assigns to another member."""
    patch.setattr(GroupMembership, "check_assigned", lambda *_: None)
