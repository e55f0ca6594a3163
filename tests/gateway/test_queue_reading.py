"""Goal: clients that read by themselves get what a native puller gets, and harm no owner.

Method: a stub calls a gateway of a real cluster, which serves all steps of a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq import Admin
from batonmq._common.clock import Clock
from batonmq._core.reset_targets import ToEarliest
from batonmq.admin import Operation, Resets, ResetScope
from batonmq_server.gateway.message_proto import duration, timestamp
from tests.gateway.remote_stub import RemoteStub, remote_client
from tests.support.cluster import local_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
ORDERS = pb.Resource(name="orders")


def queue(number: int = 0, broker: str = "broker-0", topic: str = "orders") -> pb.MessageQueue:
    return pb.MessageQueue(topic=pb.Resource(name=topic), id=number, broker=pb.Broker(name=broker))


class Reader:
    """Calls of a client that reads by itself; each returns the code and what it got."""

    def __init__(self, stub: RemoteStub, group: str = "readers") -> None:
        self.stub, self.group = stub, pb.Resource(name=group)

    async def pull(
        self, offset: int, named: pb.MessageQueue | None = None, *, wait_ms: int = 0, **more: Any
    ) -> tuple[int, list[bytes], int]:
        request = service_pb2.PullMessageRequest(
            group=self.group,
            message_queue=named or queue(),
            offset=offset,
            long_polling_timeout=duration(wait_ms),
            **({"batch_size": 32} | more),
        )
        frames = self.stub.stub.PullMessage(
            request, timeout=wait_ms / 1_000 + 5, metadata=self.stub.metadata
        )
        code, bodies, next_offset = 0, list[bytes](), -1
        async for frame in frames:
            match frame.WhichOneof("content"):
                case "status":
                    code = frame.status.code
                case "message":
                    bodies.append(frame.message.body)
                    assert not frame.message.system_properties.receipt_handle
                case "next_offset":
                    next_offset = frame.next_offset
        return code, bodies, next_offset

    async def query(self, policy: Any, at: Timestamp | None = None, **more: Any) -> tuple[int, int]:
        request = service_pb2.QueryOffsetRequest(
            message_queue=queue(**more), query_offset_policy=policy, timestamp=at
        )
        answer = await self.stub.call("QueryOffset", request)
        return answer.status.code, answer.offset

    async def get(self, named: pb.MessageQueue | None = None) -> tuple[int, int]:
        request = service_pb2.GetOffsetRequest(group=self.group, message_queue=named or queue())
        answer = await self.stub.call("GetOffset", request)
        return answer.status.code, answer.offset

    async def update(self, offset: int, named: pb.MessageQueue | None = None) -> pb.Status:
        request = service_pb2.UpdateOffsetRequest(
            group=self.group, message_queue=named or queue(), offset=offset
        )
        status: pb.Status = (await self.stub.call("UpdateOffset", request)).status
        return status


@pytest.mark.long
async def test_client_that_reads_by_itself_reads_commits_and_is_refused_with_codes(
    tmp_path: Path,
) -> None:
    async with (
        local_cluster(tmp_path, gateways=1) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"]) as stub,
    ):
        await admin.create_topic("orders", 1)
        await admin.update_group("readers", ownership="off")
        reader = Reader(stub)
        await _stored_queues_are_its_route(stub)
        await _messages_are_read(reader)
        await _offsets_are_found(reader)
        await _progress_is_kept(reader, admin)
        await _bad_calls_are_refused(reader)
        await _group_with_owners_is_refused(stub, admin)


async def _stored_queues_are_its_route(stub: RemoteStub) -> None:
    request = service_pb2.QueryRouteRequest(topic=ORDERS)
    plain = await stub.call("QueryRoute", request)
    assert [one.broker.name for one in plain.message_queues] == ["gateway-0"]
    stream = stub.stub.Telemetry(metadata=stub.metadata)
    settings = pb.Settings(
        client_type=pb.PULL_CONSUMER,
        subscription=pb.Subscription(group=pb.Resource(name="readers")),
    )
    await stream.write(service_pb2.TelemetryCommand(settings=settings))
    answer = await stream.read()
    assert isinstance(answer, service_pb2.TelemetryCommand)
    assert answer.status.code == pb.OK
    stored = await stub.call("QueryRoute", request)
    (only,) = stored.message_queues
    assert (only.broker.name, only.id, only.permission) == ("broker-0", 0, pb.READ)
    assert only.broker.endpoints == plain.message_queues[0].broker.endpoints
    stream.cancel()


async def _messages_are_read(reader: Reader) -> None:
    assert await reader.pull(0) == (pb.MESSAGE_NOT_FOUND, [], 0)
    await reader.stub.send("orders", b"a", b"b", b"c")
    assert await reader.pull(0) == (pb.OK, [b"a", b"b", b"c"], 3)
    assert await reader.pull(0) == (pb.OK, [b"a", b"b", b"c"], 3), "nothing is in flight"
    assert await reader.pull(1, batch_size=1) == (pb.OK, [b"b"], 2)
    dear = pb.FilterExpression(type=pb.SQL, expression="price > 5")
    nothing = await reader.pull(0, wait_ms=300, filter_expression=dear)
    assert nothing == (pb.MESSAGE_NOT_FOUND, [], 3)
    assert await reader.pull(9) == (pb.ILLEGAL_OFFSET, [], -1), "beyond the end"


async def _offsets_are_found(reader: Reader) -> None:
    now_unix_ms = Clock().unix_ms()
    assert await reader.query(pb.BEGINNING) == (pb.OK, 0)
    assert await reader.query(pb.END) == (pb.OK, 3)
    assert await reader.query(pb.TIMESTAMP, timestamp(now_unix_ms - 3_600_000)) == (pb.OK, 0)
    assert await reader.query(pb.TIMESTAMP, timestamp(now_unix_ms + 3_600_000)) == (pb.OK, 3)
    assert (await reader.query(pb.TIMESTAMP))[0] == pb.BAD_REQUEST
    assert (await reader.query(pb.QueryOffsetPolicy.ValueType(9)))[0] == pb.BAD_REQUEST


async def _progress_is_kept(reader: Reader, admin: Admin) -> None:
    assert await reader.get() == (pb.OFFSET_NOT_FOUND, 0)
    assert (await reader.update(2)).code == pb.OK
    assert (await reader.update(2)).code == pb.OK, "a repeated call"
    assert await reader.get() == (pb.OK, 2)
    for offset in (1, 4, -1):
        assert (await reader.update(offset)).code == pb.ILLEGAL_OFFSET, offset
    assert await reader.get() == (pb.OK, 2)
    resets = Resets(admin)
    plan = await resets.plan("readers", ToEarliest(), ResetScope(topic="orders"))
    await resets.reset(plan, Operation("operator", "replay"))
    refused = await reader.update(3)
    assert refused.code == pb.ILLEGAL_OFFSET
    assert "GetOffset" in refused.message
    assert await reader.get() == (pb.OK, 0)
    assert (await reader.update(3)).code == pb.OK


async def _bad_calls_are_refused(reader: Reader) -> None:
    for named, code in (
        (queue(1), pb.NOT_FOUND),
        (queue(-1), pb.NOT_FOUND),
        (queue(broker="gateway-0"), pb.NOT_FOUND),
        (queue(topic="nowhere"), pb.TOPIC_NOT_FOUND),
        (queue(topic="a b"), pb.ILLEGAL_TOPIC),
    ):
        assert await reader.pull(0, named) == (code, [], -1), named
        assert (await reader.get(named))[0] == code, named
        assert (await reader.update(0, named)).code == code, named
    for options, code in (
        ({"offset": -1}, pb.ILLEGAL_OFFSET),
        ({"offset": 0, "batch_size": 0}, pb.BAD_REQUEST),
        ({"offset": 0, "wait_ms": -1}, pb.ILLEGAL_POLLING_TIME),
        (
            {"offset": 0, "filter_expression": pb.FilterExpression(type=pb.SQL, expression="a >")},
            pb.ILLEGAL_FILTER_EXPRESSION,
        ),
    ):
        wanted: dict[str, Any] = options
        assert await reader.pull(**wanted) == (code, [], -1), options
    nameless = Reader(reader.stub, "a b")
    assert (await nameless.update(0)).code == pb.ILLEGAL_CONSUMER_GROUP
    unknown = Reader(reader.stub, "unknown")
    assert (await unknown.pull(0))[0] == pb.CONSUMER_GROUP_NOT_FOUND
    assert (await unknown.update(0)).code == pb.CONSUMER_GROUP_NOT_FOUND


async def _group_with_owners_is_refused(stub: RemoteStub, admin: Admin) -> None:
    await stub.receive_until("billing", "orders", 3)
    owned = Reader(stub, "billing")
    assert (await owned.pull(0))[0] == pb.PRECONDITION_FAILED
    refused = await owned.update(3)
    assert refused.code == pb.PRECONDITION_FAILED
    assert "--ownership off" in refused.message
    (row,) = [
        row for row in (await admin.group_progress("billing")).queues if row.topic == "orders"
    ]
    assert row.committed_offset == 0, "the owner's progress has not moved"
    assert await owned.get() == (pb.OK, 0)
