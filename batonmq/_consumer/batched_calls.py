"""Calls of the queues of one consumer, joined into batches.

When a member joins or leaves, many queues move at once. Their requests of the same moment to one
service travel in one call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.aio import unless
from batonmq._common.batcher import Batcher
from batonmq._common.rpc import answered, error_from_pb, from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.moved_group import GROUP_MOVED
from batonmq._consumer.session import (
    Session,
    queue_of,
    queue_to_pb,
    ranges_from_pb,
    ranges_to_pb,
)
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import normalize
from batonmq.errors import BatonError, NotAssigned, Unreachable

log = logging.getLogger(__name__)

ACQUIRE_HOLD_MS = 15_000
"""How long the lock manager may hold a request for a queue that has an owner."""
ITEMS_MAX = 1_024
"""Queues of one call, at most."""
REST_MS = 3_000
"""How long a consumer that leaves tries to release grants that it has not seen, in milliseconds."""


@dataclass(frozen=True, slots=True)
class ReceivedGrant:
    """A grant, and when its request was sent, by the monotonic clock."""

    grant: lockmgr_pb.Grant
    sent_ms: int


@dataclass(eq=False, slots=True)
class _PendingAcquire:
    """A queue that is to be acquired, and the future of the outcome.

    Attributes:
        grant: That the caller got; None: there is none yet, or it may have been lost.
    """

    queue: QueueRef
    item: lockmgr_pb.AcquireItem
    grant: lockmgr_pb.Grant | None = None
    outcome: asyncio.Future[ReceivedGrant | BatonError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def settle(self, outcome: ReceivedGrant | BatonError) -> None:
        """Set the outcome, unless the caller has stopped waiting."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class BatchedCalls:
    """Joins the requests of one moment, and those that arrive while a call is under way.

    All methods raise the error that the call, or its item, was refused with.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._extents: Batcher[QueueRef, storage_pb.QueryOffsetsOutcome | BatonError] = Batcher(
            self._query_extents, items_max=ITEMS_MAX
        )
        # The services refuse calls with two items of one queue.
        self._closes: Batcher[offsets_pb.CloseItem, offsets_pb.CloseOutcome] = Batcher(
            self._close, items_max=ITEMS_MAX, key=_queue_of_item
        )
        self._releases: Batcher[lockmgr_pb.Hold, None] = Batcher(
            self._release, items_max=ITEMS_MAX, key=_queue_of_item
        )
        self._pending: list[_PendingAcquire] = []
        self._arrived = asyncio.Event()
        self._under_way: dict[int, Sequence[_PendingAcquire]] = {}
        self._releasing: dict[asyncio.Task[None], QueueRef] = {}
        self._abandoned = False
        self._claimed: dict[QueueRef, lockmgr_pb.AcquireItem] = {}

    async def run(self) -> None:
        """Make the calls until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for loop in (self._extents.run, self._closes.run, self._releases.run):
                tasks.create_task(loop())
            while True:
                await self._arrived.wait()
                await asyncio.sleep(0)  # tasks that the same event wakes share a call
                self._arrived.clear()
                pending = [one for one in self._pending if not one.outcome.done()]
                self._pending = []
                for begin in range(0, len(pending), ITEMS_MAX):
                    tasks.create_task(self._acquire(tasks, pending[begin : begin + ITEMS_MAX]))

    # ---- requests of one queue

    async def extent(self, queue: QueueRef) -> storage_pb.QueueOffsets:
        """Return the first and the next offset of a queue."""
        outcome = await self._extents.call(queue)
        if isinstance(outcome, BatonError):
            raise outcome
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
        return outcome.offsets

    async def acquire(self, queue: QueueRef, item: lockmgr_pb.AcquireItem) -> ReceivedGrant:
        """Acquire a queue; the lock manager holds the request while another member owns the queue.

        If the caller is cancelled, a grant that still arrives is released. One that has arrived
        in the same turn of the event loop is returned in spite of the cancellation.
        """
        pending = _PendingAcquire(queue, item)
        self._pending.append(pending)
        self._arrived.set()
        try:
            outcome = await pending.outcome
        except asyncio.CancelledError:
            if pending.grant is None:
                raise
            outcome = pending.outcome.result()
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    async def close(self, item: offsets_pb.CloseItem) -> offsets_pb.CloseOutcome:
        """Close a token at offsets."""
        return await self._closes.call(item)

    async def release(self, hold: lockmgr_pb.Hold) -> None:
        """Release a lock with a closed token."""
        await self._releases.call(hold)

    async def release_rest(self) -> None:
        """At the end, release grants that may have been lost, or whose caller was cancelled.

        A call that fails is repeated for up to `REST_MS`. If all fail, their queues are free when
        the leases expire.
        """
        session = self._session
        if not self._abandoned:
            return
        request = lockmgr_pb.ReleaseAllRequest(
            incarnation=session.incarnation, group=session.group, drained=True
        )
        end_ms = session.clock.monotonic_ms() + REST_MS
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=REST_MS / 1000)
        failures = 0
        while True:
            try:
                stub = await session.directory.lockmgr()
                await answered(stub.ReleaseAll(request, timeout=CALL_TIMEOUT_S))
                return
            except BatonError as error:
                if session.clock.monotonic_ms() >= end_ms:
                    log.info("grants that may be left are not released error=%s", error)
                    return
                await session.directory.pause(error, failures)
                failures += 1

    # ---- keep-alives

    async def release_orphans(self, holds: Sequence[lockmgr_pb.Hold]) -> None:
        """Close and release grants with lost answers; nothing was delivered under them."""
        holds = holds[:ITEMS_MAX]
        for hold in holds:
            item = self._claimed.get(queue_of(hold.queue))
            if item is not None:
                await self._close_unused(item, hold.token, item.reset_epoch)
        await self._release(holds)

    @property
    def seen_seq(self) -> int:
        """The highest `acquire_seq` up to which all outcomes have arrived."""
        return min(self._under_way) - 1 if self._under_way else self._session.acquire_seq

    def busy(self, queue: QueueRef) -> bool:
        """Whether the queue is being acquired here, or a grant of it is being released."""
        under_way = (one for batch in self._under_way.values() for one in batch)
        acquiring = any(one.queue == queue for one in (*self._pending, *under_way))
        return acquiring or queue in self._releasing.values()

    # ---- the calls

    async def _acquire(self, tasks: asyncio.TaskGroup, pending: Sequence[_PendingAcquire]) -> None:
        """Acquire many queues with one stream, which ends as soon as no caller waits for it."""
        batch = self._still_assigned(pending)
        if not batch:
            return
        seq = self._session.next_acquire_seq()
        self._under_way[seq] = batch
        request = lockmgr_pb.AcquireRequest(
            incarnation=self._session.incarnation,
            acquire_seq=seq,
            generation=self._session.view.generation,
            items=[one.item for one in batch],
            hold_ms=ACQUIRE_HOLD_MS,
            reads_others=True,
        )
        settled = asyncio.Event()

        def check(_: object) -> None:
            if all(one.outcome.done() for one in batch):
                settled.set()

        for one in batch:
            one.outcome.add_done_callback(check)
        error: BatonError = Unreachable("the lock manager ended an Acquire without an outcome")
        try:
            reading = self._read(tasks, request, {one.queue: one for one in batch})
            await unless(settled, reading)
        except BatonError as refusal:
            error = refusal
        finally:
            del self._under_way[seq]
            for one in batch:
                self._note_outcome(one)
            cancelled = any(one.outcome.cancelled() for one in batch)
            self._abandoned |= cancelled or not all(one.outcome.done() for one in batch)
            if cancelled:
                self._session.keep_alive_soon.set()  # it reports grants that were lost
        for one in batch:
            one.settle(error)

    def _note_outcome(self, one: _PendingAcquire) -> None:
        """Remember what a request claimed if a grant for it may arrive late or never."""
        if one.grant is not None:
            return
        before = self._claimed.get(one.queue)
        resume = list(one.item.resume)
        if before is not None and before.reset_epoch == one.item.reset_epoch:
            resume += before.resume
        self._claimed[one.queue] = lockmgr_pb.AcquireItem(
            queue=one.item.queue,
            resume=ranges_to_pb(normalize(ranges_from_pb(resume))),
            reset_epoch=one.item.reset_epoch,
        )

    def _still_assigned(self, pending: Sequence[_PendingAcquire]) -> list[_PendingAcquire]:
        """Return the requests that the group's record allows; refuse the others.

        The record may be newer than a request: then the queue is being revoked.
        """
        view = self._session.view
        for one in pending:
            if one.queue not in view.assigned:
                one.settle(
                    NotAssigned(
                        f"queue {one.queue} is not assigned to this consumer any more",
                        retry_after_ms=100,
                    )
                )
        return [one for one in pending if not one.outcome.done()]

    async def _read(
        self,
        tasks: asyncio.TaskGroup,
        request: lockmgr_pb.AcquireRequest,
        batch: Mapping[QueueRef, _PendingAcquire],
    ) -> None:
        session = self._session
        stub = await session.directory.lockmgr()
        sent_ms = session.clock.monotonic_ms()
        stream = stub.Acquire(request, timeout=ACQUIRE_HOLD_MS / 1000 + CALL_TIMEOUT_S)
        try:
            async for answer in stream:
                for one in (answer, *answer.others):
                    self._decided(tasks, batch[queue_of(one.queue)], one, sent_ms)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def _decided(
        self,
        tasks: asyncio.TaskGroup,
        pending: _PendingAcquire,
        answer: lockmgr_pb.AcquireResponse,
        sent_ms: int,
    ) -> None:
        """Settle one request; release its grant if the caller no longer waits."""
        session, grant = self._session, answer.grant
        if answer.HasField("error"):
            pending.settle(error_from_pb(answer.error))
        elif pending.outcome.done():
            task = tasks.create_task(self._release_unwanted(pending.item, grant))
            self._releasing[task] = pending.queue
            task.add_done_callback(self._releasing.pop)
            self._abandoned = True
        else:
            session.epochs.observe(grant.offsets_set, grant.offsets_epoch)
            pending.grant = grant
            self._claimed.pop(pending.queue, None)
            pending.settle(ReceivedGrant(grant, sent_ms))

    async def _release_unwanted(
        self, item: lockmgr_pb.AcquireItem, grant: lockmgr_pb.Grant
    ) -> None:
        """Release the grant of a cancelled caller.

        Until it is done, no keep-alive releases it as an orphan. If a call fails, a keep-alive
        reports it, once the consumer has no other token of the queue. Other grants do not wait for
        this.
        """
        try:
            await self._close_unused(item, grant.token, grant.reset_epoch)
            await self.release(lockmgr_pb.Hold(queue=item.queue, token=grant.token))
        except BatonError as error:
            log.info("unwanted grant not released queue=%s error=%s", queue_of(item.queue), error)
            self._session.keep_alive_soon.set()

    async def _close_unused(
        self, item: lockmgr_pb.AcquireItem, token: int, reset_epoch: int
    ) -> None:
        """Close a grant that is not used, so that the next owner waits for no lease.

        What was in flight at this consumer before stays in flight under the grant. The fence has
        flagged it, except the messages that the request claimed. These were dropped, so the Close
        names them as unfinished. A refusal, as of a newer token, needs no other call.
        """
        outcome = await self.close(
            offsets_pb.CloseItem(
                queue=item.queue, token=token, reset_epoch=reset_epoch, unfinished=item.resume
            )
        )
        if outcome.HasField("error"):
            error = error_from_pb(outcome.error)
            if isinstance(error, GROUP_MOVED):
                raise error
        self._claimed.pop(queue_of(item.queue), None)

    async def _query_extents(
        self, queues: Sequence[QueueRef]
    ) -> list[storage_pb.QueryOffsetsOutcome | BatonError]:
        """Make one call per broker; a broker that fails concerns only its own queues."""
        outcomes: dict[QueueRef, storage_pb.QueryOffsetsOutcome | BatonError] = {}

        async def ask(broker: str) -> None:
            own_queues = [queue for queue in queues if queue.broker == broker]
            request = storage_pb.QueryOffsetsRequest(queues=map(queue_to_pb, own_queues))
            try:
                stub = await self._session.directory.storage(broker)
                answer = await answered(stub.QueryOffsets(request, timeout=CALL_TIMEOUT_S))
                outcomes.update(zip(own_queues, answer.outcomes, strict=True))
            except BatonError as error:
                outcomes.update(dict.fromkeys(own_queues, error))

        async with asyncio.TaskGroup() as tasks:
            for broker in sorted({queue.broker for queue in queues}):
                tasks.create_task(ask(broker))
        return [outcomes[queue] for queue in queues]

    async def _close(
        self, items: Sequence[offsets_pb.CloseItem]
    ) -> Sequence[offsets_pb.CloseOutcome]:
        session = self._session
        keeper = await session.keeper()
        request = offsets_pb.CloseRequest(
            offsets_epoch=session.epochs.of(keeper.offsets_set), items=items
        )
        return (await answered(keeper.stub.Close(request, timeout=CALL_TIMEOUT_S))).outcomes

    async def _release(self, holds: Sequence[lockmgr_pb.Hold]) -> list[None]:
        request = lockmgr_pb.ReleaseRequest(incarnation=self._session.incarnation, holds=holds)
        stub = await self._session.directory.lockmgr()
        await answered(stub.Release(request, timeout=CALL_TIMEOUT_S))
        return [None] * len(holds)


def _queue_of_item(item: offsets_pb.CloseItem | lockmgr_pb.Hold) -> QueueRef:
    return queue_of(item.queue)
