"""Goal: an operator asks one client behind a gateway, and gets its answer or a precise refusal.

Method: a client written by hand, which answers as it is told, is connected to the second of two
gateways of a real cluster; then official clients. The commands and the library are used as an
operator uses them. One cluster serves all steps, as its start takes seconds.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from baton.gateway.v1 import gateway_service_pb2 as gateway_pb
from baton.gateway.v1 import gateway_service_pb2_grpc as gateway_grpc
from batonmq import Admin, Producer, errors
from batonmq._common.rpc import from_rpc_error
from batonmq._core.queues import QueueRef
from batonmq.admin import DeadLetters, RemoteClients, RemoteCommands
from batonmq_server.gateway.operator_commands import TRACE_BYTES_MAX
from batonmq_server.local.cluster import LocalCluster
from tests.cli.baton import BATON
from tests.gateway.official_clients import MORE, official_client
from tests.gateway.remote_stub import RemoteStub, remote_client
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
GROUP, SHOP, KIOSK = "billing", "shop-7@1@0@a", "kiosk@2@0@b"
Command = service_pb2.TelemetryCommand
Answer = Callable[[Command], Command | None]


class Listener:
    """A push consumer that answers commands by `answer`, and remembers what it was told."""

    def __init__(self, client: RemoteStub) -> None:
        self.client = client
        self.told: list[Command] = []
        self.answer: Answer = lambda _: None

    @asynccontextmanager
    async def connected(self, kind: int = pb.PUSH_CONSUMER) -> AsyncIterator[None]:
        stream: Any = self.client.stub.Telemetry(metadata=self.client.metadata)
        settings = pb.Settings(
            client_type=pb.ClientType.ValueType(kind),
            user_agent=pb.UA(language=pb.JAVA, version="5.2.0"),
            subscription=pb.Subscription(
                group=pb.Resource(name=GROUP),
                subscriptions=[pb.SubscriptionEntry(topic=pb.Resource(name="orders"))],
            ),
        )
        await stream.write(Command(settings=settings))
        assert (await stream.read()).status.code == pb.OK

        async def serve() -> None:
            try:
                while (command := await stream.read()) is not grpc.aio.EOF:
                    if command.WhichOneof("command") == "settings":
                        continue
                    self.told.append(command)
                    if (answer := self.answer(command)) is not None:
                        await stream.write(answer)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # the test ends the stream

        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve())
            try:
                yield
            finally:
                stream.cancel()
                serving.cancel()


def says(code: int, text: str = "") -> Answer:
    """Return an answer to a command to verify a message."""

    def answer(command: Command) -> Command:
        nonce = command.verify_message_command.nonce
        status = pb.Status(code=pb.Code.ValueType(code), message=text)
        return Command(
            status=status, verify_message_result=service_pb2.VerifyMessageResult(nonce=nonce)
        )

    return answer


def prints(text: str, code: int = pb.OK) -> Answer:
    """Return an answer to a command to print stack traces."""

    def answer(command: Command) -> Command:
        nonce = command.print_thread_stack_trace_command.nonce
        trace = service_pb2.ThreadStackTrace(nonce=nonce, thread_stack_trace=text)
        return Command(status=pb.Status(code=pb.Code.ValueType(code)), thread_stack_trace=trace)

    return answer


class Operator:
    """Runs commands, and asks by the library."""

    def __init__(self, cluster: LocalCluster, admin: Admin) -> None:
        self.cluster, self.admin = cluster, admin
        self.remote = RemoteCommands(admin, timeout_s=20)

    async def run(self, *arguments: str) -> tuple[int | None, str, str]:
        """Return status, standard output and standard error of a command."""
        process = await asyncio.create_subprocess_exec(
            *(*BATON, "--nameserver", self.cluster.nameserver, *arguments), stdout=PIPE, stderr=PIPE
        )
        out, error = await process.communicate()
        return process.returncode, out.decode(), error.decode()

    async def refused(self, kind: type[errors.BatonError], asking: Awaitable[object]) -> str:
        """Return the message of the refusal."""
        with pytest.raises(kind) as refused:
            await asking
        return refused.value.message


@pytest.mark.long
async def test_operator_asks_the_client_at_the_gateway_that_has_it(tmp_path: Path) -> None:
    async with (
        local_cluster(tmp_path, gateways=2) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway-1"], SHOP) as shop,
        remote_client(cluster.addresses["gateway-1"], KIOSK) as kiosk,
        remote_client(cluster.addresses["gateway"], SHOP) as shop_without_a_stream,
    ):
        operator, listener = Operator(cluster, admin), Listener(shop)
        await admin.create_topic("orders", 1)
        await admin.create_topic("others", 1)
        async with Producer(cluster.nameserver) as producer:
            receipt = await producer.send("orders", b"order 1", tag="paid", keys=["k"])
            other = await producer.send("others", b"x")
        queue = receipt.queue
        await operator.refused(
            errors.RemoteClientNotFound,
            operator.remote.verify_message(GROUP, SHOP, queue, receipt.offset),
        )
        # The first gateway knows the client by its calls only.
        heartbeat = service_pb2.HeartbeatRequest(group=pb.Resource(name=GROUP))
        await shop_without_a_stream.call("Heartbeat", heartbeat)
        async with listener.connected(), Listener(kiosk).connected(pb.SIMPLE_CONSUMER):
            await listener_consumes_the_message(operator, listener, receipt.message_id)
            await result_of_the_listener_is_told(operator, listener, queue)
            await refusals_are_precise(operator, listener, queue, other.queue)
            await stack_traces_are_shown_and_bounded(operator, listener)
            await malformed_requests_are_refused(cluster.addresses["gateway-1"], queue)
        assert await progress(admin) == [], "nothing was held or acknowledged"
        await until(lambda: stream_is_gone(operator, queue))


async def progress(admin: Admin) -> list[int]:
    """Return the offsets that the group has committed."""
    return [one.committed_offset for one in await admin.progress(GROUP) if one.committed_offset]


async def stream_is_gone(operator: Operator, queue: QueueRef) -> bool:
    try:
        await operator.remote.verify_message(GROUP, SHOP, queue, 0)
    except errors.RemoteClientNotFound:
        return True
    except errors.RemoteClientSilent:
        return False
    raise AssertionError("no client can have answered")


async def listener_consumes_the_message(
    operator: Operator, listener: Listener, message_id: str
) -> None:
    listener.answer = says(pb.OK)
    status, out, error = await operator.run("gateway", "verify", GROUP, SHOP, message_id)
    assert (status, error) == (0, "")
    assert out.startswith(f"consumed by client {SHOP} in ")
    assert "asked by gateway-1" in out
    (command,) = listener.told
    message = command.verify_message_command.message
    assert (message.topic.name, message.body) == ("orders", b"order 1")
    assert (message.system_properties.tag, list(message.system_properties.keys)) == ("paid", ["k"])
    assert message.system_properties.delivery_attempt == 1
    assert len(message.system_properties.body_digest.checksum) == 32


async def result_of_the_listener_is_told(
    operator: Operator, listener: Listener, queue: QueueRef
) -> None:
    listener.answer = says(pb.FAILED_TO_CONSUME_MESSAGE, "no such account\x1b[2J")
    named = ("--topic", queue.topic, "--queue", str(queue.queue_id), "--offset", "0")
    status, out, _ = await operator.run("gateway", "verify", GROUP, SHOP, *named)
    assert (status, "failed by client" in out) == (1, True)
    assert "no such account [2J" in out, "what a client says does not reach the terminal as it is"
    listener.answer = says(pb.MESSAGE_CORRUPTED)
    found = await operator.remote.verify_message(GROUP, SHOP, queue, 0)
    assert (found.outcome, found.text, found.gateway) == ("corrupted", "", "gateway-1")


async def refusals_are_precise(
    operator: Operator, listener: Listener, queue: QueueRef, other: QueueRef
) -> None:
    remote, told = operator.remote, len(listener.told)
    verify, refused = remote.verify_message, operator.refused
    text = await refused(errors.RemoteClientNotFound, verify(GROUP, "nobody", queue, 0))
    assert "no gateway has a telemetry stream of client nobody of group billing" in text
    text = await refused(errors.RemoteCommandUnsupported, verify(GROUP, KIOSK, queue, 0))
    assert f"client {KIOSK} (JAVA 5.2.0) is no push consumer" in text
    text = await refused(errors.NotSubscribed, verify(GROUP, SHOP, other, 0))
    assert "group billing does not subscribe to topic others" in text
    await refused(errors.MessageNotFound, verify(GROUP, SHOP, queue, 1))
    await refused(errors.OffsetOutOfRange, verify(GROUP, SHOP, queue, 99))
    await refused(errors.RemoteClientNotFound, verify("strangers", SHOP, queue, 0))
    assert len(listener.told) == told, "no refused command reached the client"
    listener.answer = says(pb.NOT_IMPLEMENTED)
    text = await refused(errors.RemoteCommandUnsupported, verify(GROUP, SHOP, queue, 0))
    assert f"client {SHOP} (JAVA 5.2.0) can't verify messages: NOT_IMPLEMENTED" in text
    listener.answer = lambda _: None
    short = RemoteCommands(operator.admin, timeout_s=1)
    text = await refused(errors.RemoteClientSilent, short.verify_message(GROUP, SHOP, queue, 0))
    assert "did not answer within" in text
    assert len(listener.told) == told + 2, "a command without an answer is not repeated"
    with pytest.raises(errors.InvalidArgument):
        RemoteCommands(operator.admin, timeout_s=61)


async def stack_traces_are_shown_and_bounded(operator: Operator, listener: Listener) -> None:
    listener.answer = prints("main\n\tat Shop.run(Shop.java:7)\x1b[2J")
    status, out, error = await operator.run("gateway", "threads", SHOP)
    assert (status, error) == (0, "")
    assert out == "main\n\tat Shop.run(Shop.java:7)\\x1b[2J\n"
    listener.answer = prints("x" * (TRACE_BYTES_MAX + 7))
    found = await operator.remote.stack_traces(SHOP, GROUP)
    assert (len(found.text), found.cut_bytes) == (TRACE_BYTES_MAX, 7)
    for text, code in (("", pb.UNSUPPORTED), ("mock stack", pb.OK), ("", pb.OK)):
        listener.answer = prints(text, code)
        asking = operator.remote.stack_traces(SHOP)
        said = await operator.refused(errors.RemoteCommandUnsupported, asking)
        assert "can't print stack traces" in said
    await operator.refused(
        errors.RemoteClientNotFound, operator.remote.stack_traces(SHOP, "strangers")
    )


async def malformed_requests_are_refused(address: str, queue: QueueRef) -> None:
    place = {"topic": queue.topic, "broker": queue.broker, "queue_id": queue.queue_id}
    requests: Sequence[dict[str, Any]] = (
        {"client_id": SHOP, "queue": place},
        {"group": GROUP, "queue": place},
        {"group": GROUP, "client_id": SHOP},
        {"group": GROUP, "client_id": SHOP, "queue": {"topic": "orders"}},
        {"group": GROUP, "client_id": SHOP, "queue": {**place, "topic": "a b"}},
        {"group": GROUP, "client_id": SHOP, "queue": place, "offset": -1},
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = gateway_grpc.GatewayServiceStub(channel)
        asked: list[Any] = [
            stub.VerifyMessage(gateway_pb.VerifyMessageRequest(**one), timeout=5)
            for one in requests
        ]
        for group in ("", "a b"):
            ask = gateway_pb.GetStackTracesRequest(client_id=SHOP if group else "", group=group)
            asked.append(stub.GetStackTraces(ask, timeout=5))
        for one in asked:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await one
            kind = type(from_rpc_error(refused.value))
            assert kind in (errors.InvalidArgument, errors.InvalidName)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            ask = gateway_pb.GetStackTracesRequest(client_id=SHOP, group="strangers")
            await stub.GetStackTraces(ask, timeout=5)
        assert isinstance(from_rpc_error(refused.value), errors.NotMember)


async def test_dead_letter_is_verified_as_it_was_first_sent(tmp_path: Path) -> None:
    settings = {"delivery_attempts_max": 1, "invisible_ms_min": 100}
    async with (
        local_cluster(tmp_path, gateways=1, gateway=settings) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"], SHOP) as shop,
    ):
        listener = Listener(shop)
        await admin.create_topic("orders", 1)
        assert (await shop.send("orders", b"poison")).code == pb.OK
        async with listener.connected():
            (held,) = await shop.receive_until(GROUP, "orders", 1, invisible_ms=100)
            letters = DeadLetters(admin)

            async def found() -> list[Any]:
                try:
                    return [one async for one in letters.read(GROUP)]
                except errors.TopicNotFound:
                    return []

            await until(found)
            (letter,) = await found()
            assert letter.queue.topic == f"%DLQ%{GROUP}"
            listener.answer = says(pb.OK)
            remote = RemoteCommands(admin)
            verified = await remote.verify_message(GROUP, SHOP, letter.queue, letter.offset)
            assert verified.outcome == "consumed"
            (command,) = listener.told
            message = command.verify_message_command.message
            assert (message.topic.name, message.body) == ("orders", b"poison")
            assert message.system_properties.message_id == held.system_properties.message_id
            assert message.system_properties.delivery_attempt == 2
            assert [one async for one in letters.read(GROUP)] == [letter], "it stays"


@pytest.mark.long
@pytest.mark.parametrize("language", ["python", "node", *(one for one in MORE if one == "java")])
async def test_official_client_answers_or_the_refusal_says_why(
    tmp_path: Path, language: str
) -> None:
    client = official_client(language)
    async with (
        local_cluster(tmp_path, gateways=1) as cluster,
        Admin(cluster.nameserver) as admin,
        Producer(cluster.nameserver) as producer,
    ):
        await admin.create_topic("orders", 4)
        receipt = await producer.send("orders", b"m0")
        task = {
            "op": "push",
            "endpoints": cluster.addresses["gateway"],
            "topic": "orders",
            "group": GROUP,
            "count": 3 if language == "java" else 2,
            "seconds": 60,
        }
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.run(task))
            name = await push_consumer(admin)
            remote = RemoteCommands(admin, timeout_s=20 if language != "python" else 2)
            verifying = remote.verify_message(GROUP, name, receipt.queue, receipt.offset)
            if language == "java":
                assert (await verifying).outcome == "consumed"
                assert "Client" in (await remote.stack_traces(name)).text
            elif language == "node":
                with pytest.raises(errors.RemoteCommandUnsupported, match="NOT_IMPLEMENTED"):
                    await verifying
                with pytest.raises(errors.RemoteCommandUnsupported, match="'mock stack'"):
                    await remote.stack_traces(name)
            else:
                ignores = "official clients of PYTHON ignore this command"
                with pytest.raises(errors.RemoteClientSilent, match=ignores):
                    await verifying
                with pytest.raises(errors.RemoteClientSilent, match=ignores):
                    await remote.stack_traces(name)
            await producer.send("orders", b"m1")
            (received,) = (await running).values()
        bodies = [one["body"] for one in received]
        assert sorted(bodies) == (["m0", "m0", "m1"] if language == "java" else ["m0", "m1"])


async def push_consumer(admin: Admin) -> str:
    """Return the id of the push consumer of the group, once it is in use."""
    found = list[str]()

    async def consumes() -> bool:
        report = await RemoteClients(admin).clients(GROUP)
        found[:] = [one.client_id for one in report.clients if one.kind == "push_consumer"]
        handled = [one for one in await admin.progress(GROUP) if one.committed_offset]
        return bool(found and handled)

    await until(consumes, timeout_s=60)
    return found[0]
