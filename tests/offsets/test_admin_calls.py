"""Goal: resets, undos, clones and deletions of groups have the right answers, are durable by then,
and are published.

Method: the real service behind a real channel, with its real disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.metrics.v1.metrics_service_pb2 import MetricBatch, ProgressReset
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError
from batonmq_server.offsets.codec import encode_key
from batonmq_server.offsets.persistence import HOLDS, RESET
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from tests.offsets.service_calls import (
    TERM,
    Service,
    call,
    fence_item,
    queue,
    reasons,
    rejection,
    run,
    store_topic,
)
from tests.support.conditions import until


@pytest.fixture(autouse=True)
async def _topic_exists(etcd: EtcdSession) -> None:
    await store_topic(etcd, queue_count=10)


def reset(to_offset: int = 4, *queue_ids: int, **fields: Any) -> pb.ResetRequest:
    items = [
        pb.ResetItem(queue=queue(queue_id=queue_id), to_offset=to_offset)
        for queue_id in queue_ids or (3,)
    ]
    order = {"op_id": "op", "by": "admin", "reason": "replay", "items": items}
    return pb.ResetRequest(**(order | fields))


def undo(**fields: Any) -> pb.ResetRequest:
    return reset(op_id="undo", items=[], undo_group="readers", undo_op_id="op", **fields)


def clone(**fields: Any) -> pb.CloneRequest:
    order = {"op_id": "copy", "by": "admin", "reason": "new"}
    return pb.CloneRequest(**(order | {"from_group": "readers", "to_group": "others"} | fields))


async def refused(calling: Awaitable[object]) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await calling
    return from_rpc_error(raised.value)


STEP = pb.ResetStep(
    queue=queue(), from_offset=6, to_offset=4, replayed_count=3, reset_epoch=1, token=2
)


async def worked(service: Service) -> None:
    """client-a has acked [0, 6) and 8 of the delivered [0, 10)."""
    await service.start_owner()
    item = pb.CommitItem(queue=queue(), token=1, committed_offset=6, acked=[run(8, 9)])
    await call(service, "Commit", pb.CommitRequest(items=[item]))


async def progress(service: Service, group: str = "readers") -> pb.Progress:
    answer = await call(service, "Query", pb.QueryRequest(queues=[queue(group)]))
    result: pb.Progress = answer.outcomes[0].progress
    return result


async def test_reset_and_its_repetition_return_the_same_steps(service: Service) -> None:
    await worked(service)
    for _ in range(2):
        answer = await call(service, "Reset", reset())
        assert [outcome.step for outcome in answer.outcomes] == [STEP]
    now = await progress(service)
    assert (now.committed_offset, now.acked_count, now.maybe_seen_count) == (4, 0, 6)
    assert (now.closed, now.HasField("holder"), now.source) == (True, False, 4)


async def test_reset_and_its_record_are_durable_in_one_write_when_it_is_answered(
    service: Service,
) -> None:
    for queue_id in (1, 2, 3):
        await service.start_owner(queue_id=queue_id)
    before = dict(service.stored())
    entries = service.registry.get_sample_value("baton_offsets_durable_entries_total") or 0
    await call(service, "Reset", reset(4, 1, 2, 3))
    after = dict(service.stored())
    changed = {key for key, value in after.items() if before.get(key) != value}
    keys = {encode_key(GroupQueue("readers", "news", "broker-a", q)) for q in (1, 2, 3)}
    holds = {HOLDS + key + b"\x002" for key in keys}
    assert changed == {RESET + b"readers\x001", *keys, *holds}
    values = service.registry.get_sample_value
    assert values("baton_offsets_durable_entries_total") == entries + 7


async def test_reset_rejects_single_items(service: Service) -> None:
    await worked(service)
    await call(service, "Reset", reset())
    answer = await call(service, "Reset", reset(5, 3, 9))
    assert reasons(answer.outcomes[:1]) == ["REASON_OPERATION_EXISTS"]
    assert answer.outcomes[1].step.to_offset == 5


async def test_dry_run_needs_no_reason_and_writes_nothing(service: Service) -> None:
    await worked(service)
    before = service.stored()
    answer = await call(service, "Reset", reset(dry_run=True, op_id="", by="", reason=""))
    assert [outcome.step for outcome in answer.outcomes] == [STEP]
    cloned = await call(service, "Clone", clone(dry_run=True, op_id="", by="", reason=""))
    assert [step.to_offset for step in cloned.steps] == [6]
    assert service.stored() == before
    listed = await call(service, "ListResets", pb.ListResetsRequest(group="readers"))
    assert list(listed.resets) == []


async def test_undo_restores_acked_offsets(service: Service) -> None:
    await worked(service)
    await call(service, "Reset", reset())
    dry = await call(service, "Reset", undo(dry_run=True))
    answer = await call(service, "Reset", undo())
    assert list(dry.outcomes) == list(answer.outcomes)
    now = await progress(service)
    assert (now.committed_offset, list(now.acked)) == (6, [run(8, 9)])
    code, error = await rejection(
        service, "Reset", reset(op_id="x", items=[], undo_op_id="nothing", undo_group="readers")
    )
    assert (code, error.reason) == (grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND")


async def test_undo_of_a_deleted_queue_is_unknown(service: Service) -> None:
    await worked(service)
    await call(service, "Reset", reset())
    answer = await call(service, "DeleteGroup", pb.DeleteGroupRequest(group="readers"))
    assert answer.queue_count == 1
    assert reasons((await call(service, "Reset", undo())).outcomes) == ["REASON_UNKNOWN_QUEUE"]


async def test_clone_returns_its_steps(service: Service) -> None:
    await worked(service)
    for _ in range(2):
        answer = await call(service, "Clone", clone())
        (step,) = answer.steps
        assert step == pb.ResetStep(
            queue=queue("others"),
            from_offset=6,
            to_offset=6,
            skipped_count=1,
            reset_epoch=1,
            token=1,
        )
    now = await progress(service, "others")
    assert (now.committed_offset, list(now.acked), now.source) == (6, [run(8, 9)], 5)
    code, error = await rejection(service, "Clone", clone(reason="another"))
    assert (code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "OPERATION_EXISTS")


async def test_reset_and_clone_create_no_progress_on_queues_that_do_not_exist(
    service: Service, etcd: EtcdSession
) -> None:
    """A topic that was shrunk leaves progress, which may still be reset."""
    await service.start_owner(queue_id=9)
    await store_topic(etcd, queue_count=2)
    for dry_run in (True, False):
        outcomes = (await call(service, "Reset", reset(4, 1, 2, 9, dry_run=dry_run))).outcomes
        assert reasons(outcomes[1:2]) == ["REASON_QUEUE_NOT_FOUND"]
        assert [one.step.queue.queue.queue_id for one in outcomes] == [1, 0, 9]
    for dry_run in (True, False):
        steps = (await call(service, "Clone", clone(dry_run=dry_run))).steps
        assert [step.queue.queue.queue_id for step in steps] == [1]
    await etcd.delete("topics/news")
    outcomes = (await call(service, "Reset", reset(4, 5, op_id="next"))).outcomes
    assert reasons(outcomes) == ["REASON_TOPIC_NOT_FOUND"]
    assert {key.queue_id for key, _ in service.offsets.table.items()} == {1, 9}


async def test_list_resets_returns_the_newest_first(service: Service) -> None:
    await worked(service)
    await call(service, "Reset", reset())
    await call(service, "Reset", undo())
    await call(service, "Clone", clone())
    request = pb.ListResetsRequest(group="readers")
    second, first = (await call(service, "ListResets", request)).resets
    assert first.unix_ms > 0
    first.ClearField("unix_ms")
    assert first == pb.RecordedReset(
        op_id="op", kind=pb.PROGRESS_SOURCE_RESET, by="admin", reason="replay", steps=[STEP]
    )
    assert (second.op_id, second.undone_op_id) == ("undo", "op")
    request = pb.ListResetsRequest(group="others")
    (copied,) = (await call(service, "ListResets", request)).resets
    assert (copied.kind, copied.from_group) == (pb.PROGRESS_SOURCE_CLONE, "readers")


async def test_delete_group_leaves_tombstones(service: Service) -> None:
    await worked(service)
    for topic, count in (("weather", 0), ("news", 1), ("", 0)):
        request = pb.DeleteGroupRequest(group="readers", topic=topic)
        assert (await call(service, "DeleteGroup", request)).queue_count == count
    answer = await call(service, "Query", pb.QueryRequest(queues=[queue()]))
    facts = answer.outcomes[0].error.facts
    assert (facts["token"], facts["reset_epoch"]) == ("2", "1")
    commit = pb.CommitItem(queue=queue(), token=1, committed_offset=7)
    answer = await call(service, "Commit", pb.CommitRequest(items=[commit]))
    assert answer.outcomes[0].error.facts["why"] == "RESET"


async def test_group_that_exists_keeps_its_progress(service: Service, etcd: EtcdSession) -> None:
    """A late or repeated deletion finds a group that was created again."""
    await worked(service)
    before = await progress(service)
    await etcd.put(etcd.key("gates", "readers"), b"")
    for topic in ("", "news"):
        request = pb.DeleteGroupRequest(group="readers", topic=topic)
        code, error = await rejection(service, "DeleteGroup", request)
        assert (code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "GROUP_IN_USE")
    after = await progress(service)
    assert (after.token, after.committed_offset) == (before.token, before.committed_offset)
    await etcd.delete(etcd.key("gates", "readers"))
    request = pb.DeleteGroupRequest(group="readers")
    assert (await call(service, "DeleteGroup", request)).queue_count == 1


async def test_queue_granted_while_etcd_is_read_keeps_its_progress(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd's answer is of an earlier moment: a member may have acquired a queue since."""
    await worked(service)
    read_done, resume = asyncio.Event(), asyncio.Event()
    read_gate = service.offsets.gates.read

    async def slowly(key: str) -> KeyValue | None:
        entry = await read_gate(key)
        read_done.set()
        await resume.wait()
        return entry

    monkeypatch.setattr(service.offsets.gates, "read", slowly)
    token = (await progress(service)).token
    async with asyncio.TaskGroup() as tasks:
        request = pb.DeleteGroupRequest(group="readers")
        deleting = tasks.create_task(refused(call(service, "DeleteGroup", request)))
        await read_done.wait()
        again = fence_item(
            attempt="second", expected_token=token, condition=pb.FENCE_CONDITION_SAME_HOLDER
        )
        fenced = await call(service, "Fence", pb.FenceRequest(term=TERM, items=[again]))
        assert fenced.outcomes[0].HasField("fenced")
        resume.set()
    assert deleting.result().reason == "GROUP_IN_USE"
    assert (await progress(service)).token == token + 1


async def test_resets_are_published_and_repetitions_only_counted(
    service: Service,
) -> None:
    await worked(service)

    async def first_batch() -> MetricBatch:
        async for batch in service.hub.watch():
            return batch
        raise AssertionError("the stream has no end")

    async with asyncio.TaskGroup() as tasks:
        batch = tasks.create_task(first_batch())
        await until(lambda: service.hub.watched)
        await call(service, "Reset", reset(dry_run=True))
        for to_offset in (4, 4, 5):
            await call(service, "Reset", reset(to_offset))
    (event,) = (await batch).events
    assert event.queue == queue()
    assert event.progress_reset == ProgressReset(
        op_id="op", from_offset=6, to_offset=4, by="admin", reason="replay"
    )
    await call(service, "Reset", undo())
    await call(service, "Clone", clone())

    def moves(op: str, outcome: str) -> float | None:
        labels = {"op": op, "outcome": outcome}
        return service.registry.get_sample_value("baton_offsets_moves_total", labels)

    assert [moves("reset", each) for each in ("moved", "repeated", "OPERATION_EXISTS")] == [1] * 3
    assert (moves("undo", "moved"), moves("clone", "moved")) == (1, 1)


@pytest.mark.parametrize("method", ["Reset", "Clone"])
async def test_owner_is_fenced_by_a_reset(service: Service, etcd: EtcdSession, method: str) -> None:
    await worked(service)
    await store_topic(etcd)
    move: Any = reset() if method == "Reset" else clone(from_group="empty", to_group="readers")
    if method == "Clone":
        service.add_gate("empty", ownership=2)
        item = pb.CommitItem(queue=queue("empty"), committed_offset=2)
        await call(service, "Commit", pb.CommitRequest(items=[item]))
    await call(service, method, move)
    delivery = pb.DeliveryItem(queue=queue(), token=1, first_offset=10, next_offset=11)
    answer = await call(service, "RecordDelivered", pb.RecordDeliveredRequest(items=[delivery]))
    facts = answer.outcomes[0].error.facts
    assert (facts["why"], facts["current"], facts["reset_epoch"]) == ("RESET", "2", "1")
