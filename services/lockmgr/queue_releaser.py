"""Queues that go to nobody: released by their owner, forced by an operator, or cleared because the
subscription of their group changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, HandoverPending, NoQuorum, UnknownQueue
from batonmq_server.lockmgr.core.decision import (
    FenceCondition,
    FreeDecision,
    GrantDecision,
    decide_clear,
)
from batonmq_server.lockmgr.core.handover_timing import OwnershipEnd
from batonmq_server.lockmgr.core.lock_entry import ChangeStep, LockEntry, Observation, PendingChange
from batonmq_server.lockmgr.entry_changes import (
    CHANGE_WAIT_S,
    EntryChanges,
    term_ended,
    wait_for_outcome,
)
from batonmq_server.lockmgr.handover import (
    ClearRequest,
    ForceRequest,
    HandOverExecutor,
    HandOverRefusal,
    Term,
)
from batonmq_server.lockmgr.lock_store import LockWrite, WriteConflict
from batonmq_server.lockmgr.membership import Membership
from batonmq_server.lockmgr.queue_notifier import QueueNotifier
from batonmq_server.lockmgr.queue_observer import QueueObserver

log = logging.getLogger(__name__)

_FORCE_TRIES = 4
_CLEAR_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ForceReleaseResult:
    """What an operator's release did."""

    previous: Incarnation | None
    token: int
    maybe_seen_count: int


class QueueReleaser:
    """Frees queues of one term."""

    def __init__(
        self,
        term: Term,
        members: Membership,
        looks: QueueObserver,
        waiting: QueueNotifier,
        changes: EntryChanges,
        hand_overs: HandOverExecutor,
    ) -> None:
        self._term, self._table, self._members = term, term.table, members
        self._looks, self._waiting, self._changes = looks, waiting, changes
        self._hand_overs = hand_overs
        self._forced: dict[GroupQueue, tuple[str, ForceReleaseResult]] = {}
        self._clearing: set[str] = set()

    # Released by the owner

    async def release(
        self, incarnation: Incarnation, holds: Sequence[tuple[GroupQueue, int]]
    ) -> int:
        """Free what matches; how many entries were freed.

        Raises:
            NoQuorum: not known yet; the change goes on.
            NotLeader: the term ended meanwhile.
        """
        tasks = [
            self._changes.tasks.create_task(self._release(key, incarnation, token))
            for key, token in holds
            if self._table.owns(key, incarnation, token)
        ]
        if not tasks:
            return 0
        _, open_tasks = await asyncio.wait(tasks, timeout=CHANGE_WAIT_S)
        if open_tasks:
            raise NoQuorum(
                f"{len(open_tasks)} of {len(tasks)} releases are not known to be written",
                retry_after_ms=500,
            )
        freed = [None if task.cancelled() else task.result() for task in tasks]
        if None in freed:
            raise term_ended()
        return sum(filter(None, freed))

    async def release_all(
        self, incarnation: Incarnation, group: str, *, drained: bool
    ) -> tuple[int, list[GroupQueue]]:
        """Free what the incarnation has closed at offsets, in one group or in all.

        Args:
            drained: Also what it has nothing in hand of; the fence of the next owner tests that
                again.

        Returns:
            How many entries were freed, and those that stay.

        Raises:
            OffsetsUnreachable: it is not known which ones are finished.
            NoQuorum, NotLeader: see `release`.
        """
        keys = [key for key in self._table.owned_by(incarnation) if group in ("", key.group)]
        looks = await self._changes.finish(self._looks.all_of(keys))
        holds = []
        for key, seen in zip(keys, looks, strict=True):
            if isinstance(seen, BatonError):
                raise seen
            entry = self._table.get(key)
            finished = seen.closed or (drained and seen.drained)
            if entry is not None and finished and seen.token >= entry.lock.token:
                holds.append((key, entry.lock.token))
        freed_count = await self.release(incarnation, holds)
        owned = set(self._table.owned_by(incarnation))
        return freed_count, [key for key in keys if key in owned]

    async def _release(self, key: GroupQueue, owner: Incarnation, token: int) -> bool | None:
        """Free one entry, once no other change of it is under way.

        Returns:
            Whether it was freed; None if the term is over.
        """
        await self._changes.over(key)
        entry = self._table.get(key)
        if entry is None or not self._table.owns(key, owner, token):
            return False
        if entry.pending is not None:
            return None
        self._table.begin(key, ChangeStep.RELEASE)
        freed = await self._changes.start(key, self._write(entry))
        self._waiting.settled(key)
        if freed:
            log.info("queue released key=%s owner=%s token=%d", key, owner.client_id, token)
            self._term.recorder.released(key, owner, token)
            self._term.tenures.ended(key, OwnershipEnd(owner, token, self._now_ms()))
        return freed

    async def _write(self, entry: LockEntry) -> bool | None:
        """Write that nobody owns the entry, which is marked; see `_release` for the answer."""
        key, lock = entry.key, entry.lock.freed()
        outcome = await self._term.store.persist(LockWrite(key, lock, entry.revision))
        if isinstance(outcome, WriteConflict) and outcome.deposed:
            return None
        if isinstance(outcome, WriteConflict):
            log.error("lock changed behind the leader's back key=%s", key)
            self._table.reloaded(key, outcome.lock, outcome.revision, fenced=False)
        else:
            self._table.freed(key, lock, outcome)
        return not isinstance(outcome, WriteConflict)

    # Forced by an operator

    async def force(self, force: ForceRequest) -> ForceReleaseResult:
        """Take a queue from its owner, whatever it is doing; once per operation id.

        Raises:
            UnknownQueue: nobody has ever owned it.
            HandoverPending: another change of it is under way, or this one goes on.
            OffsetsUnreachable, NotLeader: nothing was changed, or that is not known.
        """
        return await self._changes.finish(self._force_out(force))

    async def _force_out(self, force: ForceRequest) -> ForceReleaseResult:
        for _ in range(_FORCE_TRIES):
            done = self._forced_before(force)
            if done is not None:
                return done
            seen = await self._looks.look(force.key)
            entry = self._table.get(force.key)
            if entry is None or entry.pending is not None:
                raise _pending(force.key)
            pending = self._table.begin(force.key, ChangeStep.FENCE)
            work = self._force(force, pending, seen.token)
            outcome = await wait_for_outcome(self._changes.start(force.key, work))
            if isinstance(outcome, ForceReleaseResult):
                return outcome
            if outcome is not None and not outcome.again:
                raise outcome.error
        raise _pending(force.key)

    def _forced_before(self, force: ForceRequest) -> ForceReleaseResult | None:
        """The answer of this operation, if it was carried out.

        Raises:
            UnknownQueue: nobody has ever owned the queue.
            HandoverPending: it is changing hands.
        """
        entry = self._table.get(force.key)
        if entry is None or not (entry.revision or entry.pending):
            raise UnknownQueue(
                f"nobody has ever owned {force.key}", facts={"queue": str(force.key)}
            )
        if entry.pending is not None:
            raise _pending(force.key)
        if entry.lock.forced_op_id != force.op_id:
            return None
        op_id, forced = self._forced.get(force.key, ("", None))
        return forced if op_id == force.op_id else ForceReleaseResult(None, entry.lock.token, 0)

    async def _force(
        self, force: ForceRequest, pending: PendingChange, expected_token: int
    ) -> ForceReleaseResult | HandOverRefusal:
        entry = self._table.get(force.key)
        assert entry is not None
        before, token = entry.lock.owner, entry.lock.token
        grant = GrantDecision((FenceCondition.FORCED,), expected_token)
        answer = await self._hand_overs.free(force, grant, pending)
        if isinstance(answer, HandOverRefusal):
            return answer
        count = sum(part.next_offset - part.first_offset for part in answer.maybe_seen)
        forced = ForceReleaseResult(before, answer.token, count)
        self._forced[force.key] = force.op_id, forced
        log.warning(
            "queue forced key=%s previous=%s token=%d op_id=%s by=%s reason=%s",
            force.key,
            before.client_id if before else "",
            answer.token,
            force.op_id,
            force.by,
            force.reason,
        )
        event = metrics_pb.LockForced(
            previous_client_id=before.client_id if before else "",
            token=answer.token,
            by=force.by,
            reason=force.reason,
        )
        self._term.recorder.forced(force.key, event)
        if before is not None:
            self._term.tenures.ended(
                force.key, OwnershipEnd(before, token, self._now_ms(), forced=True)
            )
        self._waiting.settled(force.key)
        return forced

    # Cleared because the subscription changes

    async def clear_draining(self) -> None:
        """Free what the owners of draining groups can't free by themselves, for ever.

        No group waits for another one, whose set of offsets may not answer.
        """
        async with asyncio.TaskGroup() as looks:
            while True:
                await asyncio.sleep(_CLEAR_INTERVAL_S)
                for group in self._table.owning_groups():
                    if self._members.is_draining(group) and group not in self._clearing:
                        self._clearing.add(group)
                        looks.create_task(self._clear_group(group))

    async def _clear_group(self, group: str) -> None:
        keys = self._table.owned_in(group)
        try:
            found = await self._looks.all_of(keys)
        finally:
            self._clearing.discard(group)
        for key, seen in zip(keys, found, strict=True):
            if isinstance(seen, BatonError):
                log.info("queue not observed key=%s error=%s", key, seen)
            else:
                self._clear(key, seen)

    def _clear(self, key: GroupQueue, seen: Observation) -> None:
        entry = self._table.get(key)
        if entry is None or entry.lock.owner is None or entry.pending is not None:
            return
        decision = decide_clear(entry, seen, self._now_ms(), self._term.policy)
        if isinstance(decision, FreeDecision):
            self._table.begin(key, ChangeStep.RELEASE)
            self._changes.start(key, self._cleared(entry, self._write(entry), silent=False))
        elif decision is not None:
            pending = self._table.begin(key, ChangeStep.FENCE)
            taking = self._hand_overs.free(ClearRequest(key), decision, pending)
            self._changes.start(key, self._cleared(entry, taking, silent=True))

    async def _cleared(self, entry: LockEntry, change: Awaitable[object], *, silent: bool) -> None:
        owner, token = entry.lock.owner, entry.lock.token
        outcome = await change
        if entry.lock.owner is None:
            name = owner.client_id if owner else ""
            log.info("queue cleared key=%s owner=%s outcome=%s", entry.key, name, outcome)
            self._term.recorder.cleared()
            if owner is not None:
                end = OwnershipEnd(owner, token, self._now_ms(), silent=silent)
                self._term.tenures.ended(entry.key, end)
            self._waiting.settled(entry.key)

    def _now_ms(self) -> int:
        return self._term.clock.monotonic_ms()


def _pending(key: GroupQueue) -> HandoverPending:
    return HandoverPending(f"{key} is changing hands", retry_after_ms=100)
