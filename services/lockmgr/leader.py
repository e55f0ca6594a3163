"""The calls that a leader answers during one term.

A change that a call has begun runs in the task group of the term, to its end, even if the call is
cancelled; the call only waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._common.aio import in_steps
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, SubscriptionDraining
from batonmq_server.lockmgr.core.decision import (
    DenyDecision,
    GrantDecision,
    RenewDecision,
    WaitDecision,
)
from batonmq_server.lockmgr.core.lock_entry import (
    ChangeStep,
    DecisionProfile,
    LockEntry,
    LockState,
    PendingChange,
    RunningHandler,
)
from batonmq_server.lockmgr.core.lock_table import HoldReport, HoldState, KeepAliveCall
from batonmq_server.lockmgr.entry_changes import EntryChanges, term_ended, wait_for_outcome
from batonmq_server.lockmgr.group_membership import GroupMembership
from batonmq_server.lockmgr.handover_executor import (
    HandOverExecutor,
    HandOverRefusal,
    handover_pending,
)
from batonmq_server.lockmgr.lock_proto import WatchNotice
from batonmq_server.lockmgr.lock_remover import LockRemover
from batonmq_server.lockmgr.queue_notifier import QueueNotifier
from batonmq_server.lockmgr.queue_observer import QueueObserver
from batonmq_server.lockmgr.queue_releaser import QueueReleaser
from batonmq_server.lockmgr.queue_requests import QueueRequest
from batonmq_server.lockmgr.term import Term

log = logging.getLogger(__name__)

_TRIES_MAX = 4
"""Observations for one request before it waits for the next slot."""
_HOUSEKEEPING_S = 1.0

TOGETHER_MAX = 256
"""Outcomes that are yielded together, at most."""
AcquireOutcome = tuple[GroupQueue, pb.Grant | BatonError]
Decided = tuple[GroupQueue, pb.Grant | Exception]


class Leader:
    """Answers calls in one term.

    Args:
        may_answer: Returns whether the leader's own lease is valid (protocol section 8).
        tasks: Lives as long as the term.
        watchers_max: Greatest number of Watch streams.
    """

    def __init__(
        self,
        term: Term,
        members: GroupMembership,
        may_answer: Callable[[], bool],
        tasks: asyncio.TaskGroup,
        watchers_max: int,
    ) -> None:
        self._term, self._table, self._members = term, term.table, members
        self._may_answer, self._tasks = may_answer, tasks
        self._executor = HandOverExecutor(term)
        self._changes = EntryChanges(tasks)
        self._observer = QueueObserver(term.table, term.offsets, term.clock)
        self._notifier = QueueNotifier(term, members, self._observer.observe, watchers_max)
        self.releaser = QueueReleaser(
            term, members, self._observer, self._notifier, self._changes, self._executor
        )
        remover = LockRemover(
            term, members, self._observer, self._notifier, self._changes, self.releaser
        )
        for loop in (
            self._notifier.observe_held,
            self._notifier.follow_groups,
            self._notifier.follow_gates,
            self.releaser.clear_draining_groups,
            remover.run,
            self._keep_house,
        ):
            tasks.create_task(loop())

    # Calls

    async def acquire(
        self, requests: Sequence[QueueRequest], hold_ms: int, together_bytes: int
    ) -> AsyncGenerator[Sequence[AcquireOutcome], None]:
        """Yield one outcome per request, as soon as it is decided. Closing it ends all waiting.

        Args:
            together_bytes: Outcomes that were decided at the same moment are yielded together,
                until they have so many bytes; 0 for each alone.

        Raises:
            NotLeader: the term is over; the other outcomes are not known.
        """
        self.check_leads()
        size = len(requests)
        decided: asyncio.Queue[Decided] = asyncio.Queue(size)
        until_ms = self._term.now_ms() + hold_ms
        started = [self._tasks.create_task(self._answer(r, until_ms, decided)) for r in requests]
        try:
            while size:
                outcomes, failure = taken_together(await decided.get(), decided, together_bytes)
                size -= len(outcomes)
                if outcomes:
                    self.check_leads()
                    yield outcomes
                if failure is not None:
                    raise failure
        finally:
            for task in started:
                task.cancel()

    def keep_alive(
        self,
        incarnation: Incarnation,
        acquire_seq: int,
        holds: Sequence[tuple[GroupQueue, int]],
        running: Mapping[GroupQueue, RunningHandler],
    ) -> list[HoldReport]:
        """Renew the leases of the holds that match their entries; see `LockTable.keep_alive`."""
        groups = {key.group for key, _ in holds}
        call = KeepAliveCall(
            incarnation=incarnation,
            acquire_seq=acquire_seq,
            holds=holds,
            evicted_groups=frozenset(
                group for group in groups if not self._members.is_member(group, incarnation)
            ),
            draining_groups=frozenset(filter(self._members.is_draining, groups)),
            running=running,
        )
        now_ms = self._term.now_ms()
        reports = self._table.keep_alive(call, now_ms)
        self._record_times(call, reports, now_ms)
        self._term.metrics.kept_alive(reports)
        return reports

    async def watch(
        self, incarnation: Incarnation, together_max: int
    ) -> AsyncGenerator[Sequence[WatchNotice], None]:
        """Yield the notices for a client; see `QueueNotifier.watch`.

        Raises:
            NotLeader: the term is over.
            Overloaded: the limit of streams is reached.
        """
        self.check_leads()
        async with aclosing(self._notifier.watch(incarnation, together_max)) as watched:
            async for notices in watched:
                self.check_leads()
                yield notices
        self.check_leads()

    def describe(self, key: GroupQueue) -> tuple[LockEntry, bool]:
        """Return the entry, and whether its owner is not a member of the group any more."""
        entry = self._table.get(key) or LockEntry(key)
        owner = entry.lock.owner
        return entry, owner is not None and not self._members.is_member(key.group, owner)

    def entries(self, group: str, topic: str, after: GroupQueue | None) -> Iterator[LockEntry]:
        """Yield the entries of a listing; see `LockTable.entries`."""
        return self._table.entries(group, topic, after)

    @property
    def term(self) -> int:
        """Number of the term."""
        return self._term.number

    @property
    def lease_ms(self) -> int:
        """Length of the leases that owners are told."""
        return self._term.policy.lease_ms

    @property
    def silence_ms(self) -> int:
        """Time after which a silent owner may lose a queue."""
        return self._term.policy.silence_ms

    def check_leads(self) -> None:
        """Return if this node may still answer.

        Raises:
            NotLeader: the leader's own lease has expired, or is about to.
        """
        if not self._may_answer():
            raise term_ended()

    async def wait_for_changes(self) -> None:
        """Return once no change is in progress, or after some seconds."""
        await self._changes.wait_for_all()

    def lock_confirmed(self, key: GroupQueue) -> None:
        """Wake the requests that wait for a lock of the previous leader."""
        self._notifier.change_ended(key)

    def close(self) -> None:
        """End the Watch streams: the term is over."""
        self._notifier.streams.close()

    async def _keep_house(self) -> None:
        """Drop old waiters and set the gauges, until cancelled."""
        while True:
            self._table.drop_old_waiters(self._term.now_ms())
            counts: Counter[LockState] = Counter()
            async for entry in in_steps(self._table.stored()):
                counts[entry.state] += 1
            watchers = len(self._notifier.streams)
            self._term.metrics.set_gauges(self._term.number, counts, watchers)
            await asyncio.sleep(_HOUSEKEEPING_S)

    # One requested queue

    async def _answer(
        self,
        request: QueueRequest,
        until_ms: int,
        decided: asyncio.Queue[Decided],
    ) -> None:
        outcome: pb.Grant | Exception = term_ended()
        try:
            outcome = await self._acquire(request, until_ms)
        except BatonError as error:
            requester = request.requester.incarnation
            self._term.metrics.denied(request.key, requester, error)
            outcome = error = _without_frames(error)
            self._table.record_denial(request.key, requester, error, self._term.now_ms())
        except Exception as error:  # noqa: BLE001  raised again in the call
            outcome = error
        finally:
            decided.put_nowait((request.key, outcome))

    async def _acquire(self, request: QueueRequest, until_ms: int) -> pb.Grant:
        key, requester = request.key, request.requester
        await self._members.wait_for_generation(key.group, requester.generation)
        while True:
            self.check_leads()
            answer = await self._admit_and_try(request)
            if isinstance(answer, pb.Grant):
                return answer
            if answer.stale_gate:
                continue
            may_wait = answer.may_wait
            if not may_wait or not await self._notifier.hold(key, requester.incarnation, until_ms):
                raise answer.error

    async def _admit_and_try(self, request: QueueRequest) -> pb.Grant | HandOverRefusal:
        """Try by the present gate of the group.

        Raises:
            NotMember, NotSubscribed, ModeChanged, NotAssigned: the requester may not own the queue.
        """
        try:
            gate = self._members.admit(request.key, request.requester)
        except SubscriptionDraining as error:
            return HandOverRefusal(error, may_wait=True)
        if not self._may_take_any(request):
            self._members.check_assigned(request.key, request.requester)
        answer = await self._try(replace(request, gate=gate))
        stale_gate = isinstance(answer, HandOverRefusal) and answer.stale_gate
        if stale_gate and not await self._members.wait_for_new_gate(request.key.group, gate):
            return HandOverRefusal(handover_pending(request.key))
        return answer

    def _may_take_any(self, request: QueueRequest) -> bool:
        """Return whether the assignment does not matter.

        An owner that is to lose the queue may have handlers to finish under its next token. DeFiBus
        has no assignment.
        """
        entry = self._table.get(request.key)
        owner = entry.lock.owner if entry is not None else None
        defibus = self._term.policy.profile is DecisionProfile.DEFIBUS
        return defibus or request.requester.incarnation.matches(owner)

    async def _try(self, request: QueueRequest) -> pb.Grant | HandOverRefusal:
        """Observe if necessary, decide, and carry it out; again if offsets contradicts."""
        key = request.key
        answer: pb.Grant | HandOverRefusal | None = None
        for _ in range(_TRIES_MAX):
            now_ms = self._term.now_ms()
            if self._table.needs_observation(key, request.requester, now_ms):
                await self._observer.observe(key)
            decision = self._table.decide(key, request.requester, self._term.now_ms())
            match decision:
                case DenyDecision(error):
                    return HandOverRefusal(error)
                case WaitDecision(error):
                    return HandOverRefusal(error, may_wait=True)
                case GrantDecision():
                    answer = await self._hand_over(request, decision)
                case RenewDecision():
                    entry = self._table.get(key)
                    assert entry is not None
                    answer = await self._executor.repeat_grant(request, entry)
            if isinstance(answer, pb.Grant) or (answer is not None and not answer.observe_again):
                return answer
        return answer or HandOverRefusal(handover_pending(key), may_wait=True)

    async def _hand_over(
        self, request: QueueRequest, decision: GrantDecision
    ) -> pb.Grant | HandOverRefusal:
        self.check_leads()
        pending = self._table.begin_change(
            request.key, ChangeStep.FENCE, request.requester.incarnation
        )
        change = self._changes.start(
            request.key, partial(self._carry_out, request, decision, pending)
        )
        return await wait_for_outcome(change) or HandOverRefusal(handover_pending(request.key))

    async def _carry_out(
        self, request: QueueRequest, decision: GrantDecision, pending: PendingChange
    ) -> pb.Grant | HandOverRefusal:
        answer = await self._executor.hand_over(request, decision, pending)
        if isinstance(answer, pb.Grant):
            self._notifier.change_ended(request.key)
        return answer

    def _record_times(
        self, call: KeepAliveCall, reports: Sequence[HoldReport], now_ms: int
    ) -> None:
        """Note the owners that are notified, and those that had to release their queue long ago."""
        timings = self._term.timings
        for report, (key, token) in zip(reports, call.holds, strict=False):
            if report.wanted is not None:
                timings.owner_notified(key, now_ms)
            elif key.group in call.evicted_groups and report.state is HoldState.NOT_OWNER:
                entry = self._table.get(key)
                owns = self._table.owns(key, call.incarnation, token)
                if owns and entry is not None and not entry.phantom:
                    timings.owner_overdue(key)


def _without_frames(error: BatonError) -> BatonError:
    """Return an error to be kept: without the frames, and so the requests, of what raised it."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def taken_together(
    first: Decided, decided: asyncio.Queue[Decided], bytes_max: int
) -> tuple[list[AcquireOutcome], Exception | None]:
    """Return the outcomes that are decided by now, and the error that ends the call after them.

    Args:
        first: The first of them.
        decided: The others.
        bytes_max: When the grants have so many bytes, the others are left.
    """
    outcomes: list[AcquireOutcome] = []
    (key, outcome), bytes_count = first, 0
    while isinstance(outcome, pb.Grant | BatonError):
        outcomes.append((key, outcome))
        bytes_count += outcome.ByteSize() if isinstance(outcome, pb.Grant) else 0
        if len(outcomes) == TOGETHER_MAX or bytes_count >= bytes_max or decided.empty():
            return outcomes, None
        key, outcome = decided.get_nowait()
    return outcomes, outcome
