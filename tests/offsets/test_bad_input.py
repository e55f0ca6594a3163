"""Goal: malformed input is rejected with the name of the field, and changes nothing: the whole call
or, if a call has items of many clients, only the item.

Method: the real service behind a real channel; every batched call with a bad item after a good one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.rpc import error_from_pb
from batonmq.errors import BatonError
from batonmq_server.offsets.request_reader import ITEMS_MAX, NUMBER_MAX
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

INT64_MAX = (1 << 63) - 1
# ---- bad input, every call

ITEMS: dict[str, Callable[..., Any]] = {
    "Fence": lambda item: pb.FenceRequest(term=TERM, items=[fence_item(attempt="x"), item]),
    "RecordDelivered": lambda item: pb.RecordDeliveredRequest(
        items=[pb.DeliveryItem(queue=queue(), token=1, next_offset=5_000), item]
    ),
    "Touch": lambda item: pb.TouchRequest(items=[pb.TouchItem(queue=queue(), token=1), item]),
    "Commit": lambda item: pb.CommitRequest(
        items=[pb.CommitItem(queue=queue(), token=1, committed_offset=1), item]
    ),
    "Close": lambda item: pb.CloseRequest(
        items=[pb.CloseItem(queue=queue(), token=1, committed_offset=1), item]
    ),
}
BATCHED = sorted(VALID_ITEMS)
SHARED = {"Fence", "RecordDelivered", "Touch"}
"""Calls with items of many clients."""


async def refused_item(service: Service, method: str, bad: Any) -> BatonError:
    """Return the error of an item after a good one; the fact `field` as if the call had failed."""
    request = ITEMS[method](bad)
    if method not in SHARED:
        code, error = await rejection(service, method, request)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        return error
    count = len(service.offsets.table)
    valid, rejected = (await call(service, method, request)).outcomes
    assert not valid.HasField("error") or reasons([valid]) == ["REASON_TOKEN_MISMATCH"]
    assert len(service.offsets.table) == count
    error = error_from_pb(rejected.error)
    assert error.kind == "INVALID_ARGUMENT"
    error.facts["field"] = f"items[1].{error.facts['field']}"
    return error


def named(group: str = "g", topic: str = "t", broker: str = "b", queue_id: int = 0) -> Any:
    inner = queue_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
    return queue_pb2.GroupQueue(group=group, queue=inner)


BAD_QUEUES = {
    "no queue": (None, "INVALID_ARGUMENT", "queue"),
    "no inner queue": (queue_pb2.GroupQueue(group="g"), "INVALID_ARGUMENT", "queue"),
    "no group": (named(group=""), "INVALID_NAME", "group"),
    "separator in group": (named(group="../etc/passwd"), "INVALID_NAME", "group"),
    "NUL in group": (named(group="a\0b"), "INVALID_NAME", "group"),
    "newline in topic": (named(topic="news\n"), "INVALID_NAME", "topic"),
    "backslash in topic": (named(topic="a\\b"), "INVALID_NAME", "topic"),
    "long topic": (named(topic="t" * 128), "INVALID_NAME", "topic"),
    "separator in broker": (named(broker="a/b"), "INVALID_NAME", "broker"),
    "control character in broker": (named(broker="a\x1b"), "INVALID_NAME", "broker"),
    "queue id": (named(queue_id=65_536), "INVALID_ARGUMENT", "queue_id"),
}


@pytest.mark.parametrize("method", BATCHED)
@pytest.mark.parametrize("case", BAD_QUEUES)
async def test_malformed_queue_is_rejected(service: Service, method: str, case: str) -> None:
    await service.start_owner()
    bad, reason, field = BAD_QUEUES[case]
    error = await refused_item(service, method, VALID_ITEMS[method](queue=bad))
    assert (error.reason, error.facts["field"]) == (reason, f"items[1].{field}")


@pytest.mark.parametrize("case", BAD_QUEUES)
async def test_malformed_queue_is_rejected_by_query(service: Service, case: str) -> None:
    bad, reason, field = BAD_QUEUES[case]
    bad = bad or queue_pb2.GroupQueue()
    code, error = await rejection(service, "Query", pb.QueryRequest(queues=[queue(), bad]))
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert error.facts["field"] == f"items[1].{field}"


@pytest.mark.parametrize("group", ["", "a/b", "a\0", "a\n", "g" * 128, "ü"])
async def test_malformed_group_is_rejected_by_query_group(service: Service, group: str) -> None:
    code, error = await rejection(service, "QueryGroup", pb.QueryGroupRequest(group=group))
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_NAME")


def acks(field: str, value: int) -> pb.Acks:
    """Acks with one field set."""
    result = pb.Acks()
    setattr(result, field, value)
    return result


BAD_RUNS = [
    [run(-1, 4)],
    [run(4, 4)],
    [run(5, 4)],
    [run(0, 5), run(4, 6)],
    [run(6, 8), run(0, 5)],
    [run(0, NUMBER_MAX + 1)],
    [run(0, INT64_MAX)],
]
BAD_ITEMS: list[tuple[str, dict[str, Any], str]] = [
    *[("Commit", {"acked": runs}, "acked") for runs in BAD_RUNS],
    *[("Close", {"acked": runs}, "acked") for runs in BAD_RUNS],
    *[("Close", {"unfinished": runs}, "unfinished") for runs in BAD_RUNS],
    *[("Fence", {"resume": runs}, "resume") for runs in BAD_RUNS],
    *[
        (method, {"token": token}, "token")
        for method in ("RecordDelivered", "Touch", "Commit", "Close")
        for token in (0, -1, INT64_MAX)
        if (method, token) != ("Commit", 0)  # for a group without ownership
    ],
    *[
        ("RecordDelivered", {"progress": acks(field, value)}, f"progress.{field}")
        for field in ("committed_offset", "reset_epoch")
        for value in (-1, INT64_MAX)
    ],
    *[
        ("RecordDelivered", {"progress": pb.Acks(acked=runs)}, "progress.acked")
        for runs in BAD_RUNS
    ],
    ("RecordDelivered", {"subscription_generation": -1}, "subscription_generation"),
    ("Fence", {"subscription_generation": -1}, "subscription_generation"),
    *[
        (method, {field: value}, field)
        for method in ("Commit", "Close")
        for field in ("committed_offset", "reset_epoch")
        for value in (-1, INT64_MAX)
    ],
    ("RecordDelivered", {"first_offset": 1}, "next_offset"),
    ("RecordDelivered", {"first_offset": 2}, "next_offset"),
    ("RecordDelivered", {"first_offset": -1}, "next_offset"),
    ("RecordDelivered", {"next_offset": INT64_MAX}, "next_offset"),
    ("Fence", {"condition": pb.FENCE_CONDITION_UNSPECIFIED}, "condition"),
    ("Fence", {"condition": 99}, "condition"),
    ("Fence", {"attempt": ""}, "attempt"),
    ("Fence", {"attempt": "a" * 65}, "attempt"),
    ("Fence", {"attempt": "a\nb"}, "attempt"),
    ("Fence", {"condition": pb.FENCE_CONDITION_IDLE}, "idle_ms"),
    ("Fence", {"condition": pb.FENCE_CONDITION_IDLE, "idle_ms": -5}, "idle_ms"),
    ("Fence", {"condition": pb.FENCE_CONDITION_FORCED}, "forced_by"),
    ("Fence", {"condition": pb.FENCE_CONDITION_FORCED, "forced_by": "a\n"}, "forced_by"),
    ("Fence", {"condition": pb.FENCE_CONDITION_FORCED, "forced_by": "a"}, "forced_reason"),
    ("Fence", {"holder": queue_pb2.Incarnation(client_id="a")}, "holder.incarnation_id"),
    ("Fence", {"holder": queue_pb2.Incarnation(client_id="", incarnation_id=1)}, "client_id"),
    ("Fence", {"holder": queue_pb2.Incarnation(client_id="a/b", incarnation_id=1)}, "client_id"),
    ("Fence", {"holder": queue_pb2.Incarnation(client_id="a\0", incarnation_id=1)}, "client_id"),
    *[
        ("Fence", {field: value}, field)
        for field in ("expected_token", "token_min", "reset_epoch", "initial_offset")
        for value in (-1, INT64_MAX)
    ],
]


@pytest.mark.parametrize(("method", "fields", "field"), BAD_ITEMS)
async def test_malformed_item_is_rejected(
    service: Service, method: str, fields: dict[str, Any], field: str
) -> None:
    await service.start_owner()
    error = await refused_item(service, method, VALID_ITEMS[method](**fields))
    assert error.facts["field"] == f"items[1].{field}"


@pytest.mark.parametrize("method", [*BATCHED, "Query"])
async def test_call_without_items_is_rejected(service: Service, method: str) -> None:
    request = getattr(pb, f"{method}Request")()
    if method == "Fence":
        request.term = TERM
    code, error = await rejection(service, method, request)
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert error.facts == {"field": "items"}


@pytest.mark.parametrize("method", [*BATCHED, "Query"])
async def test_call_with_too_many_items_is_rejected(service: Service, method: str) -> None:
    await service.start_owner()
    if method == "Query":
        request: Any = pb.QueryRequest(queues=[queue()] * (ITEMS_MAX + 1))
    else:
        request = ITEMS[method](VALID_ITEMS[method]())
        request.items.extend([request.items[0]] * (ITEMS_MAX - 1))
    code, error = await rejection(service, method, request)
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED")
    assert error.facts == {"field": "items", "limit": "1024", "actual": "1025"}


@pytest.mark.parametrize(
    ("method", "field"),
    [("Commit", "acked"), ("Close", "acked"), ("Close", "unfinished"), ("Fence", "resume")],
)
async def test_too_many_ranges_are_rejected(service: Service, method: str, field: str) -> None:
    await service.start_owner()
    runs = [run(at, at + 1) for at in range(0, 2_002, 2)]
    error = await refused_item(service, method, VALID_ITEMS[method](**{field: runs}))
    assert error.reason == "LIMIT_EXCEEDED"
    assert error.facts == {"field": f"items[1].{field}", "limit": "1000", "actual": "1001"}


@pytest.mark.parametrize("method", ["Commit", "Close"])
async def test_two_items_for_one_queue_are_rejected(service: Service, method: str) -> None:
    await service.start_owner()
    code, error = await rejection(
        service, method, ITEMS[method](VALID_ITEMS[method](queue=queue()))
    )
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert error.facts == {"field": "items"}


@pytest.mark.parametrize("term", [0, -1, INT64_MAX])
@pytest.mark.parametrize("method", ["Announce", "Fence"])
async def test_malformed_term_is_rejected(service: Service, method: str, term: int) -> None:
    items = {"items": [fence_item()]} if method == "Fence" else {}
    request = getattr(pb, f"{method}Request")(term=term, **items)
    code, error = await rejection(service, method, request)
    assert (code, error.facts) == (grpc.StatusCode.INVALID_ARGUMENT, {"field": "term"})


@pytest.mark.parametrize(
    "method", [*BATCHED, "Query", "Announce", "DeleteTopic", "DeleteGroup", "Reset", "Clone"]
)
async def test_caller_that_has_seen_a_newer_epoch_is_rejected(
    service: Service, method: str
) -> None:
    await service.start_owner()
    if method in ITEMS:
        request = ITEMS[method](VALID_ITEMS[method]())
    elif method == "Query":
        request = pb.QueryRequest(queues=[queue()])
    elif method == "DeleteTopic":
        request = delete_topic_request()
    elif method in ("DeleteGroup", "Reset", "Clone"):
        request = getattr(pb, f"{method}Request")()
    else:
        request = pb.AnnounceRequest(term=99)
    request.offsets_epoch = 2
    code, error = await rejection(service, method, request)
    assert (code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OLD_EPOCH")
    assert error.facts == {"epoch": "1", "current": "2"}


@pytest.mark.parametrize("method", ["RecordDelivered", "Touch", "Commit", "Close"])
async def test_stale_token_is_fenced_and_writes_nothing(service: Service, method: str) -> None:
    await service.start_owner()
    before = service.stored()
    request_type = getattr(pb, f"{method}Request")
    request = request_type(items=[VALID_ITEMS[method](queue=queue(), token=5)])
    answer = await call(service, method, request)
    assert reasons(answer.outcomes) == ["REASON_FENCED"]
    assert service.stored() == before


@pytest.mark.parametrize("method", ["RecordDelivered", "Touch", "Commit", "Close"])
async def test_unknown_queue_is_rejected_and_stays_unknown(service: Service, method: str) -> None:
    await service.start_owner()
    before = service.stored()
    request = getattr(pb, f"{method}Request")(items=[VALID_ITEMS[method]()])
    answer = await call(service, method, request)
    assert reasons(answer.outcomes) == ["REASON_UNKNOWN_QUEUE"]
    assert (service.stored(), len(service.offsets.table)) == (before, 1)


# ---- resets, clones, deletions of groups

BAD_RESETS: dict[str, tuple[dict[str, Any], str]] = {
    "no op id": ({"op_id": ""}, "op_id"),
    "long op id": ({"op_id": "x" * 65}, "op_id"),
    "op id with a newline": ({"op_id": "x\ny"}, "op_id"),
    "no operator": ({"by": ""}, "by"),
    "no reason": ({"reason": ""}, "reason"),
    "long reason": ({"reason": "x" * 1_025}, "reason"),
    "no queues": ({"items": []}, "items"),
    "too many queues": ({"items": [pb.ResetItem(queue=queue())] * 1_025}, "items"),
    "a queue twice": ({"items": [pb.ResetItem(queue=queue())] * 2}, "items"),
    "queues of two groups": (
        {"items": [pb.ResetItem(queue=queue()), pb.ResetItem(queue=queue("others"))]},
        "items",
    ),
    "offset below 0": (
        {"items": [pb.ResetItem(queue=queue(), to_offset=-1)]},
        "items[0].to_offset",
    ),
    "great offset": (
        {"items": [pb.ResetItem(queue=queue(), to_offset=INT64_MAX)]},
        "items[0].to_offset",
    ),
    "undo with queues": ({"undo_op_id": "x", "undo_group": "readers"}, "items"),
    "undo without a group": ({"undo_op_id": "x", "items": []}, "group"),
    "undo of no id": ({"undo_op_id": "a b", "undo_group": "g", "items": []}, "undo_op_id"),
}


@pytest.mark.parametrize("case", BAD_RESETS)
async def test_malformed_reset_is_rejected(service: Service, case: str) -> None:
    fields, field = BAD_RESETS[case]
    items = [pb.ResetItem(queue=queue(), to_offset=4)]
    good: dict[str, Any] = {"op_id": "op", "by": "admin", "reason": "replay", "items": items}
    code, error = await rejection(service, "Reset", pb.ResetRequest(**(good | fields)))
    assert (code, error.facts["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"op_id": ""}, "op_id"),
        ({"from_group": ""}, "group"),
        ({"to_group": "a/b"}, "group"),
        ({"to_group": "readers"}, "to_group"),
        ({"topic": "a\n"}, "topic"),
    ],
)
async def test_malformed_clone_is_rejected(
    service: Service, fields: dict[str, str], field: str
) -> None:
    good: Any = {
        "op_id": "op",
        "by": "a",
        "reason": "b",
        "from_group": "readers",
        "to_group": "others",
    }
    code, error = await rejection(service, "Clone", pb.CloneRequest(**(good | fields)))
    assert (code, error.facts["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    "request_pb",
    [
        pb.DeleteGroupRequest(),
        pb.DeleteGroupRequest(group="readers", topic="a/b"),
        pb.ListResetsRequest(),
    ],
)
async def test_malformed_group_or_topic_is_rejected(service: Service, request_pb: Any) -> None:
    await service.start_owner()
    name = type(request_pb).__name__.removesuffix("Request")
    code, error = await rejection(service, name, request_pb)
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_NAME")


async def test_resume_without_a_holder_is_rejected(service: Service) -> None:
    await service.start_owner()
    item = fence_item(resume=[run(0, 1)])
    item.ClearField("holder")
    error = await refused_item(service, "Fence", item)
    assert (error.reason, error.facts) == ("INVALID_ARGUMENT", {"field": "items[1].resume"})
