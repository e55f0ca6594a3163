"""Goal: the answers on the wire are those of the core, and malformed calls change nothing.

Method: the real service behind a real channel, with its real disk.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.common.v1 import error_pb2, queue_pb2
from baton.metrics.v1.metrics_service_pb2 import MetricBatch
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._core.queues import GroupQueue
from batonmq_server.offsets.codec import decode_progress, encode_key, unseal
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.persistence import TOPIC
from tests.offsets.service_calls import (
    TERM,
    VALID_ITEMS,
    Service,
    call,
    delete_topic_request,
    fence_item,
    queue,
    reasons,
    rejection,
    run,
)
from tests.support.conditions import until

INT64_MAX = (1 << 63) - 1


# ---- the answer of each call


async def test_announce_returns_every_queue(service: Service) -> None:
    await service.start_owner(queue_id=3)
    answer = await call(service, "Announce", pb.AnnounceRequest(term=8))
    holder = queue_pb2.Incarnation(client_id="client-a", incarnation_id=1)
    assert list(answer.queues) == [pb.QueueToken(queue=queue(), token=1, holder=holder)]
    assert answer.offsets_epoch == 1


async def test_announce_of_an_older_term_is_old_epoch(service: Service) -> None:
    await call(service, "Announce", pb.AnnounceRequest(term=8))
    code, error = await rejection(service, "Announce", pb.AnnounceRequest(term=7))
    assert (code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OLD_EPOCH")
    assert error.facts == {"epoch": "7", "current": "8"}


async def test_fence_has_an_outcome_for_each_item(service: Service) -> None:
    await service.start_owner()
    items = [
        fence_item(),
        fence_item(attempt="b"),
        fence_item(attempt="c", expected_token=1),
        fence_item(
            attempt="d",
            expected_token=1,
            condition=pb.FENCE_CONDITION_FORCED,
            forced_by="operator",
            forced_reason="stuck",
            holder=queue_pb2.Incarnation(client_id="client-b", incarnation_id=1),
        ),
    ]
    answer = await call(service, "Fence", pb.FenceRequest(term=TERM, items=items))
    assert answer.outcomes[0].fenced == pb.Fenced(token=1)
    assert reasons(answer.outcomes[1:3]) == ["REASON_TOKEN_MISMATCH", "REASON_UNACKED"]
    assert answer.outcomes[3].fenced == pb.Fenced(token=2, maybe_seen=[run(0, 10)])


async def test_fence_conditions_reach_the_core(service: Service) -> None:
    await service.start_owner()
    other = queue_pb2.Incarnation(client_id="client-b", incarnation_id=1)
    same, idle = pb.FENCE_CONDITION_SAME_HOLDER, pb.FENCE_CONDITION_IDLE
    items = [
        fence_item(attempt="b", expected_token=1, condition=same, holder=other),
        fence_item(attempt="c", expected_token=1, condition=idle, idle_ms=60_000, holder=other),
        fence_item(attempt="d", expected_token=1, condition=same, resume=[run(0, 4)], token_min=4),
    ]
    answer = await call(service, "Fence", pb.FenceRequest(term=TERM, items=items))
    assert reasons(answer.outcomes[:2]) == ["REASON_NOT_HOLDER", "REASON_NOT_IDLE"]
    assert answer.outcomes[2].fenced == pb.Fenced(token=5, maybe_seen=[run(4, 10)])


async def test_fence_of_another_term_is_old_epoch_for_each_item(service: Service) -> None:
    await call(service, "Announce", pb.AnnounceRequest(term=TERM))
    answer = await call(
        service, "Fence", pb.FenceRequest(term=6, items=[fence_item(), fence_item()])
    )
    assert reasons(answer.outcomes) == ["REASON_OLD_EPOCH"] * 2
    assert len(service.offsets.table) == 0


async def test_record_delivered_returns_maybe_seen(service: Service) -> None:
    await service.start_owner()
    force = fence_item(
        attempt="b",
        expected_token=1,
        condition=pb.FENCE_CONDITION_FORCED,
        forced_by="x",
        forced_reason="y",
    )
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[force]))
    items = [
        pb.DeliveryItem(queue=queue(), token=2, first_offset=0, next_offset=12),
        pb.DeliveryItem(queue=queue(), token=2, first_offset=12, next_offset=20),
        pb.DeliveryItem(queue=queue(), token=2, first_offset=21, next_offset=22),
        pb.DeliveryItem(queue=queue(), token=1, first_offset=20, next_offset=22),
        pb.DeliveryItem(queue=queue(queue_id=9), token=1, first_offset=0, next_offset=1),
    ]
    answer = await call(service, "RecordDelivered", pb.RecordDeliveredRequest(items=items))
    assert [list(outcome.delivered.maybe_seen) for outcome in answer.outcomes[:2]] == [
        [run(0, 10)],
        [],
    ]
    assert answer.outcomes[1].HasField("delivered")
    assert reasons(answer.outcomes[2:]) == [
        "REASON_DELIVERY_GAP",
        "REASON_FENCED",
        "REASON_UNKNOWN_QUEUE",
    ]
    fenced = answer.outcomes[3].error
    assert fenced.retry == error_pb2.RETRY_REDO
    assert dict(fenced.facts) == {
        "token": "1",
        "current": "2",
        "reset_epoch": "0",
        "why": "FORCED",
    }


async def test_touch_returns_an_error_or_an_empty_outcome(service: Service) -> None:
    await service.start_owner()
    items = [
        pb.TouchItem(queue=queue(), token=1),
        pb.TouchItem(queue=queue(), token=2),
        pb.TouchItem(queue=queue(queue_id=9), token=2),
    ]
    answer = await call(service, "Touch", pb.TouchRequest(items=items))
    assert not answer.outcomes[0].HasField("error")
    assert reasons(answer.outcomes[1:]) == ["REASON_FENCED", "REASON_UNKNOWN_QUEUE"]


async def test_commit_returns_progress_and_noop(service: Service) -> None:
    await service.start_owner()
    item = pb.CommitItem(queue=queue(), token=1, committed_offset=2, acked=[run(4, 6), run(6, 8)])
    request = pb.CommitRequest(items=[item])
    first, second = [await call(service, "Commit", request) for _ in range(2)]
    assert first.outcomes[0].committed == pb.Committed(committed_offset=2)
    assert second.outcomes[0].committed == pb.Committed(committed_offset=2, noop=True)


async def test_commit_rejects_single_items(service: Service) -> None:
    await service.start_owner(queue_id=1)
    await service.start_owner(queue_id=2)
    await service.start_owner(queue_id=3)
    items = [
        pb.CommitItem(queue=queue(queue_id=1), token=9, committed_offset=2),
        pb.CommitItem(queue=queue(queue_id=2), token=1, committed_offset=11),
        pb.CommitItem(queue=queue(queue_id=3), token=1, committed_offset=3),
        pb.CommitItem(queue=queue(queue_id=4), token=1, committed_offset=3),
    ]
    answer = await call(service, "Commit", pb.CommitRequest(items=items))
    assert answer.outcomes[2].committed.committed_offset == 3
    assert reasons([answer.outcomes[place] for place in (0, 1, 3)]) == [
        "REASON_FENCED",
        "REASON_BEYOND_DELIVERED",
        "REASON_UNKNOWN_QUEUE",
    ]


async def test_close_makes_unfinished_offsets_maybe_seen(service: Service) -> None:
    await service.start_owner()
    item = pb.CloseItem(
        queue=queue(), token=1, committed_offset=2, acked=[run(4, 5)], unfinished=[run(6, 7)]
    )
    request = pb.CloseRequest(items=[item])
    first, second = [await call(service, "Close", request) for _ in range(2)]
    assert first.outcomes[0].closed == pb.Committed(committed_offset=2)
    assert second.outcomes[0].closed == pb.Committed(committed_offset=2, noop=True)
    fence = pb.FenceRequest(term=TERM, items=[fence_item(attempt="b", expected_token=1)])
    assert (await call(service, "Fence", fence)).outcomes[0].fenced == pb.Fenced(
        token=2, committed_offset=2, acked=[run(4, 5)], maybe_seen=[run(6, 7)]
    )


async def test_query_returns_every_field_or_unknown_queue(service: Service) -> None:
    await service.start_owner()
    commit = pb.CommitItem(queue=queue(), token=1, committed_offset=2, acked=[run(4, 6)])
    await call(service, "Commit", pb.CommitRequest(items=[commit]))
    request = pb.QueryRequest(queues=[queue(), queue("unknown")])
    outcome, unknown_outcome = (await call(service, "Query", request)).outcomes
    assert reasons([unknown_outcome]) == ["REASON_UNKNOWN_QUEUE"]
    assert outcome.progress.update_unix_ms > 0
    assert outcome.progress.idle_ms < 60_000
    outcome.progress.ClearField("update_unix_ms")
    outcome.progress.ClearField("idle_ms")
    assert outcome.progress == pb.Progress(
        queue=queue(),
        token=1,
        holder=queue_pb2.Incarnation(client_id="client-a", incarnation_id=1),
        committed_offset=2,
        delivered_offset=10,
        acked_count=2,
        unacked_count=6,
        unacked_count_min=6,
        lowest_unacked_offset=2,
        acked_range_count=1,
        source=pb.PROGRESS_SOURCE_COMMIT,
        acked=[run(4, 6)],
    )


async def test_query_group_returns_its_queues_in_order(service: Service) -> None:
    for queue_id in (10, 2):
        await service.start_owner(queue_id=queue_id)
    answer = await call(service, "QueryGroup", pb.QueryGroupRequest(group="readers"))
    assert [progress.queue.queue.queue_id for progress in answer.queues] == [2, 10]
    empty = await call(service, "QueryGroup", pb.QueryGroupRequest(group="unknown"))
    assert (empty.offsets_epoch, len(empty.queues)) == (1, 0)


async def test_delete_topic_leaves_tombstones_only_for_fences(service: Service) -> None:
    for queue_id in (3, 4):
        await service.start_owner(queue_id=queue_id)
    answer = await call(service, "DeleteTopic", delete_topic_request())
    assert answer == pb.DeleteTopicResponse(offsets_epoch=1, queue_count=2)
    group_answer = await call(service, "QueryGroup", pb.QueryGroupRequest(group="readers"))
    assert list(group_answer.queues) == []
    (outcome,) = (await call(service, "Query", pb.QueryRequest(queues=[queue()]))).outcomes
    assert reasons([outcome]) == ["REASON_UNKNOWN_QUEUE"]
    assert outcome.error.facts["token"] == "2"
    tokens = (await call(service, "Announce", pb.AnnounceRequest(term=TERM))).queues
    assert [(each.token, each.closed, each.HasField("holder")) for each in tokens] == [
        (2, True, False)
    ] * 2
    for method, item in VALID_ITEMS.items():
        if method == "Fence":
            continue
        late_call = await call(
            service, method, getattr(pb, f"{method}Request")(items=[item(queue=queue())])
        )
        assert reasons(late_call.outcomes) == ["REASON_FENCED"]
        assert late_call.outcomes[0].error.facts["why"] == "RESET"
    fence = fence_item(attempt="anew", expected_token=2, initial_offset=5)
    passed = await call(service, "Fence", pb.FenceRequest(term=TERM, items=[fence]))
    assert passed.outcomes[0].fenced == pb.Fenced(token=3, committed_offset=5, reset_epoch=1)


async def test_start_offset_of_an_earlier_topic_of_the_name_is_rejected(service: Service) -> None:
    await service.start_owner()
    await call(service, "DeleteTopic", delete_topic_request())
    stale = fence_item(attempt="late", expected_token=2, initial_offset=900, topic_id=1)
    stale_call = await call(service, "Fence", pb.FenceRequest(term=TERM, items=[stale]))
    assert reasons(stale_call.outcomes) == ["REASON_OLD_TOPIC"]
    assert stale_call.outcomes[0].error.facts == {
        "topic_id": "1",
        "current": str(delete_topic_request().topic_id),
    }
    (outcome,) = (await call(service, "Query", pb.QueryRequest(queues=[queue()]))).outcomes
    assert outcome.error.reason, "the queue has no progress"
    fresh = fence_item(
        attempt="anew", expected_token=2, initial_offset=5, topic_id=delete_topic_request().topic_id
    )
    passed = await call(service, "Fence", pb.FenceRequest(term=TERM, items=[fresh]))
    assert passed.outcomes[0].fenced.committed_offset == 5


async def test_repeated_delete_topic_does_not_change_the_new_topic(service: Service) -> None:
    await service.start_owner()
    await call(service, "DeleteTopic", delete_topic_request())
    fence = fence_item(attempt="anew", expected_token=2)
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[fence]))
    before = service.stored()
    again = await call(service, "DeleteTopic", delete_topic_request())
    assert again == pb.DeleteTopicResponse(offsets_epoch=1)
    assert service.stored() == before
    (outcome,) = (await call(service, "Query", pb.QueryRequest(queues=[queue()]))).outcomes
    assert outcome.progress.token == 3


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"topic": ""}, "INVALID_NAME", "topic"),
        ({"topic": "a/b"}, "INVALID_NAME", "topic"),
        ({"topic_id": 0}, "INVALID_ARGUMENT", "topic_id"),
        ({"topic_id": -1}, "INVALID_ARGUMENT", "topic_id"),
    ],
)
async def test_malformed_deletion_is_rejected(
    service: Service, fields: dict[str, Any], reason: str, field: str
) -> None:
    await service.start_owner()
    code, error = await rejection(service, "DeleteTopic", delete_topic_request(**fields))
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert error.facts["field"] == field


# ---- durability


async def test_deletion_is_durable_with_all_its_queues_when_it_is_answered(
    service: Service,
) -> None:
    for queue_id in range(20):
        await service.start_owner(queue_id=queue_id)
    before = dict(service.stored())
    await call(service, "DeleteTopic", delete_topic_request())
    after = dict(service.stored())
    changed = {key for key, value in after.items() if before.get(key) != value}
    queues = {encode_key(GroupQueue("readers", "news", "broker-a", q)) for q in range(20)}
    assert changed == {TOPIC + b"news", *queues}
    assert unseal(TOPIC + b"news", after[TOPIC + b"news"]) == b"7"


async def test_every_answered_change_is_on_the_disk(service: Service) -> None:
    await service.start_owner()

    async def stored_with(name: str, request: Any) -> bytes:
        await call(service, name, request)
        return dict(service.stored())[b"readers\0news\0broker-a\0" + b"3"]

    commit = pb.CommitItem(queue=queue(), token=1, committed_offset=2)
    close = pb.CloseItem(queue=queue(), token=1, committed_offset=3)
    far_delivery = pb.DeliveryItem(queue=queue(), token=2, first_offset=3, next_offset=9_000)
    states = [
        await stored_with("Commit", pb.CommitRequest(items=[commit])),
        await stored_with("Close", pb.CloseRequest(items=[close])),
        await stored_with(
            "Fence", pb.FenceRequest(term=TERM, items=[fence_item(attempt="b", expected_token=1)])
        ),
        await stored_with("RecordDelivered", pb.RecordDeliveredRequest(items=[far_delivery])),
    ]
    assert len(set(states)) == 4


async def test_delivery_below_the_reservation_writes_nothing(service: Service) -> None:
    await service.start_owner(delivered=10)
    before = service.stored()
    item = pb.DeliveryItem(queue=queue(), token=1, first_offset=10, next_offset=26)
    await call(service, "RecordDelivered", pb.RecordDeliveredRequest(items=[item]))
    assert service.stored() == before


async def test_concurrent_calls_share_writes(service: Service) -> None:
    for queue_id in range(50):
        await service.start_owner(queue_id=queue_id)

    def writes() -> float:
        name = "baton_offsets_durable_write_seconds_count"
        return service.registry.get_sample_value(name) or 0

    before = writes()
    async with asyncio.TaskGroup() as tasks:
        for queue_id in range(50):
            item = pb.CommitItem(queue=queue(queue_id=queue_id), token=1, committed_offset=2)
            tasks.create_task(call(service, "Commit", pb.CommitRequest(items=[item])))
    assert writes() - before < 50


# ---- events and metrics


@pytest.mark.parametrize("method", ["Commit", "Close"])
async def test_changes_are_published_and_repetitions_are_not(service: Service, method: str) -> None:
    await service.start_owner(queue_id=1)
    await service.start_owner(queue_id=2)

    def request(*queue_ids: int) -> Any:
        items = [
            VALID_ITEMS[method](queue=queue(queue_id=queue_id), committed_offset=2)
            for queue_id in queue_ids
        ]
        return getattr(pb, f"{method}Request")(items=items)

    await call(service, method, request(2))

    async def first_batch() -> MetricBatch:
        async for batch in service.hub.watch():
            return batch
        raise AssertionError("the stream has no end")

    async with asyncio.TaskGroup() as tasks:
        batch = tasks.create_task(first_batch())
        await until(lambda: service.hub.watched)
        await call(service, method, request(2, 1))
    (event,) = (one for one in (await batch).events if one.HasField("committed"))
    assert event.queue == queue(queue_id=1)
    committed = event.committed
    assert (committed.committed_offset, committed.token) == (2, 1)
    assert committed.closed == (method == "Close")
    assert committed.client_id == "client-a"


async def test_outcomes_are_counted(service: Service) -> None:
    await service.start_owner()
    commit = pb.CommitItem(queue=queue(), token=1, acked=[run(2, 3), run(4, 5)])
    for token in (1, 1, 2):
        commit.token = token
        await call(service, "Commit", pb.CommitRequest(items=[commit]))
    values = service.registry.get_sample_value

    def commits(outcome: str) -> float | None:
        return values("baton_offsets_commits_total", {"op": "commit", "outcome": outcome})

    assert [commits(outcome) for outcome in ("changed", "noop", "FENCED")] == [1, 1, 1]
    assert values("baton_offsets_fenced_total", {"op": "commit", "why": "TAKEN"}) == 1
    fences = {"condition": "CLOSED_OR_DRAINED", "outcome": "granted"}
    assert values("baton_offsets_fences_total", fences) == 1
    assert values("baton_offsets_ack_ranges_max") == 2
    assert values("baton_offsets_queues") == 1


MEMBER, STRANGER = 11, 12
"""Owner numbers of two identities."""


async def test_calls_under_a_token_are_refused_for_another_identity(service: Service) -> None:
    """Every identity that may read the group sees the incarnation and token of a member."""
    await call(service, "Announce", pb.AnnounceRequest(term=TERM))
    item = fence_item()
    item.holder.owner = MEMBER
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[item]))

    async def reasons_for(caller: int) -> list[str]:
        deliveries = [pb.DeliveryItem(queue=queue(), token=1, next_offset=10, caller=caller)]
        touches = [pb.TouchItem(queue=queue(), token=1, caller=caller)]
        commits = [pb.CommitItem(queue=queue(), token=1, committed_offset=2)]
        closes = [pb.CloseItem(queue=queue(), token=1, committed_offset=2)]
        requests = {
            "RecordDelivered": pb.RecordDeliveredRequest(items=deliveries),
            "Touch": pb.TouchRequest(items=touches),
            "Commit": pb.CommitRequest(items=commits, caller=caller),
            "Close": pb.CloseRequest(items=closes, caller=caller),
        }
        outcomes = [
            (await call(service, name, request)).outcomes[0] for name, request in requests.items()
        ]
        return reasons(outcomes)

    assert await reasons_for(STRANGER) == ["REASON_NOT_HOLDER"] * 4
    assert await reasons_for(MEMBER) == ["REASON_UNSPECIFIED"] * 4


async def test_acks_of_a_pull_of_another_identity_are_refused(service: Service) -> None:
    await call(service, "Announce", pb.AnnounceRequest(term=TERM))
    item = fence_item()
    item.holder.owner = MEMBER
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[item]))
    delivery = pb.DeliveryItem(queue=queue(), token=1, next_offset=10, caller=MEMBER)
    await call(service, "RecordDelivered", pb.RecordDeliveredRequest(items=[delivery]))
    acks = pb.Acks(committed_offset=10)
    foreign = pb.DeliveryItem(
        queue=queue(), token=1, first_offset=10, next_offset=11, progress=acks, caller=STRANGER
    )
    answer = await call(service, "RecordDelivered", pb.RecordDeliveredRequest(items=[foreign]))
    assert reasons(answer.outcomes) == ["REASON_NOT_HOLDER"]
    (outcome,) = (await call(service, "Query", pb.QueryRequest(queues=[queue()]))).outcomes
    assert outcome.progress.committed_offset == 0


async def test_holder_keeps_its_identity_in_the_stored_progress(service: Service) -> None:
    await call(service, "Announce", pb.AnnounceRequest(term=TERM))
    item = fence_item()
    item.holder.owner = MEMBER
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[item]))
    key = GroupQueue("readers", "news", "broker-a", 3)
    stored = {name: value for name, value in service.stored()}
    progress = decode_progress(key, unseal(encode_key(key), stored[encode_key(key)]))
    assert isinstance(progress, Progress)
    assert progress.holder is not None
    assert progress.holder.owner == MEMBER
