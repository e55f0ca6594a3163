"""Goal: acks sent with a delivery follow section 6.6 of the protocol, and a call is accepted only
in the mode of its group (section 15).

Method: the real service behind a real channel; the test adds the gates of groups to its mirror.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.offsets.service_calls import (
    TERM,
    VALID_ITEMS,
    Service,
    call,
    fence_item,
    queue,
    reasons,
    run,
    store_topic,
)

OFF = nameserver_pb.OWNERSHIP_OFF
BROADCASTING = nameserver_pb.MESSAGE_MODEL_BROADCASTING


def pull(
    first: int, next_: int, progress: pb.Acks | None = None, **fields: Any
) -> pb.RecordDeliveredRequest:
    item: dict[str, Any] = {"queue": queue(), "token": 1, "progress": progress, **fields}
    delivery = pb.DeliveryItem(first_offset=first, next_offset=next_, **item)
    return pb.RecordDeliveredRequest(items=[delivery])


async def outcome(service: Service, request: pb.RecordDeliveredRequest) -> pb.DeliveryOutcome:
    answer: pb.DeliveryOutcome = (await call(service, "RecordDelivered", request)).outcomes[0]
    return answer


async def progress(service: Service, group: str = "readers") -> pb.Progress:
    answer = await call(service, "Query", pb.QueryRequest(queues=[queue(group)]))
    result: pb.Progress = answer.outcomes[0].progress
    return result


# ---- acks sent with a delivery


async def test_s6_6_acks_are_committed_with_a_delivery(service: Service) -> None:
    await service.start_owner()
    request = pull(10, 20, pb.Acks(committed_offset=4, acked=[run(6, 8)]))
    first, second = [await outcome(service, request) for _ in range(2)]
    assert first.delivered.progress == pb.Committed(committed_offset=4)
    assert second.delivered.progress == pb.Committed(committed_offset=4, noop=True)
    now = await progress(service)
    assert (now.committed_offset, now.delivered_offset, now.acked_count) == (4, 20, 2)
    assert now.source == pb.PROGRESS_SOURCE_PULL


async def test_s6_6_delivery_without_acks_has_no_commit_result(service: Service) -> None:
    await service.start_owner()
    assert not (await outcome(service, pull(10, 20))).delivered.HasField("progress")


async def test_s6_6_acks_of_a_delivery_are_durable_when_it_is_answered(
    service: Service,
) -> None:
    await service.start_owner()
    before = service.stored()
    assert (await outcome(service, pull(10, 20))).HasField("delivered")
    assert service.stored() == before, "the delivery itself is covered by the reservation"
    await outcome(service, pull(20, 30, pb.Acks(committed_offset=4)))
    assert service.stored() != before


@pytest.mark.parametrize(
    ("acks", "reason"),
    [
        (pb.Acks(committed_offset=11), "REASON_BEYOND_DELIVERED"),
        (pb.Acks(committed_offset=4, reset_epoch=1), "REASON_FENCED"),
    ],
)
async def test_s6_6_rejected_acks_reject_their_delivery(
    service: Service, acks: pb.Acks, reason: str
) -> None:
    await service.start_owner()
    assert reasons([await outcome(service, pull(10, 20, acks))]) == [reason]
    now = await progress(service)
    assert (now.committed_offset, now.delivered_offset) == (0, 10)


async def test_s6_6_acks_and_delivery_under_a_stale_token_are_fenced(
    service: Service,
) -> None:
    await service.start_owner()
    fence = fence_item(attempt="b", expected_token=1, condition=pb.FENCE_CONDITION_FORCED)
    fence.forced_by, fence.forced_reason = "operator", "stuck"
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[fence]))
    rejection = await outcome(service, pull(10, 20, pb.Acks(committed_offset=4)))
    assert rejection.error.facts["why"] == "FORCED"
    now = await progress(service)
    assert (now.committed_offset, now.forced_by, now.forced_reason) == (0, "operator", "stuck")


async def test_s6_6_acks_open_the_window_that_their_delivery_needs(service: Service) -> None:
    await service.start_owner(delivered=3_000)
    holes = [run(at, at + 1) for at in range(1, 2_001, 2)]
    item = pb.CommitItem(queue=queue(), token=1, acked=holes)
    await call(service, "Commit", pb.CommitRequest(items=[item]))
    assert (await progress(service)).ack_capped
    assert service.registry.get_sample_value("baton_offsets_capped_queues") == 1
    assert service.registry.get_sample_value("baton_offsets_ack_window_used_ratio") == 1
    assert reasons([await outcome(service, pull(3_000, 3_001))]) == ["REASON_ACK_CAP"]
    delivery = await outcome(service, pull(3_000, 3_001, pb.Acks(committed_offset=2_000)))
    assert delivery.delivered.progress.committed_offset == 2_000
    assert service.registry.get_sample_value("baton_offsets_capped_queues") == 0


async def test_s6_6_accepted_acks_stay_when_their_delivery_is_rejected(
    service: Service,
) -> None:
    await service.start_owner()
    rejection = await outcome(service, pull(15, 20, pb.Acks(committed_offset=4)))
    assert reasons([rejection]) == ["REASON_DELIVERY_GAP"]
    assert (await progress(service)).committed_offset == 4


async def test_s6_6_acks_of_pulls_are_counted_separately(service: Service) -> None:
    await service.start_owner()
    for acks in (pb.Acks(committed_offset=4), None, pb.Acks(committed_offset=99)):
        await outcome(service, pull(10, 20, acks))
    values = service.registry.get_sample_value
    labels = [{"op": "pull", "outcome": each} for each in ("changed", "BEYOND_DELIVERED")]
    assert [values("baton_offsets_commits_total", each) for each in labels] == [1, 1]


async def test_s14_delivery_of_another_subscription_is_fenced(service: Service) -> None:
    await service.start_owner(delivered=0)
    fence = fence_item(attempt="b", expected_token=1, subscription_generation=5)
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[fence]))
    rejection = await outcome(service, pull(0, 1, token=2, subscription_generation=4))
    assert rejection.error.facts["why"] == "SUBSCRIPTION"
    assert (await outcome(service, pull(0, 1, token=2, subscription_generation=5))).HasField(
        "delivered"
    )
    assert (await progress(service)).subscription_generation == 5


async def test_s4_fence_without_holder_is_announced_as_closed(service: Service) -> None:
    await service.start_owner()
    item = fence_item(attempt="b", expected_token=1, condition=pb.FENCE_CONDITION_FORCED)
    item.forced_by, item.forced_reason = "operator", "stuck"
    item.ClearField("holder")
    answer = await call(service, "Fence", pb.FenceRequest(term=TERM, items=[item]))
    assert answer.outcomes[0].fenced == pb.Fenced(token=2, maybe_seen=[run(0, 10)])
    announcement = await call(service, "Announce", pb.AnnounceRequest(term=TERM))
    assert list(announcement.queues) == [pb.QueueToken(queue=queue(), token=2, closed=True)]


# ---- the mode of the group


def commit(group: str, **fields: Any) -> pb.CommitRequest:
    return pb.CommitRequest(items=[pb.CommitItem(queue=queue(group), **fields)])


async def test_s15_group_without_ownership_commits_without_token(
    service: Service, etcd: EtcdSession
) -> None:
    await store_topic(etcd)
    service.add_gate("free", ownership=OFF)
    request = commit("free", committed_offset=40, acked=[run(42, 44)])
    for noop in (False, True):
        answer = await call(service, "Commit", request)
        assert answer.outcomes[0].committed == pb.Committed(committed_offset=40, noop=noop)
    now = await progress(service, "free")
    assert (now.token, now.closed, now.acked_count, now.delivered_offset) == (0, True, 2, 40)


async def test_s15_commit_without_token_creates_no_progress_on_a_queue_that_does_not_exist(
    service: Service, etcd: EtcdSession
) -> None:
    """Nothing would remove it."""
    service.add_gate("free", ownership=OFF)
    answer = await call(service, "Commit", commit("free", committed_offset=4))
    assert reasons(answer.outcomes) == ["REASON_TOPIC_NOT_FOUND"]
    await store_topic(etcd, queue_count=4)
    elsewhere = queue("free")
    elsewhere.queue.broker = "broker-z"
    queues = [queue("free", 3), queue("free", 4), elsewhere]
    request = pb.CommitRequest(items=[pb.CommitItem(queue=one) for one in queues])
    answer = await call(service, "Commit", request)
    assert answer.outcomes[0].HasField("committed")
    assert reasons(answer.outcomes)[1:] == ["REASON_QUEUE_NOT_FOUND"] * 2
    assert [key.queue_id for key in service.offsets.table.queues_of("free")] == [3]


async def test_s15_commit_without_token_goes_on_when_the_topic_is_deleted(
    service: Service, etcd: EtcdSession
) -> None:
    await store_topic(etcd)
    service.add_gate("free", ownership=OFF)
    await call(service, "Commit", commit("free", committed_offset=4))
    await etcd.delete("topics/news")
    answer = await call(service, "Commit", commit("free", committed_offset=6))
    assert answer.outcomes[0].committed.committed_offset == 6


@pytest.mark.parametrize("method", ["RecordDelivered", "Commit", "Close"])
async def test_s15_call_under_a_token_is_rejected_for_a_group_without_ownership(
    service: Service, method: str
) -> None:
    await service.start_owner()
    service.add_gate("readers", ownership=OFF)
    before = service.stored()
    request = getattr(pb, f"{method}Request")(items=[VALID_ITEMS[method](queue=queue())])
    answer = await call(service, method, request)
    assert reasons(answer.outcomes) == ["REASON_MODE_CHANGED"]
    assert service.stored() == before


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        ({}, "REASON_MODE_CHANGED"),
        ({"model": BROADCASTING}, "REASON_MODE_CHANGED"),
        (None, "REASON_GROUP_NOT_FOUND"),
    ],
    ids=["owned", "broadcasting", "unknown"],
)
async def test_s15_commit_without_token_is_rejected_for_any_other_group(
    service: Service, gate: dict[str, Any] | None, reason: str
) -> None:
    service.add_gate("another", ownership=OFF)
    if gate is not None:
        service.add_gate("free", **gate)
    answer = await call(service, "Commit", commit("free", committed_offset=4))
    assert reasons(answer.outcomes) == [reason]
    assert len(service.offsets.table) == 0


async def test_s15_commit_without_token_waits_until_groups_are_known(service: Service) -> None:
    answer = await call(service, "Commit", commit("free", committed_offset=4))
    assert reasons(answer.outcomes) == ["REASON_NOT_SERVING"]
    assert answer.outcomes[0].error.retry_after_ms > 0


async def test_s15_call_under_a_token_needs_no_known_group(service: Service) -> None:
    await service.start_owner()
    answer = await call(service, "Commit", commit("readers", token=1, committed_offset=4))
    assert answer.outcomes[0].committed.committed_offset == 4
