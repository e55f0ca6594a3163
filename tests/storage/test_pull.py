"""Goal: no message is delivered before offsets has recorded it; a pull without messages waits.

Method: the whole node over gRPC with a real etcd; offsets is a twin that accepts, rejects or does
not answer, as the test says.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._core.records import check_batch
from batonmq.errors import (
    AckCap,
    BadExpression,
    BatonError,
    DataLoss,
    DeliveryUnrecorded,
    Fenced,
    InvalidArgument,
    InvalidName,
    LimitExceeded,
    OffsetAheadOfLog,
    Overloaded,
    QueueNotFound,
    TopicNotFound,
    WrongBroker,
)
from tests.storage.batches import TOPIC, batch, tagged
from tests.storage.running_node import GROUP, TIMEOUT_S, RunningNode, pull_request, running_node
from tests.support.conditions import until

LONG_MS = 30_000


async def pulled(node: RunningNode, **fields: Any) -> pb.PullResponse:
    """Return the answer of a long poll; raise its BatonError."""
    return await node.pull(hold_ms=LONG_MS, **fields)


async def test_pull_is_recorded_and_answered_with_the_stored_bytes(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        original = batch(b"a", b"b")
        await node.append(original, batch(b"c"))
        answer = await node.pull()
        assert [check_batch(raw, stamped=True).count for raw in answer.batches] == [2, 1]
        assert answer.batches[0][56:] == original[56:]
        assert (answer.pull_id, answer.next_offset, answer.offsets_epoch) == (9, 3, 1)
        assert (answer.queue_first_offset, answer.queue_next_offset) == (0, 3)
        assert node.offsets.recorded == [(GROUP, 0, 0, 3)]


async def test_messages_max_bounds_the_recorded_range(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(*[b"x"] * 50))
        answer = await node.pull(offset=10, messages_max=5)
        assert answer.next_offset == 15
        assert node.offsets.recorded == [(GROUP, 0, 10, 15)]


async def test_first_batch_fits_whatever_bytes_max_says(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"x" * 10_000), batch(b"y"))
        answer = await node.pull(bytes_max=1)
        assert (len(answer.batches), answer.next_offset) == (1, 1)


async def test_maybe_seen_offsets_are_returned_as_redelivered(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a", b"b", b"c"))
        node.offsets.maybe_seen = [(1, 2)]
        (flagged,) = (await node.pull()).redelivered
        assert (flagged.first_offset, flagged.next_offset) == (1, 2)


async def test_filtered_messages_are_recorded_and_counted(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(tagged("x", "y"), tagged("x"), tagged("y"))
        answer = await node.pull(expression="y || z")
        assert [check_batch(raw, stamped=True).first_offset for raw in answer.batches] == [0, 3]
        assert (answer.next_offset, answer.filtered_count) == (4, 2)
        nothing = await pulled(node, expression="z")
        assert (list(nothing.batches), nothing.next_offset, nothing.filtered_count) == ([], 4, 4)
        assert node.offsets.recorded == [(GROUP, 0, 0, 4)] * 2


async def test_colliding_tags_pass_at_storage(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(tagged("BB"), tagged("CC"))
        answer = await node.pull(expression="Aa")
        assert (len(answer.batches), answer.filtered_count) == (1, 1)


async def test_pull_without_hold_time_and_messages_is_empty_and_unrecorded(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        answer = await node.pull()
        assert (list(answer.batches), answer.next_offset, answer.offsets_epoch) == ([], 0, 0)
        assert node.offsets.calls == []


async def test_long_poll_that_times_out_is_empty_and_unrecorded(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        answer = await node.pull(offset=1, hold_ms=50)
        assert (list(answer.batches), answer.next_offset) == ([], 1)
        assert node.offsets.calls == []
        await node.wait_long_polls(0)


async def test_long_poll_is_woken_by_its_queue_only(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(pulled(node, queue_id=1))
        second = tasks.create_task(pulled(node, queue_id=2))
        await node.wait_long_polls(2)
        await node.append(batch(b"a", queue_id=2))
        answer = await second
        assert answer.next_offset == 1
        await node.wait_long_polls(1)
        assert not first.done()
        await node.append(batch(b"a", queue_id=1))
        assert (await first).next_offset == 1
        assert node.offsets.recorded == [(GROUP, 2, 0, 1), (GROUP, 1, 0, 1)]


async def test_several_groups_wait_for_one_queue(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(pulled(node, group=f"group-{n}")) for n in range(20)]
        await node.wait_long_polls(20)
        await node.append(batch(b"a"))
        assert [(await one).next_offset for one in waiting] == [1] * 20
        assert {group for group, *_ in node.offsets.recorded} == {f"group-{n}" for n in range(20)}


async def test_long_poll_woken_by_a_filtered_message_is_recorded(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(pulled(node, expression="y"))
        await node.wait_long_polls(1)
        await node.append(tagged("x"))
        answer = await waiting
        assert (answer.next_offset, answer.filtered_count) == (1, 1)
        assert node.offsets.recorded == [(GROUP, 0, 0, 1)]


async def test_stale_token_gets_no_bytes(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        node.offsets.tokens[GROUP, 0] = 2
        with pytest.raises(Fenced) as refused:
            await node.pull(token=1)
        assert refused.value.facts["current"] == "2"
        assert node.offsets.recorded == []
        assert (await node.pull(token=2)).next_offset == 1


async def test_token_that_became_stale_during_a_long_poll_gets_no_bytes(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(rejection_of(pulled(node)))
        await node.wait_long_polls(1)
        node.offsets.tokens[GROUP, 0] = 2
        await node.append(batch(b"a"))
        assert isinstance(await waiting, Fenced)


async def rejection_of(call: Any) -> BatonError | None:
    try:
        await call
    except BatonError as error:
        return error
    return None


async def test_long_polls_are_touched_and_fenced_ones_answered(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with (
        running_node(etcd_endpoint, tmp_path, touch_interval_ms=100) as node,
        asyncio.TaskGroup() as tasks,
    ):
        long_poll = tasks.create_task(pulled(node, queue_id=1))
        fenced = tasks.create_task(rejection_of(pulled(node, queue_id=2)))
        await node.wait_long_polls(2)
        await until(lambda: {(GROUP, 1, 1), (GROUP, 2, 1)} <= set(node.offsets.touched))
        node.offsets.tokens[GROUP, 2] = 5
        assert isinstance(await fenced, Fenced)
        assert not long_poll.done()
        await node.append(batch(b"a", queue_id=1))
        assert (await long_poll).next_offset == 1
        assert node.offsets.recorded == [(GROUP, 1, 0, 1)]


async def test_other_errors_of_offsets_are_passed_on(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        node.offsets.rejection = AckCap("full", facts={"ranges": 9, "limit": 9})
        with pytest.raises(AckCap) as refused:
            await node.pull()
        assert refused.value.facts["limit"] == "9"


async def test_pull_gets_no_bytes_while_offsets_does_not_answer(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path, record_age_ms_max=200) as node:
        await node.append(batch(b"a"))
        node.offsets.answering.clear()
        with pytest.raises(DeliveryUnrecorded) as refused:
            await node.pull()
        assert refused.value.retry_after_ms > 0
        node.offsets.answering.set()

        async def goes_on() -> bool:
            try:
                return (await node.pull()).next_offset == 1
            except DeliveryUnrecorded:  # an answer may take longer than its maximum age
                return False

        await until(goes_on)


async def test_pull_gets_no_bytes_without_offsets(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        await node.etcd.delete(node.etcd.key("nodes", "offsets", "a"))
        await until(lambda: "offsets/a" not in node.runtime.nodes.values)
        with pytest.raises(DeliveryUnrecorded):
            await node.pull()


async def test_answer_of_offsets_under_an_old_epoch_is_not_used(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        node.offsets.epoch = 5
        assert (await node.pull()).offsets_epoch == 5
        node.offsets.claimed_epoch = 4
        with pytest.raises(DeliveryUnrecorded):
            await node.pull()
        node.offsets.epoch, node.offsets.claimed_epoch = 6, 0
        assert (await node.pull(offsets_epoch=6)).offsets_epoch == 6


async def test_wrongly_claimed_epoch_fails_only_its_own_pull(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        with pytest.raises(DeliveryUnrecorded):
            await node.pull(offsets_epoch=1 << 40)
        assert (await node.pull()).next_offset == 1


async def test_concurrent_pulls_share_calls(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(*(batch(b"a", queue_id=n) for n in range(8)))
        node.offsets.answering.clear()
        calls = [
            node.stub.Pull(pull_request(queue_id=n % 8, group=f"g{n}"), timeout=TIMEOUT_S)
            for n in range(90)  # a connection has 100 calls at most
        ]
        await until(lambda: open_pulls(node) == 90)
        node.offsets.answering.set()
        assert [(await call).next_offset for call in calls] == [1] * 90
        assert sum(node.offsets.calls) == 90
        assert len(node.offsets.calls) < 10


def open_pulls(node: RunningNode) -> float | None:
    labels = {"service": "StorageService", "method": "Pull"}
    return node.runtime.registry.get_sample_value("baton_rpc_open", labels)


async def test_abandoned_pull_leaves_nothing_behind(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        call = node.stub.Pull(pull_request(hold_ms=LONG_MS), timeout=60)
        await node.wait_long_polls(1)
        call.cancel()
        await node.wait_long_polls(0)


async def test_long_poll_beyond_the_limit_is_rejected(etcd_endpoint: str, tmp_path: Path) -> None:
    async with (
        running_node(etcd_endpoint, tmp_path, long_polls_max=1) as node,
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(pulled(node))
        await node.wait_long_polls(1)
        with pytest.raises(Overloaded) as refused:
            await pulled(node)
        assert refused.value.facts == {"limit": "1"}
        await node.append(batch(b"a"))
        assert (await waiting).next_offset == 1


async def test_long_poll_of_a_deleted_topic_ends_with_topic_not_found(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(rejection_of(pulled(node)))
        await node.wait_long_polls(1)
        await node.etcd.delete(node.etcd.key("topics", TOPIC))
        rejection = await waiting
        assert isinstance(rejection, TopicNotFound)
        assert rejection.facts == {"topic": TOPIC}


async def test_offset_beyond_the_log_is_rejected(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        with pytest.raises(OffsetAheadOfLog) as refused:
            await pulled(node, offset=2)
        assert refused.value.facts == {"offset": "2", "next_offset": "1"}
        assert node.offsets.calls == []


async def test_damaged_batch_is_data_loss_and_not_recorded(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        (receipt,) = await node.append(batch(b"hello"))
        segment = tmp_path / "log" / f"{0:020d}"
        with segment.open("r+b") as file:
            file.seek(receipt.position + len(batch(b"hello")) - 1)
            file.write(b"?")
        with pytest.raises(DataLoss) as refused:
            await node.pull()
        assert refused.value.facts == {"position": "0"}
        assert node.offsets.calls == []


BAD_PULLS: list[tuple[dict[str, Any], type[BatonError], str]] = [
    ({"queue": None}, InvalidArgument, "queue"),
    ({"group": ""}, InvalidName, "group"),
    ({"group": "a/b"}, InvalidName, "group"),
    ({"group": "a\nb"}, InvalidName, "group"),
    ({"group": "x" * 128}, InvalidName, "group"),
    ({"topic": ""}, InvalidName, "topic"),
    ({"topic": "../etc"}, InvalidName, "topic"),
    ({"topic": "a\0b"}, InvalidName, "topic"),
    ({"broker": ""}, InvalidName, "broker"),
    ({"broker": "Broker/A"}, InvalidName, "broker"),
    ({"queue_id": 65_536}, LimitExceeded, "queue_id"),
    ({"token": -1}, InvalidArgument, "token"),
    ({"subscription_generation": -1}, InvalidArgument, "subscription_generation"),
    ({"offset": -1}, InvalidArgument, "offset"),
    ({"offsets_epoch": -1}, InvalidArgument, "offsets_epoch"),
    ({"bytes_max": 4 * 1024 * 1024 + 1}, LimitExceeded, "bytes_max"),
    ({"messages_max": 65_536}, LimitExceeded, "messages_max"),
    ({"hold_ms": 30_001}, LimitExceeded, "hold_ms"),
    ({"expression": "a" * 2_049}, LimitExceeded, "expression"),
]


async def test_each_bad_field_is_rejected_by_name_before_anything_is_recorded(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        end = (await node.describe()).next_position
        for fields, expected, field in BAD_PULLS:
            rejection = await rejection_of(node.pull(**fields))
            assert type(rejection) is expected, (fields, rejection)
            assert rejection is not None
            assert rejection.facts["field"] == field
            assert rejection.kind == "INVALID_ARGUMENT"
            if expected is LimitExceeded:
                assert rejection.facts.keys() == {"field", "limit", "actual"}
        assert node.offsets.calls == []
        assert (await node.describe()).next_position == end


@pytest.mark.parametrize("expression", ["a||", "||", "a b", "* || a", "a|b", "x" * 128, "a\x01"])
async def test_bad_expression_is_rejected(
    etcd_endpoint: str, tmp_path: Path, expression: str
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        with pytest.raises(BadExpression) as refused:
            await node.pull(expression=expression)
        assert refused.value.facts == {"expression": expression}


async def test_unknown_topic_queue_and_broker_have_different_errors(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        rejections = [
            await rejection_of(node.pull(**fields))
            for fields in ({"topic": "missing"}, {"queue_id": 8}, {"broker": "broker-b"})
        ]
        assert [type(one) for one in rejections] == [TopicNotFound, QueueNotFound, WrongBroker]
        assert rejections[2] is not None
        assert rejections[2].facts == {"asked": "broker-b", "actual": "broker-a"}
        assert node.offsets.calls == []


async def test_statuses_are_those_of_the_contract(etcd_endpoint: str, tmp_path: Path) -> None:
    codes = grpc.StatusCode
    async with running_node(etcd_endpoint, tmp_path) as node:
        for fields, code in (
            ({"topic": "missing"}, codes.NOT_FOUND),
            ({"offset": 5}, codes.OUT_OF_RANGE),
            ({"broker": "broker-b"}, codes.FAILED_PRECONDITION),
            ({"expression": "||"}, codes.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await node.stub.Pull(pull_request(**fields), timeout=TIMEOUT_S)
            assert refused.value.code() is code
            assert from_rpc_error(refused.value).remedy


async def test_deliveries_are_counted(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(tagged("x", "x", "y"))
        await node.pull(expression="x")
        sample = node.runtime.registry.get_sample_value
        assert sample("baton_storage_appended_messages_total") == 3
        assert sample("baton_storage_delivered_messages_total") == 2
        assert sample("baton_storage_filtered_messages_total") == 1


async def test_appends_and_deliveries_are_in_the_metric_stream(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        events: list[metrics_pb.MetricEvent] = []

        async def listen() -> None:
            async for one in node.runtime.hub.watch():
                events.extend(one.events)

        listening = tasks.create_task(listen())
        await until(lambda: node.runtime.hub.watched)
        await node.append(tagged("x", "y"))
        await node.pull(expression="x")
        await until(lambda: events)
        listening.cancel()
        by_kind = {one.WhichOneof("kind"): one for one in events}
        appended, delivered = by_kind["appended"].appended, by_kind["delivered"].delivered
        assert (appended.message_count, appended.next_offset) == (2, 2)
        assert (delivered.message_count, delivered.filtered_count) == (1, 1)
        assert (list(delivered.runs), delivered.lost_count) == ([0, 1, 1], 0)
        assert delivered.byte_count == appended.byte_count
        assert by_kind["delivered"].queue.group == GROUP
