"""One hand-over, to an asker or to nobody: fence at offsets, then persist in etcd, then say so
(protocol section 5).

Neither step is left before its outcome is known: a fence is repeated with the same attempt id, a
transaction until it was made or refused. Until then the table keeps the entry as pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.clock import Clock
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
from batonmq_server.lockmgr.core.handover_timing import (
    HandOverTimes,
    HandOverTimings,
    NextOwner,
    OwnershipEnd,
)
from batonmq_server.lockmgr.core.lock_entry import (
    ChangeStep,
    LockEntry,
    LockPolicy,
    LockRecord,
    PendingChange,
    Requester,
)
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.lock_proto import incarnation_to_pb, key_to_pb
from batonmq_server.lockmgr.lock_store import BACKOFF, LockStore, LockWrite, WriteConflict
from batonmq_server.lockmgr.metrics import LockmgrMetrics
from batonmq_server.lockmgr.offsets_client import (
    FencedQueue,
    FenceOutcome,
    OffsetsClient,
    offsets_unreachable,
)
from batonmq_server.runtime.etcd.session import Compare
from batonmq_server.runtime.group_gates import GATES_PREFIX as GATES
from batonmq_server.runtime.group_gates import GroupGate

log = logging.getLogger(__name__)

_TO_NOBODY = FenceCondition.CLOSED_OR_DRAINED
"""Passes on what is closed from the start, since nobody holds it."""


@dataclass(frozen=True, slots=True)
class QueueRequest:
    """One queue that somebody asks for, with what it brings along as an earlier owner.

    `gate`: the group's, by which the asker was admitted; etcd has to have it still when the grant
    is persisted.
    """

    key: GroupQueue
    asker: Requester
    resume: Sequence[queue_pb2.OffsetRange] = ()
    reset_epoch: int = 0
    initial_offset: int = 0
    topic_id: int = 0
    gate: GroupGate | None = None

    @property
    def subscription_generation(self) -> int:
        """What deliveries under the grant have to name; 0 lets any pass."""
        gate = self.gate
        return gate.subscription_generation if gate is not None and gate.bound else 0

    def change(self, lock: LockRecord, revision: int) -> LockWrite:
        """What to persist over the entry of `revision`."""
        assert self.gate is not None, "nobody gets a queue who was not admitted"
        unchanged = Compare(GATES + self.key.group, mod_revision=self.gate.revision)
        return LockWrite(self.key, lock, revision, unchanged)

    def fence(self) -> pb.FenceItem:
        """What is the same in every fence for it."""
        return pb.FenceItem(
            queue=key_to_pb(self.key),
            holder=incarnation_to_pb(self.asker.incarnation),
            resume=self.resume,
            reset_epoch=self.reset_epoch,
            initial_offset=self.initial_offset,
            topic_id=self.topic_id,
            subscription_generation=self.subscription_generation,
        )


@dataclass(frozen=True, slots=True)
class ForceRequest:
    """An operator takes a queue from its owner; `op_id` is the same when that is repeated."""

    key: GroupQueue
    op_id: str
    by: str
    reason: str

    @property
    def attempt(self) -> str:
        """Id of the fence: that of the operation."""
        return f"force-{self.op_id}"

    def fence(self) -> pb.FenceItem:
        """What is the same in every fence for it."""
        return pb.FenceItem(queue=key_to_pb(self.key), forced_by=self.by, forced_reason=self.reason)


@dataclass(frozen=True, slots=True)
class ClearRequest:
    """A queue that goes to nobody because the subscription of its group changes."""

    key: GroupQueue

    def fence(self) -> pb.FenceItem:
        """What is the same in every fence for it."""
        return pb.FenceItem(queue=key_to_pb(self.key))


@dataclass(frozen=True, slots=True)
class HandOverRefusal:
    """No grant. `clears`: waiting makes sense; `again`: looking anew at once does; `stale_gate`:
    it does once the group's new gate is here."""

    error: BatonError
    clears: bool = False
    again: bool = False
    stale_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What a leader works with during one term.

    Attributes:
        number: Create revision of its election key.
        tenures: Of owners, for those who watch.
    """

    number: int
    policy: LockPolicy
    table: LockTable
    offsets: OffsetsClient
    store: LockStore
    clock: Clock
    random: Random
    recorder: LockmgrMetrics
    tenures: HandOverTimings = field(default_factory=HandOverTimings)


@dataclass(frozen=True, slots=True)
class _FencePassed:
    """A fence that succeeded."""

    attempt: str
    condition: FenceCondition
    fenced: FencedQueue


class HandOverExecutor:
    """Carries out what the decision table has granted."""

    def __init__(self, term: Term) -> None:
        self._term, self._table = term, term.table
        self._attempts = 0

    async def carry_out(
        self, wish: QueueRequest, grant: GrantDecision, pending: PendingChange
    ) -> lockmgr_pb.Grant | HandOverRefusal:
        """Fence, persist, and settle the entry, which `pending` has marked.

        If the term turns out to be over, the entry stays pending: nobody is renewed any more.
        """
        entry = self._table.get(wish.key)
        assert entry is not None
        before, start_ms = entry.lock, self._now_ms()
        waiter = entry.waiters.get(wish.asker.incarnation)
        passed = await self._fence(wish, grant, pending, entry)
        if isinstance(passed, HandOverRefusal):
            return self._not_fenced(wish.key, passed)
        fenced_ms, pending.step = self._now_ms(), ChangeStep.PERSIST
        owner = wish.asker.incarnation
        lock = LockRecord(
            owner=owner,
            token=passed.fenced.answer.token,
            acquire_seq=wish.asker.acquire_seq,
            attempt=passed.attempt,
            generation=wish.asker.generation,
            subscription_generation=wish.subscription_generation,
            forced_op_id=entry.lock.forced_op_id,
        )
        outcome = await self._term.store.persist(wish.change(lock, entry.revision))
        if isinstance(outcome, WriteConflict):
            return self._not_persisted(wish.key, outcome)
        self._granted(wish, grant, passed, lock, outcome)
        end_ms = self._now_ms()
        self._term.recorder.phases(
            fence=fenced_ms - start_ms, persist=end_ms - fenced_ms, total=end_ms - start_ms
        )
        handed = self._term.tenures.passed(
            wish.key,
            OwnershipEnd(before.owner, before.token, start_ms) if before.owner else None,
            NextOwner(owner, waiter.since_ms if waiter else None, start_ms),
        )
        if handed is not None:
            self._term.recorder.handed_over(
                wish.key,
                _handed_over(handed, passed, lock, fenced_ms - handed.end_ms, end_ms - fenced_ms),
            )
        return self.answer(passed.fenced, lock, newly_acquired=grant.newly_acquired)

    async def free(
        self, taking: ForceRequest | ClearRequest, grant: GrantDecision, pending: PendingChange
    ) -> pb.Fenced | HandOverRefusal:
        """As `carry_out`, to nobody: what any gate allows."""
        entry = self._table.get(taking.key)
        assert entry is not None
        passed = await self._fence(taking, grant, pending, entry)
        if isinstance(passed, HandOverRefusal):
            return self._not_fenced(taking.key, passed)
        pending.step = ChangeStep.PERSIST
        op_id = taking.op_id if isinstance(taking, ForceRequest) else entry.lock.forced_op_id
        lock = replace(entry.lock.freed(), token=passed.fenced.answer.token, forced_op_id=op_id)
        outcome = await self._term.store.persist(LockWrite(taking.key, lock, entry.revision))
        if isinstance(outcome, WriteConflict):
            return self._not_persisted(taking.key, outcome)
        self._table.freed(taking.key, lock, outcome)
        return passed.fenced.answer

    async def repeat(
        self, wish: QueueRequest, entry: LockEntry
    ) -> lockmgr_pb.Grant | HandOverRefusal:
        """Answer the grant once more, if offsets confirms that its token is in force.

        The fence's own attempt is asked again: offsets repeats its answer and does nothing. The
        token and condition it carries could not pass as a new fence.
        """
        lock, stamp = entry.lock, entry.stamp
        item = wish.fence()
        item.MergeFrom(
            self._try_of(FenceCondition.SAME_HOLDER, lock.token - 1, lock.attempt, lock.token)
        )
        try:
            verdict = await self._term.offsets.fence(item)
        except BatonError as error:
            return HandOverRefusal(offsets_unreachable(error))
        if entry.stamp != stamp or entry.pending is not None:
            return HandOverRefusal(self._pending_error(wish.key), clears=True, again=True)
        if isinstance(verdict, BatonError) or verdict.answer.token != lock.token:
            self._table.distrust(wish.key)
            return HandOverRefusal(self._pending_error(wish.key), clears=True, again=True)
        self._table.renew(wish.key, self._now_ms())
        self._term.recorder.repeated()
        return self.answer(verdict, lock, newly_acquired=entry.newly_acquired)

    def answer(
        self, fenced: FencedQueue, lock: LockRecord, *, newly_acquired: bool
    ) -> lockmgr_pb.Grant:
        """What the new owner is told."""
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

    async def _fence(
        self,
        taking: QueueRequest | ForceRequest | ClearRequest,
        grant: GrantDecision,
        pending: PendingChange,
        entry: LockEntry,
    ) -> _FencePassed | HandOverRefusal:
        """Try the conditions in order; each under an attempt id of its own."""
        conditions, expected_token = deque(grant.conditions), grant.expected_token
        refused: list[BatonError] = []
        while conditions:
            condition = conditions.popleft()
            if isinstance(taking, ForceRequest) and condition is FenceCondition.FORCED:
                pending.attempt = taking.attempt
            else:
                pending.attempt = self._next_attempt()
            item = taking.fence()
            item.MergeFrom(
                self._try_of(condition, expected_token, pending.attempt, entry.lock.token)
            )
            verdict = await self._until_known(item)
            if not isinstance(verdict, BatonError):
                return _FencePassed(pending.attempt, condition, verdict)
            if isinstance(verdict, TokenMismatch):
                if verdict.detail.attempt != pending.attempt:
                    return HandOverRefusal(self._pending_error(taking.key), clears=True, again=True)
                # Ours, and its answer is lost: fence once more, from the holder that we made.
                ours = FenceCondition.SAME_HOLDER if item.HasField("holder") else _TO_NOBODY
                conditions = deque([ours])
                expected_token = verdict.detail.token
            elif isinstance(verdict, Superseded):
                return HandOverRefusal(self._pending_error(taking.key), clears=True, again=True)
            elif not isinstance(verdict, Unacked | NotIdle | NotHolder):
                return HandOverRefusal(verdict)
            refused.append(verdict)
        return HandOverRefusal(self._why(entry, refused), clears=True)

    async def _until_known(self, item: pb.FenceItem) -> FenceOutcome:
        tries, unknown = 0, False
        while True:
            try:
                verdict = await self._term.offsets.fence(item)
                if not isinstance(verdict, OldEpoch):
                    return verdict
                if not await self._announced(item.queue.group):
                    return NotLeader("a newer lock manager leads", retry_after_ms=200)
            except (Unreachable, Internal) as error:
                unknown = True
                log.warning("fence not known attempt=%s error=%s", item.attempt, error)
            except BatonError as error:
                if not unknown:
                    plain = isinstance(error, OffsetsUnreachable | Overloaded | InvalidArgument)
                    return error if plain else offsets_unreachable(error)
            await asyncio.sleep(BACKOFF.delay_ms(tries, self._term.random) / 1000)
            tries += 1

    async def _announced(self, group: str) -> bool:
        """Tell the group's set our term, which it may have lost; False if it knows a newer one."""
        offsets = self._term.offsets
        try:
            await offsets.announce(offsets.set_of(group))
        except OldEpoch:
            return False
        return True

    def _try_of(
        self, condition: FenceCondition, expected_token: int, attempt: str, token_min: int
    ) -> pb.FenceItem:
        """What one try adds to a fence."""
        return pb.FenceItem(
            attempt=attempt,
            expected_token=expected_token,
            condition=pb.FenceCondition.Value(f"FENCE_CONDITION_{condition.value}"),
            idle_ms=self._term.policy.silence_ms if condition is FenceCondition.IDLE else 0,
            token_min=token_min,
        )

    def _why(self, entry: LockEntry, refused: Sequence[BatonError]) -> BatonError:
        """The refusal that tells an asker most, in the words of the decision table."""
        unacked = next((error for error in refused if isinstance(error, Unacked)), None)
        slot_ms = self._term.policy.slot_ms
        if unacked is None:
            return held_error(entry, self._now_ms(), self._term.policy)
        owner = entry.lock.owner
        return Unacked(
            f"{entry.key}: {unacked.message}",
            retry_after_ms=slot_ms,
            facts={**unacked.facts, "owner": owner.client_id if owner else ""},
        )

    def _not_fenced(self, key: GroupQueue, refusal: HandOverRefusal) -> HandOverRefusal:
        if not isinstance(refusal.error, NotLeader):
            self._table.refused(key)
        if refusal.again:
            self._table.distrust(key)
        return refusal

    def _not_persisted(self, key: GroupQueue, conflict: WriteConflict) -> HandOverRefusal:
        if conflict.deposed:
            return HandOverRefusal(NotLeader("another lock manager leads", retry_after_ms=200))
        if conflict.gate:
            log.info("grant overtaken by a change of the group key=%s", key)
        else:
            log.error("lock changed behind the leader's back key=%s", key)
        self._table.reloaded(key, conflict.lock, conflict.revision, fenced=True)
        error = self._pending_error(key)
        return HandOverRefusal(
            error, clears=True, again=not conflict.gate, stale_gate=conflict.gate
        )

    def _granted(
        self,
        wish: QueueRequest,
        grant: GrantDecision,
        passed: _FencePassed,
        lock: LockRecord,
        revision: int,
    ) -> None:
        entry = self._table.get(wish.key)
        assert entry is not None
        before = entry.lock.owner
        wait_ms = self._table.granted(
            wish.key, lock, revision, self._now_ms(), newly_acquired=grant.newly_acquired
        )
        event = metrics_pb.LockGranted(
            client_id=wish.asker.incarnation.client_id,
            token=lock.token,
            previous_client_id=before.client_id if before else "",
            wait_ms=wait_ms,
            stolen=passed.condition is FenceCondition.IDLE
            and before not in (None, wish.asker.incarnation),
        )
        log.info(
            "queue granted key=%s owner=%s token=%d condition=%s previous=%s",
            wish.key,
            event.client_id,
            event.token,
            passed.condition.value,
            event.previous_client_id,
        )
        self._term.recorder.granted(wish.key, event, newly_acquired=grant.newly_acquired)

    def _next_attempt(self) -> str:
        self._attempts += 1
        return f"{self._term.number}-{self._attempts}-{self._term.random.getrandbits(32):08x}"

    def _now_ms(self) -> int:
        return self._term.clock.monotonic_ms()

    @staticmethod
    def _pending_error(key: GroupQueue) -> HandoverPending:
        return HandoverPending(f"{key} is changing hands", retry_after_ms=100)


def _handed_over(
    handed: HandOverTimes, passed: _FencePassed, lock: LockRecord, fence_ms: int, persist_ms: int
) -> metrics_pb.HandedOver:
    manner = handed.manner(passed.condition, unfinished=bool(passed.fenced.answer.maybe_seen))
    return metrics_pb.HandedOver(
        previous_client_id=handed.end.owner.client_id,
        previous_token=handed.end.token,
        client_id=lock.owner.client_id if lock.owner else "",
        token=lock.token,
        manner=metrics_pb.HandedOver.Manner.Value(f"MANNER_{manner.value}"),
        contend_ms=handed.contend_ms,
        drain_ms=handed.drain_ms,
        fence_ms=fence_ms,
        persist_ms=persist_ms,
    )
