"""Calls that the queues of one consumer make together.

When members come or go many queues change hands at once. What they ask of a service in the same
moment rides in one call.
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
from batonmq._consumer.session import Session, queue_of, queue_to_pb
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError, NotAssigned, Unreachable

log = logging.getLogger(__name__)

ACQUIRE_HOLD_MS = 15_000
ITEMS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class ReceivedGrant:
    """A grant, and when its request was sent."""

    grant: lockmgr_pb.Grant
    sent_ms: int


@dataclass(eq=False, slots=True)
class _PendingAcquire:
    queue: QueueRef
    item: lockmgr_pb.AcquireItem
    outcome: asyncio.Future[ReceivedGrant | BatonError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def settle(self, outcome: ReceivedGrant | BatonError) -> None:
        """Tell who asked, if anybody still waits."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class BatchedCalls:
    """Joins what is asked in one moment, or while a call of the kind is under way.

    All methods raise what the call, or its item, was refused with.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._extents: Batcher[QueueRef, storage_pb.QueryOffsetsOutcome | BatonError] = Batcher(
            self._ask_extents, items_max=ITEMS_MAX
        )
        self._closes: Batcher[offsets_pb.CloseItem, offsets_pb.CloseOutcome] = Batcher(
            self._close, items_max=ITEMS_MAX
        )
        self._releases: Batcher[lockmgr_pb.Hold, None] = Batcher(self._release, items_max=ITEMS_MAX)
        self._wishes: list[_PendingAcquire] = []
        self._wished = asyncio.Event()
        self._open: dict[int, Sequence[_PendingAcquire]] = {}
        self._gave_up = False

    async def run(self) -> None:
        """Carry calls for ever; to be run as one task."""
        async with asyncio.TaskGroup() as tasks:
            for loop in (self._extents.run, self._closes.run, self._releases.run):
                tasks.create_task(loop())
            while True:
                await self._wished.wait()
                await asyncio.sleep(0)  # who is woken by the same event asks in the same call
                self._wished.clear()
                wishes = [wish for wish in self._wishes if not wish.outcome.done()]
                self._wishes = []
                for begin in range(0, len(wishes), ITEMS_MAX):
                    tasks.create_task(self._acquire(tasks, wishes[begin : begin + ITEMS_MAX]))

    # ---- what a queue asks

    async def extent(self, queue: QueueRef) -> storage_pb.QueueOffsets:
        """First and next offset of a queue."""
        outcome = await self._extents.call(queue)
        if isinstance(outcome, BatonError):
            raise outcome
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
        return outcome.offsets

    async def acquire(self, queue: QueueRef, item: lockmgr_pb.AcquireItem) -> ReceivedGrant:
        """Ask for a queue, held at lockmgr while somebody else has it.

        Whoever stops waiting does not get it: a grant that still comes is released.
        """
        wish = _PendingAcquire(queue, item)
        self._wishes.append(wish)
        self._wished.set()
        outcome = await wish.outcome
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    async def close(self, item: offsets_pb.CloseItem) -> offsets_pb.CloseOutcome:
        """Close a token at offsets."""
        return await self._closes.call(item)

    async def release(self, hold: lockmgr_pb.Hold) -> None:
        """Tell lockmgr that a token is closed."""
        await self._releases.call(hold)

    async def release_rest(self) -> None:
        """At the end: give back grants that came too late for anybody to see them.

        If that fails they are free once their lease is over.
        """
        session = self._session
        if not self._gave_up:
            return
        request = lockmgr_pb.ReleaseAllRequest(
            incarnation=session.incarnation, group=session.group, drained=True
        )
        try:
            stub = await session.directory.lockmgr()
            await answered(stub.ReleaseAll(request, timeout=CALL_TIMEOUT_S))
        except BatonError as error:
            log.info("what may be left is not released error=%s", error)

    # ---- keep-alives

    async def release_orphans(self, holds: Sequence[lockmgr_pb.Hold]) -> None:
        """Give back grants whose answers were lost; nothing was delivered under them."""
        await self._release(holds[:ITEMS_MAX])

    @property
    def seen_seq(self) -> int:
        """Highest `acquire_seq` up to which all outcomes have been seen."""
        return min(self._open) - 1 if self._open else self._session.acquire_seq

    def asks_for(self, queue: QueueRef) -> bool:
        """Whether an Acquire of the queue is under way, or about to be."""
        under_way = (wish for wishes in self._open.values() for wish in wishes)
        return any(wish.queue == queue for wish in (*self._wishes, *under_way))

    # ---- the calls

    async def _acquire(self, tasks: asyncio.TaskGroup, asked: Sequence[_PendingAcquire]) -> None:
        """One stream for many queues; it ends as soon as nobody waits for it any more."""
        wishes = self._by_the_record(asked)
        if not wishes:
            return
        seq = self._session.next_acquire_seq()
        self._open[seq] = wishes
        request = lockmgr_pb.AcquireRequest(
            incarnation=self._session.incarnation,
            acquire_seq=seq,
            generation=self._session.view.generation,
            items=[wish.item for wish in wishes],
            hold_ms=ACQUIRE_HOLD_MS,
        )
        settled = asyncio.Event()

        def look(_: object) -> None:
            if all(wish.outcome.done() for wish in wishes):
                settled.set()

        for wish in wishes:
            wish.outcome.add_done_callback(look)
        error: BatonError = Unreachable("lockmgr ended an Acquire without an outcome")
        try:
            reading = self._read(tasks, request, {wish.queue: wish for wish in wishes})
            await unless(settled, reading)
        except BatonError as refusal:
            error = refusal
        finally:
            del self._open[seq]
            self._gave_up |= any(wish.outcome.cancelled() for wish in wishes)
        for wish in wishes:
            wish.settle(error)

    def _by_the_record(self, asked: Sequence[_PendingAcquire]) -> list[_PendingAcquire]:
        """What may be asked for by the generation of the record that is known now.

        That may be newer than the wish, whose end is on its way then.
        """
        view = self._session.view
        for wish in asked:
            if wish.queue not in view.assigned:
                wish.settle(NotAssigned(f"{wish.queue} is not ours any more", retry_after_ms=100))
        return [wish for wish in asked if not wish.outcome.done()]

    async def _read(
        self,
        tasks: asyncio.TaskGroup,
        request: lockmgr_pb.AcquireRequest,
        wishes: Mapping[QueueRef, _PendingAcquire],
    ) -> None:
        session = self._session
        stub = await session.directory.lockmgr()
        sent_ms = session.clock.monotonic_ms()
        stream = stub.Acquire(request, timeout=ACQUIRE_HOLD_MS / 1000 + CALL_TIMEOUT_S)
        try:
            async for answer in stream:
                wish = wishes[queue_of(answer.queue)]
                if answer.HasField("error"):
                    wish.settle(error_from_pb(answer.error))
                elif wish.outcome.done():
                    tasks.create_task(self._give_back(wish.item, answer.grant))
                else:
                    session.epochs.saw(answer.grant.offsets_set, answer.grant.offsets_epoch)
                    wish.settle(ReceivedGrant(answer.grant, sent_ms))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def _give_back(self, item: lockmgr_pb.AcquireItem, grant: lockmgr_pb.Grant) -> None:
        """Give a grant back that nobody waits for; what fails is an orphan of the next keep-alive.

        What the wish claimed to have in hand is in flight under the grant: it was dropped, and
        the next owner gets it flagged. Grants of other queues do not wait for this.
        """
        try:
            if item.resume:
                await self.close(
                    offsets_pb.CloseItem(
                        queue=item.queue,
                        token=grant.token,
                        reset_epoch=grant.reset_epoch,
                        unfinished=item.resume,
                    )
                )
            await self.release(lockmgr_pb.Hold(queue=item.queue, token=grant.token))
        except BatonError as error:
            log.debug("grant not given back queue=%s error=%s", item.queue, error)

    async def _ask_extents(
        self, queues: Sequence[QueueRef]
    ) -> list[storage_pb.QueryOffsetsOutcome | BatonError]:
        """One call per broker; one that is away concerns only its own queues."""
        found: dict[QueueRef, storage_pb.QueryOffsetsOutcome | BatonError] = {}

        async def ask(broker: str) -> None:
            asked = [queue for queue in queues if queue.broker == broker]
            request = storage_pb.QueryOffsetsRequest(queues=map(queue_to_pb, asked))
            try:
                stub = await self._session.directory.storage(broker)
                answer = await answered(stub.QueryOffsets(request, timeout=CALL_TIMEOUT_S))
                found.update(zip(asked, answer.outcomes, strict=True))
            except BatonError as error:
                found.update(dict.fromkeys(asked, error))

        async with asyncio.TaskGroup() as tasks:
            for broker in sorted({queue.broker for queue in queues}):
                tasks.create_task(ask(broker))
        return [found[queue] for queue in queues]

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
