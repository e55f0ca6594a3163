"""Authorization of calls that name a message by its id.

Goal: a caller without permission to consume a topic gets no message of it by id, and a caller
without permission to produce to it cancels no scheduled batch of it. With authorization off, both
calls work.
Method: the servicers on a node with a disk in memory, and access rules with the test's grants.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import pytest

from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import schedule_service_pb2 as pb
from baton.storage.v1 import transaction_service_pb2 as transaction_pb
from batonmq._common.rpc import error_from_pb
from batonmq._core.records import TOPIC_BYTES_MAX
from batonmq.errors import DataLoss, NotScheduled, PermissionDenied
from batonmq_server.runtime.access.permissions import (
    AccessRole,
    Authorizer,
    Grant,
    Permission,
)
from batonmq_server.storage.core.checks import check
from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.scan import HEAD_BYTES_MAX
from batonmq_server.storage.core.schedule import (
    FIRST,
    SCHEDULED_BYTES_MAX,
    SCHEDULED_HEAD_BYTES_MAX,
    ScheduledBatch,
    encode_scheduled,
    read_scheduled_topic,
)
from batonmq_server.storage.damage_tracker import DamageTracker
from batonmq_server.storage.query_server import QueryServicer
from batonmq_server.storage.schedule_server import ScheduleServicer, decode_id
from batonmq_server.storage.transaction_server import TransactionServicer
from tests.storage.batches import NOW, TOPIC, batch
from tests.storage.schedule_scene import BROKER, SEGMENT_BYTES, Scene, new_scene

CONTEXT: Any = None
HOUR_MS = 3_600_000
FILL = b"x" * (SEGMENT_BYTES // 2)


class PermissionCheck:
    """A permission check for one caller."""

    def __init__(self, *grants: Grant) -> None:
        self._access = Authorizer()
        self._access.set_grants("caller", grants)

    def __call__(self, context: Any, *needs: Permission) -> None:
        self._access.check("caller", needs)


def scheduling(scene: Scene, *grants: Grant) -> ScheduleServicer:
    return ScheduleServicer(scene.appender, scene.topics, scene.due.wake, PermissionCheck(*grants))


def position(scene: Scene, schedule_id: str) -> int | None:
    """Return the position at which a scheduled batch is stored now."""
    return scene.store.schedule.waiting.position(decode_id(schedule_id, BROKER))


async def test_cancelling_a_scheduled_batch_needs_permission_to_produce_to_its_topic() -> None:
    async with new_scene() as scene:
        receipt = await scene.schedule(batch(b"body"), NOW + 60_000)
        request = pb.CancelScheduledRequest(schedule_id=receipt.schedule_id)
        with pytest.raises(PermissionDenied) as refused:
            servicer = scheduling(scene, Grant(AccessRole.CONSUME, f"topic:{TOPIC}"))
            await servicer.CancelScheduled(request, CONTEXT)
        assert refused.value.facts["resource"] == f"topic:{TOPIC}"
        assert scene.waiting() == 1
        allowed = scheduling(scene, Grant(AccessRole.PRODUCE, f"topic:{TOPIC}"))
        await allowed.CancelScheduled(request, CONTEXT)
        assert scene.waiting() == 0


@pytest.mark.parametrize("body", [b"body", FILL])
async def test_scheduled_message_is_not_read_before_the_permission_to_cancel_it(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    async with new_scene() as scene:
        receipt = await scene.schedule(batch(body), NOW + 60_000)
        request = pb.CancelScheduledRequest(schedule_id=receipt.schedule_id)
        sizes: list[int] = []
        read = scene.store.log.read

        def counting(position: int, bytes_max: int) -> bytes:
            sizes.append(bytes_max)
            return read(position, bytes_max)

        with monkeypatch.context() as patch, pytest.raises(PermissionDenied) as refused:
            patch.setattr(scene.store.log, "read", counting)
            await scheduling(scene).CancelScheduled(request, CONTEXT)
        assert refused.value.facts["resource"] == f"topic:{TOPIC}"
        assert sizes == [SCHEDULED_HEAD_BYTES_MAX], "the head names the topic"
        assert scene.waiting() == 1


def test_topic_of_the_largest_scheduled_batch_is_in_its_head() -> None:
    topic = "t" * TOPIC_BYTES_MAX
    large = [b"x" * (SCHEDULED_BYTES_MAX // 3 - 200)] * 3
    inner = batch(*large, topic=topic)
    outer = encode_scheduled(ScheduledBatch(NOW, 7, FIRST, inner))

    class Log:
        def read(self, position: int, bytes_max: int) -> bytes:
            return outer[position : position + bytes_max]

    assert read_scheduled_topic(cast("CommitLog", Log()), 0) == topic
    with pytest.raises(DataLoss):
        read_scheduled_topic(cast("CommitLog", Log()), 8)


async def test_rewritten_scheduled_batch_is_still_authorized_by_its_topic() -> None:
    async with new_scene() as scene:
        receipt = await scene.schedule(batch(b"body"), NOW + 40 * HOUR_MS)
        for _ in range(2):  # so that old batches block retention
            await scene.schedule(batch(FILL), NOW)
        await scene.deliver()
        first = position(scene, receipt.schedule_id)
        scene.clock.pass_ms(24 * HOUR_MS)
        await scene.rewrite_old()
        assert position(scene, receipt.schedule_id) != first
        request = pb.CancelScheduledRequest(schedule_id=receipt.schedule_id)
        with pytest.raises(PermissionDenied):
            await scheduling(scene).CancelScheduled(request, CONTEXT)
        allowed = scheduling(scene, Grant(AccessRole.PRODUCE, f"topic:{TOPIC}"))
        await allowed.CancelScheduled(request, CONTEXT)
        assert scene.waiting() == 0


async def test_unknown_schedule_id_is_not_scheduled_for_every_caller() -> None:
    async with new_scene() as scene:
        receipt = await scene.schedule(batch(b"body"), NOW + 1_000)
        scene.clock.pass_ms(2_000)
        await scene.deliver()
        request = pb.CancelScheduledRequest(schedule_id=receipt.schedule_id)
        with pytest.raises(NotScheduled):
            await scheduling(scene).CancelScheduled(request, CONTEXT)


async def test_message_is_read_by_id_only_after_the_permission_to_consume_its_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with new_scene() as scene:
        (receipt,) = scene.appender.append(
            [check(batch(b"body"))], {TOPIC: scene.topics.topics[TOPIC]}
        )
        assert not isinstance(receipt, Exception)
        await scene.flusher.wait_until_safe(receipt.next_position)
        damage = DamageTracker(lambda: None)
        request = query_pb.GetMessageRequest(message_id=f"{BROKER}-{receipt.position:x}-0")

        def servicer(*grants: Grant) -> QueryServicer:
            return QueryServicer(
                BROKER, scene.store, scene.topics, damage, require=PermissionCheck(*grants)
            )

        denied = servicer(Grant(AccessRole.PRODUCE, f"topic:{TOPIC}"))
        sizes: list[int] = []
        read = scene.store.log.read

        def counting(position: int, bytes_max: int) -> bytes:
            sizes.append(bytes_max)
            return read(position, bytes_max)

        with monkeypatch.context() as patch, pytest.raises(PermissionDenied):
            patch.setattr(scene.store.log, "read", counting)
            await denied.GetMessage(request, CONTEXT)
        assert sizes == [HEAD_BYTES_MAX], "the header names the topic; no message is read"
        answer = await servicer(Grant(AccessRole.CONSUME, f"topic:{TOPIC}")).GetMessage(
            request, CONTEXT
        )
        assert answer.message.batch


def transacting(scene: Scene, *grants: Grant) -> TransactionServicer:
    return TransactionServicer(
        scene.appender,
        scene.topics,
        scene.streams,
        scene.checker.wake,
        check_first_ms=6_000,
        require=PermissionCheck(*grants),
    )


def checks_of(
    servicer: TransactionServicer,
) -> AsyncGenerator[transaction_pb.WatchChecksResponse, None]:
    request = transaction_pb.WatchChecksRequest(group="shop")
    stream: Any = servicer.WatchChecks(request, CONTEXT)
    return cast("AsyncGenerator[transaction_pb.WatchChecksResponse, None]", stream)


async def test_rolled_back_transaction_is_known_only_to_callers_that_may_produce() -> None:
    async with new_scene() as scene:
        (name,) = await scene.begin(batch(b"body"))
        state = transaction_pb.TRANSACTION_STATE_ROLLED_BACK
        end = transaction_pb.EndRequest(
            items=[transaction_pb.EndItem(transaction_id=name, state=state)]
        )
        other = transaction_pb.EndRequest(
            items=[transaction_pb.EndItem(transaction_id=name, state=state, topic="refunds")]
        )
        allowed = transacting(scene, Grant(AccessRole.PRODUCE, f"topic:{TOPIC}"))
        stranger = transacting(scene, Grant(AccessRole.CONSUME, f"topic:{TOPIC}"))
        for duplicate in (False, True):
            (outcome,) = (await allowed.End(end, CONTEXT)).outcomes
            assert (outcome.receipt.state, outcome.receipt.duplicate) == (state, duplicate)
        (outcome,) = (await stranger.End(end, CONTEXT)).outcomes
        assert error_from_pb(outcome.error).reason == "PERMISSION_DENIED"
        (outcome,) = (await allowed.End(other, CONTEXT)).outcomes
        assert error_from_pb(outcome.error).reason == "TRANSACTION_NOT_FOUND"


async def test_transaction_is_listed_asked_and_ended_only_by_callers_that_may_produce() -> None:
    async with new_scene() as scene:
        (name,) = await scene.begin(batch(b"body"))
        end = transaction_pb.EndRequest(
            items=[
                transaction_pb.EndItem(
                    transaction_id=name, state=transaction_pb.TRANSACTION_STATE_COMMITTED
                )
            ]
        )
        listing = transaction_pb.ListTransactionsRequest()
        allowed = transacting(scene, Grant(AccessRole.PRODUCE, f"topic:{TOPIC}"))
        stranger = transacting(scene, Grant(AccessRole.CONSUME, f"topic:{TOPIC}"))
        (outcome,) = (await stranger.End(end, CONTEXT)).outcomes
        assert error_from_pb(outcome.error).reason == "PERMISSION_DENIED"
        assert not (await stranger.ListTransactions(listing, CONTEXT)).transactions
        async with (
            aclosing(checks_of(stranger)) as unasked,
            aclosing(checks_of(allowed)) as asked,
        ):
            assert not (await anext(unasked)).checks
            assert not (await anext(asked)).checks
            scene.clock.pass_ms(10_000)
            await scene.checker.check()
            assert [one.transaction_id for one in (await anext(asked)).checks] == [name]
            assert scene.metric("check_streams") == 2
        assert scene.metric("check_streams") == 0
        assert len((await allowed.ListTransactions(listing, CONTEXT)).transactions) == 1
        (outcome,) = (await allowed.End(end, CONTEXT)).outcomes
        assert outcome.receipt.first_offset == 0
        (outcome,) = (await stranger.End(end, CONTEXT)).outcomes
        assert error_from_pb(outcome.error).reason == "PERMISSION_DENIED", "it has ended"
        (outcome,) = (await allowed.End(end, CONTEXT)).outcomes
        assert outcome.receipt.duplicate
        assert scene.bodies() == [b"body"]
