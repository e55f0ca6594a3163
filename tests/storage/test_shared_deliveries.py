"""Goal: a wrong claim of one consumer does not fail the other deliveries of the same call.

Method: the offsets twin behind a real channel; while its answer is delayed, deliveries gather.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._connection.channels import MESSAGE_BYTES_MAX
from batonmq.errors import BatonError, DeliveryUnrecorded
from batonmq_server.storage import delivery_recorder as deliveries
from batonmq_server.storage.delivery_recorder import (
    CALL_BYTES_MAX,
    DeliveryRecorder,
    PendingDelivery,
)
from tests.storage.offsets_twin import OffsetsTwin
from tests.storage.test_delivery_recorder import HOLDER, recording, rejection_of
from tests.support.conditions import until

PATIENT_MS = 20_000


async def results_of(
    recorder: DeliveryRecorder, twin: OffsetsTwin, *some: PendingDelivery
) -> Sequence[BatonError | None]:
    """Return the results of deliveries that gather while the first one is in flight."""
    twin.answering.clear()
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(rejection_of(recorder, some[0]))]
        await until(lambda: twin.calls == [1])
        waiting += [tasks.create_task(rejection_of(recorder, one)) for one in some[1:]]
        await asyncio.sleep(0)  # now the deliveries are queued
        twin.answering.set()
    return [one.result() for one in waiting]


async def test_wrongly_claimed_epoch_does_not_fail_other_pulls_of_the_call() -> None:
    """As after a restart of storage, which has not seen an epoch yet."""
    wrong, right = PendingDelivery(HOLDER, 1, 2, 1 << 40), PendingDelivery(HOLDER, 2, 3, 7)
    async with recording(Clock(), PATIENT_MS) as (recorder, twin):
        twin.epoch = 7
        refused = await results_of(recorder, twin, wrong, wrong, right, wrong)
        assert [type(one) for one in refused] == [
            DeliveryUnrecorded,
            DeliveryUnrecorded,
            type(None),
            DeliveryUnrecorded,
        ]


async def test_very_large_acks_are_split_over_several_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC rejects a message that is too large as a whole."""
    assert 2 * CALL_BYTES_MAX < MESSAGE_BYTES_MAX
    monkeypatch.setattr(deliveries, "CALL_BYTES_MAX", 1_000)
    acks = pb.Acks(acked=[queue_pb2.OffsetRange(first_offset=1 << 40, next_offset=1 << 41)] * 50)
    few = PendingDelivery(HOLDER, 0, 1, 0)
    many = PendingDelivery(HOLDER, 0, 1, 0, progress=acks)
    async with recording(Clock(), PATIENT_MS) as (recorder, twin):
        refused = await results_of(recorder, twin, few, few, many, many, few, many, few, few)
        assert refused == [None] * 8
        assert twin.calls == [1, 2, 2, 3]
