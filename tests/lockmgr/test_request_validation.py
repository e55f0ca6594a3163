"""Goal: a malformed request is rejected with a reason and its field, and changes nothing.

Method: one well-formed request per RPC, broken in one field at a time, sent over gRPC to a lock
manager with real etcd and offsets; afterwards etcd has no lock and offsets has received no fence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError
from tests.lockmgr.scene import TIMEOUT_S, Member, Node, Scene, queue

LONG = "x" * 128
BAD_NAMES = ["", "a/b", "a\x00b", "a\nb", "../x", "ä", "a b", LONG]
Spoil = Callable[[Any], None]


def acquire_request() -> pb.AcquireRequest:
    return pb.AcquireRequest(
        incarnation=Member("a").incarnation,
        acquire_seq=1,
        generation=1,
        items=[pb.AcquireItem(queue=queue())],
    )


def keep_alive_request() -> pb.KeepAliveRequest:
    return pb.KeepAliveRequest(
        incarnation=Member("a").incarnation,
        acquire_seq=1,
        holds=[pb.Hold(queue=queue(), token=1)],
    )


def release_request() -> pb.ReleaseRequest:
    return pb.ReleaseRequest(
        incarnation=Member("a").incarnation, holds=[pb.Hold(queue=queue(), token=1)]
    )


def release_all_request() -> pb.ReleaseAllRequest:
    return pb.ReleaseAllRequest(incarnation=Member("a").incarnation)


def watch_request() -> pb.WatchRequest:
    return pb.WatchRequest(incarnation=Member("a").incarnation)


def force_request() -> pb.ForceReleaseRequest:
    return pb.ForceReleaseRequest(queue=queue(), op_id="op", by="operator", reason="stuck")


def describe_request() -> pb.DescribeRequest:
    return pb.DescribeRequest(queue=queue())


def no_incarnation(request: Any) -> None:
    request.ClearField("incarnation")


def no_incarnation_id(request: Any) -> None:
    request.incarnation.incarnation_id = 0


def client_named(name: str) -> Spoil:
    def spoil(request: Any) -> None:
        request.incarnation.client_id = name

    return spoil


def queues_of(request: Any) -> Any:
    if isinstance(request, pb.ForceReleaseRequest | pb.DescribeRequest):
        return [request]
    return request.items if isinstance(request, pb.AcquireRequest) else request.holds


def group_named(name: str) -> Spoil:
    def spoil(request: Any) -> None:
        queues_of(request)[0].queue.group = name

    return spoil


def topic_named(name: str) -> Spoil:
    def spoil(request: Any) -> None:
        queues_of(request)[0].queue.queue.topic = name

    return spoil


def broker_named(name: str) -> Spoil:
    def spoil(request: Any) -> None:
        queues_of(request)[0].queue.queue.broker = name

    return spoil


def queue_id(value: int) -> Spoil:
    def spoil(request: Any) -> None:
        queues_of(request)[0].queue.queue.queue_id = value

    return spoil


def no_queue(request: Any) -> None:
    queues_of(request)[0].ClearField("queue")


def twice(request: Any) -> None:
    queues_of(request).add().CopyFrom(queues_of(request)[0])


def nothing(request: Any) -> None:
    del queues_of(request)[:]


def many(count: int) -> Spoil:
    def spoil(request: Any) -> None:
        first = queues_of(request)[0]
        for number in range(1, count):
            more = queues_of(request).add()
            more.CopyFrom(first)
            more.queue.queue.queue_id = number

    return spoil


def field(name: str, value: int | str) -> Spoil:
    return lambda r: setattr(r, name, value)


def item_field(name: str, value: int) -> Spoil:
    return lambda r: setattr(queues_of(r)[0], name, value)


def resuming(*ranges: tuple[int, int]) -> Spoil:
    def spoil(request: Any) -> None:
        for first, next_ in ranges:
            request.items[0].resume.add(first_offset=first, next_offset=next_)

    return spoil


def two_groups(request: Any) -> None:
    more = request.items.add()
    more.CopyFrom(request.items[0])
    more.queue.group = "other"


OF_CLIENTS: list[tuple[Spoil, str, str]] = [
    (no_incarnation, "INVALID_NAME", "client_id"),
    (no_incarnation_id, "INVALID_ARGUMENT", "incarnation_id"),
    *((client_named(name), "INVALID_NAME", "client_id") for name in BAD_NAMES[:-1]),
    (client_named("x" * 256), "INVALID_NAME", "client_id"),
]
OF_QUEUES: list[tuple[Spoil, str, str]] = [
    *((group_named(name), "INVALID_NAME", "group") for name in BAD_NAMES),
    *((topic_named(name), "INVALID_NAME", "topic") for name in BAD_NAMES),
    *((broker_named(name), "INVALID_NAME", "broker") for name in [*BAD_NAMES, "Upper"]),
    (no_queue, "INVALID_NAME", "group"),
    (queue_id(65_536), "LIMIT_EXCEEDED", "queue_id"),
]
EVERYWHERE = OF_CLIENTS + OF_QUEUES
OF_ACQUIRE: list[tuple[Spoil, str, str]] = [
    (nothing, "INVALID_ARGUMENT", "items"),
    (many(1_025), "LIMIT_EXCEEDED", "items"),
    (twice, "INVALID_ARGUMENT", "items"),
    (two_groups, "INVALID_ARGUMENT", "items"),
    (field("acquire_seq", 0), "INVALID_ARGUMENT", "acquire_seq"),
    (field("acquire_seq", -1), "INVALID_ARGUMENT", "acquire_seq"),
    (field("generation", 0), "INVALID_ARGUMENT", "generation"),
    (field("hold_ms", 15_001), "LIMIT_EXCEEDED", "hold_ms"),
    (item_field("reset_epoch", -1), "INVALID_ARGUMENT", "reset_epoch"),
    (item_field("reset_epoch", 1 << 62 | 1), "INVALID_ARGUMENT", "reset_epoch"),
    (item_field("initial_offset", -1), "INVALID_ARGUMENT", "initial_offset"),
    (item_field("initial_offset", 1 << 62 | 1), "INVALID_ARGUMENT", "initial_offset"),
    (resuming((5, 5)), "INVALID_ARGUMENT", "resume"),
    (resuming((-1, 5)), "INVALID_ARGUMENT", "resume"),
    (resuming((5, 9), (8, 12)), "INVALID_ARGUMENT", "resume"),
    (resuming((0, 1 << 62 | 1)), "INVALID_ARGUMENT", "resume"),
    (resuming(*((n, n + 1) for n in range(0, 2 * 4_097, 2))), "LIMIT_EXCEEDED", "resume"),
]
OF_RELEASE: list[tuple[Spoil, str, str]] = [
    (nothing, "INVALID_ARGUMENT", "holds"),
    (many(1_025), "LIMIT_EXCEEDED", "holds"),
    (twice, "INVALID_ARGUMENT", "holds"),
    (item_field("token", 0), "INVALID_ARGUMENT", "token"),
    (item_field("token", -1), "INVALID_ARGUMENT", "token"),
]


def running(request: pb.KeepAliveRequest) -> pb.RunningHandler:
    call = request.holds[0].running
    call.queue.CopyFrom(queue().queue)
    return call


def before_the_first_offset(request: Any) -> None:
    running(request).offset = -1


def since_the_future(request: Any) -> None:
    running(request).running_ms = -1


def of_a_bad_topic(request: Any) -> None:
    running(request).queue.topic = "a/b"


OF_KEEP_ALIVE: list[tuple[Spoil, str, str]] = [
    (before_the_first_offset, "INVALID_ARGUMENT", "running.offset"),
    (since_the_future, "INVALID_ARGUMENT", "running.running_ms"),
    (of_a_bad_topic, "INVALID_NAME", "topic"),
    (many(10_001), "LIMIT_EXCEEDED", "holds"),
    (twice, "INVALID_ARGUMENT", "holds"),
    (item_field("token", 0), "INVALID_ARGUMENT", "token"),
    (field("acquire_seq", -1), "INVALID_ARGUMENT", "acquire_seq"),
]
OF_RELEASE_ALL: list[tuple[Spoil, str, str]] = [
    *((field("group", name), "INVALID_NAME", "group") for name in BAD_NAMES[1:]),
]
OF_FORCE: list[tuple[Spoil, str, str]] = [
    *(
        (field("op_id", op_id), "INVALID_ARGUMENT", "op_id")
        for op_id in ("", "a b", "a\n", "ä", "x" * 59)
    ),
    (field("by", ""), "INVALID_ARGUMENT", "by"),
    (field("by", "x" * 256), "LIMIT_EXCEEDED", "by"),
    (field("reason", ""), "INVALID_ARGUMENT", "reason"),
    (field("reason", "x" * 1_025), "LIMIT_EXCEEDED", "reason"),
]


async def refusal(node: Node, request: Any) -> BatonError:
    try:
        if isinstance(request, pb.AcquireRequest):
            answers = [a async for a in node.stub.Acquire(request, timeout=TIMEOUT_S)]
            raise AssertionError(f"accepted {answers[:1]}")
        if isinstance(request, pb.WatchRequest):
            raise AssertionError(f"accepted {await anext(aiter(node.stub.Watch(request)))}")
        method = type(request).__name__.removesuffix("Request")
        answer = await getattr(node.stub, method)(request, timeout=TIMEOUT_S)
        raise AssertionError(f"accepted {answer}")
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return from_rpc_error(error)


@pytest.mark.parametrize(
    ("make", "cases"),
    [
        (acquire_request, EVERYWHERE + OF_ACQUIRE),
        (keep_alive_request, EVERYWHERE + OF_KEEP_ALIVE),
        (release_request, EVERYWHERE + OF_RELEASE),
        (release_all_request, OF_CLIENTS + OF_RELEASE_ALL),
        (watch_request, OF_CLIENTS),
        (force_request, OF_QUEUES + OF_FORCE),
        (describe_request, OF_QUEUES),
    ],
    ids=["Acquire", "KeepAlive", "Release", "ReleaseAll", "Watch", "ForceRelease", "Describe"],
)
async def test_malformed_request_is_rejected_and_changes_nothing(
    scene: Scene, make: Callable[[], Any], cases: list[tuple[Spoil, str, str]]
) -> None:
    node = await scene.leader()
    await scene.set_group(Member("a"))
    for number, (spoil, reason, field_path) in enumerate(cases):
        request = make()
        spoil(request)
        error = await refusal(node, request)
        assert (error.reason, error.facts["field"]) == (reason, field_path), number
        assert error.message
        assert error.remedy
    assert await scene.stored_count() == 0
    assert scene.rules.fences() == []
    assert (await node.stub.List(pb.ListRequest(), timeout=TIMEOUT_S)).entries == []


async def test_well_formed_request_at_every_limit_is_accepted(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a" * 255)
    request = acquire_request()
    request.incarnation.CopyFrom(a.incarnation)
    request.generation = await scene.set_group(a, queue_count=65_536)
    many(1_024)(request)
    queue_id(65_535)(request)
    resuming(*((n, n + 1) for n in range(0, 2 * 4_096, 2)))(request)
    item_field("initial_offset", 1 << 62)(request)
    answers = [r async for r in node.stub.Acquire(request, timeout=20)]
    assert sum(answer.HasField("grant") for answer in answers) == 1_024


async def test_malformed_filter_of_a_listing_is_rejected(scene: Scene) -> None:
    node = await scene.leader()
    requests = [pb.ListRequest(group=name) for name in BAD_NAMES[1:]]
    for request in [*requests, *(pb.ListRequest(topic=name) for name in BAD_NAMES[1:])]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.stub.List(request, timeout=TIMEOUT_S)
        assert from_rpc_error(refused.value).reason == "INVALID_NAME"


async def test_unknown_client_renews_and_releases_nothing(scene: Scene) -> None:
    node, client = await scene.leader(), Member("x")
    assert await client.state(node, 1) == "NOT_OWNER"
    assert await client.release(node, 1) == 0
    assert await scene.stored_count() == 0


async def test_call_without_a_deadline_is_rejected(scene: Scene) -> None:
    node = await scene.leader()
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.stub.KeepAlive(keep_alive_request())
    assert from_rpc_error(refused.value).reason == "NO_DEADLINE"


async def test_malformed_item_at_offsets_does_not_fail_the_others(scene: Scene) -> None:
    """offsets rejects whole calls, and one call carries the requests of several clients."""
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)

    async def spoil(request: Any, proceed: Any) -> Any:
        for item in request.items:
            if item.queue.queue.queue_id == 3:
                item.attempt = ""
        return await proceed()

    scene.rules.rules["Fence"] = spoil
    outcomes = await a.acquire_each(node, generation, range(8))
    errors = {q: o for q, o in outcomes.items() if isinstance(o, BatonError)}
    assert set(errors) == {3}
    assert errors[3].reason == "INVALID_ARGUMENT"
    assert await scene.stored_count() == 7
