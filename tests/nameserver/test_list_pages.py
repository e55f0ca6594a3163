"""Lists of topics, groups and grants, in pages.

Goal: the pages of a list have every entry once, also while others are created and deleted; a
malformed token is rejected; the client library reads all pages.
Method: a replica on a real etcd with small pages; for the client, more entries than one page has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from baton.nameserver.v1 import access_service_pb2 as access_pb
from baton.nameserver.v1 import access_service_pb2_grpc as access_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from batonmq._common.aio import STEP_ITEMS
from batonmq._connection.channels import connect
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq_server.nameserver.core.topics import Topic
from batonmq_server.nameserver.node_drains import NodeDrains
from batonmq_server.nameserver.server import NameserverServicer
from batonmq_server.runtime import paging
from batonmq_server.runtime.access.permissions import Permission
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import CALL_TIMEOUT_S, Direct, Replica, refusal
from tests.support.conditions import until

NAMES = [f"{number:02}" for number in range(25)]


async def topics_page(
    nameserver: Replica, page_token: str = "", page_size: int = 10
) -> tuple[list[str], str]:
    request = pb.ListTopicsRequest(page_size=page_size, page_token=page_token)
    answer = await nameserver.stub.ListTopics(request, timeout=CALL_TIMEOUT_S)
    return [topic.name for topic in answer.topics], answer.next_page_token


async def groups_page(
    nameserver: Replica, page_token: str = "", page_size: int = 10
) -> tuple[list[str], str]:
    request = pb.ListGroupsRequest(page_size=page_size, page_token=page_token)
    answer = await nameserver.stub.ListGroups(request, timeout=CALL_TIMEOUT_S)
    return [group.name for group in answer.groups], answer.next_page_token


async def identities_page(
    nameserver: Replica, page_token: str = "", page_size: int = 10
) -> tuple[list[str], str]:
    request = access_pb.ListAccessRequest(page_size=page_size, page_token=page_token)
    async with connect(nameserver.address) as channel:
        stub = access_grpc.AccessServiceStub(channel)
        answer = await stub.ListAccess(request, timeout=CALL_TIMEOUT_S)
    return [one.identity for one in answer.identities], answer.next_page_token


ReadPage = Callable[[Replica, str], Awaitable[tuple[list[str], str]]]


async def all_pages(nameserver: Replica, read: ReadPage) -> list[list[str]]:
    names, page_token = await read(nameserver, "")
    pages = [names]
    while page_token:
        names, page_token = await read(nameserver, page_token)
        pages.append(names)
    return pages


async def store_topics(nameserver: Replica, etcd: EtcdSession, names: list[str]) -> None:
    """Write topics to etcd, without a call for each, and wait until the replica has them."""
    for name in names:
        topic = StoredTopic(name=name, topic_id=1, spread=[pb.QueueSpread(broker="broker-a")])
        revision = await etcd.put(etcd.key("topics", name), topic.SerializeToString())

    async def listed() -> bool:
        async with Admin(nameserver.address) as admin:
            return {topic.name for topic in await admin.list_topics()} >= set(names)

    assert revision
    await until(listed)


async def test_topics_are_listed_in_pages(nameserver: Replica, etcd: EtcdSession) -> None:
    await store_topics(nameserver, etcd, NAMES)
    names = [*NAMES, "flights"]
    assert await all_pages(nameserver, topics_page) == [names[:10], names[10:20], names[20:]]


async def test_groups_are_listed_in_pages(nameserver: Replica) -> None:
    for name in NAMES:
        await nameserver.set_group(name)
    assert await all_pages(nameserver, groups_page) == [NAMES[:10], NAMES[10:20], NAMES[20:]]


async def test_identities_are_listed_in_pages(nameserver: Replica) -> None:
    async with Admin(nameserver.address) as admin:
        for name in NAMES:
            await AccessControl(admin).grant(name, RoleGrant(Role.CONSUME, "topic:orders"))
    assert await all_pages(nameserver, identities_page) == [NAMES[:10], NAMES[10:20], NAMES[20:]]


async def test_last_page_that_is_full_has_no_token(nameserver: Replica) -> None:
    for name in NAMES[:10]:
        await nameserver.set_group(name)
    assert await groups_page(nameserver) == (NAMES[:10], "")


async def test_topics_created_and_deleted_between_pages_leave_the_others_listed_once(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await store_topics(nameserver, etcd, NAMES)
    first, page_token = await topics_page(nameserver)
    last_listed, next_unlisted = NAMES[9], NAMES[10]
    for name in (last_listed, next_unlisted):
        await nameserver.delete(name)
    for name in ("0-before", "2-after"):
        await nameserver.create(name, 1)
    second, page_token = await topics_page(nameserver, page_token)
    third, page_token = await topics_page(nameserver, page_token)
    assert first == NAMES[:10]
    assert [*second, *third] == [*NAMES[11:20], "2-after", *NAMES[20:], "flights"]
    assert page_token == ""


@pytest.mark.parametrize("read", [topics_page, groups_page, identities_page])
async def test_malformed_page_token_is_rejected(nameserver: Replica, read: ReadPage) -> None:
    error = await refusal(read(nameserver, "flights"))
    assert (error.reason, error.facts) == ("INVALID_ARGUMENT", {"field": "page_token"})


async def test_client_reads_all_pages(
    nameserver: Replica, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "PAGE_SIZE_DEFAULT", 10)
    await store_topics(nameserver, etcd, NAMES)
    async with Admin(nameserver.address) as admin:
        control = AccessControl(admin)
        for name in NAMES:
            await admin.update_group(name, policy="reject")
            await control.grant(name, RoleGrant(Role.CONSUME, "topic:orders"))
        assert [topic.name for topic in await admin.list_topics()] == [*NAMES, "flights"]
        assert [group.name for group in await admin.list_groups()] == NAMES
        assert [one.identity for one in await control.list()] == NAMES


async def test_caller_of_a_list_is_authenticated_once(direct: Direct) -> None:
    direct.catalog.topics |= {name: cast("Topic", None) for name in NAMES}
    calls = 0

    def permissions_of(_: object) -> Callable[[Permission], bool]:
        nonlocal calls
        calls += 1
        return lambda _: False

    parts: dict[str, Any] = dict.fromkeys(
        ("queue_moves", "removals", "require", "etcd_monitor", "system_topics")
    )
    unused: Any = None
    servicer = NameserverServicer(
        direct.catalog,
        direct.topics,
        direct.groups,
        unused,
        unused,
        NodeDrains(unused),
        permissions_of=permissions_of,
        **parts,
    )
    answer = await servicer.ListTopics(pb.ListTopicsRequest(), unused)
    assert (list(answer.topics), answer.next_page_token, calls) == ([], "", 1)


async def test_list_of_which_the_caller_sees_nothing_does_not_block_other_tasks(
    direct: Direct,
) -> None:
    names = [f"{number:04}" for number in range(3_200)]
    direct.catalog.topics |= {name: cast("Topic", None) for name in names}
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        await direct.topics.list(pb.ListTopicsRequest(), lambda _: False)
        counting.cancel()
    assert turns >= len(names) // STEP_ITEMS
