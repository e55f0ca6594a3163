"""Carries out hand-overs: fence at offsets, then persist in etcd, then answer (protocol section 5).

Each step continues until its outcome is known: a fence is repeated with the same attempt id, a
transaction until it was made or rejected. Until then the table keeps the entry as pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._core.queues import GroupQueue
from batonmq.errors import (
    BatonError,
    HandoverPending,
    Internal,
    InvalidArgument,
    NotHolder,
    NotIdle,
    NotLeader,
    OffsetsUnreachable,
    OldEpoch,
    Overloaded,
    Superseded,
    TokenMismatch,
    Unacked,
    Unreachable,
)
from batonmq_server.lockmgr.core.decision import FenceCondition, GrantDecision, held_error
from batonmq_server.lockmgr.core.handover_timing import HandOverTimes, NextOwner, OwnershipEnd
from batonmq_server.lockmgr.core.lock_entry import (
    ChangeStep,
    LockEntry,
    LockRecord,
    PendingChange,
)
from batonmq_server.lockmgr.lock_store import BACKOFF, LockWrite, WriteConflict
from batonmq_server.lockmgr.offsets_client import FencedQueue, FenceOutcome, offsets_unreachable
from batonmq_server.lockmgr.queue_requests import (
    ClearRequest,
    FenceRequest,
    ForceRequest,
    QueueRequest,
)
from batonmq_server.lockmgr.term import Term

log = logging.getLogger(__name__)

_OWN_FREE_TOKEN = FenceCondition.CLOSED_OR_DRAINED
"""Passes on a token that was issued to no holder: it is closed from the start."""


@dataclass(frozen=True, slots=True)
class HandOverRefusal:
    """A hand-over that was not made.

    Attributes:
        may_wait: Whether the reason can clear, so that the request may be held.
        observe_again: Whether to observe and decide again at once.
        stale_gate: Whether to try again once the new gate of the group is known.
        fenced: Whether the owner was fenced all the same, by an attempt whose answer was lost.
    """

    error: BatonError
    may_wait: bool = False
    observe_again: bool = False
    stale_gate: bool = False
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class _PassedFence:
    attempt: str
    condition: FenceCondition
    fenced: FencedQueue


def handover_pending(key: GroupQueue) -> HandoverPending:
    """Return the error for a queue during a change of its owner."""
    return HandoverPending(f"a hand-over of {key} is in progress", retry_after_ms=100)


class HandOverExecutor:
    """Carries out what the decision table has granted."""

    def __init__(self, term: Term) -> None:
        self._term, self._table = term, term.table
        self._attempts = 0

    async def hand_over(
        self, request: QueueRequest, decision: GrantDecision, pending: PendingChange
    ) -> lockmgr_pb.Grant | HandOverRefusal:
        """Fence, persist, and end the change of the entry, which `pending` has marked.

        If the term turns out to be over, the entry stays pending, and no lease of it is renewed.
        """
        entry = self._table.get(request.key)
        assert entry is not None
        before, start_ms = entry.lock, self._term.now_ms()
        owner = request.requester.incarnation
        waiter = entry.waiters.get(owner)
        passed = await self._fence(request, decision, pending, entry)
        if isinstance(passed, HandOverRefusal):
            return self._not_fenced(request.key, passed)
        fenced_ms, pending.step = self._term.now_ms(), ChangeStep.PERSIST
        lock = LockRecord(
            owner=owner,
            token=passed.fenced.answer.token,
            acquire_seq=request.requester.acquire_seq,
            attempt=passed.attempt,
            generation=request.requester.generation,
            subscription_generation=request.subscription_generation,
            forced_op_id=entry.lock.forced_op_id,
        )
        result = await self._term.store.persist(request.write(lock, entry.revision))
        if isinstance(result, WriteConflict):
            return self._not_persisted(request.key, result)
        self._granted(request, decision, passed, lock, result)
        end_ms = self._term.now_ms()
        self._term.metrics.observe_phases(
            fence=fenced_ms - start_ms, persist=end_ms - fenced_ms, total=end_ms - start_ms
        )
        times = self._term.timings.queue_granted(
            request.key,
            OwnershipEnd(before.owner, before.token, start_ms) if before.owner else None,
            NextOwner(owner, waiter.since_ms if waiter else None, start_ms),
        )
        if times is not None:
            fence_ms, persist_ms = fenced_ms - times.end_ms, end_ms - fenced_ms
            event = _handed_over_event(times, passed, lock, fence_ms, persist_ms)
            self._term.metrics.handed_over(request.key, event)
        return self._grant(passed.fenced, lock, newly_acquired=decision.newly_acquired)

    async def free(
        self,
        request: ForceRequest | ClearRequest,
        decision: GrantDecision,
        pending: PendingChange,
    ) -> pb.Fenced | HandOverRefusal:
        """Fence and persist like `hand_over`, but without a new owner, under any gate."""
        entry = self._table.get(request.key)
        assert entry is not None
        passed = await self._fence(request, decision, pending, entry)
        if isinstance(passed, HandOverRefusal):
            return self._not_fenced(request.key, passed)
        pending.step = ChangeStep.PERSIST
        op_id = request.op_id if isinstance(request, ForceRequest) else entry.lock.forced_op_id
        lock = replace(entry.lock.freed(), token=passed.fenced.answer.token, forced_op_id=op_id)
        result = await self._term.store.persist(LockWrite(request.key, lock, entry.revision))
        if isinstance(result, WriteConflict):
            return self._not_persisted(request.key, result)
        self._table.end_freed(request.key, lock, result, self._term.now_ms())
        return passed.fenced.answer

    async def repeat_grant(
        self, request: QueueRequest, entry: LockEntry
    ) -> lockmgr_pb.Grant | HandOverRefusal:
        """Return the grant again and renew the lease, if offsets confirms that the token is valid.

        The attempt that issued the token is sent again: offsets repeats its answer and changes
        nothing. With this token and condition it could not pass as a new fence.
        """
        lock, version = entry.lock, entry.version
        item = request.fence_item()
        item.MergeFrom(
            self._attempt_item(FenceCondition.SAME_HOLDER, lock.token - 1, lock.attempt, lock.token)
        )
        try:
            outcome = await self._term.offsets.fence(item)
        except BatonError as error:
            return HandOverRefusal(offsets_unreachable(error))
        if entry.version != version or entry.pending is not None:
            return self._observe_again(request.key)
        if isinstance(outcome, BatonError) or outcome.answer.token != lock.token:
            self._table.discard_observation(request.key)
            return self._observe_again(request.key)
        self._table.renew_lease(request.key, self._term.now_ms())
        self._term.metrics.grant_repeated()
        return self._grant(outcome, lock, newly_acquired=entry.newly_acquired)

    def _grant(
        self, fenced: FencedQueue, lock: LockRecord, *, newly_acquired: bool
    ) -> lockmgr_pb.Grant:
        start = fenced.answer
        return lockmgr_pb.Grant(
            token=start.token,
            committed_offset=start.committed_offset,
            acked=start.acked,
            maybe_seen=start.maybe_seen,
            reset_epoch=start.reset_epoch,
            lease_ms=self._term.policy.lease_ms,
            newly_acquired=newly_acquired,
            offsets_set=fenced.offsets_set,
            offsets_epoch=fenced.offsets_epoch,
            subscription_generation=lock.subscription_generation,
        )

    # Fencing

    async def _fence(
        self,
        request: FenceRequest,
        decision: GrantDecision,
        pending: PendingChange,
        entry: LockEntry,
    ) -> _PassedFence | HandOverRefusal:
        """Try the conditions in order, each with an attempt id of its own."""
        conditions, expected_token = deque(decision.conditions), decision.observation.token
        errors: list[BatonError] = []
        fenced = False
        while conditions:
            condition = conditions.popleft()
            if isinstance(request, ForceRequest) and condition is FenceCondition.FORCED:
                pending.attempt = request.attempt
            else:
                pending.attempt = self._next_attempt()
            item = request.fence_item()
            item.MergeFrom(
                self._attempt_item(condition, expected_token, pending.attempt, entry.lock.token)
            )
            if condition is FenceCondition.CLOSED_OR_DRAINED:
                item.observed_delivered_offset = decision.observation.delivered
                item.observed_reset_epoch = decision.observation.reset_epoch
            outcome = await self._fence_until_known(item)
            if not isinstance(outcome, BatonError):
                return _PassedFence(pending.attempt, condition, outcome)
            if isinstance(outcome, TokenMismatch):
                if outcome.detail.attempt != pending.attempt:
                    return self._observe_again(request.key, fenced=fenced)
                # This attempt passed and its answer was lost: fence again, from its own token.
                fenced = True
                own_holder = item.HasField("holder")
                conditions = deque([FenceCondition.SAME_HOLDER if own_holder else _OWN_FREE_TOKEN])
                expected_token = outcome.detail.token
            elif isinstance(outcome, Superseded):
                # This attempt passed, its answer was lost, and a reset came after it.
                return self._observe_again(request.key, fenced=True)
            elif isinstance(outcome, NotIdle) and condition is FenceCondition.CLOSED_OR_DRAINED:
                # The owner has worked since the decision.
                return self._observe_again(request.key, fenced=fenced)
            elif not isinstance(outcome, Unacked | NotIdle | NotHolder):
                return HandOverRefusal(outcome, fenced=fenced)
            errors.append(outcome)
        refusal = self._most_telling(entry, errors)
        return HandOverRefusal(refusal, may_wait=True, fenced=fenced)

    async def _fence_until_known(self, item: pb.FenceItem) -> FenceOutcome:
        tries, unknown = 0, False
        while True:
            try:
                outcome = await self._term.offsets.fence(item)
                if not isinstance(outcome, OldEpoch):
                    return outcome
                if not await self._announced(item.queue.group):
                    return NotLeader("a newer lock manager leads", retry_after_ms=200)
            except (Unreachable, Internal) as error:
                unknown = True
                log.warning("fence outcome not known attempt=%s error=%s", item.attempt, error)
            except BatonError as error:
                if not unknown:
                    as_is = isinstance(error, OffsetsUnreachable | Overloaded | InvalidArgument)
                    return error if as_is else offsets_unreachable(error)
            await asyncio.sleep(BACKOFF.delay_ms(tries, self._term.random) / 1000)
            tries += 1

    async def _announced(self, group: str) -> bool:
        """Announce the term to the group's set, which may have lost it; False if it is outdated."""
        offsets = self._term.offsets
        try:
            await offsets.announce(offsets.set_of(group))
        except OldEpoch:
            return False
        return True

    def _attempt_item(
        self, condition: FenceCondition, expected_token: int, attempt: str, token_min: int
    ) -> pb.FenceItem:
        """Return the part of a fence that differs between attempts."""
        return pb.FenceItem(
            attempt=attempt,
            expected_token=expected_token,
            condition=pb.FenceCondition.Value(f"FENCE_CONDITION_{condition.value}"),
            idle_ms=self._term.policy.silence_ms if condition is FenceCondition.IDLE else 0,
            token_min=token_min,
        )

    def _next_attempt(self) -> str:
        self._attempts += 1
        return f"{self._term.number}-{self._attempts}-{self._term.random.getrandbits(32):08x}"

    # Outcomes

    def _granted(
        self,
        request: QueueRequest,
        decision: GrantDecision,
        passed: _PassedFence,
        lock: LockRecord,
        revision: int,
    ) -> None:
        entry = self._table.get(request.key)
        assert entry is not None
        before, owner = entry.lock.owner, request.requester.incarnation
        newly_acquired = decision.newly_acquired
        wait_ms = self._table.end_granted(
            request.key, lock, revision, self._term.now_ms(), newly_acquired=newly_acquired
        )
        event = metrics_pb.LockGranted(
            client_id=owner.client_id,
            token=lock.token,
            previous_client_id=before.client_id if before else "",
            wait_ms=wait_ms,
            stolen=passed.condition is FenceCondition.IDLE
            and before is not None
            and not owner.matches(before),
        )
        log.info(
            "queue granted key=%s owner=%s token=%d condition=%s previous=%s",
            request.key,
            event.client_id,
            event.token,
            passed.condition.value,
            event.previous_client_id,
        )
        self._term.metrics.granted(request.key, event, newly_acquired=newly_acquired)

    def _not_fenced(self, key: GroupQueue, refusal: HandOverRefusal) -> HandOverRefusal:
        if not isinstance(refusal.error, NotLeader):
            self._table.end_unchanged(key, fenced=refusal.fenced)
        if refusal.observe_again:
            self._table.discard_observation(key)
        return refusal

    def _not_persisted(self, key: GroupQueue, conflict: WriteConflict) -> HandOverRefusal:
        if conflict.deposed:
            return HandOverRefusal(NotLeader("another lock manager leads", retry_after_ms=200))
        if conflict.gate_changed:
            log.info("grant not written: the group has changed key=%s", key)
        else:
            log.error("lock in etcd was changed by another writer key=%s", key)
        self._table.end_reloaded(key, conflict.lock, conflict.revision, fenced=True)
        return HandOverRefusal(
            handover_pending(key),
            may_wait=True,
            observe_again=not conflict.gate_changed,
            stale_gate=conflict.gate_changed,
        )

    def _most_telling(self, entry: LockEntry, errors: Sequence[BatonError]) -> BatonError:
        """Return the error that tells the requester most, worded like those of the decisions."""
        unacked = next((error for error in errors if isinstance(error, Unacked)), None)
        if unacked is None:
            return held_error(entry, self._term.now_ms(), self._term.policy)
        owner = entry.lock.owner
        return Unacked(
            f"{entry.key}: {unacked.message}",
            retry_after_ms=self._term.policy.slot_ms,
            facts={**unacked.facts, "owner": owner.client_id if owner else ""},
        )

    @staticmethod
    def _observe_again(key: GroupQueue, *, fenced: bool = False) -> HandOverRefusal:
        return HandOverRefusal(
            handover_pending(key), may_wait=True, observe_again=True, fenced=fenced
        )


def _handed_over_event(
    times: HandOverTimes, passed: _PassedFence, lock: LockRecord, fence_ms: int, persist_ms: int
) -> metrics_pb.HandedOver:
    manner = times.manner(passed.condition, unfinished=bool(passed.fenced.answer.maybe_seen))
    return metrics_pb.HandedOver(
        previous_client_id=times.end.owner.client_id,
        previous_token=times.end.token,
        client_id=lock.owner.client_id if lock.owner else "",
        token=lock.token,
        manner=metrics_pb.HandedOver.Manner.Value(f"MANNER_{manner.value}"),
        contend_ms=times.contend_ms,
        drain_ms=times.drain_ms,
        fence_ms=fence_ms,
        persist_ms=persist_ms,
    )
