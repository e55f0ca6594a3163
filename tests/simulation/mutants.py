"""The protocol, broken on purpose: each mutant leaves out one thing that the protocol asks for.

A mutant replaces a method of a real class for the time of a test. The names in brackets are
those of protocol section 17. A simulator that does not find one of them would not find a
programmer's mistake of that kind either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb

from batonmq.common.errors import BatonError
from batonmq.common.rpc import from_rpc_error
from batonmq.consuming import giving_back, runner
from batonmq.consuming.runner import QueueRunner
from batonmq.consuming.session import ranges_to_pb
from batonmq.core.inflight import Acks, Closing, QueueProgress
from batonmq.directory import CALL_TIMEOUT_S
from services.lockmgr.core import access
from services.lockmgr.core import table as lock_table
from services.lockmgr.core.access import Condition, Decision, Grant, Replay, decide_access
from services.lockmgr.core.locks import Asker, Entry, Lock, Observation, Pending, Policy, QueueKey
from services.lockmgr.core.table import KeepAlive, LockTable, Report
from services.lockmgr.handover import HandOvers, Refusal, Term, Wish, _Passed
from services.lockmgr.leader import Leader
from services.lockmgr.store import Conflict
from services.offsets.core.calls import Acks as TableAcks
from services.offsets.core.calls import (
    Committed,
    Delivered,
    Fence,
    Instant,
    Limits,
    Source,
)
from services.offsets.core.calls import Delivery as TableDelivery
from services.offsets.core.calls import Grant as TableGrant
from services.offsets.core.progress import Progress
from services.offsets.core.ranges import EMPTY
from services.offsets.group_commit import GroupCommit
from services.storage.deliveries import Deliveries, Delivery, Verdict
from tests.simulation.options import Options
from tests.support.network import Faults

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken protocol.

    Attributes:
        name: What is left out.
        break_it: Leaves it out, until the monkeypatch is undone.
        options: A kind of run in which it matters.
        rules: What it breaks: which of them is seen first depends on the run.
        seeds_max: It is found within so many seeds; one run in four, at least, finds it.
    """

    name: str
    break_it: Break
    options: Options
    rules: tuple[str, ...]
    seeds_max: int = 40


CALM = Options(steps=30)
CRASHES = Options(steps=40, kills=6, pauses=4, slow_handlers=0.05)
ZOMBIES = Options(steps=40, pauses=8, kills=2, pause_ms_max=40_000, slow_handlers=0.1)
SLOW = Options(steps=40, joins=6, leaves=6, slow_handlers=0.2)
LOSSY = replace(SLOW, faults=Faults(loss=0.08), slow_handlers=0.5, joins=8, leaves=8, steps=80)
NAPS = Options(
    steps=60, queues=6, consumers=6, faults=Faults(duplicate=0.5), joins=6, leaves=2, pauses=4,
    cuts=4, pause_ms_max=4_000, slow_handlers=0.3,
)  # fmt: skip
DEAF = Options(steps=60, deaf=12, pause_ms_max=40_000)
LATE = Options(
    steps=80, queues=6, consumers=4, faults=Faults(duplicate=0.5, slow=0.1), joins=12, leaves=12
)
UNDERWAY = Options(
    steps=120, queues=8, consumers=6, faults=Faults(loss=0.03, duplicate=0.3, slow=0.05), joins=2,
    leaves=6, pauses=4, service_pauses=3, pause_ms_max=4_000,
)  # fmt: skip
FAILOVER = Options(steps=40, service_kills=8, service_pauses=4, joins=6, leaves=2)


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
        return _Passed("none", Condition.CLOSED_OR_DRAINED, answer)

    patch.setattr(HandOvers, "_fence", fence)


def unconditional_fence(patch: pytest.MonkeyPatch) -> None:
    """[fence_uncond] Drained is tested by lockmgr, and not again inside the swap."""
    patch.setattr(Progress, "_check_condition", lambda *_: None)


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
            token=passed.answer.token,
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

        _in_background(persist())
        return self.answer(passed.answer, lock, newly_acquired=True)

    patch.setattr(HandOvers, "carry_out", carry_out)


def answer_before_durable(patch: pytest.MonkeyPatch) -> None:
    """Offsets answers fences, commits and closes before they are on its disk."""

    async def settled(*_: object) -> None:
        return

    patch.setattr(GroupCommit, "settled", settled)
    patch.setattr(GroupCommit, "settled_all", settled)


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


def commit_without_token(patch: pytest.MonkeyPatch) -> None:
    """[commit_no_token] A commit counts, whoever sends it."""
    real = Progress.commit

    def commit(self: Progress, _: int, acks: TableAcks, now: Instant, source: Source) -> Committed:
        return real(self, self.token, acks, now, source)

    patch.setattr(Progress, "commit", commit)


def pull_without_token(patch: pytest.MonkeyPatch) -> None:
    """[pull_no_token] A delivery, also that of a pull that was parked, counts whoever pulls."""
    record, touch = Progress.record_delivered, Progress.touch

    def recorded(
        self: Progress, _: int, delivery: TableDelivery, limits: Limits, now: Instant
    ) -> Delivered:
        return record(self, self.token, delivery, limits, now)

    patch.setattr(Progress, "record_delivered", recorded)
    patch.setattr(Progress, "touch", lambda self, _, now: touch(self, self.token, now))


def no_deadline(patch: pytest.MonkeyPatch) -> None:
    """[no_deadline] A client starts what it has as long as nobody tells it not to."""

    def may_start(self: QueueRunner) -> bool:
        return self.progress is not None and not self.stopping.is_set()

    patch.setattr(QueueRunner, "may_start", may_start)


def close_without_draining(patch: pytest.MonkeyPatch) -> None:
    """[release_no_drain] A client that loses a queue says "done" with handlers running."""

    async def give_back(queue: QueueRunner) -> None:
        closing = replace(queue.end(), unfinished=())
        await giving_back.close(queue, closing)
        await giving_back.release(queue, closing.token)
        queue.given_back(closing.token)

    patch.setattr(runner, "give_back", give_back)


def close_not_frozen(patch: pytest.MonkeyPatch) -> None:
    """[close_retry_forgets] A repeated Close says what is true by then: nothing is unfinished."""

    async def close(queue: QueueRunner, closing: Closing) -> None:
        item = offsets_pb.CloseItem(
            queue=queue.key,
            token=closing.token,
            reset_epoch=closing.reset_epoch,
            committed_offset=closing.acks.committed,
            acked=ranges_to_pb(closing.acks.ranges),
            unfinished=ranges_to_pb(closing.unfinished),
        )
        directory = queue.session.directory
        while True:
            try:
                stub = await directory.offsets()
                await stub.Close(offsets_pb.CloseRequest(items=[item]), timeout=CALL_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as failure:
                await directory.pause(from_rpc_error(failure), 0)
            except BatonError as failure:
                await directory.pause(failure, 0)
            del item.unfinished[:]

    patch.setattr(giving_back, "close", close)


def count_per_contender(patch: pytest.MonkeyPatch) -> None:
    """Every look counts as a slot without change, so that many contenders wait less."""

    def needs_look(self: LockTable, key: QueueKey, *_: object) -> bool:
        entry = self.get(key)
        return entry is None or entry.pending is None

    def observe(self: LockTable, key: QueueKey, seen: Observation, stamp: int, now_ms: int) -> None:
        entry = self._touch(key)
        if entry.stamp != stamp or entry.pending is not None:
            return
        same, entry.seen, entry.seen_ms = entry.seen == seen, seen, now_ms
        entry.slots = entry.slots + 1 if same else 0

    patch.setattr(LockTable, "needs_look", needs_look)
    patch.setattr(LockTable, "observe", observe)


def forget_the_table(patch: pytest.MonkeyPatch) -> None:
    """[forget_table] A new leader begins with nothing: every queue looks free."""

    async def take_over(self: Leader, term: Term) -> None:
        await self._members.ready()
        await self._until_answered("announce", term.offsets.announce)

    patch.setattr(Leader, "_take_over", take_over)


def record_after_sending(patch: pytest.MonkeyPatch) -> None:
    """[deliver_before_record] Bytes leave storage, and their delivery is recorded meanwhile."""

    async def record(self: Deliveries, delivery: Delivery) -> Verdict:
        _in_background(self._batcher.call(delivery))
        return Verdict((), self._epoch, self._clock.monotonic_ms())

    patch.setattr(Deliveries, "record", record)


def record_in_memory(patch: pytest.MonkeyPatch) -> None:
    """[record_not_durable] Nothing durable says how far deliveries have come."""
    real = Progress.record_delivered

    def record(
        self: Progress, token: int, delivery: TableDelivery, limits: Limits, now: Instant
    ) -> Delivered:
        reserved = self.delivered_reserved
        delivered = real(self, token, delivery, limits, now)
        self.delivered_reserved = reserved
        return delivered._replace(changed=False)

    patch.setattr(Progress, "record_delivered", record)


def renew_while_taken(patch: pytest.MonkeyPatch) -> None:
    """[renew_during_steal, renew_after_fence] A keep-alive counts until etcd has the new owner."""
    real = LockTable._renew

    def renew(self: LockTable, call: KeepAlive, key: QueueKey, token: int, now_ms: int) -> Report:
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


def idle_untested(patch: pytest.MonkeyPatch) -> None:
    """A lease that is over at the lock manager is enough: offsets does not look."""
    real = Progress._check_condition

    def check(self: Progress, wish: Fence, now: Instant) -> None:
        if wish.condition.value != "IDLE":
            real(self, wish, now)

    patch.setattr(Progress, "_check_condition", check)


def maybe_seen_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What the holder before has in flight is not noted when its queue is taken."""
    real = Progress.fence

    def fence(self: Progress, wish: Fence, now: Instant) -> TableGrant:
        before = self.maybe_seen
        grant = real(self, wish, now)
        if grant.changed:
            self.maybe_seen = before
            self.grant = grant = grant._replace(maybe_seen=before)
        return grant

    patch.setattr(Progress, "fence", fence)


def acked_ranges_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A new owner starts at the committed offset, whatever is acked above it."""
    real = Progress.fence

    def fence(self: Progress, wish: Fence, now: Instant) -> TableGrant:
        self.acked = EMPTY
        return real(self, wish, now)

    patch.setattr(Progress, "fence", fence)


def commit_all_received(patch: pytest.MonkeyPatch) -> None:
    """A client commits what it has received, handled or not."""

    def acks(self: QueueProgress) -> Acks:
        return Acks(self.next_offset, (), self._version)

    patch.setattr(QueueProgress, "acks", acks)


MUTANTS = (
    Mutant("skip the fence", skip_fence, CALM, ("V1", "V2")),
    Mutant("fence unconditionally", unconditional_fence, DEAF, ("section 4", "V6")),
    Mutant("grant before it is persisted", grant_before_persist, CALM, ("V11",)),
    Mutant("answer before it is durable", answer_before_durable, CALM, ("V8", "V9")),
    Mutant("stored token on renewal", stored_token_on_renewal, CRASHES, ("V11", "V7")),
    Mutant("commit without token", commit_without_token, ZOMBIES, ("V3",)),
    Mutant("pull without token", pull_without_token, NAPS, ("V3",)),
    Mutant("no deadline", no_deadline, ZOMBIES, ("V3", "V6", "V7")),
    Mutant("close without draining", close_without_draining, SLOW, ("V6", "V7")),
    Mutant("close not frozen", close_not_frozen, LOSSY, ("V6", "V7")),
    Mutant("count per contender", count_per_contender, CALM, ("section 7",)),
    Mutant("forget the table", forget_the_table, FAILOVER, ("section 7", "section 12")),
    Mutant("record after sending", record_after_sending, CALM, ("V8",)),
    Mutant("record in memory", record_in_memory, CALM, ("V8",)),
    Mutant("renew while taken", renew_while_taken, UNDERWAY, ("section 5",)),
    Mutant("old request", old_request, LATE, ("story 8",)),
    Mutant("idle untested", idle_untested, ZOMBIES, ("section 4", "V6")),
    Mutant("maybe-seen forgotten", maybe_seen_forgotten, ZOMBIES, ("V7",)),
    Mutant("acked ranges forgotten", acked_ranges_forgotten, ZOMBIES, ("V9",)),
    Mutant("commit what is received", commit_all_received, CALM, ("V4",)),
)


def _in_background(work: Any) -> None:
    asyncio.get_running_loop().create_task(work)
