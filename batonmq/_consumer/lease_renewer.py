"""The two calls that are made for all queues of a consumer together: keep-alive and commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.aio import wait_until
from batonmq._common.rpc import answered, error_from_pb
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.batched_calls import BatchedCalls
from batonmq._consumer.local_offsets import LocalOffsets, LocalProgress
from batonmq._consumer.lock_watch import LockWatch
from batonmq._consumer.moved_group import GROUP_MOVED
from batonmq._consumer.queue_puller import OWNERSHIP_LOST
from batonmq._consumer.session import Session, queue_of, ranges_to_pb
from batonmq._core.queue_progress import Acks, QueueProgress
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

COMMIT_ITEMS_MAX = 1_024
HOLDS_MAX = 10_000
"""Queues that one keep-alive renews, at most."""
COMMIT_GATHER_MS = 10
"""Acks that arrive within this time ride in the same commit."""


class LeaseRenewer:
    """Renews and commits for the queues in `runners`, which its owner changes as it likes."""

    def __init__(
        self,
        session: Session,
        calls: BatchedCalls,
        runners: Mapping[QueueRef, AssignedQueue],
        notices: LockWatch,
    ) -> None:
        self._session, self._calls = session, calls
        self._runners, self._notices = runners, notices

    async def run_keep_alives(self) -> None:
        """Renew the leases for ever, if the group has any (protocol section 5, KeepAlive)."""
        session = self._session
        while True:
            await wait_until(session.keep_alive_soon, session.settings.keep_alive_ms)
            session.keep_alive_soon.clear()
            if not session.view.owned:
                continue
            try:
                await self._keep_alive()
            except BatonError as error:
                log.debug("keep-alive failed error=%s", error)
                await session.directory.pause(error, 0)

    async def run_commits(self) -> None:
        """Commit acks for ever, often enough."""
        session, failures = self._session, 0
        while True:
            if await wait_until(session.commit_soon, session.settings.commit_interval_ms):
                await asyncio.sleep(COMMIT_GATHER_MS / 1000)
            session.commit_soon.clear()
            try:
                await self.commit()
                failures = 0
            except BatonError as error:
                log.debug("commit failed error=%s", error)
                await session.directory.pause(error, failures)
                failures += 1

    async def commit(self) -> None:
        """Commit everything that is handled by now; of a broadcasting member, to its file.

        Raises:
            BatonError: the call failed; nothing is known, and the next commit repeats it.
        """
        now_ms = self._session.clock.monotonic_ms()
        found = [
            (runner, runner.progress, acks)
            for runner in list(self._runners.values())
            if runner.progress is not None and (acks := runner.to_commit(now_ms)) is not None
        ]
        if self._session.local is not None:
            await self._save(self._session.local, found)
            return
        for start in range(0, len(found), COMMIT_ITEMS_MAX):
            await self._commit(found[start : start + COMMIT_ITEMS_MAX])

    async def _save(
        self, local: LocalOffsets, found: Sequence[tuple[AssignedQueue, QueueProgress, Acks]]
    ) -> None:
        for runner, _, acks in found:
            local.put(runner.queue, LocalProgress(acks.committed, acks.ranges))
        if await local.save():
            for runner, progress, acks in found:
                runner.committed(progress, acks, self._session.clock.monotonic_ms())

    async def _commit(self, found: Sequence[tuple[AssignedQueue, QueueProgress, Acks]]) -> None:
        session = self._session
        keeper = await session.keeper()
        request = offsets_pb.CommitRequest(
            offsets_epoch=session.epochs.of(keeper.offsets_set),
            items=[
                offsets_pb.CommitItem(
                    queue=runner.key,
                    token=progress.token,
                    reset_epoch=progress.reset_epoch,
                    committed_offset=acks.committed,
                    acked=ranges_to_pb(acks.ranges),
                )
                for runner, progress, acks in found
            ],
        )
        sent_ms = session.clock.monotonic_ms()
        answer = await answered(keeper.stub.Commit(request, timeout=CALL_TIMEOUT_S))
        if not session.epochs.saw(keeper.offsets_set, answer.offsets_epoch):
            return
        elsewhere: BatonError | None = None
        for (runner, progress, acks), outcome in zip(found, answer.outcomes, strict=True):
            if not outcome.HasField("error"):
                runner.committed(progress, acks, sent_ms)
                continue
            refusal = error_from_pb(outcome.error)
            if isinstance(refusal, GROUP_MOVED):
                elsewhere = refusal
                continue
            log.info("commit refused queue=%s error=%s", runner.queue, refusal)
            if runner.progress is progress and isinstance(refusal, OWNERSHIP_LOST):
                runner.refused(refusal)
        if elsewhere is not None:
            raise elsewhere

    async def _keep_alive(self) -> None:
        """Renew everything; more than fits into one call takes several.

        Each call names what it does not list as an orphan. Only the first is asked for those; what
        the others list has a runner with a token, and is none.
        """
        held = [(queue, runner.token) for queue, runner in self._runners.items() if runner.token]
        seen_seq = self._calls.seen_seq
        for begin in range(0, max(len(held), 1), HOLDS_MAX):
            await self._renew(dict(held[begin : begin + HOLDS_MAX]), 0 if begin else seen_seq)

    async def _renew(self, held: Mapping[QueueRef, int], seen_seq: int) -> None:
        session = self._session
        request = lockmgr_pb.KeepAliveRequest(
            incarnation=session.incarnation,
            acquire_seq=seen_seq,
            holds=[
                lockmgr_pb.Hold(queue=session.key(queue), token=token)
                for queue, token in held.items()
            ],
        )
        sent_ms = session.clock.monotonic_ms()
        stub = await session.directory.lockmgr()
        answer = await answered(stub.KeepAlive(request, timeout=CALL_TIMEOUT_S))
        orphans = []
        for report in answer.reports:
            queue = queue_of(report.queue)
            runner = self._runners.get(queue)
            if report.state == lockmgr_pb.HOLD_STATE_ORPHAN:
                if not (runner and runner.token) and not self._calls.asks_for(queue):
                    orphans.append(lockmgr_pb.Hold(queue=report.queue, token=report.token))
            elif runner is None or runner.token != held.get(queue):
                continue
            elif report.state in (lockmgr_pb.HOLD_STATE_OK, lockmgr_pb.HOLD_STATE_WANTED):
                runner.renew(sent_ms, answer.lease_ms)
                if report.state == lockmgr_pb.HOLD_STATE_WANTED:
                    self._notices.wanted(queue, report.token, report.wanted_reason)
            elif report.state == lockmgr_pb.HOLD_STATE_NOT_OWNER:
                log.info("not owner queue=%s token=%d", queue, report.token)
                runner.fence()
        if orphans:
            log.info("releasing %d orphaned grants", len(orphans))
            await self._calls.release_orphans(orphans)
