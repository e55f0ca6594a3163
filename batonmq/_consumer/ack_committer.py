"""Commits the acks of a consumer: of all queues by one call, or to the file of its member."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.aio import wait_until
from batonmq._common.rpc import answered, error_from_pb
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.local_offsets import LocalOffsets, LocalProgress
from batonmq._consumer.moved_group import GROUP_MOVED
from batonmq._consumer.queue_puller import OWNERSHIP_LOST
from batonmq._consumer.session import Session, ranges_to_pb
from batonmq._core.commit_schedule import CommitSchedule
from batonmq._core.queue_progress import Acks, QueueProgress
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

COMMIT_ITEMS_MAX = 1_024


class AckCommitter:
    """Commits the acks of `queues`, a mapping that changes with the assignment of the member."""

    def __init__(self, session: Session, queues: Mapping[QueueRef, AssignedQueue]) -> None:
        self._session, self._queues = session, queues
        self._stated = session.epochs.newest
        """The epoch of offsets that has the positions of all queues, as far as it needs them."""

    async def run(self) -> None:
        """Commit until cancelled.

        Every `commit_interval_ms` of all queues, and when it is asked for, of those with new acks.
        While a handler runs long, every `LONG_CALL_COMMIT_MS` of all queues: the refusal of such a
        commit tells the consumer of a reset (protocol section 13).
        """
        session, failures = self._session, 0
        now_ms = session.clock.monotonic_ms
        schedule = CommitSchedule(session.settings.commit_interval_ms, now_ms())
        while True:
            wait_ms = schedule.wait_ms(now_ms(), running=bool(session.running))
            soon = await wait_until(session.commit_soon, wait_ms)
            if soon:
                await asyncio.sleep(session.commit_gather_ms / 1000)
            every = schedule.is_due(
                now_ms(), running=bool(session.running), runs_long=self._handles_long
            )
            if not (soon or every):
                continue
            session.commit_soon.clear()
            try:
                await self._commit(every=every or session.epochs.newest != self._stated)
                failures = 0
            except BatonError as error:
                log.debug("commit failed error=%s", error)
                session.commit_soon.set()  # the queues and callers that wait do not ask again
                await session.directory.pause(error, failures)
                failures += 1

    def _handles_long(self) -> bool:
        now_ms = self._session.clock.monotonic_ms()
        return any(queue.handles_long(now_ms) for queue in self._queues.values())

    async def _commit(self, *, every: bool) -> None:
        """Commit the messages handled so far; a broadcasting member commits to its file.

        Args:
            every: Whether a queue without new acks may have a reason for a commit, too.

        Raises:
            BatonError: the call failed; its effect is unknown, and the next commit repeats it.
        """
        now_ms, newest = self._session.clock.monotonic_ms(), self._session.epochs.newest
        due = [
            (queue, queue.progress, acks)
            for queue in [one for one in self._queues.values() if every or one.acked]
            if queue.progress is not None and (acks := queue.acks_due(now_ms)) is not None
        ]
        if self._session.local is not None:
            await self._save(self._session.local, due)
        else:
            for start in range(0, len(due), COMMIT_ITEMS_MAX):
                await self._send(due[start : start + COMMIT_ITEMS_MAX])
        if every:
            self._stated = newest

    async def _save(
        self, local: LocalOffsets, due: Sequence[tuple[AssignedQueue, QueueProgress, Acks]]
    ) -> None:
        for queue, _, acks in due:
            local.put(queue.ref, LocalProgress(acks.committed, acks.ranges))
        if await local.save():
            for queue, progress, acks in due:
                queue.committed(progress, acks, self._session.clock.monotonic_ms())

    async def _send(self, due: Sequence[tuple[AssignedQueue, QueueProgress, Acks]]) -> None:
        session = self._session
        keeper = await session.keeper()
        epoch = session.epochs.of(keeper.offsets_set)
        request = offsets_pb.CommitRequest(
            offsets_epoch=epoch,
            items=[
                offsets_pb.CommitItem(
                    queue=queue.key,
                    token=progress.token,
                    reset_epoch=progress.reset_epoch,
                    committed_offset=acks.committed,
                    acked=ranges_to_pb(acks.ranges),
                    received_offset=progress.received_offset if queue.with_ownership else None,
                )
                for queue, progress, acks in due
            ],
        )
        for queue, *_ in due:
            queue.stated_set = keeper.offsets_set if queue.with_ownership else ""
        sent_ms = session.clock.monotonic_ms()
        answer = await answered(keeper.stub.Commit(request, timeout=CALL_TIMEOUT_S))
        if not session.epochs.observe(keeper.offsets_set, answer.offsets_epoch):
            return
        moved: BatonError | None = None
        for (queue, progress, acks), outcome in zip(due, answer.outcomes, strict=True):
            if not outcome.HasField("error"):
                if queue.progress is progress and answer.offsets_epoch == epoch:
                    queue.position_known = keeper.offsets_set, epoch
                queue.committed(progress, acks, sent_ms)
                continue
            refusal = error_from_pb(outcome.error)
            if isinstance(refusal, GROUP_MOVED):
                moved = refusal
                continue
            log.info("commit refused queue=%s error=%s", queue.ref, refusal)
            if queue.progress is progress and isinstance(refusal, OWNERSHIP_LOST):
                queue.refuse(refusal)
        if moved is not None:
            raise moved
