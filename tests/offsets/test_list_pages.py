"""Lists of resets, holds and the progress of a group, in pages.

Goal: the pages of a list have every entry once, also while entries are added and removed between
two pages; a malformed token is rejected.
Method: the real service behind a real channel, with small pages.
"""

from __future__ import annotations

import base64
from typing import Any

import grpc
import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq_server.offsets.core.holds import HOLDS_MAX
from batonmq_server.runtime import paging
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.offsets.service_calls import (
    TERM,
    Service,
    call,
    fence_item,
    queue,
    rejection,
    store_topic,
)

QUEUES = [(topic, broker, number) for topic in ("news", "sport") for broker in "ab" for number in
          (0, 2, 10)]  # fmt: skip
REQUESTS: dict[str, Any] = {
    "QueryGroup": pb.QueryGroupRequest(group="readers"),
    "ListResets": pb.ListResetsRequest(group="readers"),
    "ListHolds": pb.ListHoldsRequest(queue=queue()),
}
NOT_TOKENS = ["!", "bm8", paging.token_of_key("news\0a"), paging.token_of_key("-1")]


@pytest.fixture(autouse=True)
async def _topics_exist(etcd: EtcdSession) -> None:
    for topic in ("early", "news", "sport"):
        await store_topic(etcd, 11, topic, ("a", "b", "broker-a", "c"))


def ref(topic: str, broker: str, queue_id: int) -> queue_pb2.GroupQueue:
    inner = queue_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
    return queue_pb2.GroupQueue(group="readers", queue=inner)


async def reset(service: Service, op_id: str, *queues: queue_pb2.GroupQueue) -> None:
    items = [pb.ResetItem(queue=each, to_offset=1) for each in queues]
    request = pb.ResetRequest(op_id=op_id, by="admin", reason="test", items=items)
    await call(service, "Reset", request)


async def force(service: Service, token: int) -> None:
    """Give the queue to another client, which adds a hold."""
    item = fence_item(
        attempt=f"attempt-{token + 1}",
        expected_token=token,
        condition=pb.FENCE_CONDITION_FORCED,
        forced_by="admin",
        forced_reason="test",
        holder=queue_pb2.Incarnation(client_id=f"client-{token}", incarnation_id=1),
    )
    await call(service, "Fence", pb.FenceRequest(term=TERM, items=[item]))


async def queue_page(service: Service, page_token: str, size: int) -> tuple[list[Any], str]:
    request = pb.QueryGroupRequest(group="readers", page_size=size, page_token=page_token)
    answer = await call(service, "QueryGroup", request)
    refs = [each.queue.queue for each in answer.queues]
    return [(one.topic, one.broker, one.queue_id) for one in refs], answer.next_page_token


async def reset_page(service: Service, page_token: str, size: int) -> tuple[list[Any], str]:
    request = pb.ListResetsRequest(group="readers", page_size=size, page_token=page_token)
    answer = await call(service, "ListResets", request)
    return [one.op_id for one in answer.resets], answer.next_page_token


async def hold_page(service: Service, page_token: str, size: int) -> tuple[list[Any], str]:
    request = pb.ListHoldsRequest(queue=queue(), page_size=size, page_token=page_token)
    answer = await call(service, "ListHolds", request)
    return [one.token for one in answer.holds], answer.next_page_token


async def all_pages(service: Service, read: Any, size: int) -> list[list[Any]]:
    entries, page_token = await read(service, "", size)
    pages = [entries]
    while page_token:
        entries, page_token = await read(service, page_token, size)
        pages.append(entries)
    return pages


async def test_progress_of_a_group_is_paged_in_the_order_of_its_queues(service: Service) -> None:
    await reset(service, "op", *(ref(*each) for each in reversed(QUEUES)))
    pages = await all_pages(service, queue_page, 5)
    assert [len(page) for page in pages] == [5, 5, 2]
    assert [each for page in pages for each in page] == QUEUES


async def test_queues_added_and_removed_between_pages_hide_no_other_queue(service: Service) -> None:
    await reset(service, "op", *(ref(*each) for each in QUEUES))
    first, page_token = await queue_page(service, "", 5)
    await reset(service, "more", ref("early", "a", 0), ref("sport", "c", 0))
    await call(service, "DeleteTopic", pb.DeleteTopicRequest(topic="news", topic_id=9))
    rest, page_token = await queue_page(service, page_token, 100)
    assert (first, page_token) == (QUEUES[:5], "")
    assert rest == [*QUEUES[6:], ("sport", "c", 0)]


async def test_resets_are_paged_newest_first(service: Service) -> None:
    for number in range(7):
        await reset(service, f"op-{number}", queue())
    pages = await all_pages(service, reset_page, 3)
    assert pages == [["op-6", "op-5", "op-4"], ["op-3", "op-2", "op-1"], ["op-0"]]


async def test_resets_recorded_between_pages_do_not_shift_the_next_page(service: Service) -> None:
    for number in range(4):
        await reset(service, f"op-{number}", queue())
    first, page_token = await reset_page(service, "", 2)
    await reset(service, "newer", queue())
    rest, page_token = await reset_page(service, page_token, 2)
    assert (first, rest, page_token) == (["op-3", "op-2"], ["op-1", "op-0"], "")
    newest, _ = await reset_page(service, "", 1)
    assert newest == ["newer"]


async def test_holds_are_paged_newest_first_also_while_the_owner_changes(service: Service) -> None:
    await service.start_owner(delivered=0)
    for token in range(1, 7):
        await force(service, token)
    assert await all_pages(service, hold_page, 3) == [[7, 6, 5], [4, 3, 2], [1]]
    first, page_token = await hold_page(service, "", 3)
    await force(service, 7)
    rest, page_token = await hold_page(service, page_token, 10)
    assert (first, rest, page_token) == ([7, 6, 5], [4, 3, 2, 1], "")


async def test_holds_dropped_between_pages_are_left_out(service: Service) -> None:
    await service.start_owner(delivered=0)
    for token in range(1, HOLDS_MAX):
        await force(service, token)
    _, page_token = await hold_page(service, "", HOLDS_MAX - 2)
    await force(service, HOLDS_MAX)
    assert await hold_page(service, page_token, 10) == ([2], "")


@pytest.mark.parametrize("method", REQUESTS)
async def test_default_page_has_all_of_a_short_list(service: Service, method: str) -> None:
    await service.start_owner()
    await reset(service, "op", queue())
    assert not (await call(service, method, REQUESTS[method])).next_page_token


@pytest.mark.parametrize("page_token", NOT_TOKENS)
@pytest.mark.parametrize("method", REQUESTS)
async def test_malformed_page_token_is_rejected(
    service: Service, method: str, page_token: str
) -> None:
    await service.start_owner()
    request = type(REQUESTS[method])()
    request.CopyFrom(REQUESTS[method])
    request.page_token = page_token
    code, error = await rejection(service, method, request)
    assert (code, error.facts["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "page_token")


async def test_page_token_of_one_list_is_rejected_by_another(service: Service) -> None:
    await reset(service, "op", *(ref(*each) for each in QUEUES))
    _, page_token = await queue_page(service, "", 1)
    request = pb.ListResetsRequest(group="readers", page_token=page_token)
    code, _ = await rejection(service, "ListResets", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert b"news" in base64.urlsafe_b64decode(page_token), "the token is opaque, not encrypted"
