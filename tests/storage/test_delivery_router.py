"""Goal: a delivery is recorded at the set that keeps its group, and no set waits for another one.

Method: twins of two offsets sets behind real channels; the test writes placements to the mirror.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._common.clock import Clock
from batonmq.errors import (
    BatonError,
    DeliveryUnrecorded,
    Fenced,
    GroupMoved,
    NotServing,
)
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.runtime.group_placements import (
    PLACEMENTS_PREFIX,
    GroupPlacement,
    GroupPlacements,
)
from batonmq_server.storage.delivery_recorder import DeliveryRecorder, PendingDelivery
from batonmq_server.storage.delivery_router import DeliveryRouter
from batonmq_server.storage.long_polls import QueueOwner
from tests.storage.offsets_twin import OffsetsTwin
from tests.support.conditions import until
from tests.support.grpc_server import serving

NEAR, FAR = (
    QueueOwner("near", "orders", "broker-a", 0, 1),
    QueueOwner("far", "orders", "broker-a", 0, 1),
)


class Scene:
    """Two offsets sets, by name, and the placement of each group."""

    def __init__(self) -> None:
        self.twins = {"a": OffsetsTwin(), "b": OffsetsTwin()}  # type: ignore[abstract]
        etcd = EtcdSession("127.0.0.1:1", "unused", Clock())
        self._mirror, nodes = EtcdMirror(etcd, PLACEMENTS_PREFIX), EtcdMirror(etcd, "nodes/")
        self.places = GroupPlacements(self._mirror, nodes)

    def put(self, group: str, place: GroupPlacement) -> None:
        """Write the placement of a group into the mirror."""
        self._mirror.revision += 1
        revision = self._mirror.revision
        self._mirror.values[group] = KeyValue(group, place.encode(), revision, revision)


@asynccontextmanager
async def two_sets() -> AsyncIterator[tuple[Scene, DeliveryRouter]]:
    """Set a keeps the group `near`, set b keeps `far`."""
    scene = Scene()
    scene.put("near", GroupPlacement("a"))
    scene.put("far", GroupPlacement("b"))

    def add(twin: OffsetsTwin, server: object) -> None:
        offsets_grpc.add_OffsetsServiceServicer_to_server(twin, server)  # type: ignore[arg-type]

    async with (
        serving(partial(add, scene.twins["a"])) as a,
        serving(partial(add, scene.twins["b"])) as b,
        asyncio.TaskGroup() as tasks,
    ):
        stubs = {name: offsets_grpc.OffsetsServiceStub(one) for name, one in (("a", a), ("b", b))}

        def make(name: str) -> DeliveryRecorder:
            return DeliveryRecorder(lambda: stubs[name], Clock(), offsets_set=name)

        deliveries = DeliveryRouter(scene.places, make)
        running = tasks.create_task(deliveries.run())
        yield scene, deliveries
        running.cancel()


def range_of(owner: QueueOwner, epoch: int = 0, offsets_set: str = "") -> PendingDelivery:
    return PendingDelivery(owner, 0, 1, epoch, offsets_set=offsets_set)


async def rejection_of(deliveries: DeliveryRouter, delivery: PendingDelivery) -> BatonError | None:
    try:
        await deliveries.record(delivery)
    except BatonError as error:
        return error
    return None


async def test_delivery_is_recorded_at_the_set_of_its_group_without_waiting_for_other_sets() -> (
    None
):
    async with two_sets() as (scene, deliveries), asyncio.TaskGroup() as tasks:
        scene.twins["b"].answering.clear()
        late = tasks.create_task(deliveries.record(range_of(FAR)))
        await until(lambda: scene.twins["b"].calls == [1])
        verdict = await deliveries.record(range_of(NEAR))
        assert (verdict.offsets_set, verdict.offsets_epoch) == ("a", 1)
        assert not late.done()
        scene.twins["b"].answering.set()
        assert (await late).offsets_set == "b"
        assert [group for group, *_ in scene.twins["a"].recorded] == ["near"]
        assert [group for group, *_ in scene.twins["b"].recorded] == ["far"]


async def test_moved_group_is_recorded_at_its_new_set_whose_epoch_is_lower() -> None:
    async with two_sets() as (scene, deliveries):
        scene.twins["a"].epoch = 9
        verdict = await deliveries.record(range_of(NEAR))
        assert verdict.offsets_epoch == 9
        scene.put("near", GroupPlacement("b", 1, "a"))
        verdict = await deliveries.record(range_of(NEAR, epoch=9, offsets_set="a"))
        assert (verdict.offsets_set, verdict.offsets_epoch) == ("b", 1)
        rejection = await rejection_of(deliveries, range_of(NEAR, epoch=9, offsets_set="b"))
        assert isinstance(rejection, DeliveryUnrecorded), "of its own set the epoch counts"


async def test_position_is_sent_only_with_an_epoch_of_the_set_that_records() -> None:
    async with two_sets() as (scene, deliveries):
        for offsets_set in ("a", "b"):
            stated = PendingDelivery(NEAR, 0, 1, 1, offsets_set=offsets_set, received_offset=7)
            await deliveries.record(stated)
        own, other = scene.twins["a"].items
        assert (own.received_offset, own.received_epoch) == (7, 1)
        assert not other.HasField("received_offset")


@pytest.mark.parametrize(
    "rejection", [GroupMoved("it is kept by c"), NotServing("it is on its way")]
)
async def test_error_of_a_set_that_does_not_keep_the_group_does_not_fence(
    rejection: BatonError,
) -> None:
    async with two_sets() as (scene, deliveries):
        scene.twins["a"].rejection = rejection
        error = await rejection_of(deliveries, range_of(NEAR))
        assert isinstance(error, DeliveryUnrecorded)
        scene.twins["a"].rejection = None
        assert await rejection_of(deliveries, range_of(NEAR)) is None


async def test_owners_are_touched_at_their_sets_and_a_silent_set_fences_none() -> None:
    async with two_sets() as (scene, deliveries):
        stale = replace(NEAR, token=7)
        scene.twins["b"].claimed_epoch = 4
        await deliveries.touch([FAR])
        scene.twins["b"].claimed_epoch = 3
        verdicts = await deliveries.touch([FAR, stale, NEAR])
        assert [type(one) for one in verdicts] == [type(None), Fenced, type(None)]
        assert scene.twins["a"].touched == [("near", 0, 7), ("near", 0, 1)]
