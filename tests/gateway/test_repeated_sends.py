"""A send that a client repeats is stored once: by each gateway, for each type of message.

Method: real processes. A client sends with the message ids of an earlier call: at the same gateway,
at another one, after a restart, and after a call whose answer it never got.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq import Admin
from batonmq._common.clock import Clock
from batonmq.admin.transactions import Transactions
from batonmq_server.gateway.message_proto import timestamp
from tests.gateway.remote_stub import RemoteStub, remote_client
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def message(message_id: str, body: bytes, **system: Any) -> pb.Message:
    properties = pb.SystemProperties(
        message_id=message_id, born_timestamp=timestamp(Clock().unix_ms()), **system
    )
    return pb.Message(topic=pb.Resource(name="orders"), body=body, system_properties=properties)


async def send(
    stub: RemoteStub, *messages: pb.Message, timeout_s: float = 10
) -> service_pb2.SendMessageResponse:
    request = service_pb2.SendMessageRequest(messages=messages)
    answer: service_pb2.SendMessageResponse = await stub.call("SendMessage", request, timeout_s)
    return answer


@pytest.mark.long
async def test_repeated_send_has_the_outcome_of_the_first_one_at_every_gateway(
    tmp_path: Path,
) -> None:
    due = timestamp(Clock().unix_ms() + 3_000_000)
    kinds = {
        "normal": message("n", b"normal"),
        "ordered": message("f", b"ordered", message_type=pb.FIFO, message_group="g"),
        "later": message("d", b"later", message_type=pb.DELAY, delivery_timestamp=due),
        "half": message("t", b"half", message_type=pb.TRANSACTION),
    }
    async with (
        local_cluster(tmp_path, gateways=2, brokers=2) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"]) as first,
        remote_client(cluster.addresses["gateway-1"]) as second,
        remote_client(cluster.addresses["gateway-1"], "another client") as other,
    ):
        await admin.create_topic("orders", 4)
        before = {name: await send(first, one) for name, one in kinds.items()}
        assert {answer.status.code for answer in before.values()} == {pb.OK}
        await cluster.restart("storage")
        for stub in (first, second):
            for name, one in kinds.items():
                (known,), (entry,) = before[name].entries, (await send(stub, one)).entries
                if name == "later":  # another key signs it, and it names the same message
                    entry.recall_handle = known.recall_handle
                assert entry == known, name
        _, open_count, _ = await Transactions(admin).find()
        assert open_count == 1
        await send(first, message("n", b"another body"))
        await send(other, message("n", b"normal"))
        answer = await send(first, *(message(str(n), b"%d" % n) for n in range(20)))
        again = await send(second, *(message(str(n), b"%d" % n) for n in range(20)))
        assert again.entries == answer.entries
        received = await first.receive_until("billing", "orders", 24, wait_ms=3_000)
        bodies = Counter(one.body for one in received)
        assert bodies == Counter(
            [b"normal", b"normal", b"another body", b"ordered", *(b"%d" % n for n in range(20))]
        )


@pytest.mark.long
async def test_send_that_timed_out_and_is_repeated_at_another_gateway_is_stored_once(
    tmp_path: Path,
) -> None:
    async with (
        local_cluster(tmp_path, gateways=2) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"]) as first,
        remote_client(cluster.addresses["gateway-1"]) as second,
    ):
        await admin.create_topic("orders", 2)
        assert (await send(first, message("warm", b"warm"))).status.code == pb.OK
        messages = [message(str(n), b"%d" % n) for n in range(8)]
        cluster.pause("storage")
        try:
            for one in messages:
                answer = await send(first, one, timeout_s=0.6)
                assert answer.status.code == pb.PROXY_TIMEOUT
        finally:
            cluster.resume("storage")

        async def stored(one: pb.Message) -> bool:
            return (await send(second, one, timeout_s=1)).status.code == pb.OK

        for one in messages:
            await until(partial(stored, one), 30)
        received = await first.receive_until("billing", "orders", 10, wait_ms=3_000)
        bodies = Counter(one.body for one in received)
        assert bodies == Counter([b"warm", *(one.body for one in messages)])


async def test_recall_without_an_outcome_in_time_is_answered_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    async with (
        local_cluster(tmp_path, gateways=1) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"]) as stub,
    ):
        await admin.create_topic("orders", 2)
        due = timestamp(Clock().unix_ms() + 3_000_000)
        later = message("d", b"later", message_type=pb.DELAY, delivery_timestamp=due)
        (entry,) = (await send(stub, later)).entries
        request = service_pb2.RecallMessageRequest(
            topic=pb.Resource(name="orders"), recall_handle=entry.recall_handle
        )
        cluster.pause("storage")
        try:
            answer = await stub.call("RecallMessage", request, 0.8)
            assert answer.status.code == pb.PROXY_TIMEOUT
        finally:
            cluster.resume("storage")
        answer = await stub.call("RecallMessage", request)
        # The first attempt may have reached storage after all.
        assert answer.status.code in (pb.OK, pb.MESSAGE_NOT_FOUND)


async def test_messages_of_a_message_group_after_one_that_fails_are_not_sent(
    tmp_path: Path,
) -> None:
    async with (
        local_cluster(tmp_path, gateways=1) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"]) as stub,
    ):
        await admin.create_topic("orders", 2)
        fifo: dict[str, Any] = {"message_type": pb.FIFO, "message_group": "g"}
        call = [message(str(n), b"%d" % n, **fifo) for n in range(10)]
        answer = await send(stub, *call)
        assert [entry.offset for entry in answer.entries] == list(range(10))
        await admin.update_topic("orders", permission="read")
        late = await send(
            stub, message("a", b"a", **fifo), message("b", b"b", **fifo), message("c", b"c")
        )
        assert [entry.status.code for entry in late.entries] == [pb.FORBIDDEN] * 3
        texts = ["not sent: an earlier" in entry.status.message for entry in late.entries]
        assert texts == [False, True, False]
