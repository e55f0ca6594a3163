"""Calls of the queues of one consumer, joined into batches.

Goal: requests that are made at once share a call; each queue gets its own outcome; a cancelled
caller gets no queue, and its grant is released (protocol section 5).
Method: real gRPC to services that record requests and answer when the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import pytest

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as pb_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.aio import unless
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_to_pb
from batonmq._connection.directory import Directory
from batonmq._consumer import batched_calls
from batonmq._consumer.batched_calls import BatchedCalls
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.group_view import GroupView
from batonmq._consumer.session import Session
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError, Held, NotAssigned, Unreachable
from tests.support.conditions import until
from tests.support.grpc_server import serving_at

TOPIC, BROKER, GROUP = "orders", "broker-a", "billing"
ASSIGNED = 3
"""Number of queues that the group's record assigns to the consumer."""


class Lockmgr(pb_grpc.LockmgrServiceServicer):
    """A lock manager that answers an item when `answers` has an entry for its queue.

    Attributes:
        answers: Token of the grant, or the refusal, by queue id.
        refusals: Number of calls of ReleaseAll that fail first.
        ended: Number of Acquire streams that have ended.
        failing: Whether Acquire ends without outcomes.
        mute: Event that Release waits for; None answers at once.
    """

    def __init__(self) -> None:
        self.answers: dict[int, int | BatonError] = {}
        self.answered = asyncio.Event()
        self.acquires: list[pb.AcquireRequest] = []
        self.releases: list[list[int]] = []
        self.released_all: list[str] = []
        self.refusals = 0
        self.ended = 0
        self.failing = False
        self.mute: asyncio.Event | None = None

    def answer(self, answers: dict[int, int | BatonError]) -> None:
        self.answers |= answers
        self.answered.set()

    async def Acquire(
        self, request: pb.AcquireRequest, context: Any
    ) -> AsyncIterator[pb.AcquireResponse]:
        self.acquires.append(request)
        left = {item.queue.queue.queue_id: item.queue for item in request.items}
        try:
            while left and not self.failing:
                self.answered.clear()
                for queue_id in left.keys() & self.answers.keys():
                    yield _response(left.pop(queue_id), self.answers[queue_id])
                if left:
                    await self.answered.wait()
        finally:
            self.ended += 1

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self.releases.append([hold.token for hold in request.holds])
        if self.mute is not None:
            await self.mute.wait()
        return pb.ReleaseResponse()

    async def ReleaseAll(
        self, request: pb.ReleaseAllRequest, context: Any
    ) -> pb.ReleaseAllResponse:
        self.released_all.append(request.group)
        if len(self.released_all) <= self.refusals:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "offsets is about to be another node")
        return pb.ReleaseAllResponse()


class Nameserver(nameserver_grpc.NameserverServiceServicer):
    """A nameserver that lists one node of each service, all at one address."""

    def __init__(self) -> None:
        self.address = ""

    async def DescribeCluster(
        self, request: nameserver_pb.DescribeClusterRequest, context: Any
    ) -> nameserver_pb.DescribeClusterResponse:
        kinds = (
            (nameserver_pb.SERVICE_KIND_STORAGE, BROKER),
            (nameserver_pb.SERVICE_KIND_OFFSETS, "offsets-0"),
            (nameserver_pb.SERVICE_KIND_LOCKMGR, "lockmgr-0"),
        )
        return nameserver_pb.DescribeClusterResponse(
            nodes=[
                nameserver_pb.Node(service=kind, node_id=name, address=self.address, leader=True)
                for kind, name in kinds
            ],
            generation=1,
        )


class Offsets(offsets_grpc.OffsetsServiceServicer):
    """An offsets service that closes every queue, and records the number of items of each call.

    Attributes:
        failing: Whether Close fails.
        gate: Close waits for it.
    """

    def __init__(self) -> None:
        self.failing, self.gate = False, asyncio.Event()
        self.gate.set()
        self.closes: list[int] = []
        self.items: list[offsets_pb.CloseItem] = []

    async def Close(
        self, request: offsets_pb.CloseRequest, context: Any
    ) -> offsets_pb.CloseResponse:
        self.closes.append(len(request.items))
        self.items += request.items
        await self.gate.wait()
        if self.failing:
            raise Unreachable("offsets is about to be another node")
        closed = offsets_pb.Committed(committed_offset=1)
        return offsets_pb.CloseResponse(
            offsets_epoch=1,
            outcomes=[offsets_pb.CloseOutcome(closed=closed) for _ in request.items],
        )


class Storage(storage_grpc.StorageServiceServicer):
    """A storage node that has every queue, and records the number of queues of each call."""

    def __init__(self) -> None:
        self.extents: list[int] = []

    async def QueryOffsets(
        self, request: storage_pb.QueryOffsetsRequest, context: Any
    ) -> storage_pb.QueryOffsetsResponse:
        self.extents.append(len(request.queues))
        return storage_pb.QueryOffsetsResponse(
            outcomes=[
                storage_pb.QueryOffsetsOutcome(
                    offsets=storage_pb.QueueOffsets(next_offset=10 + queue.queue_id, topic_id=7)
                )
                for queue in request.queues
            ]
        )


@dataclass(frozen=True, slots=True)
class OtherServices:
    """The services besides the lock manager."""

    offsets: Offsets
    storage: Storage


@asynccontextmanager
async def scene() -> AsyncIterator[tuple[BatchedCalls, Lockmgr, OtherServices]]:
    """Run batched calls and the services that they call."""
    nameserver, lockmgr = Nameserver(), Lockmgr()  # type: ignore[abstract]
    others = OtherServices(Offsets(), Storage())  # type: ignore[abstract]
    adders: list[Any] = [
        lambda server: pb_grpc.add_LockmgrServiceServicer_to_server(lockmgr, server),
        lambda server: offsets_grpc.add_OffsetsServiceServicer_to_server(others.offsets, server),
        lambda server: storage_grpc.add_StorageServiceServicer_to_server(others.storage, server),
        lambda server: nameserver_grpc.add_NameserverServiceServicer_to_server(nameserver, server),
    ]
    async with serving_at(*adders) as address:
        nameserver.address = address
        directory = Directory(address, Random(1))
        session = Session(
            group=GROUP,
            incarnation=queue_pb2.Incarnation(client_id="a", incarnation_id=1),
            settings=ConsumerSettings(),
            directory=directory,
            clock=Clock(),
            random=Random(1),
            on_ownership=lambda _: None,
            view=GroupView(
                generation=5, member=True, assigned=frozenset(queue(n) for n in range(ASSIGNED))
            ),
        )
        calls = BatchedCalls(session)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(calls.run())
            yield calls, lockmgr, others
            running.cancel()
        await directory.close()


def queue(queue_id: int, broker: str = BROKER) -> QueueRef:
    return QueueRef(TOPIC, broker, queue_id)


async def acquired(
    calls: BatchedCalls, queue_id: int, *resume: queue_pb2.OffsetRange
) -> int | BatonError:
    """Acquire a queue; return the token of the grant, or the refusal."""
    try:
        item = pb.AcquireItem(queue=_key(queue_id), resume=resume)
        return (await calls.acquire(queue(queue_id), item)).grant.token
    except BatonError as error:
        return error


async def test_concurrent_requests_share_an_acquire_and_get_their_own_outcomes() -> None:
    async with scene() as (calls, lockmgr, _), asyncio.TaskGroup() as tasks:
        lockmgr.answer({0: 70, 1: Held("another member owns it"), 2: 72})
        acquiring = [tasks.create_task(acquired(calls, queue_id)) for queue_id in range(3)]
        outcomes = [await task for task in acquiring]
        assert [outcomes[0], type(outcomes[1]), outcomes[2]] == [70, Held, 72]
        (request,) = lockmgr.acquires
        assert [item.queue.queue.queue_id for item in request.items] == [0, 1, 2]
        assert request.acquire_seq == 1


async def test_outcome_does_not_wait_for_the_others() -> None:
    async with scene() as (calls, lockmgr, _), asyncio.TaskGroup() as tasks:
        lockmgr.answer({0: 70})
        late = tasks.create_task(acquired(calls, 1))
        assert await acquired(calls, 0) == 70
        assert not late.done()
        assert calls.busy(queue(1))
        lockmgr.answer({1: 71})
        assert await late == 71
        await until(lambda: not calls.busy(queue(1)))


async def test_each_acquire_has_a_higher_number_and_counts_as_seen_when_it_ends() -> None:
    async with scene() as (calls, lockmgr, _), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(acquired(calls, 0))
        await until(lambda: len(lockmgr.acquires) == 1)
        assert calls.seen_seq == 0
        lockmgr.answer({1: 71})
        assert await acquired(calls, 1) == 71
        await until(lambda: lockmgr.ended == 1)
        assert calls.seen_seq == 0, "the outcome of the first has not arrived"
        lockmgr.answer({0: 70})
        assert await first == 70
        await until(lambda: calls.seen_seq == 2)
        assert [request.acquire_seq for request in lockmgr.acquires] == [1, 2]


async def test_acquire_ends_when_no_caller_waits_for_it() -> None:
    async with scene() as (calls, lockmgr, _), asyncio.TaskGroup() as tasks:
        acquiring = [tasks.create_task(acquired(calls, queue_id)) for queue_id in range(2)]
        await until(lambda: len(lockmgr.acquires) == 1)
        for task in acquiring:
            task.cancel()
        await until(lambda: lockmgr.ended == 1)
        await until(lambda: not calls.busy(queue(0)))


@asynccontextmanager
async def unwanted_grant(
    calls: BatchedCalls, lockmgr: Lockmgr, *resume: queue_pb2.OffsetRange
) -> AsyncIterator[None]:
    """Request two queues, cancel the caller of queue 0, and grant queue 0 during the block.

    After the block queue 1 is granted, and its caller gets the grant.
    """
    async with asyncio.TaskGroup() as tasks:
        cancelled = tasks.create_task(acquired(calls, 0, *resume))
        waiting = tasks.create_task(acquired(calls, 1))
        await until(lambda: len(lockmgr.acquires) == 1)
        cancelled.cancel()
        lockmgr.answer({0: 70})
        yield
        lockmgr.answer({1: 71})
        assert await waiting == 71


async def test_grant_whose_caller_was_cancelled_is_released() -> None:
    async with scene() as (calls, lockmgr, _), unwanted_grant(calls, lockmgr):
        await until(lambda: lockmgr.releases == [[70]])


async def test_caller_that_is_cancelled_as_its_grant_arrives_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else would release it: the next owner would wait until the queue counts as quiet."""
    settle = batched_calls._PendingAcquire.settle

    def settle_and_cancel(pending: Any, outcome: Any) -> None:
        settle(pending, outcome)
        waiting.cancel()

    monkeypatch.setattr(batched_calls._PendingAcquire, "settle", settle_and_cancel)
    async with scene() as (calls, lockmgr, _), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(acquired(calls, 0))
        lockmgr.answer({0: 70})
        assert await waiting == 70
        assert lockmgr.releases == []


async def test_result_of_acquire_is_not_lost_to_a_revocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above, by the helper that the queues use."""
    settle, revoked = batched_calls._PendingAcquire.settle, asyncio.Event()

    def settle_and_revoke(pending: Any, outcome: Any) -> None:
        settle(pending, outcome)
        revoked.set()

    monkeypatch.setattr(batched_calls._PendingAcquire, "settle", settle_and_revoke)
    async with scene() as (calls, lockmgr, _):
        lockmgr.answer({0: 70})
        assert await unless(revoked, acquired(calls, 0)) == 70


async def test_grant_does_not_wait_for_the_release_of_an_unwanted_one() -> None:
    async with scene() as (calls, lockmgr, _):
        lockmgr.mute = asyncio.Event()
        async with unwanted_grant(calls, lockmgr):
            await until(lambda: lockmgr.releases == [[70]])
        lockmgr.mute.set()


async def test_unwanted_grant_is_busy_until_its_release_has_ended() -> None:
    """A keep-alive reports it as an orphan meanwhile. Offsets refuses calls that close it twice."""
    async with scene() as (calls, lockmgr, _):
        lockmgr.mute = asyncio.Event()
        async with unwanted_grant(calls, lockmgr):
            await until(lambda: lockmgr.releases == [[70]])
        await until(lambda: not calls.busy(queue(1)))
        assert calls.busy(queue(0))
        lockmgr.mute.set()
        await until(lambda: not calls.busy(queue(0)))
        assert calls._session.keep_alive_soon.is_set(), "a grant may have been lost on its way"


async def test_two_unwanted_grants_of_one_queue_are_closed_in_calls_of_their_own() -> None:
    async with scene() as (calls, lockmgr, others), asyncio.TaskGroup() as tasks:
        others.offsets.gate.clear()
        first = tasks.create_task(calls.close(offsets_pb.CloseItem(queue=_key(1), token=1)))
        await until(lambda: others.offsets.closes == [1])
        closes = [
            tasks.create_task(calls.close(offsets_pb.CloseItem(queue=_key(queue_id), token=token)))
            for queue_id, token in ((0, 70), (2, 5), (0, 71))
        ]
        await asyncio.sleep(0)
        others.offsets.gate.set()
        await asyncio.wait([first, *closes])
        assert [item.token for item in others.offsets.items] == [1, 70, 5, 71]
        assert others.offsets.closes == [1, 2, 1]
        lockmgr.mute = asyncio.Event()
        releases = [
            tasks.create_task(calls.release(pb.Hold(queue=_key(0), token=token)))
            for token in (70, 71)
        ]
        await until(lambda: lockmgr.releases == [[70]])
        lockmgr.mute.set()
        await asyncio.wait(releases)
        assert lockmgr.releases == [[70], [71]]


async def test_end_waits_for_the_release_of_unwanted_grants() -> None:
    """A ReleaseAll before their Close would leave the queue taken until the lease expires."""
    async with scene() as (calls, lockmgr, others), asyncio.TaskGroup() as tasks:
        others.offsets.gate.clear()
        async with unwanted_grant(calls, lockmgr):
            await until(lambda: others.offsets.closes == [1])
        leaving = tasks.create_task(calls.release_rest())
        await asyncio.sleep(0)
        assert lockmgr.released_all == []
        others.offsets.gate.set()
        await leaving
        assert (lockmgr.releases, lockmgr.released_all) == ([[70]], [GROUP])


async def test_keep_alive_follows_a_release_that_fails() -> None:
    async with scene() as (calls, lockmgr, others):
        others.offsets.failing = True
        async with unwanted_grant(calls, lockmgr):
            await until(lambda: others.offsets.closes == [1])
            await until(calls._session.keep_alive_soon.is_set)
        await until(lambda: not calls.busy(queue(0)))
        assert lockmgr.releases == []


async def test_queue_that_the_record_does_not_assign_is_not_requested() -> None:
    """A late request with the newer generation would acquire the queue of another member."""
    async with scene() as (calls, lockmgr, _), asyncio.TaskGroup() as tasks:
        lockmgr.answer({0: 70})
        acquiring = [tasks.create_task(acquired(calls, queue_id)) for queue_id in (0, ASSIGNED)]
        assert await acquiring[0] == 70
        assert isinstance(await acquiring[1], NotAssigned)
        (request,) = lockmgr.acquires
        assert [item.queue.queue.queue_id for item in request.items] == [0]
        assert request.generation == 5


async def test_unwanted_grant_with_claimed_work_is_closed_before_its_release() -> None:
    """Section 11: dropped messages are delivered again, flagged, before the lease expires."""
    resume = queue_pb2.OffsetRange(first_offset=3, next_offset=5)
    async with scene() as (calls, lockmgr, others), unwanted_grant(calls, lockmgr, resume):
        await until(lambda: lockmgr.releases == [[70]])
        (closed,) = others.offsets.items
        assert (closed.token, list(closed.unfinished), list(closed.acked)) == (70, [resume], [])


async def test_orphaned_grant_is_closed_with_all_claims_of_its_requests_before_its_release() -> (
    None
):
    """The lost grant may belong to any request since the last grant that arrived."""
    async with scene() as (calls, lockmgr, others):
        lockmgr.failing = True
        for first_offset in (3, 8):
            resume = queue_pb2.OffsetRange(first_offset=first_offset, next_offset=first_offset + 1)
            item = pb.AcquireItem(queue=_key(0), resume=[resume], reset_epoch=2)
            with pytest.raises(Unreachable):
                await calls.acquire(queue(0), item)
        await calls.release_orphans([pb.Hold(queue=_key(0), token=70)])
        (closed,) = others.offsets.items
        unfinished = [(r.first_offset, r.next_offset) for r in closed.unfinished]
        assert (closed.token, closed.reset_epoch, unfinished) == (70, 2, [(3, 4), (8, 9)])
        assert lockmgr.releases == [[70]]


async def test_claims_of_earlier_requests_are_forgotten_when_a_grant_arrives() -> None:
    async with scene() as (calls, lockmgr, others):
        lockmgr.failing = True
        resume = queue_pb2.OffsetRange(first_offset=3, next_offset=5)
        with pytest.raises(Unreachable):
            await calls.acquire(queue(0), pb.AcquireItem(queue=_key(0), resume=[resume]))
        lockmgr.failing = False
        lockmgr.answer({0: 70})
        assert await acquired(calls, 0) == 70
        await calls.release_orphans([pb.Hold(queue=_key(0), token=71)])
        assert (others.offsets.items, lockmgr.releases) == ([], [[71]])


async def test_acquire_that_ends_without_outcomes_fails_all_waiting_requests() -> None:
    async with scene() as (calls, lockmgr, _):
        lockmgr.failing = True
        outcome = await acquired(calls, 0)
        assert isinstance(outcome, Unreachable)
        await calls.release_rest()
        assert lockmgr.released_all == [GROUP], "a grant may have been lost on its way"


async def test_grants_that_may_be_left_are_released_at_the_end() -> None:
    async with scene() as (calls, lockmgr, _), asyncio.TaskGroup() as tasks:
        lockmgr.answer({0: 70})
        assert await acquired(calls, 0) == 70
        await calls.release_rest()
        assert lockmgr.released_all == [], "a grant was released though every outcome had arrived"
        gone = tasks.create_task(acquired(calls, 1))
        await until(lambda: len(lockmgr.acquires) == 2)
        gone.cancel()
        await until(lambda: lockmgr.ended == 2)
        lockmgr.refusals = 2
        await calls.release_rest()
        assert lockmgr.released_all == [GROUP] * 3, "two failed"


async def test_concurrent_closes_and_releases_share_calls() -> None:
    async with scene() as (calls, lockmgr, others), asyncio.TaskGroup() as tasks:
        closes = [
            tasks.create_task(calls.close(offsets_pb.CloseItem(queue=_key(queue_id), token=1)))
            for queue_id in range(50)
        ]
        releases = [
            tasks.create_task(calls.release(pb.Hold(queue=_key(token), token=token)))
            for token in range(50)
        ]
        assert [(await close).closed.committed_offset for close in closes] == [1] * 50
        await asyncio.wait(releases)
        assert (sum(others.offsets.closes), len(others.offsets.closes) <= 2) == (50, True)
        assert sorted(token for call in lockmgr.releases for token in call) == list(range(50))
        assert len(lockmgr.releases) <= 2


async def test_concurrent_extents_share_one_call_per_broker() -> None:
    async with scene() as (calls, _, others), asyncio.TaskGroup() as tasks:
        queries = [tasks.create_task(calls.extent(queue(queue_id))) for queue_id in range(20)]
        extents = [await task for task in queries]
        assert [extent.next_offset for extent in extents] == list(range(10, 30))
        assert len(others.storage.extents) <= 2


async def test_unreachable_broker_fails_only_its_own_queues() -> None:
    async with scene() as (calls, _, _others), asyncio.TaskGroup() as tasks:
        reachable = tasks.create_task(calls.extent(queue(3)))
        with pytest.raises(BatonError):
            await calls.extent(queue(0, "broker-b"))
        assert (await reachable).next_offset == 13


def _key(queue_id: int) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(
        group=GROUP, queue=queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)
    )


def _response(key: queue_pb2.GroupQueue, answer: int | BatonError) -> pb.AcquireResponse:
    if isinstance(answer, BatonError):
        return pb.AcquireResponse(queue=key, error=error_to_pb(answer))
    return pb.AcquireResponse(queue=key, grant=pb.Grant(token=answer, offsets_epoch=1))
