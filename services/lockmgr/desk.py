"""What one leader answers during its term: requests held, owners renewed, queues freed.

Whatever has been begun for a queue runs in the leader's task group and comes to its end even if
the call that asked for it is gone; a call only waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, HandoverPending, SubscriptionDraining
from batonmq_server.lockmgr.changes import Changes, moved, outcome_of
from batonmq_server.lockmgr.core.access import Deny, Grant
from batonmq_server.lockmgr.core.locks import Entry, Pending, Step
from batonmq_server.lockmgr.core.table import HoldState, KeepAlive, Report
from batonmq_server.lockmgr.freeing import Freeing
from batonmq_server.lockmgr.handover import HandOvers, Refusal, Term, Wish
from batonmq_server.lockmgr.looking import Looks
from batonmq_server.lockmgr.membership import Membership
from batonmq_server.lockmgr.translate import Notice
from batonmq_server.lockmgr.waiting import Waiting

log = logging.getLogger(__name__)

_LOOKS_MAX = 4
"""Looks at one queue before a request waits for the next slot."""
_HOUSEKEEPING_S = 1.0

Outcome = tuple[GroupQueue, pb.Grant | BatonError]


class Desk:
    """Answers for one term.

    Args:
        leads: Whether this node may still answer (protocol section 8).
        tasks: Lives as long as the term.
        watchers_max: More streams of Watch than this are refused.
    """

    def __init__(
        self,
        term: Term,
        members: Membership,
        leads: Callable[[], bool],
        tasks: asyncio.TaskGroup,
        watchers_max: int,
    ) -> None:
        self._term, self._table, self._members = term, term.table, members
        self._leads, self._tasks = leads, tasks
        self._hand_overs = HandOvers(term)
        self._changes = Changes(tasks)
        self._looks = Looks(term.table, term.offsets, term.clock)
        self._waiting = Waiting(term, members, self._looks.look, watchers_max)
        self.freeing = Freeing(
            term, members, self._looks, self._waiting, self._changes, self._hand_overs
        )
        for loop in (
            self._waiting.watch_parked,
            self._waiting.follow_groups,
            self._waiting.follow_gates,
            self.freeing.clear_draining,
            self._keep_house,
        ):
            tasks.create_task(loop())

    # Calls

    async def acquire(self, wishes: Sequence[Wish], hold_ms: int) -> AsyncGenerator[Outcome, None]:
        """An outcome per wish, as soon as it is decided. Closing it gives up what still waits.

        Raises:
            NotLeader: the term is over; what has not been answered is open.
        """
        self.check_leads()
        decided: asyncio.Queue[tuple[GroupQueue, pb.Grant | Exception]] = asyncio.Queue(len(wishes))
        until_ms = self._now_ms() + hold_ms
        started = [self._tasks.create_task(self._answer(w, until_ms, decided)) for w in wishes]
        try:
            for _ in wishes:
                key, outcome = await decided.get()
                if not isinstance(outcome, pb.Grant | BatonError):
                    raise outcome
                self.check_leads()
                yield key, outcome
        finally:
            for task in started:
                task.cancel()

    def keep_alive(
        self, incarnation: Incarnation, acquire_seq: int, holds: Sequence[tuple[GroupQueue, int]]
    ) -> list[Report]:
        """Renew what matches."""
        groups = {key.group for key, _ in holds}
        call = KeepAlive(
            incarnation=incarnation,
            acquire_seq=acquire_seq,
            holds=holds,
            evicted_groups=frozenset(
                group for group in groups if not self._members.is_member(group, incarnation)
            ),
            draining_groups=frozenset(filter(self._members.is_draining, groups)),
        )
        now_ms = self._now_ms()
        reports = self._table.keep_alive(call, now_ms)
        self._note(call, reports, now_ms)
        self._term.recorder.kept_alive(reports)
        return reports

    async def watch(self, incarnation: Incarnation) -> AsyncGenerator[Notice, None]:
        """What concerns the client, as it happens.

        Raises:
            NotLeader: the term is over.
            Overloaded: too many watch already.
        """
        self.check_leads()
        async with aclosing(self._waiting.watch(incarnation)) as notices:
            async for notice in notices:
                self.check_leads()
                yield notice
        self.check_leads()

    def describe(self, key: GroupQueue) -> tuple[Entry, bool]:
        """The entry, and whether its owner is no member of the group any more."""
        entry = self._table.get(key) or Entry(key)
        owner = entry.lock.owner
        return entry, owner is not None and not self._members.is_member(key.group, owner)

    def entries(self, group: str, topic: str, after: GroupQueue | None) -> Iterator[Entry]:
        """Yield the entries of a listing; see `LockTable.entries`."""
        return self._table.entries(group, topic, after)

    @property
    def term(self) -> int:
        """The term that is answered for."""
        return self._term.number

    @property
    def lease_ms(self) -> int:
        """Length of a lease."""
        return self._term.policy.lease_ms

    @property
    def silence_ms(self) -> int:
        """How long an owner may be silent before it may lose a queue."""
        return self._term.policy.silence_ms

    def check_leads(self) -> None:
        """Refuse to answer once the leader's lease is nearly over.

        Raises:
            NotLeader: it is.
        """
        if not self._leads():
            raise moved()

    async def settle(self) -> None:
        """Wait, but not for long, until no change is under way."""
        await self._changes.settle()

    def confirmed(self, key: GroupQueue) -> None:
        """A lock of the leader before counts now."""
        self._waiting.settled(key)

    def close(self) -> None:
        """End the streams: the term is over."""
        self._waiting.watchers.close()

    async def _keep_house(self) -> None:
        """Forget old waiters and publish what the table holds, for ever."""
        while True:
            self._table.forget_waiters(self._now_ms())
            watchers = len(self._waiting.watchers)
            self._term.recorder.standing(self._term.number, self._table.counts(), watchers)
            await asyncio.sleep(_HOUSEKEEPING_S)

    # One wish

    async def _answer(
        self,
        wish: Wish,
        until_ms: int,
        decided: asyncio.Queue[tuple[GroupQueue, pb.Grant | Exception]],
    ) -> None:
        outcome: pb.Grant | Exception = moved()
        try:
            outcome = await self._acquire(wish, until_ms)
        except BatonError as error:
            self._term.recorder.denied(wish.key, wish.asker.incarnation, error)
            self._table.denied(wish.key, wish.asker.incarnation, error, self._now_ms())
            outcome = error
        except Exception as error:  # noqa: BLE001  raised in the call that asked
            outcome = error
        finally:
            decided.put_nowait((wish.key, outcome))

    async def _acquire(self, wish: Wish, until_ms: int) -> pb.Grant:
        await self._members.arrive(wish.key.group, wish.asker.generation)
        while True:
            self.check_leads()
            answer = await self._admitted(wish)
            if isinstance(answer, pb.Grant):
                return answer
            if answer.stale_gate:
                continue
            asker = wish.asker.incarnation
            if not answer.clears or not await self._waiting.park(wish.key, asker, until_ms):
                raise answer.error

    async def _admitted(self, wish: Wish) -> pb.Grant | Refusal:
        """Try by the gate that the group has now.

        Raises:
            NotMember, NotSubscribed, ModeChanged: the asker may not have the queue.
        """
        try:
            gate = self._members.admit(wish.key, wish.asker)
        except SubscriptionDraining as error:
            return Refusal(error, clears=True)
        answer = await self._try(replace(wish, gate=gate))
        overtaken = isinstance(answer, Refusal) and answer.stale_gate
        if overtaken and not await self._members.passed(wish.key.group, gate):
            return Refusal(_pending(wish.key))
        return answer

    async def _try(self, wish: Wish) -> pb.Grant | Refusal:
        """Look if need be, decide, and do it; once more if offsets knew better."""
        answer: pb.Grant | Refusal | None = None
        for _ in range(_LOOKS_MAX):
            if self._table.needs_look(wish.key, wish.asker, self._now_ms()):
                await self._looks.look(wish.key)
            decision = self._table.decide(wish.key, wish.asker, self._now_ms())
            if isinstance(decision, Deny):
                return Refusal(decision.error, clears=decision.clears)
            if isinstance(decision, Grant):
                answer = await self._hand_over(wish, decision)
            elif decision is not None:
                entry = self._table.get(wish.key)
                assert entry is not None
                answer = await self._hand_overs.repeat(wish, entry)
            if isinstance(answer, pb.Grant) or (answer is not None and not answer.again):
                return answer
        return answer or Refusal(_pending(wish.key), clears=True)

    async def _hand_over(self, wish: Wish, grant: Grant) -> pb.Grant | Refusal:
        self.check_leads()
        pending = self._table.begin(wish.key, Step.FENCE)
        change = self._changes.start(wish.key, self._carry_out(wish, grant, pending))
        return await outcome_of(change) or Refusal(_pending(wish.key))

    async def _carry_out(self, wish: Wish, grant: Grant, pending: Pending) -> pb.Grant | Refusal:
        answer = await self._hand_overs.carry_out(wish, grant, pending)
        if isinstance(answer, pb.Grant):
            self._waiting.settled(wish.key)
        return answer

    def _note(self, call: KeepAlive, reports: Sequence[Report], now_ms: int) -> None:
        """Who was told, and who should have given its queue back long ago."""
        tenures = self._term.tenures
        for report, (key, token) in zip(reports, call.holds, strict=False):
            if report.wanted is not None:
                tenures.told(key, now_ms)
            elif key.group in call.evicted_groups and report.state is HoldState.NOT_OWNER:
                entry = self._table.get(key)
                owns = self._table.owns(key, call.incarnation, token)
                if owns and entry is not None and not entry.phantom:
                    tenures.overdue(key)

    def _now_ms(self) -> int:
        return self._term.clock.monotonic_ms()


def _pending(key: GroupQueue) -> HandoverPending:
    return HandoverPending(f"{key} is changing hands", retry_after_ms=100)
