"""Calls that share one stream.

Goal: a call within a stream has the response, the error, the deadline and the metrics of the same
call alone; a stream that ends or is missing costs no more than its calls in flight.
Method: a real server with the edge, and real channels. The servicer does what each request says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from baton.calls.v1 import call_service_pb2 as calls_pb
from baton.calls.v1 import call_service_pb2_grpc as calls_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import STATUS_TRAILER, from_rpc_error
from batonmq._connection import call_stream
from batonmq._connection.call_stream import CALL_BYTES_MAX, CallStream
from batonmq._connection.channels import OPTIONS, connect
from batonmq.errors import (
    BatonError,
    Internal,
    InvalidArgument,
    NoDeadline,
    NotServing,
    TopicNotFound,
    Unreachable,
)
from batonmq_server.runtime import call_streams
from batonmq_server.runtime.call_streams import CALLS_MAX, ServerWithCalls
from batonmq_server.runtime.interceptor import EdgeInterceptor
from tests.support.conditions import until
from tests.support.own_logs import own_warnings

APPEND = "/baton.storage.v1.StorageService/Append"
EXCHANGE = "/baton.calls.v1.CallService/Exchange"
SOON_S = 5.0
"""Far below the deadlines of the calls, and far above what a busy machine needs."""
Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(pb_grpc.StorageServiceServicer):
    """The first batch of a request selects the behaviour."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cancelled: list[str] = []
        self.timeouts_s: list[float | None] = []
        self.proceed = asyncio.Event()

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        name = request.batches[0].decode()
        self.calls.append(name)
        self.timeouts_s.append(context.time_remaining())
        if name.startswith("waits"):
            try:
                await self.proceed.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
        match name:
            case "refused":
                facts = {"topic": "refused"}
                raise TopicNotFound("there is none", retry_after_ms=250, facts=facts)
            case "bug":
                raise RuntimeError("secret of /etc/passwd")
            case "cancels itself":
                raise asyncio.CancelledError
        outcome = pb.AppendOutcome(receipt=pb.AppendReceipt(first_offset=len(name)))
        return pb.AppendResponse(outcomes=[outcome])

    async def Pull(self, request: pb.PullRequest, context: Context) -> pb.PullResponse:
        return pb.PullResponse(batches=[bytes(600_000)])


class Recorder(grpc.aio.ServerInterceptor):
    """Records the methods that are called, also those without a handler."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self.methods.append(handler_call_details.method)
        return await continuation(handler_call_details)


@dataclass
class Server:
    """A server with the edge, with or without streams of calls."""

    edge: EdgeInterceptor
    registry: CollectorRegistry
    servicer: Servicer
    recorder: Recorder
    server: grpc.aio.Server
    port: int

    def metric(self, name: str, method: str = "Append", **labels: str) -> float:
        service = "CallService" if method == "Exchange" else "StorageService"
        every = {"service": service, "method": method} | labels
        return self.registry.get_sample_value(f"baton_rpc_{name}", every) or 0


@asynccontextmanager
async def serving(
    port: int = 0,
    *,
    with_calls: bool = True,
    options: Iterable[tuple[str, int]] = OPTIONS,
) -> AsyncIterator[Server]:
    registry, recorder = CollectorRegistry(), Recorder()
    edge = EdgeInterceptor(Clock(), registry)
    servicer = Servicer()  # type: ignore[abstract]
    server = grpc.aio.server(interceptors=[recorder, edge], options=tuple(options))
    adder: Any = ServerWithCalls(server, edge) if with_calls else server
    pb_grpc.add_StorageServiceServicer_to_server(servicer, adder)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield Server(edge, registry, servicer, recorder, server, port)
    finally:
        await server.stop(None)


@dataclass
class Client:
    """A channel with streams of calls."""

    channel: grpc.aio.Channel
    stub: pb_grpc.StorageServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = pb_grpc.StorageServiceStub(self.channel)

    async def append(self, name: str, timeout: float = 30, size: int = 0) -> int:  # noqa: ASYNC109
        """Return the length of the name, which the server returns."""
        request = pb.AppendRequest(batches=[name.encode(), bytes(size)])
        (outcome,) = (await self.stub.Append(request, timeout=timeout)).outcomes
        return outcome.receipt.first_offset


@asynccontextmanager
async def scene() -> AsyncIterator[tuple[Server, Client]]:
    async with serving() as server, connect(f"127.0.0.1:{server.port}") as channel:
        yield server, Client(channel)


async def failure(call: Awaitable[object]) -> tuple[grpc.StatusCode, BatonError]:
    """Return status and error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), from_rpc_error(caught.value)


def call_of(call_id: int, name: str = "fine", **fields: Any) -> calls_pb.Call:
    request = pb.AppendRequest(batches=[name.encode()]).SerializeToString()
    given: dict[str, Any] = {"method": APPEND, "timeout_ms": 30_000, "request": request} | fields
    return calls_pb.Call(call_id=call_id, **given)


@pytest.fixture
def patient_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers wait long for clients that do not end a closing stream."""
    monkeypatch.setattr(call_streams, "CLOSING_S", 60.0)


class RawStream:
    """A stream of calls that a test writes by itself."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = calls_grpc.CallServiceStub(channel).Exchange()

    async def replies(self, *calls: calls_pb.Call) -> dict[int, calls_pb.Reply]:
        """Send calls, and return their replies by number."""
        await self.call.write(calls_pb.ExchangeRequest(calls=calls))
        replies: dict[int, calls_pb.Reply] = {}
        while len(replies) < len(calls):
            response = await self.call.read()
            assert response is not grpc.aio.EOF, await self.call.details()
            replies |= {reply.call_id: reply for reply in response.replies}
        return replies

    async def next(self) -> calls_pb.Reply:
        """Return the next reply, which comes alone."""
        while not (response := await self.call.read()).replies:
            pass  # the stream is accepted
        reply: calls_pb.Reply = response.replies[0]
        assert len(response.replies) == 1
        return reply

    async def reply(self, call: calls_pb.Call) -> calls_pb.Reply:
        return (await self.replies(call))[call.call_id]


def error_of(reply: calls_pb.Reply) -> BatonError:
    """Return the error of a reply, decoded as that of a call that has come alone."""
    trailers = grpc.aio.Metadata((STATUS_TRAILER, reply.details))
    nothing = grpc.aio.Metadata()
    return from_rpc_error(
        grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, nothing, trailers, reply.message)
    )


def code_of(reply: calls_pb.Reply) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == reply.code)


# ---- the same as alone


async def test_calls_go_over_one_stream_and_are_counted_by_their_methods() -> None:
    async with scene() as (server, client):
        assert [await client.append(name) for name in ("a", "bb", "ccc")] == [1, 2, 3]
        assert server.recorder.methods == [EXCHANGE]
        assert server.metric("calls_total", reason="OK") == 3
        assert server.metric("seconds_count") == 3
        assert server.metric("open") == 0
        assert server.metric("open", "Exchange") == 1


@pytest.mark.parametrize("name", ["refused", "bug"])
async def test_error_is_that_of_the_same_call_alone(name: str) -> None:
    async with scene() as (server, client):
        code, error = await failure(client.append(name))
        request = pb.AppendRequest(batches=[name.encode()])
        alone = client.stub.Append(request, timeout=30, metadata=(("a", "b"),))
        code_alone, error_alone = await failure(alone)
        assert server.recorder.methods == [EXCHANGE, APPEND]
        await until(lambda: server.metric("calls_total", reason=error.reason) == 2)
    assert code is code_alone
    assert type(error) is type(error_alone) is (TopicNotFound if name == "refused" else Internal)
    assert vars(error) == vars(error_alone)
    assert str(error) == str(error_alone)
    if name == "refused":
        assert (error.retry_after_ms, error.facts) == (250, {"topic": "refused"})


async def test_slow_call_does_not_delay_a_fast_one() -> None:
    async with scene() as (server, client), asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(client.append("waits"))
        await until(lambda: server.servicer.calls)
        assert await client.append("fine") == 4
        assert not slow.done()
        server.servicer.proceed.set()
        assert await slow == 5
        assert server.recorder.methods == [EXCHANGE]


async def test_handler_sees_the_deadline_of_its_call() -> None:
    async with scene() as (server, client):
        await client.append("fine", timeout=20)
        (left_s,) = server.servicer.timeouts_s
    assert left_s is not None
    assert 10 < left_s <= 20


async def test_call_beyond_its_deadline_fails_and_its_handler_is_cancelled() -> None:
    async with scene() as (server, client):
        await client.append("fine")
        code, error = await failure(client.append("waits", timeout=0.2))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert type(error) is Unreachable
        await until(lambda: server.servicer.cancelled == ["waits"])
        await until(lambda: server.metric("calls_total", reason="CANCELLED") == 1)
        assert await client.append("fine") == 4
        assert server.recorder.methods == [EXCHANGE]


async def test_reply_of_the_server_to_a_call_beyond_its_deadline_says_so() -> None:
    async with scene() as (_, client):
        reply = await RawStream(client.channel).reply(call_of(1, "waits", timeout_ms=50))
    assert code_of(reply) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_cancelling_one_caller_leaves_the_others() -> None:
    async with scene() as (server, client), asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(client.append("waits 1"))
        stays = tasks.create_task(client.append("waits 2"))
        await until(lambda: len(server.servicer.calls) == 2)
        gone.cancel()
        assert await client.append("fine") == 4
        server.servicer.proceed.set()
        assert await stays == 7
        assert gone.cancelled()
        assert server.recorder.methods == [EXCHANGE]


# ---- calls that the server refuses


@pytest.mark.parametrize("timeout_ms", [0, -1])
async def test_call_without_a_deadline_is_refused(timeout_ms: int) -> None:
    async with scene() as (server, client):
        stream = RawStream(client.channel)
        refused = await stream.reply(call_of(1, timeout_ms=timeout_ms))
        assert code_of(refused) is grpc.StatusCode.INVALID_ARGUMENT
        assert type(error_of(refused)) is NoDeadline
        assert server.servicer.calls == []
        assert (await stream.reply(call_of(2))).code == 0


async def test_undecodable_request_is_refused_alone() -> None:
    async with scene() as (server, client):
        replies = await RawStream(client.channel).replies(call_of(1, request=b"\xff"), call_of(2))
        assert code_of(replies[1]) is grpc.StatusCode.INVALID_ARGUMENT
        assert type(error_of(replies[1])) is InvalidArgument
        assert replies[2].code == 0
        assert server.metric("calls_total", reason="INVALID_ARGUMENT") == 1


async def test_undecodable_message_of_the_stream_ends_it() -> None:
    async with scene() as (_, client):
        broken: Any = client.channel.stream_stream(
            EXCHANGE, bytes, calls_pb.ExchangeResponse.FromString
        )
        responses = aiter(broken(iter([b"\xff"])))
        assert not (await anext(responses)).replies
        code, error = await failure(anext(responses))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert type(error) is InvalidArgument


@pytest.mark.parametrize(
    "method",
    [
        "",
        "nothing",
        "/a/b/c",
        "/baton.storage.v1.StorageService/Unknown",
        "/baton.storage.v1.StorageService/Deliver",
        EXCHANGE,
    ],
)
async def test_method_that_no_stream_may_call_is_unimplemented(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene() as (_, client):
        replies = await RawStream(client.channel).replies(call_of(1, method=method), call_of(2))
    assert code_of(replies[1]) is grpc.StatusCode.UNIMPLEMENTED
    assert replies[2].code == 0
    assert not own_warnings(caplog)


# ---- bounds


async def test_calls_beyond_the_bound_wait_and_are_served_later() -> None:
    count = CALLS_MAX + 20
    async with scene() as (server, client), asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(client.append(f"waits {number}")) for number in range(count)]
        await until(lambda: len(server.servicer.calls) == CALLS_MAX)
        # The calls beyond arrive no later than this one, and none of them may begin before it does.
        request = pb.AppendRequest(batches=[b"fine"])
        await client.stub.Append(request, timeout=30, metadata=(("a", "b"),))
        assert len(server.servicer.calls) == CALLS_MAX + 1
        server.servicer.proceed.set()
        for call in calls:
            await call
        began = [name for name in server.servicer.calls if name != "fine"]
        assert began == [f"waits {number}" for number in range(count)], "in their order"


async def test_every_slot_is_free_again_after_calls_of_each_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_streams, "CALLS_MAX", 2)
    async with scene() as (server, client):
        for _ in range(3):
            await client.append("fine")
            await failure(client.append("refused"))
            await failure(client.append("bug"))
            await failure(client.append("waits", timeout=0.05))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(client.append("waits"))
            await until(lambda: server.servicer.calls[-2:] == ["waits", "waits"])
            server.servicer.proceed.set()


async def test_large_request_goes_alone() -> None:
    async with scene() as (server, client):
        await client.append("small", size=CALL_BYTES_MAX - 100)
        assert server.recorder.methods == [EXCHANGE]
        await client.append("large", size=CALL_BYTES_MAX)
        assert server.recorder.methods == [EXCHANGE, APPEND]


async def test_call_with_metadata_goes_alone() -> None:
    async with scene() as (server, client):
        request = pb.AppendRequest(batches=[b"fine"])
        await client.stub.Append(request, timeout=30, metadata=(("a", "b"),))
        assert server.recorder.methods == [APPEND]


async def test_call_without_a_deadline_goes_alone_and_is_refused() -> None:
    async with scene() as (server, client):
        _, error = await failure(client.stub.Append(pb.AppendRequest(batches=[b"fine"])))
        assert type(error) is NoDeadline
        assert server.recorder.methods == [APPEND]


# ---- the end of a stream


async def test_drain_answers_calls_in_progress_refuses_others_and_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the client does not end it."""
    monkeypatch.setattr(call_streams, "CLOSING_S", 0.05)
    async with scene() as (server, client):
        stream = RawStream(client.channel)
        await stream.call.write(calls_pb.ExchangeRequest(calls=[call_of(1, "waits")]))
        await until(lambda: server.servicer.calls)
        server.edge.drain()
        refused = await stream.reply(call_of(2))
        assert code_of(refused) is grpc.StatusCode.UNAVAILABLE
        assert type(error_of(refused)) is NotServing
        server.servicer.proceed.set()
        last = await stream.next()
        assert (last.call_id, last.code) == (1, 0)
        code, error = await failure(stream.call.read())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert type(error) is NotServing
        await until(lambda: server.metric("open", "Exchange") == 0)
        assert server.metric("calls_total", "Exchange", reason="NOT_SERVING") == 1


async def test_stream_that_closes_answers_every_call_and_ends_when_its_client_ends_it(
    patient_server: None,
) -> None:
    async with scene() as (server, client):
        stream = RawStream(client.channel)
        await stream.call.write(calls_pb.ExchangeRequest(calls=[call_of(1)]))
        assert (await stream.next()).code == 0
        server.edge.drain()
        response = await stream.call.read()
        assert (response.closing, len(response.replies)) == (True, 0)
        for number in range(2, 5):
            assert type(error_of(await stream.reply(call_of(number)))) is NotServing
        await stream.call.done_writing()
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_calls_that_wait_for_a_slot_have_replies_though_the_time_to_close_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_streams, "CALLS_MAX", 1)
    monkeypatch.setattr(call_streams, "CLOSING_S", 0.0)
    async with scene() as (server, client):
        stream = RawStream(client.channel)
        calls = [call_of(1, "waits"), *(call_of(number) for number in range(2, 6))]
        await stream.call.write(calls_pb.ExchangeRequest(calls=calls))
        await until(lambda: server.servicer.calls)
        server.edge.drain()
        while not (await stream.call.read()).closing:
            pass
        server.servicer.proceed.set()
        replies = [await stream.next() for _ in calls]
        assert [reply.code for reply in replies] == [0] + [14] * 4
        assert type((await failure(stream.call.read()))[1]) is NotServing


async def test_no_outcome_is_unknown_when_a_process_drains(
    patient_server: None,
) -> None:
    """Whatever the moment: some calls are on their way when the stream begins to close."""
    for calls_count in range(30):
        assert await errors_of_a_drain(calls_count) == {NotServing}


async def errors_of_a_drain(after: int) -> set[type[BatonError]]:
    """Return the errors of three callers when a process drains after so many calls."""
    async with scene() as (server, client):

        async def call_until_it_fails() -> type[BatonError]:
            try:
                while True:
                    await client.append("fine")
            except grpc.aio.AioRpcError as error:
                return type(from_rpc_error(error))

        async with asyncio.TaskGroup() as tasks:
            callers = [tasks.create_task(call_until_it_fails()) for _ in range(3)]
            await until(lambda: len(server.servicer.calls) > after)
            server.edge.drain()
        return {caller.result() for caller in callers}


async def test_drain_ends_an_idle_stream_and_refuses_new_ones(
    patient_server: None,
) -> None:
    async with scene() as (server, client):
        await client.append("fine")
        server.edge.drain()
        await until(lambda: server.metric("open", "Exchange") == 0)
        assert server.metric("calls_total", "Exchange", reason="OK") == 1, "the client has ended it"
        code, error = await failure(client.append("fine"))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert type(error) is NotServing
        assert server.servicer.calls == ["fine"]


async def test_calls_in_flight_fail_with_their_server_and_the_next_call_finds_another_one() -> None:
    async with serving() as first:
        channel = connect(f"127.0.0.1:{first.port}")
        client = Client(channel)
        await client.append("fine")
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(failure(client.append("waits"))) for _ in range(3)]
            await until(lambda: len(first.servicer.calls) == 4)
            await first.server.stop(None)
            errors = [await call for call in calls]
        assert {type(error) for _, error in errors} == {Unreachable}
        await until(lambda: first.servicer.cancelled == ["waits"] * 3)
    async with channel, serving(first.port) as second:

        async def answered() -> bool:
            with suppress(grpc.aio.AioRpcError):
                return await client.append("fine") == 4
            return False

        await until(answered)
        assert set(second.recorder.methods) == {EXCHANGE}


async def test_caller_of_a_closed_port_is_told_at_once() -> None:
    async with serving() as server:
        pass
    async with connect(f"127.0.0.1:{server.port}") as channel, asyncio.timeout(SOON_S):
        code, error = await failure(Client(channel).append("fine"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert type(error) is Unreachable


async def test_idle_stream_ends_and_the_next_call_opens_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_stream, "IDLE_S", 0.05)
    async with scene() as (server, client):
        await client.append("fine")
        await until(lambda: server.metric("calls_total", "Exchange", reason="OK") == 1)
        assert server.metric("open", "Exchange") == 0
        await client.append("fine")
        assert server.recorder.methods == [EXCHANGE, EXCHANGE]


async def test_stream_with_a_call_in_progress_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stream, "IDLE_S", 0.02)
    async with scene() as (server, client), asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(client.append("waits"))
        await until(lambda: server.servicer.calls)
        begin_s = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - begin_s > 0.2)
        assert server.metric("open", "Exchange") == 1
        server.servicer.proceed.set()
        assert await slow == 5


async def test_no_call_is_lost_while_streams_end_for_being_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_stream, "IDLE_S", 0.001)
    async with scene() as (server, client):
        for number in range(200):
            await client.append("fine")
            await asyncio.sleep(number % 5 / 2000)  # the time under test, not a wait
        assert server.recorder.methods.count(EXCHANGE) > 1


async def test_client_that_goes_away_ends_its_stream_and_the_calls() -> None:
    async with scene() as (server, client):
        stream = RawStream(client.channel)
        await stream.call.write(calls_pb.ExchangeRequest(calls=[call_of(1, "waits")]))
        await until(lambda: server.servicer.calls)
        stream.call.cancel()
        await until(lambda: server.servicer.cancelled)
        await until(lambda: server.metric("open", "Exchange") == server.metric("open") == 0)


async def test_client_that_sends_no_more_gets_the_replies_of_its_calls() -> None:
    async with scene() as (server, client):
        stream = RawStream(client.channel)
        await stream.call.write(calls_pb.ExchangeRequest(calls=[call_of(1, "waits")]))
        await stream.call.done_writing()
        await until(lambda: server.servicer.calls)
        server.servicer.proceed.set()
        reply = await stream.next()
        assert (reply.call_id, reply.code) == (1, 0)
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_closed_channel_has_no_tasks_and_its_calls_have_failed() -> None:
    async with serving() as server:
        client = Client(connect(f"127.0.0.1:{server.port}"))
        async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
            call = tasks.create_task(failure(client.append("waits")))
            await until(lambda: server.servicer.calls)
            await client.channel.close()
            _, error = await call
        assert type(error) is Unreachable
        await until(
            lambda: not [task for task in asyncio.all_tasks() if "call_stream.py" in repr(task)]
        )


async def test_call_of_a_closed_channel_fails_at_once() -> None:
    async with serving() as server:
        client = Client(connect(f"127.0.0.1:{server.port}"))
        await client.append("fine")
        await client.channel.close()
        with pytest.raises((grpc.aio.AioRpcError, grpc.aio.UsageError)):
            async with asyncio.timeout(SOON_S):
                await client.append("fine")


async def test_call_fails_at_once_if_its_channel_is_closed_before_the_stream_is_open() -> None:
    async with serving() as server:
        client = Client(connect(f"127.0.0.1:{server.port}"))
        async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
            call = tasks.create_task(failure(client.append("fine")))
            await asyncio.sleep(0)  # the call has begun, its stream has not
            await client.channel.close()
            _, error = await call
        assert type(error) is Unreachable


# ---- servers of earlier versions


async def test_calls_to_a_server_without_streams_of_calls_go_alone() -> None:
    async with (
        serving(with_calls=False) as server,
        connect(f"127.0.0.1:{server.port}") as channel,
    ):
        client = Client(channel)
        assert [await client.append(name) for name in ("a", "bb", "ccc")] == [1, 2, 3]
        assert server.recorder.methods == [EXCHANGE, APPEND, APPEND, APPEND]


async def test_server_without_streams_of_calls_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_stream, "UNKNOWN_S", 0.2)
    async with (
        serving(with_calls=False) as server,
        connect(f"127.0.0.1:{server.port}") as channel,
    ):
        client = Client(channel)

        async def asked_again() -> bool:
            await client.append("fine")
            return server.recorder.methods.count(EXCHANGE) == 2

        await until(asked_again)
        assert server.recorder.methods[1] == APPEND


async def test_many_first_calls_to_a_server_without_streams_of_calls_all_succeed() -> None:
    async with serving(with_calls=False) as server:
        for _ in range(30):
            async with connect(f"127.0.0.1:{server.port}") as channel:
                client = Client(channel)

                async def twice(client: Client = client) -> None:
                    for _ in range(5):
                        await client.append("fine")

                async with asyncio.TaskGroup() as tasks:
                    for _ in range(10):
                        tasks.create_task(twice())


# ---- load, and handlers that misbehave


async def test_many_calls_that_are_sent_together_all_succeed() -> None:
    """Together they exceed the largest message of gRPC."""
    size = CALL_BYTES_MAX - 1_000
    count = dict(OPTIONS)["grpc.max_send_message_length"] // size + 10
    async with scene() as (server, client), asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(client.append("fine", size=size))
    assert server.metric("calls_total", reason="OK") == count


async def test_replies_that_are_ready_together_all_arrive() -> None:
    """Together they exceed the largest message of gRPC."""
    options = tuple({**dict(OPTIONS), "grpc.max_send_message_length": 1_000_000}.items())
    async with (
        serving(options=options) as server,
        connect(f"127.0.0.1:{server.port}") as channel,
    ):
        pull: dict[str, Any] = {
            "method": "/baton.storage.v1.StorageService/Pull",
            "request": pb.PullRequest().SerializeToString(),
        }
        replies = await RawStream(channel).replies(call_of(1, **pull), call_of(2, **pull))
        assert {reply.code for reply in replies.values()} == {0}


async def test_call_does_not_begin_after_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a call alone: gRPC does not begin it after its deadline."""
    monkeypatch.setattr(call_streams, "CALLS_MAX", 1)
    async with scene() as (server, client), asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(client.append("waits"))
        await until(lambda: server.servicer.calls)
        loop = asyncio.get_running_loop()
        code, _ = await failure(client.append("late", timeout=0.2))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        # At the server the deadline is later, by the time that the call has travelled.
        passed_s = loop.time() + 1
        await until(lambda: loop.time() > passed_s)
        server.servicer.proceed.set()
        await slow
        await client.append("fine")
        assert server.servicer.calls == ["waits", "fine"]


async def test_calls_without_callers_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_streams, "CALLS_MAX", 1)
    async with scene() as (server, client), asyncio.TaskGroup() as tasks:
        stream = CallStream(calls_grpc.CallServiceStub(client.channel).Exchange)
        running = tasks.create_task(stream.run())
        request = pb.AppendRequest(batches=[b"waits", bytes(200_000)]).SerializeToString()
        tasks.create_task(failure(stream.response(stream.begin(APPEND, request, 30))))
        await until(lambda: server.servicer.calls)
        for _ in range(15):  # more than what gRPC and the network take
            async with asyncio.TaskGroup() as late:
                for _ in range(20):
                    late.create_task(failure(stream.response(stream.begin(APPEND, request, 0.1))))
        kept = len(stream._unsent)
        running.cancel()
        stream.end()
    assert kept == 0


async def test_handler_that_cancels_itself_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that awaits work which another task has cancelled."""
    monkeypatch.setattr(call_streams, "CALLS_MAX", 1)
    async with scene() as (_, client), asyncio.timeout(SOON_S):
        await failure(client.append("cancels itself", timeout=0.2))
        assert await client.append("fine") == 4


async def test_handler_that_cancels_itself_does_not_prevent_the_end_of_the_stream() -> None:
    async with scene() as (server, client), asyncio.timeout(SOON_S):
        await failure(client.append("cancels itself", timeout=0.2))
        server.edge.drain()
        await until(lambda: server.metric("open", "Exchange") == 0)


async def test_call_that_the_server_has_begun_is_not_refused_by_the_drain() -> None:
    """NOT_SERVING says that nothing was done, but the handler may have done a part."""
    async with scene() as (server, client):
        stream = RawStream(client.channel)
        call = call_of(1, "waits", timeout_ms=300)
        await stream.call.write(calls_pb.ExchangeRequest(calls=[call]))
        await until(lambda: server.servicer.calls)
        server.edge.drain()
        reply = await stream.next()
        assert code_of(reply) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_call_begins_before_it_is_awaited() -> None:
    async with scene() as (server, client):
        begun = client.stub.Append(pb.AppendRequest(batches=[b"fine"]), timeout=10)
        await until(lambda: server.servicer.calls)
        assert server.servicer.calls == ["fine"]
        await begun


async def test_other_contracts_are_called_alone_only() -> None:
    """Their servicers admit their callers, by the metadata of each call."""
    async with scene() as (server, client):
        adder: Any = ServerWithCalls(grpc.aio.server(), server.edge)
        path = "apache.rocketmq.v2.MessagingService/SendMessage"
        handler: Any = grpc.unary_unary_rpc_method_handler(server.servicer.Append)
        adder.add_registered_method_handlers(path.partition("/")[0], {"SendMessage": handler})
        reply = await RawStream(client.channel).reply(call_of(1, method=f"/{path}"))
        assert code_of(reply) is grpc.StatusCode.UNIMPLEMENTED
        assert server.servicer.calls == []
