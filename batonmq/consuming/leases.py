"""The two calls that are made for all queues of a consumer together: keep-alive and commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import grpc.aio
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb

from batonmq.common.aio import wait_until
from batonmq.common.errors import BatonError, Fenced, UnknownQueue
from batonmq.common.rpc import error_from_pb, from_rpc_error
from batonmq.consuming.runner import QueueRunner
from batonmq.consuming.session import Session, queue_of, ranges_to_pb
from batonmq.core.inflight import Acks
from batonmq.core.route import QueueId
from batonmq.directory import CALL_TIMEOUT_S

log = logging.getLogger(__name__)

COMMIT_ITEMS_MAX = 1_024
COMMIT_GATHER_MS = 10
"""Acks that arrive within this time ride in the same commit."""


class Leases:
    """Renews and commits for the queues in `runners`, which its owner changes as it likes."""

    def __init__(self, session: Session, runners: Mapping[QueueId, QueueRunner]) -> None:
        self._session, self._runners = session, runners

    async def run_keep_alives(self) -> None:
        """Renew the leases for ever (protocol section 5, KeepAlive)."""
        session = self._session
        while True:
            await wait_until(session.keep_alive_soon, session.settings.keep_alive_ms)
            session.keep_alive_soon.clear()
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
        """Commit everything that is handled by now.

        Raises:
            BatonError: the call failed; nothing is known, and the next commit repeats it.
        """
        now_ms = self._session.clock.monotonic_ms()
        found = [
            (runner, runner.token, acks)
            for runner in list(self._runners.values())
            if (acks := runner.to_commit(now_ms)) is not None
        ]
        for start in range(0, len(found), COMMIT_ITEMS_MAX):
            await self._commit(found[start : start + COMMIT_ITEMS_MAX])

    async def _commit(self, found: Sequence[tuple[QueueRunner, int, Acks]]) -> None:
        session = self._session
        request = offsets_pb.CommitRequest(
            offsets_epoch=session.offsets_epoch,
            items=[
                offsets_pb.CommitItem(
                    queue=runner.key,
                    token=token,
                    reset_epoch=runner.progress.reset_epoch if runner.progress else 0,
                    committed_offset=acks.committed,
                    acked=ranges_to_pb(acks.ranges),
                )
                for runner, token, acks in found
            ],
        )
        sent_ms = session.clock.monotonic_ms()
        stub = await session.directory.offsets()
        try:
            answer = await stub.Commit(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if not session.saw_epoch(answer.offsets_epoch):
            return
        for (runner, token, acks), outcome in zip(found, answer.outcomes, strict=True):
            if not outcome.HasField("error"):
                runner.committed(token, acks, sent_ms)
                continue
            refusal = error_from_pb(outcome.error)
            log.info("commit refused queue=%s token=%d error=%s", runner.queue, token, refusal)
            if runner.token == token and isinstance(refusal, Fenced | UnknownQueue):
                runner.fence()

    async def _keep_alive(self) -> None:
        session = self._session
        held = {queue: r.token for queue, r in self._runners.items() if r.token}
        asking = [r.asking_seq for r in self._runners.values() if r.asking_seq]
        request = lockmgr_pb.KeepAliveRequest(
            incarnation=session.incarnation,
            acquire_seq=min(asking) - 1 if asking else session.acquire_seq,
            holds=[
                lockmgr_pb.Hold(queue=session.key(queue), token=token)
                for queue, token in held.items()
            ],
        )
        sent_ms = session.clock.monotonic_ms()
        stub = await session.directory.lockmgr()
        try:
            answer = await stub.KeepAlive(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        orphans = []
        for report in answer.reports:
            queue = queue_of(report.queue)
            runner = self._runners.get(queue)
            if report.state == lockmgr_pb.HOLD_STATE_ORPHAN:
                if runner is None or not (runner.token or runner.asking_seq):
                    orphans.append(lockmgr_pb.Hold(queue=report.queue, token=report.token))
            elif runner is None or runner.token != held.get(queue):
                continue
            elif report.state in (lockmgr_pb.HOLD_STATE_OK, lockmgr_pb.HOLD_STATE_WANTED):
                runner.renew(sent_ms, answer.lease_ms)
            elif report.state == lockmgr_pb.HOLD_STATE_NOT_OWNER:
                log.info("not owner queue=%s token=%d", queue, report.token)
                runner.fence()
        if orphans:
            await self._release(orphans)

    async def _release(self, orphans: Sequence[lockmgr_pb.Hold]) -> None:
        """Give back grants whose answers were lost; nothing was delivered under them."""
        log.info("releasing %d orphaned grants", len(orphans))
        stub = await self._session.directory.lockmgr()
        request = lockmgr_pb.ReleaseRequest(incarnation=self._session.incarnation, holds=orphans)
        try:
            await stub.Release(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
