"""The call WhyStuck.

Goal: it returns the diagnoses of the queues in the request, in order, and refuses unknown names
and topics of others.
Method: a real replica over real gRPC whose broker is down, which is then the diagnosis.
"""

from __future__ import annotations

from typing import cast

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonmq.errors import PermissionDenied
from batonmq_server.nameserver.diagnosis_calls import DiagnosisCalls
from batonmq_server.nameserver.inspector import QueueInspector
from batonmq_server.runtime.access.permissions import Permission, use_topic
from tests.nameserver.replica import Direct, Replica, refusal


async def why(nameserver: Replica, **fields: object) -> list[pb.Diagnosis]:
    request = pb.WhyStuckRequest(group="g", **fields)  # type: ignore[arg-type]
    return list((await nameserver.stub.WhyStuck(request, timeout=20)).queues)


async def test_all_queues_of_the_group_are_diagnosed_in_order(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    diagnoses = await why(nameserver)
    assert [d.queue.queue.queue_id for d in diagnoses] == list(range(8))
    assert {d.queue.group for d in diagnoses} == {"g"}
    assert {d.reason for d in diagnoses} == {pb.STUCK_REASON_STORAGE_UNREACHABLE}
    assert {d.evidence["broker"] for d in diagnoses} == {"broker-a"}
    assert {(d.lag_count, d.lag_ms, d.committed_offset, d.next_offset) for d in diagnoses} == {
        (-1, -1, -1, -1)
    }


async def test_single_queue_is_diagnosed(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    (diagnosis,) = await why(nameserver, topic="flights", broker="broker-a", queue_id=0)
    assert diagnosis.queue.queue.queue_id == 0
    assert await why(nameserver, queue_id=8) == []
    assert await why(nameserver, broker="broker-b") == []


async def test_topic_without_subscription_is_diagnosed(
    nameserver: Replica,
) -> None:
    await nameserver.create("orders", 2)
    await nameserver.join("g", "c1")
    assert {d.queue.queue.topic for d in await why(nameserver)} == {"flights"}
    assert [d.queue.queue.topic for d in await why(nameserver, topic="orders")] == ["orders"] * 2


async def test_topic_without_subscription_requires_a_permission_of_its_own(
    nameserver: Replica, direct: Direct
) -> None:
    await nameserver.create("orders", 2)
    await nameserver.join("g", "c1")
    required: list[Permission] = []

    def require(permission: Permission) -> None:
        required.append(permission)
        raise PermissionDenied("it may not")

    class NoQueues:
        with_progress: tuple[QueueRef, ...] = ()

        def queues_of_topic(self, _: object) -> tuple[()]:
            return ()

        async def queues_to_inspect(self, _: object) -> tuple[QueueRef, ...]:
            return self.with_progress

        async def inspect(self, *_: object, **__: object) -> tuple[()]:
            return ()

    inspector = NoQueues()
    calls = DiagnosisCalls(direct.groups, direct.topics, cast("QueueInspector", inspector))
    for topic in ("", "flights"):
        await calls.why_stuck(pb.WhyStuckRequest(group="g", topic=topic), require)
    for topic in ("orders", "nothing"):
        with pytest.raises(PermissionDenied):
            await calls.why_stuck(pb.WhyStuckRequest(group="g", topic=topic), require)
    inspector.with_progress = (QueueRef("flights", "broker-a", 0), QueueRef("old", "broker-a", 0))
    with pytest.raises(PermissionDenied):
        await calls.why_stuck(pb.WhyStuckRequest(group="g"), require)
    assert required == [use_topic("orders"), use_topic("nothing"), use_topic("old")]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (pb.WhyStuckRequest(group="no-group"), "GROUP_NOT_FOUND"),
        (pb.WhyStuckRequest(group="g", topic="nothing"), "TOPIC_NOT_FOUND"),
        (pb.WhyStuckRequest(group="g/h"), "INVALID_NAME"),
        (pb.WhyStuckRequest(), "INVALID_NAME"),
    ],
)
async def test_diagnosis_of_unknown_names_is_refused(
    nameserver: Replica, call: pb.WhyStuckRequest, reason: str
) -> None:
    await nameserver.join("g", "c1")
    error = await refusal(nameserver.stub.WhyStuck(call, timeout=10))
    assert error.reason == reason
