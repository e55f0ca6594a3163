"""Lock listings in pages.

Goal: the pages of a listing have every lock once, also while locks are added and removed; the lock
manager needs memory for one page only; a malformed token is rejected. Method: a lock manager with
real etcd and offsets and small pages; the lock table alone for entries that are removed; and
100,000 locks listed over gRPC in a process of its own, for the memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.cli.output import Columns, Output, OutputFormat
from batonmq_server.lockmgr.core.lock_entry import LockPolicy, LockRecord
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.runtime.paging import token_of_key
from tests.lockmgr.listing_memory import LOCKS
from tests.lockmgr.scene import GROUP, TIMEOUT_S, TOPIC, Member, Node, Scene

GROWTH_KIB_MAX = 32_000
"""One page has 1 MB at most; all 100,000 locks in one answer need 188 MB."""
COLUMNS: Columns = {"QUEUE": "queue_id", "OWNER": "client_id"}


async def page(node: Node, **options: Any) -> tuple[list[int], str]:
    """Return the queue ids of one page, and the next token."""
    answer = await node.stub.List(pb.ListRequest(**options), timeout=TIMEOUT_S)
    return [entry.queue.queue.queue_id for entry in answer.entries], answer.next_page_token


async def test_locks_are_listed_in_pages(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    await a.acquire_each(node, await scene.set_group(a), range(25))
    first, token = await page(node, page_size=10)
    second, token = await page(node, page_size=10, page_token=token)
    third, token = await page(node, page_size=10, page_token=token, group=GROUP, topic=TOPIC)
    assert (first, second, third) == ([*range(10)], [*range(10, 20)], [*range(20, 25)])
    assert token == ""
    assert await page(node, page_size=25) == ([*range(25)], "")
    assert await page(node, page_token=token_of_key(f"{GROUP}/{TOPIC}/broker-b/0")) == ([], "")
    assert await page(node, group="another") == ([], "")


async def test_locks_added_between_pages_leave_the_others_listed_once(scene: Scene) -> None:
    node, a = await scene.leader(), Member("a")
    generation = await scene.set_group(a)
    await a.acquire_each(node, generation, range(0, 40, 2))
    first, token = await page(node, page_size=10)
    await a.acquire_each(node, generation, [5, 25, 41])
    second, token = await page(node, page_size=100, page_token=token)
    assert first == [*range(0, 20, 2)]
    assert second == [20, 22, 24, 25, *range(26, 40, 2), 41]
    assert token == ""


def test_entries_removed_between_pages_leave_the_others_listed_once() -> None:
    table, requester = LockTable(LockPolicy(waiter_memory_ms=10)), Incarnation("a", 1)
    keys = [GroupQueue("g", "t", "b", queue_id) for queue_id in range(6)]
    for key in keys[::2]:
        table.load(key, LockRecord(token=1), 1, 0)
    for key in keys[1::2]:
        table.add_waiter(key, requester, 0)
    assert [entry.key for entry in table.entries()] == keys
    table.drop_old_waiters(1_000)
    assert [entry.key for entry in table.entries(after=keys[1])] == keys[2::2]
    assert [entry.key for entry in table.entries("g", "t", keys[4])] == []


@pytest.mark.parametrize(
    "token",
    [
        "flights",
        token_of_key("group/topic/broker-a"),
        token_of_key("g/t/b/x"),
        token_of_key(f"g/t/b/{'9' * 5_000}"),
    ],
    ids=["no token", "no queue id", "no number", "number too long"],
)
async def test_malformed_page_token_is_rejected(scene: Scene, token: str) -> None:
    node = await scene.leader()
    with pytest.raises(grpc.aio.AioRpcError) as rejected:
        await page(node, page_token=token)
    error = from_rpc_error(rejected.value)
    assert (error.reason, error.facts) == ("INVALID_ARGUMENT", {"field": "page_token"})


async def test_hundred_thousand_locks_are_listed_in_bounded_memory() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.lockmgr.listing_memory", stdout=asyncio.subprocess.PIPE
    )
    measured = json.loads((await process.communicate())[0])
    assert (measured["listed"], measured["pages"]) == (LOCKS, 100)
    assert measured["growth_kib"] < GROWTH_KIB_MAX


async def pages_of(*pages: Sequence[dict[str, Any]]) -> AsyncIterator[Sequence[dict[str, Any]]]:
    for rows in pages:
        yield rows


async def test_listing_is_printed_page_by_page(capsys: pytest.CaptureFixture[str]) -> None:
    first = [{"queue_id": 1, "client_id": "long-client-id"}, {"queue_id": 2, "client_id": ""}]
    last = [{"queue_id": 3, "client_id": "a"}]
    await Output(OutputFormat.TABLE).item_pages(pages_of(first, last), COLUMNS)
    paged = capsys.readouterr().out
    Output(OutputFormat.TABLE).items([*first, *last], COLUMNS)
    assert paged == capsys.readouterr().out
    await Output(OutputFormat.TABLE).item_pages(pages_of([]), COLUMNS)
    assert capsys.readouterr().out == "QUEUE  OWNER\n"


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_listing_in_json_is_one_array(capsys: pytest.CaptureFixture[str], count: int) -> None:
    rows = [{"queue_id": number, "client_id": "a"} for number in range(count)]
    await Output(OutputFormat.JSON).item_pages(pages_of(rows[:2], rows[2:]), COLUMNS)
    assert capsys.readouterr().out == json.dumps(rows, indent=2) + "\n"
