"""Goal: only a fresh record of a delivery is used, and the order of each queue is kept.

Method: the offsets twin behind a real channel, and a clock that jumps while a call is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._common.clock import Clock
from batonmq.errors import BatonError, DeliveryUnrecorded, Fenced, Unreachable
from batonmq_server.storage.delivery_recorder import TOUCHES_MAX, DeliveryRecorder, PendingDelivery
from batonmq_server.storage.long_polls import QueueOwner
from tests.storage.offsets_twin import OffsetsTwin
from tests.support.clock import MovableClock
from tests.support.conditions import until
from tests.support.grpc_server import serving

HOLDER = QueueOwner("billing", "orders", "broker-a", 0, 1)


@asynccontextmanager
async def recording(
    clock: Clock, age_ms_max: int = 2_000
) -> AsyncIterator[tuple[DeliveryRecorder, OffsetsTwin]]:
    twin = OffsetsTwin()  # type: ignore[abstract]
    async with (
        serving(
            lambda server: offsets_grpc.add_OffsetsServiceServicer_to_server(twin, server)
        ) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        stub = offsets_grpc.OffsetsServiceStub(channel)
        deliveries = DeliveryRecorder(lambda: stub, clock, age_ms_max=age_ms_max)
        running = tasks.create_task(deliveries.run())
        yield deliveries, twin
        running.cancel()


async def rejection_of(
    deliveries: DeliveryRecorder, delivery: PendingDelivery
) -> BatonError | None:
    try:
        await deliveries.record(delivery)
    except BatonError as error:
        return error
    return None


async def test_record_that_took_too_long_is_not_used() -> None:
    clock = MovableClock()
    async with recording(clock) as (deliveries, twin), asyncio.TaskGroup() as tasks:
        twin.answering.clear()
        late = tasks.create_task(rejection_of(deliveries, PendingDelivery(HOLDER, 0, 1, 0)))
        await until(lambda: twin.calls == [1])
        clock.ahead_ms = 2_001
        twin.answering.set()
        assert isinstance(await late, DeliveryUnrecorded)
        assert twin.recorded == [("billing", 0, 0, 1)]
        assert await rejection_of(deliveries, PendingDelivery(HOLDER, 0, 1, 0)) is None


async def test_waiting_deliveries_share_a_call_in_order() -> None:
    async with recording(Clock()) as (deliveries, twin), asyncio.TaskGroup() as tasks:
        twin.answering.clear()
        first = tasks.create_task(deliveries.record(PendingDelivery(HOLDER, 0, 1, 0)))
        await until(lambda: twin.calls == [1])
        others = [
            tasks.create_task(deliveries.record(PendingDelivery(HOLDER, n, n + 1, 0)))
            for n in range(1, 301)
        ]
        await asyncio.sleep(0)
        twin.answering.set()
        for one in (first, *others):
            await one
        assert twin.calls == [1, 256, 44]
        assert [begin for _, _, begin, _ in twin.recorded] == list(range(301))


async def test_each_delivery_has_its_own_result() -> None:
    async with recording(Clock()) as (deliveries, twin), asyncio.TaskGroup() as tasks:
        twin.answering.clear()
        blocker = tasks.create_task(deliveries.record(PendingDelivery(HOLDER, 0, 1, 0)))
        await until(lambda: twin.calls == [1])
        stale = replace(HOLDER, token=7)
        both = [
            tasks.create_task(rejection_of(deliveries, PendingDelivery(owner, 0, 1, 0)))
            for owner in (stale, HOLDER)
        ]
        twin.answering.set()
        await blocker
        assert isinstance(await both[0], Fenced)
        assert await both[1] is None


async def test_touch_returns_a_result_for_each_owner() -> None:
    owners = [replace(HOLDER, queue_id=n % 100, token=1 + n % 2) for n in range(TOUCHES_MAX + 5)]
    async with recording(Clock()) as (deliveries, twin):
        verdicts = await deliveries.touch(owners)
        assert [type(one) for one in verdicts] == [
            Fenced if owner.token == 2 else type(None) for owner in owners
        ]
        assert len(twin.touched) == len(owners)


async def test_touch_answered_under_an_old_epoch_is_an_error() -> None:
    async with recording(Clock()) as (deliveries, twin):
        twin.epoch = 4
        await deliveries.touch([HOLDER])
        twin.claimed_epoch = 3
        with pytest.raises(DeliveryUnrecorded):
            await deliveries.touch([HOLDER])


async def test_touch_and_record_fail_without_a_leader() -> None:
    def no_leader() -> offsets_grpc.OffsetsServiceAsyncStub:
        raise Unreachable("no offsets node is registered", retry_after_ms=200)

    deliveries = DeliveryRecorder(no_leader, Clock())
    with pytest.raises(Unreachable):
        await deliveries.touch([HOLDER])
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(deliveries.run())
        rejection = await rejection_of(deliveries, PendingDelivery(HOLDER, 0, 1, 0))
        running.cancel()
    assert isinstance(rejection, DeliveryUnrecorded)
    assert rejection.retry_after_ms == 200
