"""The metric of redelivered messages, by cause.

Goal: each kind of hand-over counts the messages in flight; a drained queue has none.
Method: the real service behind a real channel; queue 3 has [0, 10) in flight under token 1 of
client-a.
"""

from __future__ import annotations

import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from tests.offsets.service_calls import TERM, Service, call, fence_item, queue, run
from tests.support.conditions import until

OTHER = queue_pb2.Incarnation(client_id="client-b", incarnation_id=1)
FORCED = pb.FENCE_CONDITION_FORCED
BY = {"forced_by": "operator", "forced_reason": "stuck"}


def counted(service: Service) -> dict[str, float]:
    """Return the number of messages by cause, without zeros."""
    return {
        sample.labels["cause"]: sample.value
        for metric in service.registry.collect()
        for sample in metric.samples
        if sample.name == "baton_offsets_duplicates_total" and sample.value
    }


async def fence(service: Service, **fields: object) -> None:
    """Fence the queue for client-b, or with other fields, and repeat the attempt."""
    item = fence_item(**({"attempt": "b", "expected_token": 1, "holder": OTHER} | fields))

    async def granted() -> bool:
        answer = await call(service, "Fence", pb.FenceRequest(term=TERM, items=[item]))
        return bool(answer.outcomes[0].fenced.token == 2)

    for _ in range(2):
        await until(granted)


async def acked(service: Service, committed_offset: int) -> None:
    item = pb.CommitItem(queue=queue(), token=1, committed_offset=committed_offset)
    await call(service, "Commit", pb.CommitRequest(items=[item]))


async def test_hand_over_of_a_drained_queue_has_no_duplicates(service: Service) -> None:
    await service.start_owner()
    await acked(service, 10)
    await fence(service, observed_delivered_offset=10)
    assert counted(service) == {}


async def test_closed_queue_has_no_duplicates(service: Service) -> None:
    await service.start_owner()
    item = pb.CloseItem(queue=queue(), token=1, committed_offset=4)
    await call(service, "Close", pb.CloseRequest(items=[item]))
    await fence(service)
    assert counted(service) == {}


async def test_cut_off_messages_are_duplicates(service: Service) -> None:
    await service.start_owner()
    item = pb.CloseItem(queue=queue(), token=1, committed_offset=4, unfinished=[run(6, 8)])
    for _ in range(2):
        await call(service, "Close", pb.CloseRequest(items=[item]))
    await fence(service)
    assert counted(service) == {"CUT_OFF": 2}


@pytest.mark.parametrize(
    ("condition", "fields"),
    [("FORCED", BY), ("IDLE", {"idle_ms": 1})],
)
async def test_messages_in_flight_at_a_fence_are_duplicates(
    service: Service, condition: str, fields: dict[str, object]
) -> None:
    await service.start_owner()
    await acked(service, 3)
    await fence(
        service, condition=pb.FenceCondition.Value(f"FENCE_CONDITION_{condition}"), **fields
    )
    assert counted(service) == {condition: 7}


async def test_message_delivered_three_times_counts_twice(service: Service) -> None:
    await service.start_owner()
    await fence(service, condition=FORCED, **BY)
    delivery = pb.DeliveryItem(queue=queue(), token=2, next_offset=4)
    await call(service, "RecordDelivered", pb.RecordDeliveredRequest(items=[delivery]))
    item = fence_item(attempt="c", expected_token=2, condition=FORCED, **BY)
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[item]))
    assert counted(service) == {"FORCED": 14}


async def test_replayed_messages_are_counted_by_operation(service: Service) -> None:
    await service.start_owner()
    await acked(service, 6)
    to = pb.ResetItem(queue=queue(), to_offset=4)
    order = pb.ResetRequest(op_id="op", by="admin", reason="replay", items=[to])
    for _ in range(2):
        await call(service, "Reset", order)
    assert counted(service) == {"RESET": 2}
