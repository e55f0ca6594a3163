"""How a queue passes on: handlers end, what is done is told, and that we are done (section 9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.local_offsets import LocalProgress
from batonmq._consumer.moved_group import GROUP_MOVED
from batonmq._consumer.session import Session, ranges_to_pb
from batonmq._core.queue_progress import CloseContent
from batonmq.errors import BatonError

if TYPE_CHECKING:
    from batonmq._consumer.assigned_queue import AssignedQueue

log = logging.getLogger(__name__)

RELEASE_MS = 5_000
"""If lockmgr is away for longer, the next owner finds the token closed."""


async def give_back(runner: AssignedQueue) -> None:
    """Let handlers end, then close at offsets and release at lockmgr; just commit if not owned.

    Does nothing more once the token is fenced.
    """
    await _drain(runner)
    if runner.fenced:
        return
    closing = runner.end()
    if closing.unfinished:
        log.warning("drained with unfinished queue=%s %s", runner.queue, closing.unfinished)
    if runner.owned:
        await close(runner, closing)
        await release(runner, closing.token)
    else:
        await _commit_last(runner, closing)
    runner.given_back(closing.token)


async def _drain(runner: AssignedQueue) -> None:
    limit_ms = runner.session.drain_timeout_ms
    try:
        async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
            while runner.progress is not None and runner.progress.running and not runner.fenced:
                runner.ended.clear()
                await runner.ended.wait()
    except TimeoutError:
        log.info("drain timed out queue=%s", runner.queue)


async def close(runner: AssignedQueue, closing: CloseContent) -> None:
    """Repeat one frozen Close until it is answered, or the lease must be over."""
    session = runner.session
    item = offsets_pb.CloseItem(
        queue=runner.key,
        token=closing.token,
        reset_epoch=closing.reset_epoch,
        committed_offset=closing.acks.committed,
        acked=ranges_to_pb(closing.acks.ranges),
        unfinished=ranges_to_pb(closing.unfinished),
    )

    async def call() -> None:
        outcome = await runner.calls.close(item)
        if outcome.HasField("error"):
            error = error_from_pb(outcome.error)
            if isinstance(error, GROUP_MOVED):
                raise error
            log.warning("close refused queue=%s error=%s", runner.queue, error)

    await _repeat(session, 2 * runner.lease_ms, call)


async def release(runner: AssignedQueue, token: int) -> None:
    """Tell lockmgr that the token is closed."""
    hold = lockmgr_pb.Hold(queue=runner.key, token=token)
    await _repeat(runner.session, RELEASE_MS, lambda: runner.calls.release(hold))


async def _commit_last(runner: AssignedQueue, closing: CloseContent) -> None:
    """Where nobody owns the queue (section 15): what is not told now is handled once more.

    A broadcasting member puts it into its file, which is saved when the consumer is closed.
    """
    session = runner.session
    if session.local is not None:
        acks = closing.acks
        session.local.put(runner.queue, LocalProgress(acks.committed, acks.ranges))
        return
    item = offsets_pb.CommitItem(
        queue=runner.key,
        reset_epoch=closing.reset_epoch,
        committed_offset=closing.acks.committed,
        acked=ranges_to_pb(closing.acks.ranges),
    )

    async def call() -> None:
        keeper = await session.keeper()
        request = offsets_pb.CommitRequest(
            offsets_epoch=session.epochs.of(keeper.offsets_set), items=[item]
        )
        (outcome,) = (await keeper.stub.Commit(request, timeout=CALL_TIMEOUT_S)).outcomes
        if outcome.HasField("error"):
            error = error_from_pb(outcome.error)
            if isinstance(error, GROUP_MOVED):
                raise error
            log.warning("last commit refused queue=%s error=%s", runner.queue, error)

    await _repeat(session, 2 * runner.lease_ms, call)


async def _repeat(session: Session, limit_ms: int, call: Callable[[], Awaitable[None]]) -> None:
    """Call until it is answered, or time is over."""
    failures, deadline_ms = 0, session.clock.monotonic_ms() + limit_ms
    while session.clock.monotonic_ms() < deadline_ms:
        try:
            await call()
            return
        except grpc.aio.AioRpcError as failure:
            await session.directory.pause(from_rpc_error(failure), failures)
        except BatonError as failure:
            await session.directory.pause(failure, failures)
        failures += 1
