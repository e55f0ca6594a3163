"""What one leader answers during its term: requests held, owners renewed, queues freed.

Whatever has been begun for a queue runs in the leader's task group and comes to its end even if
the call that asked for it is gone; a call only waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb

from batonmq.common.errors import (
    BatonError,
    HandoverPending,
    NoQuorum,
    NotLeader,
    OffsetsUnreachable,
)
from services.lockmgr.core.access import Deny, Grant
from services.lockmgr.core.locks import Entry, Incarnation, Pending, QueueKey, Step
from services.lockmgr.core.table import KeepAlive, Report
from services.lockmgr.handover import HandOvers, Refusal, Term, Wish
from services.lockmgr.membership import Membership
from services.lockmgr.store import Change, Conflict

log = logging.getLogger(__name__)

CHANGE_WAIT_S = 5.0
"""How long a call waits for a change whose outcome is not known yet."""
_LOOKS_MAX = 4
"""Looks at one queue before a request waits for the next slot."""
_HOUSEKEEPING_S = 1.0
_MOVED = NotLeader("this node has stopped leading", retry_after_ms=200)

Outcome = tuple[QueueKey, pb.Grant | BatonError]


class Desk:
    """Answers for one term.

    Args:
        leads: Whether this node may still answer (protocol section 8).
        tasks: Lives as long as the term.
    """

    def __init__(
        self,
        term: Term,
        members: Membership,
        leads: Callable[[], bool],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._term, self._table, self._members = term, term.table, members
        self._leads, self._tasks = leads, tasks
        self._hand_overs = HandOvers(term)
        self._parked: dict[QueueKey, dict[asyncio.Event, None]] = {}
        self._anybody_parked = asyncio.Event()
        self._changing: dict[QueueKey, asyncio.Task[object]] = {}

    # Calls

    async def acquire(self, wishes: Sequence[Wish], hold_ms: int) -> AsyncGenerator[Outcome, None]:
        """An outcome per wish, as soon as it is decided. Closing it gives up what still waits.

        Raises:
            NotLeader: the term is over; what has not been answered is open.
        """
        self.check_leads()
        decided: asyncio.Queue[tuple[QueueKey, pb.Grant | Exception]] = asyncio.Queue(len(wishes))
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
        self, incarnation: Incarnation, acquire_seq: int, holds: Sequence[tuple[QueueKey, int]]
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
        )
        reports = self._table.keep_alive(call, self._now_ms())
        self._term.recorder.kept_alive(reports)
        return reports

    async def release(self, incarnation: Incarnation, holds: Sequence[tuple[QueueKey, int]]) -> int:
        """Free what matches; how many entries were freed.

        Raises:
            NoQuorum: not known yet; the change goes on.
            NotLeader: the term ended meanwhile.
        """
        tasks = [
            self._tasks.create_task(self._release(key, incarnation, token))
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
            raise _MOVED
        return sum(filter(None, freed))

    def entries(self, group: str, topic: str) -> list[Entry]:
        """Entries by key; empty filters let all pass."""
        return list(self._table.entries(group, topic))

    @property
    def term(self) -> int:
        """The term that is answered for."""
        return self._term.number

    @property
    def lease_ms(self) -> int:
        """Length of a lease."""
        return self._term.policy.lease_ms

    def check_leads(self) -> None:
        """Refuse to answer once the leader's lease is nearly over.

        Raises:
            NotLeader: it is.
        """
        if not self._leads():
            raise _MOVED

    async def settle(self) -> None:
        """Wait, but not for long, until no change is under way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHANGE_WAIT_S):
                while self._changing:
                    await asyncio.wait(self._changing.values())

    # Loops

    async def watch_parked(self) -> None:
        """Observe the queues that somebody waits for, one by one when its slot has passed."""
        while True:
            await self._anybody_parked.wait()
            now_ms = self._now_ms()
            due = {key: self._table.due_ms(key, now_ms) for key in self._parked}
            ripe = [key for key, ms in due.items() if ms <= 0]
            if ripe:
                async with asyncio.TaskGroup() as looks:
                    for key in ripe:
                        looks.create_task(self._look_and_wake(key))
            else:
                await asyncio.sleep(min(due.values()) / 1000)

    async def keep_house(self) -> None:
        """Forget old waiters and publish what the table holds."""
        while True:
            self._table.forget_waiters(self._now_ms())
            self._term.recorder.standing(self._term.number, self._table.counts())
            await asyncio.sleep(_HOUSEKEEPING_S)

    # One wish

    async def _answer(
        self,
        wish: Wish,
        until_ms: int,
        decided: asyncio.Queue[tuple[QueueKey, pb.Grant | Exception]],
    ) -> None:
        outcome: pb.Grant | Exception = _MOVED
        try:
            outcome = await self._acquire(wish, until_ms)
        except BatonError as error:
            self._term.recorder.denied(wish.key, wish.asker.incarnation, error)
            outcome = error
        except Exception as error:  # noqa: BLE001  raised in the call that asked
            outcome = error
        finally:
            decided.put_nowait((wish.key, outcome))

    async def _acquire(self, wish: Wish, until_ms: int) -> pb.Grant:
        await self._members.arrive(wish.key.group, wish.asker.generation)
        while True:
            self.check_leads()
            self._members.check(wish.key, wish.asker)
            answer = await self._try(wish)
            if isinstance(answer, pb.Grant):
                return answer
            if not answer.clears or not await self._park(wish, until_ms):
                raise answer.error

    async def _try(self, wish: Wish) -> pb.Grant | Refusal:
        """Look if need be, decide, and do it; once more if offsets knew better."""
        answer: pb.Grant | Refusal | None = None
        for _ in range(_LOOKS_MAX):
            if self._table.needs_look(wish.key, wish.asker, self._now_ms()):
                await self._look(wish.key)
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
        pending = self._table.begin(wish.key, Step.FENCE, wish.asker.incarnation)
        task = self._tasks.create_task(self._carry_out(wish, grant, pending))
        self._changing[wish.key] = task
        done, _ = await asyncio.wait({task}, timeout=CHANGE_WAIT_S)
        return task.result() if done else Refusal(_pending(wish.key))

    async def _carry_out(self, wish: Wish, grant: Grant, pending: Pending) -> pb.Grant | Refusal:
        try:
            answer = await self._hand_overs.carry_out(wish, grant, pending)
        finally:
            del self._changing[wish.key]
        if isinstance(answer, pb.Grant):
            self._wake(wish.key)
        return answer

    async def _look(self, key: QueueKey) -> None:
        stamp = self._table.look(key)
        try:
            seen = await self._term.offsets.observe(key)
        except OffsetsUnreachable:
            self._table.unseen(key, self._now_ms())
            raise
        self._table.observe(key, seen, stamp, self._now_ms())

    # Waiting

    async def _park(self, wish: Wish, until_ms: int) -> bool:
        """Hold the request until something has changed; False once its time is over."""
        asker, now_ms = wish.asker.incarnation, self._now_ms()
        if now_ms >= until_ms:
            self._table.wait(wish.key, asker, now_ms)
            return False
        woken = asyncio.Event()
        self._parked.setdefault(wish.key, {})[woken] = None
        self._anybody_parked.set()
        self._table.wait(wish.key, asker, now_ms, parked=1)
        try:
            async with asyncio.timeout((until_ms - now_ms) / 1000):
                await woken.wait()
        except TimeoutError:
            return False
        finally:
            self._table.wait(wish.key, asker, self._now_ms(), parked=-1)
            del self._parked[wish.key][woken]
            if not self._parked[wish.key]:
                del self._parked[wish.key]
            if not self._parked:
                self._anybody_parked.clear()
        return True

    async def _look_and_wake(self, key: QueueKey) -> None:
        try:
            await self._look(key)
        except BatonError as error:
            log.info("queue not observed key=%s error=%s", key, error)
            return
        self._wake(key)

    def _wake(self, key: QueueKey) -> None:
        for woken in self._parked.get(key, ()):
            woken.set()

    # Freeing

    async def _release(self, key: QueueKey, owner: Incarnation, token: int) -> bool | None:
        """Free one entry, once no other change of it is under way.

        Returns:
            Whether it was freed; None if the term is over.
        """
        while (change := self._changing.get(key)) is not None:
            await asyncio.wait({change})
        entry = self._table.get(key)
        if entry is None or not self._table.owns(key, owner, token):
            return False
        if entry.pending is not None:
            return None
        self._table.begin(key, Step.RELEASE, owner)
        this = asyncio.current_task()
        assert this is not None
        self._changing[key] = this
        try:
            outcome = await self._term.store.persist(
                Change(key, entry.lock.freed(), entry.revision)
            )
        finally:
            del self._changing[key]
        if isinstance(outcome, Conflict):
            return self._not_freed(key, outcome)
        self._table.freed(key, outcome)
        log.info("queue released key=%s owner=%s token=%d", key, owner.client_id, token)
        self._term.recorder.released(key, owner, token)
        self._wake(key)
        return True

    def _not_freed(self, key: QueueKey, conflict: Conflict) -> bool | None:
        if conflict.deposed:
            return None
        log.error("lock changed behind the leader's back key=%s", key)
        self._table.reloaded(key, conflict.lock, conflict.revision, fenced=False)
        return False

    def _now_ms(self) -> int:
        return self._term.clock.monotonic_ms()


def _pending(key: QueueKey) -> HandoverPending:
    return HandoverPending(f"{key} is changing hands", retry_after_ms=100)
