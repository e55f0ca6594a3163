"""Frees queues: released by the owner, forced by an operator, or cleared because they are to have
no owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, NoQuorum, NotLeader, UnknownQueue
from batonmq_server.lockmgr.core.decision import (
    FenceCondition,
    FreeDecision,
    GrantDecision,
    decide_clear,
)
from batonmq_server.lockmgr.core.handover_timing import OwnershipEnd
from batonmq_server.lockmgr.core.lock_entry import (
    ChangeStep,
    LockEntry,
    Observation,
    PendingChange,
)
from batonmq_server.lockmgr.entry_changes import (
    CHANGE_WAIT_S,
    EntryChanges,
    term_ended,
    wait_for_outcome,
)
from batonmq_server.lockmgr.group_membership import GroupMembership
from batonmq_server.lockmgr.handover_executor import (
    HandOverExecutor,
    HandOverRefusal,
    handover_pending,
)
from batonmq_server.lockmgr.ownerless_write import write_ownerless
from batonmq_server.lockmgr.queue_notifier import QueueNotifier
from batonmq_server.lockmgr.queue_observer import QueueObserver
from batonmq_server.lockmgr.queue_requests import ClearRequest, ForceRequest
from batonmq_server.lockmgr.term import Term

log = logging.getLogger(__name__)

_FORCE_TRIES = 4
_CLEAR_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ForceReleaseResult:
    """The result of a forced release.

    Attributes:
        previous: The owner before; None if there was none.
        token: The token now.
        maybe_seen_count: Messages that were in flight at the owner, or may have been.
    """

    previous: Incarnation | None
    token: int
    maybe_seen_count: int


class QueueReleaser:
    """Frees queues of one term."""

    def __init__(
        self,
        term: Term,
        members: GroupMembership,
        observer: QueueObserver,
        notifier: QueueNotifier,
        changes: EntryChanges,
        executor: HandOverExecutor,
    ) -> None:
        self._term, self._table, self._members = term, term.table, members
        self._observer, self._notifier, self._changes = observer, notifier, changes
        self._executor = executor
        self._forced: dict[GroupQueue, tuple[str, ForceReleaseResult]] = {}
        self._clearing: set[str] = set()

    # Released by the owner

    async def release(
        self, incarnation: Incarnation, holds: Sequence[tuple[GroupQueue, int]]
    ) -> int:
        """Free the holds that match their entries, and return how many.

        Raises:
            NoQuorum: the outcome is not known yet; the change continues.
            NotLeader: the term ended meanwhile.
        """
        tasks = [
            self._changes.create_task(self._release(key, incarnation, token))
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
        self, incarnation: Incarnation, group: str, *, drained: bool, by_operator: bool = False
    ) -> tuple[int, list[GroupQueue]]:
        """Free the queues that the incarnation has closed at offsets.

        A grant to the incarnation that is in progress counts: the request that it answers may have
        been cancelled, and no task would release the queue.

        Args:
            group: Only of this group; empty for all.
            drained: Also free queues without messages in flight; the fence of the next owner tests
                that again.
            by_operator: The caller is not the incarnation, but an operator.

        Returns:
            The number of freed entries, and the queues that it still owns.

        Raises:
            OffsetsUnreachable: it is not known which queues are closed.
            NoQuorum, NotLeader: see `release`.
        """
        if by_operator:
            incarnation = self._table.with_owner(incarnation)

        def is_granted(key: GroupQueue) -> bool:
            return group in ("", key.group) and self._table.is_granting(key, incarnation)

        if not await self._changes.wait_for_some(is_granted):
            raise NoQuorum(
                "a grant to the incarnation is not known to be written", retry_after_ms=500
            )
        keys = [key for key in self._table.owned_by(incarnation) if group in ("", key.group)]
        observations = await self._changes.run_to_end(partial(self._observer.observe_all, keys))
        holds = []
        for key, observation in zip(keys, observations, strict=True):
            if isinstance(observation, BatonError):
                raise observation
            entry = self._table.get(key)
            finished = observation.closed or (drained and observation.drained)
            if entry is not None and finished and observation.token >= entry.lock.token:
                holds.append((key, entry.lock.token))
        freed_count = await self.release(incarnation, holds)
        owned = set(self._table.owned_by(incarnation))
        return freed_count, [key for key in keys if key in owned]

    async def _release(self, key: GroupQueue, owner: Incarnation, token: int) -> bool | None:
        """Free one entry, once no other change of it is in progress.

        Returns:
            Whether it was freed; None if the term has ended.
        """
        await self._changes.wait_for(key)
        entry = self._table.get(key)
        if entry is None or not self._table.owns(key, owner, token):
            return False
        if entry.pending is not None:
            return None
        self._table.begin_change(key, ChangeStep.RELEASE)
        freed = await self._changes.start(key, partial(self._write_free, entry))
        self._notifier.change_ended(key)
        if freed:
            log.info("queue released key=%s owner=%s token=%d", key, owner.client_id, token)
            self._term.metrics.released(key, owner, token)
            self._term.timings.ownership_ended(key, OwnershipEnd(owner, token, self._term.now_ms()))
        return freed

    async def _write_free(self, entry: LockEntry) -> bool | None:
        """Write a marked entry without its owner; for the result see `_release`."""
        return await write_ownerless(self._term, entry, entry.lock.freed())

    # Forced by an operator

    async def force_release(self, request: ForceRequest) -> ForceReleaseResult:
        """Take a queue from its owner, even with messages in flight; once per operation id.

        Raises:
            UnknownQueue: the queue has never been owned.
            HandoverPending: another change is in progress, or this one continues.
            OffsetsUnreachable, NotLeader: nothing was changed, or that is not known.
        """
        return await self._changes.run_to_end(partial(self._force_release, request))

    async def _force_release(self, request: ForceRequest) -> ForceReleaseResult:
        for _ in range(_FORCE_TRIES):
            earlier = self._earlier_result(request)
            if earlier is not None:
                return earlier
            observation = await self._observer.observe(request.key)
            entry = self._table.get(request.key)
            if entry is None or entry.pending is not None:
                raise handover_pending(request.key)
            pending = self._table.begin_change(request.key, ChangeStep.FENCE)
            work = partial(self._force, request, pending, observation)
            outcome = await wait_for_outcome(self._changes.start(request.key, work))
            if isinstance(outcome, ForceReleaseResult):
                return outcome
            if outcome is not None and not outcome.observe_again:
                raise outcome.error
        raise handover_pending(request.key)

    def _earlier_result(self, request: ForceRequest) -> ForceReleaseResult | None:
        """Return the result of the operation if it was carried out before.

        Raises:
            UnknownQueue: the queue has never been owned.
            HandoverPending: a change of the queue is in progress.
        """
        entry = self._table.get(request.key)
        if entry is None or not (entry.revision or entry.pending):
            raise UnknownQueue(
                f"{request.key} has never been owned",
                remedy="Check the names: baton lock list shows the queues that have an owner.",
                facts={"queue": str(request.key)},
            )
        if entry.pending is not None:
            raise handover_pending(request.key)
        if entry.lock.forced_op_id != request.op_id:
            return None
        op_id, result = self._forced.get(request.key, ("", None))
        if result is not None and op_id == request.op_id:
            return result
        return ForceReleaseResult(None, entry.lock.token, 0)

    async def _force(
        self, request: ForceRequest, pending: PendingChange, observation: Observation
    ) -> ForceReleaseResult | HandOverRefusal:
        entry = self._table.get(request.key)
        assert entry is not None
        before, token = entry.lock.owner, entry.lock.token
        decision = GrantDecision((FenceCondition.FORCED,), observation)
        answer = await self._executor.free(request, decision, pending)
        if isinstance(answer, HandOverRefusal):
            return answer
        count = sum(part.next_offset - part.first_offset for part in answer.maybe_seen)
        result = ForceReleaseResult(before, answer.token, count)
        self._forced[request.key] = request.op_id, result
        log.warning(
            "queue forced key=%s previous=%s token=%d op_id=%s by=%s reason=%s",
            request.key,
            before.client_id if before else "",
            answer.token,
            request.op_id,
            request.by,
            request.reason,
        )
        event = metrics_pb.LockForced(
            previous_client_id=before.client_id if before else "",
            token=answer.token,
            by=request.by,
            reason=request.reason,
        )
        self._term.metrics.forced(request.key, event)
        if before is not None:
            end = OwnershipEnd(before, token, self._term.now_ms(), forced=True)
            self._term.timings.ownership_ended(request.key, end)
        self._notifier.change_ended(request.key)
        return result

    # Cleared: the subscription changes, or the owner is gone

    async def clear_draining_groups(self) -> None:
        """Free the queues of draining groups whose owners can't release them, until cancelled.

        Groups do not wait for each other, so a replica set of offsets that does not answer delays
        its own groups only.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(_CLEAR_INTERVAL_S)
                for group in self._table.groups_with_owners():
                    if self._members.is_draining(group) and group not in self._clearing:
                        self._clearing.add(group)
                        tasks.create_task(self._clear_group(group))

    async def _clear_group(self, group: str) -> None:
        keys = self._table.owned_in(group)
        try:
            observations = await self._observer.observe_all(keys)
        finally:
            self._clearing.discard(group)
        try:
            for key, observation in zip(keys, observations, strict=True):
                if isinstance(observation, BatonError):
                    log.info("queue not observed key=%s error=%s", key, observation)
                else:
                    self.clear(key, observation)
        except NotLeader:
            return  # the term is ending, and cancels this task in its next step

    def clear(self, key: GroupQueue, observation: Observation) -> None:
        """Begin to free a queue, if its owner can't release it; see `decide_clear`.

        Raises:
            NotLeader: the term has ended.
        """
        entry = self._table.get(key)
        if entry is None or entry.lock.owner is None or entry.pending is not None:
            return
        decision = decide_clear(entry, observation, self._term.now_ms(), self._term.policy)
        match decision:
            case GrantDecision():
                pending = self._table.begin_change(key, ChangeStep.FENCE)
                free = partial(self._executor.free, ClearRequest(key), decision, pending)
                change = partial(self._record_cleared, entry, free, silent=True)
            case FreeDecision():
                self._table.begin_change(key, ChangeStep.RELEASE)
                write = partial(self._write_free, entry)
                change = partial(self._record_cleared, entry, write, silent=False)
            case None:
                return
        self._changes.start(key, change)

    async def _record_cleared(
        self, entry: LockEntry, free: Callable[[], Awaitable[object]], *, silent: bool
    ) -> None:
        owner, token = entry.lock.owner, entry.lock.token
        outcome = await free()
        if entry.lock.owner is None:
            name = owner.client_id if owner else ""
            log.info("queue cleared key=%s owner=%s outcome=%s", entry.key, name, outcome)
            self._term.metrics.cleared()
            if owner is not None:
                end = OwnershipEnd(owner, token, self._term.now_ms(), silent=silent)
                self._term.timings.ownership_ended(entry.key, end)
            self._notifier.change_ended(entry.key)
