"""Goal: in a call with items of many clients, the items of one client do not fail those of others.

Method: the real service behind a real channel, with etcd, or with an etcd that does not answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq_server.offsets import placement_resolver
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.runtime.group_placements import PLACEMENTS_PREFIX
from tests.offsets.service_calls import (
    TERM,
    VALID_ITEMS,
    Service,
    call,
    queue,
    reasons,
    run,
    store_topic,
)
from tests.support.conditions import until

MADE_UP = [f"made-up-{number}" for number in range(5)]


class StalledEtcd(EtcdSession):
    """An etcd whose reads get no answer while `stalled` is set."""

    stalled = False
    stalled_reads = waiting = 0

    async def get(self, key: str) -> KeyValue | None:
        if self.stalled:
            self.stalled_reads += 1
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        return await super().get(key)


@pytest.fixture
async def etcd(etcd_endpoint: str) -> AsyncIterator[StalledEtcd]:
    async with StalledEtcd(etcd_endpoint, f"test-{secrets.token_hex(8)}", Clock()) as session:
        yield session


def shared(method: str, *items: Any) -> Any:
    """Return a call with these items."""
    term = {"term": TERM} if method == "Fence" else {}
    return getattr(pb, f"{method}Request")(items=items, **term)


async def placed_groups(etcd: EtcdSession) -> set[str]:
    entries, _ = await etcd.get_prefix(PLACEMENTS_PREFIX)
    return {stored.key.removeprefix(PLACEMENTS_PREFIX) for stored in entries}


@pytest.mark.parametrize("method", ["Fence", "RecordDelivered", "Touch"])
async def test_malformed_items_do_not_fail_the_other_items(service: Service, method: str) -> None:
    for queue_id in (3, 4):
        await service.start_owner(queue_id=queue_id)
    bad: dict[str, Any] = {"attempt": ""} if method == "Fence" else {"token": (1 << 62) + 1}
    good: dict[str, Any] = {"expected_token": 1} if method == "Fence" else {"token": 1}
    if method == "Fence":
        good["condition"] = pb.FENCE_CONDITION_SAME_HOLDER
        good["attempt"] = "attempt-2"
    item = VALID_ITEMS[method]
    request = shared(
        method,
        item(queue=queue(queue_id=3), **bad),
        item(queue=queue(queue_id=3), **good),
        item(queue=queue(queue_id=4), **bad),
        item(queue=queue(queue_id=5), **bad),
        item(queue=queue(queue_id=4), **good),
    )
    answer = await call(service, method, request)
    rejected = [one.HasField("error") for one in answer.outcomes]
    assert rejected == [True, False, True, True, False]
    facts = [dict(one.error.facts) for one in answer.outcomes if one.HasField("error")]
    assert facts == [{"field": "attempt" if method == "Fence" else "token"}] * 3


async def test_malformed_acks_fail_only_their_own_delivery(
    service: Service,
) -> None:
    await service.start_owner(queue_id=3, delivered=0)
    await service.start_owner(queue_id=4, delivered=0)
    acks = pb.Acks(acked=[run(5, 5)])
    items = [
        pb.DeliveryItem(queue=queue(queue_id=3), token=1, next_offset=1, progress=acks),
        pb.DeliveryItem(queue=queue(queue_id=4), token=1, next_offset=1),
    ]
    answer = await call(service, "RecordDelivered", shared("RecordDelivered", *items))
    assert reasons(answer.outcomes)[0] == "REASON_INVALID_ARGUMENT"
    assert answer.outcomes[0].error.facts["field"] == "progress.acked"
    assert answer.outcomes[1].HasField("delivered")
    query = pb.QueryRequest(queues=[queue(queue_id=queue_id) for queue_id in (3, 4)])
    outcomes = (await call(service, "Query", query)).outcomes
    assert [one.progress.delivered_offset for one in outcomes] == [0, 1]


@pytest.mark.parametrize("method", ["RecordDelivered", "Touch", "Commit", "Close"])
async def test_call_under_a_token_for_an_unknown_group_is_rejected_without_reading_etcd(
    service: Service, etcd: StalledEtcd, method: str
) -> None:
    await service.start_owner()
    etcd.stalled = True
    items = [VALID_ITEMS[method](queue=queue(group)) for group in MADE_UP]
    good: dict[str, Any] = {"next_offset": 11} if method == "RecordDelivered" else {}
    items.append(VALID_ITEMS[method](queue=queue(), **good))
    answer = await call(service, method, shared(method, *items))
    assert reasons(answer.outcomes)[:-1] == ["REASON_NOT_SERVING"] * len(MADE_UP)
    assert not answer.outcomes[-1].HasField("error")
    assert etcd.stalled_reads == 0


async def test_commit_without_token_for_an_unknown_group_creates_no_placement(
    service: Service, etcd: StalledEtcd
) -> None:
    await store_topic(etcd)
    service.add_gate("readers", ownership="OWNERSHIP_OFF")
    items = [pb.CommitItem(queue=queue(group), committed_offset=1) for group in MADE_UP]
    items.append(pb.CommitItem(queue=queue(), committed_offset=1))
    answer = await call(service, "Commit", shared("Commit", *items))
    assert reasons(answer.outcomes)[:-1] == ["REASON_GROUP_NOT_FOUND"] * len(MADE_UP)
    assert answer.outcomes[-1].HasField("committed")
    assert await placed_groups(etcd) == {"readers"}


async def test_groups_of_a_call_are_resolved_concurrently(
    service: Service, etcd: StalledEtcd
) -> None:
    etcd.stalled = True
    query = pb.QueryRequest(queues=[queue(group) for group in MADE_UP])
    async with asyncio.TaskGroup() as tasks:
        querying = tasks.create_task(call(service, "Query", query))
        await until(lambda: etcd.waiting == len(MADE_UP))
        querying.cancel()


async def test_slow_etcd_fails_only_items_of_groups_that_need_it(
    service: Service, etcd: StalledEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.start_owner()
    etcd.stalled = True
    monkeypatch.setattr(placement_resolver, "RESOLVE_TIMEOUT_S", 0.05)
    query = pb.QueryRequest(queues=[*map(queue, MADE_UP), queue()])
    answer = await call(service, "Query", query)
    assert reasons(answer.outcomes)[:-1] == ["REASON_NOT_SERVING"] * len(MADE_UP)
    assert answer.outcomes[-1].HasField("progress")
    assert etcd.stalled_reads == len(MADE_UP)
