"""The edge of every service.

Goal: an error is sent as status and detail only; calls without a deadline and calls to
a stopping process are rejected before the handler; the drain ends watches and long polls; every
call is counted once.
Method: a real server with a servicer that does what each request says, and a real channel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, generate_latest

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import OPTIONS, connect
from batonmq.errors import (
    BatonError,
    Difference,
    Internal,
    NoDeadline,
    NotServing,
    SubscriptionConflict,
    TopicNotFound,
    Unreachable,
)
from batonmq_server.runtime.interceptor import EdgeInterceptor
from tests.support.conditions import until

DIFFERENCE = Difference("t" * 127, "expression", "new", "a" * 2_048, "old", "b" * 2_048)
Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(pb_grpc.NameserverServiceServicer):
    """The topic of a request selects the behaviour."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ended: list[str] = []
        self.proceed = asyncio.Event()

    async def QueryRoute(
        self, request: pb.QueryRouteRequest, context: Context
    ) -> pb.QueryRouteResponse:
        self.calls.append(request.topic)
        match request.topic:
            case "refused":
                facts = {"topic": "refused"}
                raise TopicNotFound("there is none", retry_after_ms=250, facts=facts)
            case "conflict":
                raise SubscriptionConflict("they differ", differences=(DIFFERENCE,) * 64)
            case "bug":
                raise RuntimeError("secret of /etc/passwd")
            case "decode":
                b"\xff".decode()
            case "waits":
                await self.proceed.wait()
        return pb.QueryRouteResponse(route=pb.Route(generation=7))

    async def WatchRoute(
        self, request: pb.WatchRouteRequest, context: Context
    ) -> AsyncIterator[pb.WatchRouteResponse]:
        self.calls.append(request.topic)
        try:
            yield pb.WatchRouteResponse(route=pb.Route(generation=1))
            match request.topic:
                case "refused":
                    raise TopicNotFound("deleted")
                case "bug":
                    raise RuntimeError("secret of /etc/passwd")
                case "waits":
                    await asyncio.Event().wait()
        finally:
            self.ended.append(request.topic)


@dataclass
class Scene:
    """A server with the edge, and a client."""

    edge: EdgeInterceptor
    registry: CollectorRegistry
    servicer: Servicer
    channel: grpc.aio.Channel
    address: str
    stub: pb_grpc.NameserverServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = pb_grpc.NameserverServiceStub(self.channel)

    async def ask(self, topic: str, timeout: float | None = 10) -> int:  # noqa: ASYNC109
        request = pb.QueryRouteRequest(topic=topic)
        return (await self.stub.QueryRoute(request, timeout=timeout)).route.generation

    async def watch(self, topic: str, generations: list[int]) -> None:
        async for answer in self.stub.WatchRoute(pb.WatchRouteRequest(topic=topic)):
            generations.append(answer.route.generation)  # noqa: PERF401  others look meanwhile

    def metric(self, name: str, **labels: str) -> float | None:
        every = {"service": "NameserverService", "method": "QueryRoute"}
        return self.registry.get_sample_value(f"baton_rpc_{name}", every | labels)


@asynccontextmanager
async def edge(*long_polls: str) -> AsyncIterator[Scene]:
    registry = CollectorRegistry()
    interceptor = EdgeInterceptor(Clock(), registry, frozenset(long_polls))
    servicer = Servicer()  # type: ignore[abstract]
    server = grpc.aio.server(interceptors=[interceptor], options=OPTIONS)
    pb_grpc.add_NameserverServiceServicer_to_server(servicer, server)
    checks = health.aio.HealthServicer()
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield Scene(interceptor, registry, servicer, channel, f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def failure(call: Awaitable[object]) -> tuple[grpc.StatusCode, BatonError, str]:
    """Return status, error and text of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), from_rpc_error(caught.value), str(caught.value)


# ---- errors


async def test_baton_error_is_sent_as_status_with_detail() -> None:
    async with edge() as scene:
        code, error, _ = await failure(scene.ask("refused"))
    assert code is grpc.StatusCode.NOT_FOUND
    assert type(error) is TopicNotFound
    assert (error.message, error.remedy) == ("there is none", TopicNotFound.remedy)
    assert (error.retry_after_ms, error.facts) == (250, {"topic": "refused"})


async def test_generic_client_reads_reason_facts_and_retry_delay_of_an_error() -> None:
    """A channel without BatonMQ's options, and grpcio-status to decode the trailer."""
    async with edge() as scene, grpc.aio.insecure_channel(scene.address) as channel:
        call = pb_grpc.NameserverServiceStub(channel).QueryRoute(
            pb.QueryRouteRequest(topic="refused"), timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    assert (status.code, status.message) == (code_pb2.NOT_FOUND, "there is none")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(info)
    assert (info.reason, info.domain) == ("TOPIC_NOT_FOUND", "batonmq")
    assert dict(info.metadata) == {"topic": "refused"}
    assert status.details[2].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 250


async def test_largest_subscription_conflict_is_sent_whole() -> None:
    async with edge() as scene:
        _, error, _ = await failure(scene.ask("conflict"))
    assert type(error) is SubscriptionConflict
    assert error.differences == (DIFFERENCE,) * 64


async def test_unexpected_error_is_sent_as_internal_without_detail_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with edge() as scene:
        code, error, text = await failure(scene.ask("bug"))
    assert code is grpc.StatusCode.INTERNAL
    assert type(error) is Internal
    assert "secret" not in text
    assert "passwd" not in text
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "QueryRoute" in record.getMessage()
    assert record.exc_info is not None
    assert "secret of /etc/passwd" in str(record.exc_info[1])


@pytest.mark.parametrize(
    ("topic", "kind"), [("refused", TopicNotFound), ("bug", Internal)], ids=["deliberate", "bug"]
)
async def test_stream_error_follows_its_items(topic: str, kind: type[BatonError]) -> None:
    generations: list[int] = []
    async with edge() as scene:
        code, error, text = await failure(scene.watch(topic, generations))
    assert generations == [1]
    assert code.name == kind.kind
    assert type(error) is kind
    assert "secret" not in text


async def test_call_of_an_unknown_service_is_unimplemented() -> None:
    async with edge() as scene:
        stub = lockmgr_grpc.LockmgrServiceStub(scene.channel)
        code, error, _ = await failure(stub.List(lockmgr_pb.ListRequest(), timeout=10))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert type(error) is Internal


async def test_call_to_a_closed_port_is_unreachable() -> None:
    async with edge() as scene:
        code, error, _ = await failure(scene.ask("waits", timeout=0.05))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert type(error) is Unreachable


# ---- deadlines


async def test_call_without_deadline_is_rejected_before_the_handler() -> None:
    async with edge() as scene:
        code, error, _ = await failure(scene.ask("fine", timeout=None))
        assert scene.servicer.calls == []
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert type(error) is NoDeadline
    assert "QueryRoute" in error.message


async def test_watch_needs_no_deadline() -> None:
    generations: list[int] = []
    async with edge() as scene:
        await scene.watch("ends", generations)
    assert generations == [1]


async def test_health_check_needs_no_deadline() -> None:
    async with edge() as scene:
        stub: Any = health_pb2_grpc.HealthStub(scene.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# ---- drain


async def test_drain_ends_watches_with_not_serving() -> None:
    generations: list[int] = []
    async with edge() as scene, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(failure(scene.watch("waits", generations)))
        await until(lambda: generations)
        scene.edge.drain()
        code, error, _ = await watching
        await until(lambda: scene.servicer.ended == ["waits"])
    assert code is grpc.StatusCode.UNAVAILABLE
    assert type(error) is NotServing
    assert error.retry_after_ms > 0


async def test_drain_ends_long_polls_with_not_serving() -> None:
    async with edge("QueryRoute") as scene, asyncio.TaskGroup() as tasks:
        long_poll = tasks.create_task(failure(scene.ask("waits")))
        await until(lambda: scene.servicer.calls)
        scene.edge.drain()
        code, error, _ = await long_poll
    assert code is grpc.StatusCode.UNAVAILABLE
    assert type(error) is NotServing


async def test_drain_lets_other_calls_finish() -> None:
    async with edge() as scene, asyncio.TaskGroup() as tasks:
        under_way = tasks.create_task(scene.ask("waits"))
        await until(lambda: scene.servicer.calls)
        scene.edge.drain()
        scene.servicer.proceed.set()
        assert await under_way == 7


async def test_new_calls_are_rejected_after_the_drain_before_the_handler() -> None:
    generations: list[int] = []
    async with edge() as scene:
        scene.edge.drain()
        _, unary, _ = await failure(scene.ask("fine"))
        _, watch, _ = await failure(scene.watch("waits", generations))
        assert scene.servicer.calls == []
    assert type(unary) is type(watch) is NotServing


# ---- metrics


async def test_calls_are_counted_by_outcome() -> None:
    async with edge() as scene:
        for topic in ("fine", "fine", "refused", "bug", "decode"):
            if topic == "fine":
                await scene.ask(topic)
            else:
                await failure(scene.ask(topic))
        await failure(scene.ask("fine", timeout=None))
        await until(lambda: scene.metric("open") == 0)
        counted = {
            reason: scene.metric("calls_total", reason=reason)
            for reason in ("OK", "TOPIC_NOT_FOUND", "INTERNAL", "NO_DEADLINE")
        }
        assert counted == {"OK": 2, "TOPIC_NOT_FOUND": 1, "INTERNAL": 2, "NO_DEADLINE": 1}
        assert scene.metric("seconds_count") == 6


async def test_open_calls_are_exported() -> None:
    async with edge() as scene, asyncio.TaskGroup() as tasks:
        call = tasks.create_task(scene.ask("waits"))
        await until(lambda: scene.servicer.calls)
        assert scene.metric("open") == 1
        scene.servicer.proceed.set()
        await call
        await until(lambda: scene.metric("open") == 0)


async def test_cancelled_call_is_counted_as_cancelled() -> None:
    async with edge() as scene, asyncio.TaskGroup() as tasks:
        call = tasks.create_task(scene.ask("waits"))
        await until(lambda: scene.servicer.calls)
        call.cancel()
        await until(lambda: scene.metric("calls_total", reason="CANCELLED") == 1)
        assert scene.metric("open") == 0


async def test_stream_ends_when_its_watcher_disconnects() -> None:
    async with edge() as scene, asyncio.TaskGroup() as tasks:
        generations: list[int] = []
        watching = tasks.create_task(scene.watch("waits", generations))
        await until(lambda: generations)
        watching.cancel()
        await until(lambda: scene.servicer.ended == ["waits"])
        await until(lambda: scene.metric("open", method="WatchRoute") == 0)


async def test_calls_ended_by_the_drain_are_counted_as_not_serving() -> None:
    async with edge("QueryRoute") as scene, asyncio.TaskGroup() as tasks:
        long_poll = tasks.create_task(failure(scene.ask("waits")))
        await until(lambda: scene.servicer.calls)
        scene.edge.drain()
        await long_poll
        await until(lambda: scene.metric("calls_total", reason="NOT_SERVING") == 1)


async def test_metric_names_are_those_of_the_dashboards() -> None:
    async with edge() as scene:
        await scene.ask("fine")
        await until(lambda: scene.metric("open") == 0)
        shown = generate_latest(scene.registry).decode()
    labels = 'method="QueryRoute",service="NameserverService"'
    assert 'baton_rpc_calls_total{method="QueryRoute",reason="OK",' in shown
    assert f'baton_rpc_seconds_bucket{{le="0.0005",{labels}}}' in shown
    assert f"baton_rpc_open{{{labels}}} 0.0" in shown
