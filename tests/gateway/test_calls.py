"""The calls of the contract, by a stub: what they do, what they refuse, and with which code.

One cluster serves all steps of a test, as its start takes seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq import Admin, Consumer, ConsumerSettings, Producer
from batonmq._common.clock import Clock
from batonmq._core.reset_targets import ToEarliest
from batonmq.admin import Operation, Resets, ResetScope
from batonmq.admin.reports import MessageType
from batonmq.errors import TopicExists
from batonmq_server.gateway.access import METHODS, SERVICE
from batonmq_server.gateway.message_proto import timestamp
from tests.gateway.remote_stub import RemoteStub, handle_of, remote_client
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SETTINGS = {"invisible_ms_min": 100, "group_idle_ms": 1_000, "delivery_attempts_max": 3}
TOPIC = pb.Resource(name="orders")
TYPES: Sequence[MessageType] = ("normal", "fifo", "delay", "transaction")
GROUP = pb.Resource(name="billing")


class Scene:
    """A cluster with a gateway, a stub of one client, and an administrator."""

    def __init__(self, stub: RemoteStub, admin: Admin, nameserver: str, address: str) -> None:
        self.stub, self.admin, self.nameserver = stub, admin, nameserver
        self.address = address

    async def committed(self, group: str) -> int:
        """Return the sum of the committed offsets of a group on the topic."""
        rows = (await self.admin.group_progress(group)).queues
        return sum(row.committed_offset or 0 for row in rows if row.topic == "orders")


@asynccontextmanager
async def scene(
    folder: Path, queues: int = 2, *, lock_lease_ms: int = 30_000, **more: object
) -> AsyncIterator[Scene]:
    locks, settings = {"lock_lease_ms": lock_lease_ms}, SETTINGS | more
    async with (
        local_cluster(folder, gateways=1, gateway=settings, lockmgr=locks) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"]) as stub,
    ):
        await admin.create_topic("orders", queues)
        yield Scene(stub, admin, cluster.nameserver, cluster.addresses["gateway"])


def test_every_method_of_the_contract_has_a_handler_and_an_access_rule() -> None:
    methods = service_pb2.DESCRIPTOR.services_by_name["MessagingService"].methods_by_name
    assert service_pb2.DESCRIPTOR.services_by_name["MessagingService"].full_name == SERVICE
    assert set(METHODS) == set(methods)


async def test_ack_is_durable_when_it_is_answered(tmp_path: Path) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a", b"b", b"c")
        messages = await at.stub.receive_until("billing", "orders", 3)
        handles = [handle_of(one) for one in messages]
        assert await at.stub.ack("billing", "orders", [handles[0], handles[2]]) == [pb.OK] * 2
        assert await at.committed("billing") == 1
        assert await at.stub.ack("billing", "orders", [handles[1]]) == [pb.OK]
        assert await at.committed("billing") == 3
        assert await at.stub.ack("billing", "orders", handles[1:2]) == [pb.OK], "a repeated call"


async def test_handles_that_are_forged_foreign_stale_or_expired_change_nothing(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a")
        (message,) = await at.stub.receive_until("billing", "orders", 1)
        good = handle_of(message)
        forged = good[:-3] + ("A" if good[-3] != "A" else "B") + good[-2:]
        bad = pb.INVALID_RECEIPT_HANDLE
        assert await at.stub.ack("billing", "orders", [forged, "", "x y", "Zm9v"]) == [bad] * 4
        assert await at.stub.ack("auditing", "orders", [good]) == [bad], "another group"
        assert await at.stub.ack("billing", "refunds", [good]) == [bad], "another topic"
        code, changed = await at.stub.change("billing", "orders", good, 300)
        assert (code, changed != good) == (pb.OK, True)
        assert await at.stub.ack("billing", "orders", [good]) == [bad], "stale"
        assert (await at.stub.change("billing", "orders", good, 60_000)) == (bad, "")
        assert await at.committed("billing") == 0
        (again,) = await at.stub.receive_until("billing", "orders", 1)
        assert again.system_properties.delivery_attempt == 2
        assert await at.stub.ack("billing", "orders", [changed]) == [bad], "expired"
        assert await at.committed("billing") == 0
        assert await at.stub.ack("billing", "orders", [handle_of(again)]) == [pb.OK]
        assert await at.committed("billing") == 1


@pytest.mark.long
async def test_handle_of_a_reset_queue_changes_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a", b"b")
        first = await at.stub.receive_until("billing", "orders", 2)
        assert await at.stub.ack("billing", "orders", [handle_of(first[0])]) == [pb.OK]
        resets = Resets(at.admin)
        plan = await resets.plan("billing", ToEarliest(), ResetScope(topic="orders"))
        await resets.reset(plan, Operation("operator", "replay"))
        again = await at.stub.receive_until("billing", "orders", 2, wait_ms=10_000)
        assert sorted(one.body for one in again) == [b"a", b"b"]
        codes = await at.stub.ack("billing", "orders", [handle_of(first[1])])
        assert codes == [pb.INVALID_RECEIPT_HANDLE]
        assert await at.committed("billing") == 0


async def test_message_with_used_up_attempts_and_forwarded_message_are_dead_letters(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"poison")
        for attempt in (1, 2, 3):
            (message,) = await at.stub.receive_until("billing", "orders", 1, invisible_ms=200)
            assert message.system_properties.delivery_attempt == attempt
        await at.stub.send("orders", b"refused")
        (message,) = await at.stub.receive_until("billing", "orders", 1)
        for _ in range(2):  # a client repeats a call whose answer was lost
            status = await at.stub.forward("billing", "orders", handle_of(message))
            assert status == pb.Status(code=pb.OK, message="OK")

        async def both_are_ended() -> bool:
            return await at.committed("billing") == 2

        await until(both_are_ended)
        letters: list[bytes] = []
        settings = ConsumerSettings(consume_from="first", send_back=False)
        async with Consumer(at.nameserver, "undertaker", {"%DLQ%billing": "*"}, settings) as dead:
            async for letter in dead:
                letters.append(letter.body)
                if len(letters) == 2:
                    break
        assert sorted(letters) == [b"poison", b"refused"]


async def test_forward_of_what_the_client_no_longer_holds_ends_and_forwards_nothing(
    tmp_path: Path,
) -> None:
    """The clients of Java, C#, Go, Node.js and Python repeat the call for ever otherwise."""
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a")
        (message,) = await at.stub.receive_until("billing", "orders", 1, invisible_ms=200)
        (again,) = await at.stub.receive_until("billing", "orders", 1)
        old, good = handle_of(message), handle_of(again)
        of_a_restarted_gateway = good[:4] + ("A" if good[4] != "A" else "B") + good[5:]
        for stale in (old, of_a_restarted_gateway):
            status = await at.stub.forward("billing", "orders", stale)
            assert status.code == pb.OK
            assert "nothing was forwarded" in status.message
        for bad in ("", "no handle"):
            status = await at.stub.forward("billing", "orders", bad)
            assert status.code == pb.INVALID_RECEIPT_HANDLE
        status = await at.stub.forward("auditing", "orders", good)
        assert status.code == pb.INVALID_RECEIPT_HANDLE, "of another group"
        assert await at.stub.ack("billing", "orders", [good]) == [pb.OK], "still held"


@pytest.mark.long
async def test_message_group_waits_for_its_first_message_and_other_messages_go_on(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a1", b"a2", message_group="a")
        await at.stub.send("orders", b"b1", message_group="b")
        await at.stub.send("orders", b"free")
        first = await at.stub.receive_until("billing", "orders", 3)
        assert sorted(one.body for one in first) == [b"a1", b"b1", b"free"]
        held = {one.body: handle_of(one) for one in first}
        _, nothing = await at.stub.receive("billing", "orders", wait_ms=500)
        assert nothing == []
        await at.stub.ack("billing", "orders", [held[b"a1"]])
        (second,) = await at.stub.receive_until("billing", "orders", 1)
        assert second.body == b"a2"
        async with Producer(at.nameserver) as producer:
            await producer.send("orders", b"native", ordering_key="k", properties={"x": "y"})
        (native,) = await at.stub.receive_until("billing", "orders", 1)
        assert native.system_properties.message_group == "k"
        assert dict(native.user_properties) == {"x": "y"}


@pytest.mark.long
async def test_filters_by_tag_and_by_condition_and_a_conflict_of_filters(tmp_path: Path) -> None:
    async with scene(tmp_path, queues=1) as at:
        messages = [
            pb.Message(
                topic=TOPIC,
                body=f"{tag}{price}".encode(),
                user_properties={"price": str(price)},
                system_properties=pb.SystemProperties(message_id=f"{tag}{price}", tag=tag),
            )
            for tag in "ab"
            for price in (1, 9)
        ]
        await at.stub.call("SendMessage", service_pb2.SendMessageRequest(messages=messages))
        tagged = pb.FilterExpression(type=pb.TAG, expression="a || c")
        dear = pb.FilterExpression(type=pb.SQL, expression="price > 5")
        got = await at.stub.receive_until("tagged", "orders", 2, filtered=tagged)
        assert sorted(one.body for one in got) == [b"a1", b"a9"]
        got = await at.stub.receive_until("dear", "orders", 2, filtered=dear)
        assert sorted(one.body for one in got) == [b"a9", b"b9"]
        async with remote_client(at.address, "other@1@0@b") as other:
            status, _ = await other.receive("tagged", "orders", filtered=dear)
        assert status.code == pb.ILLEGAL_FILTER_EXPRESSION
        assert "a||c" in status.message
        for broken in ("price >", "a ||"):
            kind = pb.SQL if ">" in broken else pb.TAG
            status, _ = await at.stub.receive(
                "broken", "orders", filtered=pb.FilterExpression(type=kind, expression=broken)
            )
            assert status.code == pb.ILLEGAL_FILTER_EXPRESSION, broken


async def test_messages_are_refused_with_the_codes_of_the_contract(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:

        async def sent(body: bytes = b"x", topic: str = "orders", **system: Any) -> int:
            properties = system.pop("user_properties", {})
            message = pb.Message(
                topic=pb.Resource(name=topic),
                body=body,
                user_properties=properties,
                system_properties=pb.SystemProperties(**({"message_id": "m"} | system)),
            )
            request = service_pb2.SendMessageRequest(messages=[message])
            answer = await at.stub.call("SendMessage", request)
            return int(answer.status.code)

        far = Timestamp(seconds=1 << 33)
        assert await sent() == pb.OK
        assert await sent(topic="nowhere") == pb.TOPIC_NOT_FOUND
        for topic in ("", "a b", "%RETRY%billing", "BATON_SYS_METRICS", "x" * 200):
            assert await sent(topic=topic) == pb.ILLEGAL_TOPIC, topic
        assert await sent(b"") == pb.MESSAGE_BODY_EMPTY
        assert await sent(bytes((4 << 20) + 1)) == pb.MESSAGE_BODY_TOO_LARGE
        assert await sent(tag="a b") == pb.ILLEGAL_MESSAGE_TAG
        assert await sent(keys=["a b"]) == pb.ILLEGAL_MESSAGE_KEY
        for message_id in ("", "a\x1fb"):
            assert await sent(message_id=message_id) == pb.ILLEGAL_MESSAGE_ID
        assert await sent(message_group="g" * 64) == pb.ILLEGAL_MESSAGE_GROUP
        assert await sent(delivery_timestamp=far) == pb.ILLEGAL_DELIVERY_TIME
        for born in (Timestamp(seconds=1 << 50), Timestamp(seconds=-1)):
            assert await sent(born_timestamp=born) == pb.BAD_REQUEST
        assert await sent(born_timestamp=Timestamp(nanos=1 << 30)) == pb.OK
        conflict = pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        assert await sent(message_group="g", delivery_timestamp=far) == conflict
        assert await sent(message_type=pb.FIFO) == conflict
        assert await sent(message_type=pb.TRANSACTION, message_group="g") == conflict
        assert await sent(message_type=77) == pb.NOT_IMPLEMENTED
        digest = pb.Digest(type=pb.MD5, checksum="00")
        assert await sent(body_digest=digest) == pb.MESSAGE_CORRUPTED
        for name in ("", "baton.origin", "rocketmq.message_id", "a\x01b"):
            code = await sent(user_properties={name: "v"})
            assert code == pb.ILLEGAL_MESSAGE_PROPERTY_KEY, name
        many = {f"p{n}": "v" for n in range(129)}
        assert await sent(user_properties=many) == pb.MESSAGE_PROPERTIES_TOO_LARGE


async def test_topic_with_a_type_takes_messages_of_that_type_only(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        now_unix_ms = Clock().unix_ms()
        messages: dict[str, dict[str, Any]] = {
            "normal": {},
            "fifo": {"message_group": "g"},
            "delay": {"delivery_timestamp": timestamp(now_unix_ms + 3_600_000)},
            "transaction": {"message_type": pb.TRANSACTION},
        }
        for topic, only in (("orders", None), *((f"{kind}s", kind) for kind in TYPES)):
            if only is not None:
                await at.admin.create_topic(topic, 1, message_type=only)
            route = await at.stub.call(
                "QueryRoute", service_pb2.QueryRouteRequest(topic=pb.Resource(name=topic))
            )
            names = [pb.MessageType.Name(n) for n in route.message_queues[0].accept_message_types]
            wanted = TYPES if only is None else [only]
            assert [name.lower() for name in names] == list(wanted)
            for kind, system in messages.items():
                sent = {"message_id": kind} | system
                message = pb.Message(
                    topic=pb.Resource(name=topic),
                    body=b"x",
                    system_properties=pb.SystemProperties(**sent),
                )
                request = service_pb2.SendMessageRequest(messages=[message])
                status = (await at.stub.call("SendMessage", request)).status
                code = pb.OK if kind in wanted else pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
                assert status.code == code, (topic, kind, status)
        with pytest.raises(TopicExists, match="fifo"):
            await at.admin.create_topic("fifos", 1, message_type="normal")
        assert not (await at.admin.create_topic("fifos", 1)).created
        assert (await at.admin.describe_topic("fifos")).topic.message_type == "fifo"


async def test_receive_calls_are_refused_with_the_codes_of_the_contract(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        for options, code in (
            ({"group": "a b"}, pb.ILLEGAL_CONSUMER_GROUP),
            ({"topic": "a b"}, pb.ILLEGAL_TOPIC),
            ({"topic": "nowhere"}, pb.TOPIC_NOT_FOUND),
            ({"batch": 0}, pb.BAD_REQUEST),
            ({"batch": 99_999}, pb.BAD_REQUEST),
            ({"invisible_ms": 1}, pb.ILLEGAL_INVISIBLE_TIME),
            ({"invisible_ms": 13 * 3_600_000}, pb.ILLEGAL_INVISIBLE_TIME),
            (
                {"filtered": pb.FilterExpression(type=pb.FilterType.ValueType(9))},
                pb.ILLEGAL_FILTER_EXPRESSION,
            ),
        ):
            wanted: dict[str, Any] = {"group": "billing", "topic": "orders", **options}
            status, _ = await at.stub.receive(**wanted)
            assert status.code == code, options
        status, _ = await at.stub.receive("billing", "orders", wait_ms=0)
        assert status.code in (pb.OK, pb.MESSAGE_NOT_FOUND)


async def test_other_calls_are_refused_with_the_codes_of_the_contract(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        route = await at.stub.call(
            "QueryRoute", service_pb2.QueryRouteRequest(topic=pb.Resource(name="nowhere"))
        )
        assert route.status.code == pb.TOPIC_NOT_FOUND
        name = "SyncLiteSubscription"
        answer = await at.stub.call(name, service_pb2.SyncLiteSubscriptionRequest())
        assert answer.status.code == pb.NOT_IMPLEMENTED
        assert name in answer.status.message

        nameless = await at.stub.stub.QueryRoute(
            service_pb2.QueryRouteRequest(topic=TOPIC), timeout=5
        )
        assert nameless.status.code == pb.CLIENT_ID_REQUIRED


async def test_message_whose_receiver_went_before_it_came_is_not_lost(tmp_path: Path) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.receive("billing", "orders", wait_ms=100)
        request = service_pb2.ReceiveMessageRequest(
            group=GROUP,
            message_queue=pb.MessageQueue(topic=TOPIC),
            filter_expression=pb.FilterExpression(type=pb.TAG, expression="*"),
            batch_size=1,
            auto_renew=True,
        )
        calls = [
            at.stub.stub.ReceiveMessage(request, timeout=15, metadata=at.stub.metadata)
            for _ in range(20)
        ]
        waiting = [asyncio.ensure_future(call.read()) for call in calls]  # noqa: TID251  ends below
        await at.stub.send("orders", b"a")
        for call in calls:
            call.cancel()
        await asyncio.wait(waiting)
        # Some call may have been answered; then its client is told to have ended, as a client does.
        await at.stub.call("NotifyClientTermination", service_pb2.NotifyClientTerminationRequest())
        (message,) = await at.stub.receive_until("billing", "orders", 1, wait_ms=8_000)
        assert message.body == b"a"
        assert await at.stub.ack("billing", "orders", [handle_of(message)]) == [pb.OK]


async def test_telemetry_answers_settings_by_language_and_pushes_them_again(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as at:
        stream = at.stub.stub.Telemetry(metadata=at.stub.metadata)

        async def exchange(settings: pb.Settings) -> service_pb2.TelemetryCommand:
            await stream.write(service_pb2.TelemetryCommand(settings=settings))
            read = await stream.read()
            assert isinstance(read, service_pb2.TelemetryCommand)
            return read

        answer = await exchange(
            pb.Settings(client_type=pb.PRODUCER, publishing=pb.Publishing(topics=[TOPIC]))
        )
        assert answer.status.code == pb.OK
        assert answer.settings.publishing.max_body_size == 4 << 20
        for reply in (
            {"thread_stack_trace": service_pb2.ThreadStackTrace(nonce="n")},
            {"verify_message_result": service_pb2.VerifyMessageResult(nonce="n")},
        ):  # to a question of a server; the stream goes on
            more: dict[str, Any] = reply
            await stream.write(service_pb2.TelemetryCommand(**more))
        pushed = await stream.read()
        assert pushed == answer
        consumer = pb.Settings(
            client_type=pb.PUSH_CONSUMER,
            user_agent=pb.UA(language=pb.PYTHON),
            subscription=pb.Subscription(
                group=GROUP,
                subscriptions=[
                    pb.SubscriptionEntry(
                        topic=TOPIC, expression=pb.FilterExpression(type=pb.TAG, expression="*")
                    )
                ],
            ),
        )
        answer = await exchange(consumer)
        while not answer.settings.HasField("subscription"):
            read = await stream.read()
            assert isinstance(read, service_pb2.TelemetryCommand)
            answer = read
        assert answer.settings.backoff_policy.HasField("customized_backoff")
        assert answer.settings.backoff_policy.max_attempts == 3
        assert not answer.settings.subscription.fifo

        async def joined() -> bool:
            return "billing" in {group.name for group in await at.admin.list_groups()}

        await until(joined)
        await stream.done_writing()


async def test_settings_with_an_impossible_time_are_answered_and_do_not_end_the_gateway(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as at:
        for seconds, nanos in ((-(1 << 63), -(1 << 31)), ((1 << 63) - 1, (1 << 31) - 1), (-1, 0)):
            settings = pb.Settings(client_type=pb.PULL_CONSUMER)
            settings.subscription.long_polling_timeout.seconds = seconds
            settings.subscription.long_polling_timeout.nanos = nanos
            stream = at.stub.stub.Telemetry(metadata=at.stub.metadata)
            await stream.write(service_pb2.TelemetryCommand(settings=settings))
            answer: Any = await stream.read()
            assert answer.status.code == pb.OK
            assert answer.settings.subscription.long_polling_timeout.seconds == 20
            stream.cancel()
        await at.stub.send("orders", b"a")  # the same process serves


async def test_large_settings_and_endpoints_are_refused_as_they_would_be_answered_many_times(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, queues=64) as at:
        settings = pb.Settings(client_type=pb.PULL_CONSUMER)
        settings.user_agent.platform = "x" * (256 * 1024)
        stream = at.stub.stub.Telemetry(metadata=at.stub.metadata)
        await stream.write(service_pb2.TelemetryCommand(settings=settings))
        refused: Any = await stream.read()
        assert refused.status.code == pb.PAYLOAD_TOO_LARGE
        assert refused.status.message.startswith("Settings has 2621")
        settings.user_agent.platform = "x" * 1_000
        await stream.write(service_pb2.TelemetryCommand(settings=settings))
        answer: Any = await stream.read()
        assert answer.status.code == pb.OK
        request = service_pb2.QueryRouteRequest(topic=TOPIC)
        request.endpoints.addresses.add(host="x" * 1_000, port=1)
        routed = await at.stub.call("QueryRoute", request)
        assert (routed.status.code, len(routed.message_queues)) == (pb.OK, 64)
        request.endpoints.addresses.add(host="x" * 1_000_000, port=1)
        routed = await at.stub.call("QueryRoute", request)
        assert routed.status.code == pb.PAYLOAD_TOO_LARGE
        stream.cancel()


async def test_idle_group_is_left_and_its_queues_go_to_native_members(tmp_path: Path) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a", b"b")
        (one,) = await at.stub.receive_until("billing", "orders", 1, batch=1)
        assert await at.stub.ack("billing", "orders", [handle_of(one)]) == [pb.OK]
        settings = ConsumerSettings(consume_from="first")
        async with Consumer(at.nameserver, "billing", {"orders": "*"}, settings) as native:
            async for message in native:
                assert (message.body, message.redelivered) == (b"b", False)
                break


async def test_messages_of_clients_that_are_gone_do_not_keep_an_idle_group(tmp_path: Path) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a", b"b")
        await at.stub.receive_until("billing", "orders", 2, invisible_ms=200)
        await at.stub.end_client("billing")
        settings = ConsumerSettings(consume_from="first")
        bodies: list[bytes] = []
        async with Consumer(at.nameserver, "billing", {"orders": "*"}, settings) as native:
            async for message in native:
                bodies.append(message.body)
                if len(bodies) == 2:
                    break
        assert sorted(bodies) == [b"a", b"b"]


async def test_topic_that_no_client_uses_any_more_leaves_the_subscription(tmp_path: Path) -> None:
    async with scene(tmp_path, queues=1, group_idle_ms=400) as at:
        await at.admin.create_topic("refunds", 1)
        await at.stub.receive("billing", "refunds", wait_ms=100)

        async def only_orders_are_left() -> bool:
            await at.stub.receive("billing", "orders", wait_ms=200)
            group = await at.admin.describe_group("billing")
            topics = {one.topic for one in group.subscriptions}
            return topics - {"%RETRY%billing"} == {"orders"}

        await until(only_orders_are_left)
        await at.stub.send("orders", b"a")
        (message,) = await at.stub.receive_until("billing", "orders", 1, wait_ms=15_000)
        assert await at.stub.ack("billing", "orders", [handle_of(message)]) == [pb.OK]


async def test_message_that_its_client_can_not_read_becomes_a_dead_letter(tmp_path: Path) -> None:
    """The client of Node.js reads no message that has 4 MiB together with its properties."""
    async with scene(tmp_path, queues=1) as at:
        await at.stub.receive("billing", "orders", wait_ms=500)
        async with Producer(at.nameserver) as producer:
            await producer.send("orders", bytes(4 << 20))
        limit = [("grpc.max_receive_message_length", 64 * 1024)]
        async with grpc.aio.insecure_channel(at.address, options=limit) as channel:
            stub = RemoteStub(channel, "small@1@0@a")
            refused = 0
            while await at.committed("billing") == 0:
                try:
                    await stub.receive("billing", "orders", wait_ms=500, invisible_ms=200)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    refused += 1
            assert refused == SETTINGS["delivery_attempts_max"]
        letters = (await at.admin.describe_topic("%DLQ%billing")).queues
        assert sum(one.next_offset or 0 for one in letters) == 1


@pytest.mark.parametrize("large", [bytes(8_192), bytes(4 << 20)], ids=["8 KiB", "4 MiB"])
async def test_messages_beside_one_that_their_client_can_not_read_are_no_dead_letters(
    tmp_path: Path, large: bytes
) -> None:
    """With 8 KiB, the gateway has written all of the answer before the client ends the call."""
    limit = [("grpc.max_receive_message_length", 4_096), ("grpc.http2.bdp_probe", 0)]
    async with scene(tmp_path, queues=1) as at:
        await at.stub.receive("billing", "orders", wait_ms=500)
        async with Producer(at.nameserver) as producer:
            for body in (b"a", b"b", large, b"c"):
                await producer.send("orders", body)
        got: list[bytes] = []
        async with grpc.aio.insecure_channel(at.address, options=limit) as channel:
            stub = RemoteStub(channel, "small@1@0@a")
            while await at.committed("billing") < 4:
                try:
                    _, messages = await stub.receive(
                        "billing", "orders", wait_ms=1_500, invisible_ms=1_000
                    )
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    continue
                if messages:
                    await stub.ack("billing", "orders", list(map(handle_of, messages)))
                    got += [message.body for message in messages]
        assert sorted(set(got)) == [b"a", b"b", b"c"]
        letters = (await at.admin.describe_topic("%DLQ%billing")).queues
        assert sum(one.next_offset or 0 for one in letters) == 1


async def test_push_consumer_that_gives_a_message_back_gets_it_again_after_the_retry_delay(
    tmp_path: Path,
) -> None:
    """The client of Node.js asks for as many milliseconds as its settings have seconds."""
    clock = Clock()
    subscription = pb.Subscription(group=GROUP, subscriptions=[pb.SubscriptionEntry(topic=TOPIC)])
    settings = pb.Settings(client_type=pb.PUSH_CONSUMER, subscription=subscription)
    async with scene(tmp_path, queues=1) as at:
        stream = at.stub.stub.Telemetry(metadata=at.stub.metadata)
        await stream.write(service_pb2.TelemetryCommand(settings=settings))
        answer: Any = await stream.read()
        assert answer.status.code == pb.OK
        await at.stub.send("orders", b"a")
        (message,) = await at.stub.receive_until("billing", "orders", 1, renewed=True)
        for delay_ms in (1_000, 2_000):
            begin_ms = clock.monotonic_ms()
            code, _ = await at.stub.change("billing", "orders", handle_of(message), 1)
            assert code == pb.OK
            (message,) = await at.stub.receive_until(
                "billing", "orders", 1, renewed=True, wait_ms=15_000
            )
            assert clock.monotonic_ms() - begin_ms >= delay_ms
        assert await at.stub.ack("billing", "orders", [handle_of(message)]) == [pb.OK]
        stream.cancel()


async def test_message_whose_answer_was_lost_comes_again_when_the_call_is_repeated(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a")

        async def receive(attempt_id: str) -> list[pb.Message]:
            _, messages = await at.stub.receive(
                "billing", "orders", renewed=True, wait_ms=1_000, attempt_id=attempt_id
            )
            return messages

        lost: list[pb.Message] = []
        while not lost:
            lost = await receive("first")
        (again,) = await receive("first")
        assert again.system_properties.delivery_attempt == 2
        codes = await at.stub.ack("billing", "orders", [handle_of(lost[0])])
        assert codes == [pb.INVALID_RECEIPT_HANDLE]
        assert await receive("second") == [], "the client holds it"
        assert await at.stub.ack("billing", "orders", [handle_of(again)]) == [pb.OK]
        assert await receive("first") == []


async def test_group_goes_on_when_two_of_its_topics_are_deleted(tmp_path: Path) -> None:
    """A member that loses a topic ends without a hand-over: the next one waits for its leases."""
    async with scene(tmp_path, queues=1, lock_lease_ms=5_000) as at:
        for topic in ("refunds", "claims"):
            await at.admin.create_topic(topic, 1)
            await at.stub.receive("billing", topic, wait_ms=100)
        await at.stub.send("orders", b"a")
        (held,) = await at.stub.receive_until("billing", "orders", 1, wait_ms=15_000)
        for topic in ("refunds", "claims"):
            await at.admin.delete_topic(topic)
        assert await at.stub.ack("billing", "orders", [handle_of(held)]) == [pb.OK]
        await at.stub.send("orders", b"b")
        (message,) = await at.stub.receive_until("billing", "orders", 1, wait_ms=15_000)
        assert message.body == b"b"
        assert await at.stub.ack("billing", "orders", [handle_of(message)]) == [pb.OK]

        async def are_gone() -> bool:
            answers = [
                await at.stub.receive("billing", topic, wait_ms=100)
                for topic in ("refunds", "claims")
            ]
            return all(status.code == pb.TOPIC_NOT_FOUND for status, _ in answers)

        await until(are_gone)


async def test_hostile_requests_are_refused_and_the_gateway_goes_on(tmp_path: Path) -> None:
    """Every call with mutated bytes: an answer with a code, or INVALID_ARGUMENT; never a crash."""
    random = Random(5)
    async with scene(tmp_path, queues=1) as at:
        await at.stub.send("orders", b"a")
        (message,) = await at.stub.receive_until("billing", "orders", 1)
        seeds = {
            "QueryRoute": service_pb2.QueryRouteRequest(topic=TOPIC),
            "Heartbeat": service_pb2.HeartbeatRequest(group=GROUP),
            "SendMessage": service_pb2.SendMessageRequest(messages=[message]),
            "QueryAssignment": service_pb2.QueryAssignmentRequest(topic=TOPIC, group=GROUP),
            "AckMessage": service_pb2.AckMessageRequest(
                group=GROUP,
                topic=TOPIC,
                entries=[service_pb2.AckMessageEntry(receipt_handle=handle_of(message))],
            ),
            "ChangeInvisibleDuration": service_pb2.ChangeInvisibleDurationRequest(
                group=GROUP, topic=TOPIC, receipt_handle=handle_of(message)
            ),
            "RecallMessage": service_pb2.RecallMessageRequest(
                topic=TOPIC, recall_handle=handle_of(message)
            ),
        }
        methods = service_pb2.DESCRIPTOR.services_by_name["MessagingService"].methods_by_name
        codes: set[object] = set()
        async with grpc.aio.insecure_channel(at.address) as channel:
            for n in range(1_400):
                name = list(seeds)[n % len(seeds)]
                raw = bytearray(seeds[name].SerializeToString())
                for _ in range(random.randrange(1, 4)):
                    raw[random.randrange(len(raw))] = random.randrange(256)
                answer_type = getattr(service_pb2, methods[name].output_type.name)
                call: Any = channel.unary_unary(
                    f"/{SERVICE}/{name}", response_deserializer=answer_type.FromString
                )
                try:
                    answer = await call(bytes(raw), timeout=5, metadata=at.stub.metadata)
                    codes.add(answer.status.code)
                    assert answer.status.code not in (0, pb.INTERNAL_SERVER_ERROR), (name, raw)
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
                    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, raw, error)
        assert {pb.OK, pb.ILLEGAL_TOPIC, grpc.StatusCode.INVALID_ARGUMENT} <= codes, codes
        assert await at.stub.send("orders", b"still here") == pb.Status(code=pb.OK, message="OK")
