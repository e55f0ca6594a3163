"""Requests that are invalid in every state.

Goal: each is refused with its own status and reason, and no key of etcd is added or removed.
Method: every RPC with every kind of bad value, against a cluster with a topic and a group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import CALL_TIMEOUT_S, Replica, heartbeat, incarnation, refusal

BAD_NAMES = {
    "empty": "",
    "oversized": "x" * 128,
    "huge": "x" * 1_000_000,
    "control": "a\x00b",
    "newline": "abc\n",
    "escape": "\x1b[2J",
    "slash": "a/b",
    "parent": "..",
    "backslash": "a\\b",
    "space": "a b",
    "letter": "übersee",
    "dollar": "a$",
}
BAD_CLIENT_IDS = {
    "empty": "",
    "oversized": "x" * 256,
    "control": "a\x00b",
    "newline": "abc\n",
    "slash": "a/b",
    "space": "a b",
    "letter": "übersee",
}
OF_TOPIC = {
    "CreateTopic": pb.CreateTopicRequest,
    "DescribeTopic": pb.DescribeTopicRequest,
    "DeleteTopic": pb.DeleteTopicRequest,
    "QueryRoute": pb.QueryRouteRequest,
    "WatchRoute": pb.WatchRouteRequest,
}
OF_GROUP = {"WatchGroup": pb.WatchGroupRequest, "DescribeGroup": pb.DescribeGroupRequest}


@pytest_asyncio.fixture(autouse=True)
async def nothing_is_written(nameserver: Replica, etcd: EtcdSession) -> AsyncIterator[None]:
    await nameserver.join("g", "c1")
    before = (await etcd.get_prefix(""))[0]
    yield
    assert (await etcd.get_prefix(""))[0] == before


async def refused(nameserver: Replica, method: str, request: Any) -> BatonError:
    call = getattr(nameserver.stub, method)(
        request, timeout=None if method.startswith("Watch") else CALL_TIMEOUT_S
    )
    return await refusal(call.read() if method.startswith("Watch") else call)


@pytest.mark.parametrize("method", OF_TOPIC)
@pytest.mark.parametrize("bad", BAD_NAMES)
async def test_bad_topic_name_is_invalid(nameserver: Replica, method: str, bad: str) -> None:
    error = await refused(nameserver, method, OF_TOPIC[method](topic=BAD_NAMES[bad]))
    assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "topic")
    assert len(error.message) < 1_000
    assert error.message.isprintable()


@pytest.mark.parametrize("method", OF_GROUP)
@pytest.mark.parametrize("bad", BAD_NAMES)
async def test_bad_group_name_is_invalid(nameserver: Replica, method: str, bad: str) -> None:
    error = await refused(nameserver, method, OF_GROUP[method](group=BAD_NAMES[bad]))
    assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "group")


@pytest.mark.parametrize("bad", BAD_NAMES)
async def test_bad_names_in_a_heartbeat_are_invalid(nameserver: Replica, bad: str) -> None:
    request = heartbeat(BAD_NAMES[bad], "c2")
    error = await refused(nameserver, "Heartbeat", request)
    assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "group")
    request = heartbeat("g2", "c2")
    request.subscriptions[0].topic = BAD_NAMES[bad]
    error = await refused(nameserver, "Heartbeat", request)
    assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "topic")
    leave = pb.LeaveRequest(group=BAD_NAMES[bad], incarnation=incarnation("c1"))
    error = await refused(nameserver, "Leave", leave)
    assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "group")


@pytest.mark.parametrize("bad", BAD_CLIENT_IDS)
async def test_bad_client_id_is_invalid(nameserver: Replica, bad: str) -> None:
    error = await refused(nameserver, "Heartbeat", heartbeat("g2", BAD_CLIENT_IDS[bad]))
    assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "client_id")
    request = pb.LeaveRequest(group="g", incarnation=incarnation(BAD_CLIENT_IDS[bad]))
    error = await refused(nameserver, "Leave", request)
    assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "client_id")


async def test_missing_incarnation_is_invalid(nameserver: Replica) -> None:
    unset = pb.HeartbeatRequest(group="g", subscriptions=[pb.Subscription(topic="flights")])
    assert (await refused(nameserver, "Heartbeat", unset)).reason == "INVALID_NAME"
    assert (await refused(nameserver, "Leave", pb.LeaveRequest(group="g"))).reason == "INVALID_NAME"
    no_number = queue_pb2.Incarnation(client_id="c1")
    for method, request in (
        ("Heartbeat", heartbeat("g", "c1", incarnation_id=0)),
        ("Leave", pb.LeaveRequest(group="g", incarnation=no_number)),
    ):
        error = await refused(nameserver, method, request)
        assert (error.reason, error.facts) == ("INVALID_ARGUMENT", {"field": "incarnation_id"})


@pytest.mark.parametrize("host", ["x" * 256, "a\x00b", "a\nb", "\x1b[2J"])
async def test_bad_host_is_invalid(nameserver: Replica, host: str) -> None:
    request = heartbeat("g2", "c2")
    request.host = host
    error = await refused(nameserver, "Heartbeat", request)
    assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "host")


async def test_heartbeat_without_subscription_is_invalid(nameserver: Replica) -> None:
    request = pb.HeartbeatRequest(group="g2", incarnation=incarnation("c2"))
    error = await refused(nameserver, "Heartbeat", request)
    assert (error.reason, error.facts) == ("INVALID_ARGUMENT", {"field": "subscriptions"})


async def test_topic_subscribed_twice_is_invalid(nameserver: Replica) -> None:
    request = heartbeat("g2", "c2")
    request.subscriptions.append(pb.Subscription(topic="flights", expression="x"))
    error = await refused(nameserver, "Heartbeat", request)
    assert (error.reason, error.facts) == ("INVALID_ARGUMENT", {"field": "subscriptions"})


async def test_too_many_subscriptions_are_refused(nameserver: Replica) -> None:
    request = heartbeat("g2", "c2")
    request.subscriptions.extend(pb.Subscription(topic=f"t{number}") for number in range(64))
    error = await refused(nameserver, "Heartbeat", request)
    assert error.reason == "LIMIT_EXCEEDED"
    assert error.facts == {"field": "subscriptions", "limit": "64", "actual": "65"}


@pytest.mark.parametrize(
    "expression", ["||", "a||", "a||*", "a b", "a|b", "a\x00b", "sql: a", "sql: a >", "sql:a>5"]
)
async def test_bad_expression_is_refused(nameserver: Replica, expression: str) -> None:
    error = await refused(nameserver, "Heartbeat", heartbeat("g2", "c2", expression))
    assert error.reason == "BAD_EXPRESSION"


async def test_bad_condition_is_refused_with_its_position(nameserver: Replica) -> None:
    error = await refused(nameserver, "Heartbeat", heartbeat("g2", "c2", "sql: a > 5 AND b != 1"))
    assert error.reason == "BAD_EXPRESSION"
    assert "column 18: '!' is not part of the grammar" in error.message
    assert "<>" in error.remedy


async def test_oversized_expression_is_refused(nameserver: Replica) -> None:
    error = await refused(nameserver, "Heartbeat", heartbeat("g2", "c2", "x" * 2_049))
    assert error.reason == "LIMIT_EXCEEDED"
    assert error.facts == {"field": "expression", "limit": "2048", "actual": "2049"}


@pytest.mark.parametrize("field", ["model", "consume_from"])
async def test_unknown_enum_value_is_invalid(nameserver: Replica, field: str) -> None:
    request = heartbeat("g2", "c2")
    setattr(request, field, 99)
    error = await refused(nameserver, "Heartbeat", request)
    assert (error.reason, error.facts) == ("INVALID_ARGUMENT", {"field": field})


@pytest.mark.parametrize("queue_count", [1_025, 2**32 - 1])
async def test_too_many_queues_are_refused(nameserver: Replica, queue_count: int) -> None:
    error = await refusal(nameserver.create("orders", queue_count))
    assert error.reason == "LIMIT_EXCEEDED"
    assert error.facts == {"field": "queue_count", "limit": "1024", "actual": str(queue_count)}


async def test_system_topics_are_neither_created_nor_deleted(nameserver: Replica) -> None:
    for call in (nameserver.create("BATON_SYS_X"), nameserver.delete("BATON_SYS_X")):
        error = await refusal(call)
        assert (error.reason, error.facts["field"]) == ("INVALID_NAME", "topic")


@pytest.mark.parametrize("method", sorted(OF_TOPIC.keys() - {"CreateTopic"}))
async def test_unknown_topic_is_not_found(nameserver: Replica, method: str) -> None:
    error = await refused(nameserver, method, OF_TOPIC[method](topic="no-such-topic"))
    assert (error.reason, error.facts) == ("TOPIC_NOT_FOUND", {"topic": "no-such-topic"})


@pytest.mark.parametrize("method", OF_GROUP)
async def test_unknown_group_is_not_found(nameserver: Replica, method: str) -> None:
    error = await refused(nameserver, method, OF_GROUP[method](group="no-such-group"))
    assert (error.reason, error.facts) == ("GROUP_NOT_FOUND", {"group": "no-such-group"})


async def test_leave_of_an_unknown_client_has_no_effect(nameserver: Replica) -> None:
    assert not await nameserver.leave("g", "no-such-client")


async def test_call_without_deadline_is_refused(nameserver: Replica) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused_call:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await nameserver.stub.Heartbeat(heartbeat("g2", "c2"))
    assert from_rpc_error(refused_call.value).reason == "NO_DEADLINE"
