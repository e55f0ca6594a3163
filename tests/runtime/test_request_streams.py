"""Streams of requests over real gRPC.

Goal: a stream needs no deadline; its client gets the reason when a request can't be decoded, when
the service drains, when its caller has no grant or loses its token; and never a made-up error of
the server when the stream ends during a write.
Method: a real server with the edge and a servicer of Deliver that answers each request, and real
channels; for callers, grants and tokens in a real etcd.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import OPTIONS, connect, connector
from batonmq.errors import (
    BatonError,
    Internal,
    InvalidArgument,
    NotServing,
    PermissionDenied,
    Unauthenticated,
    Unreachable,
)
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.interceptor import EdgeInterceptor
from tests.access.edge_scene import METHODS, request_of, scene
from tests.support.conditions import until

DELIVER = "/baton.storage.v1.StorageService/Deliver"
LABELS = {"service": "StorageService", "method": "Deliver"}
GARBAGE = b"\xff\xff\xff"
ENDS_S = 5.0


class Echo(pb_grpc.StorageServiceServicer):
    """Answers each request, and rejects those of delivery 0.

    Attributes:
        responses: Responses to each request.
        payload_bytes: Size of each.
        yielded: Responses given to gRPC.
        written: Responses that gRPC has written.
        ended: Streams that have ended.
    """

    responses = 1
    payload_bytes = 0
    yielded = 0
    written = 0
    ended = 0

    async def Deliver(
        self, requests: AsyncIterator[pb.DeliverRequest], context: object
    ) -> AsyncIterator[pb.DeliverResponse]:
        try:
            async for request in requests:
                number = request.commands[0].delivery_id
                if number == 0:
                    raise PermissionDenied("delivery 0", facts={"identity": "app"})
                payload = pb.PullResponse(batches=[bytes(self.payload_bytes)])
                for _ in range(self.responses):
                    frame = pb.DeliveryFrame(delivery_id=number, messages=payload)
                    self.yielded += 1
                    yield pb.DeliverResponse(frames=[frame])
                    self.written += 1
        finally:
            self.ended += 1


@dataclass
class Served:
    """A server with the edge, and a channel to it."""

    echo: Echo
    edge: EdgeInterceptor
    registry: CollectorRegistry
    channel: grpc.aio.Channel

    def deliver(self) -> Any:
        """Start a stream without a deadline."""
        stub: Any = pb_grpc.StorageServiceStub(self.channel)
        return stub.Deliver(timeout=None)

    def calls(self, reason: str) -> float:
        """Return how many streams have ended with a reason."""
        labels = {**LABELS, "reason": reason}
        return self.registry.get_sample_value("baton_rpc_calls_total", labels) or 0

    def open_calls(self) -> float | None:
        return self.registry.get_sample_value("baton_rpc_open", LABELS)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    registry, echo = CollectorRegistry(), Echo()  # type: ignore[abstract]
    edge = EdgeInterceptor(Clock(), registry)
    server = grpc.aio.server(interceptors=[edge], options=OPTIONS)
    pb_grpc.add_StorageServiceServicer_to_server(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield Served(echo, edge, registry, channel)
    await server.stop(None)


def request(number: int) -> pb.DeliverRequest:
    return pb.DeliverRequest(commands=[pb.DeliveryCommand(delivery_id=number)])


async def refusal(call: Any) -> BatonError:
    """Return the error with which a stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(30):
            async for _ in call:
                pass
    return from_rpc_error(raised.value)


async def next_answer(call: Any) -> Any:
    async with asyncio.timeout(30):
        return await anext(aiter(call))


async def answer_to(call: Any, number: int) -> int:
    await call.write(request(number))
    answer: pb.DeliverResponse = await next_answer(call)
    return answer.frames[0].delivery_id


async def test_stream_without_a_deadline_answers_until_its_client_has_written_all() -> None:
    async with served() as here:
        call = here.deliver()
        assert [await answer_to(call, number) for number in (1, 2, 3)] == [1, 2, 3]
        assert here.open_calls() == 1
        await call.done_writing()
        assert [answer async for answer in call] == []
        await until(lambda: here.calls("OK") == 1)
        assert here.open_calls() == 0


async def test_cancelled_stream_ends_at_the_server_and_for_its_reader() -> None:
    async with served() as here:
        call = here.deliver()
        await answer_to(call, 1)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(next_answer(call))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
        # The servicer is cancelled, or reads the end of the requests before that.
        await until(lambda: here.calls("CANCELLED") + here.calls("OK") == 1)
        assert here.echo.ended == 1
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(request(1))


async def test_undecodable_request_ends_the_stream_as_an_invalid_argument() -> None:
    async with served() as here:
        raw: Any = here.channel.stream_stream(DELIVER)
        call = raw(timeout=None)
        await call.write(request(1).SerializeToString())
        assert await next_answer(call)
        await call.write(GARBAGE)
        error = await refusal(call)
        assert isinstance(error, InvalidArgument)
        assert error.facts == {"field": "request"}
        await until(lambda: here.calls("INVALID_ARGUMENT") == 1)
        assert here.echo.ended == 1


async def test_drain_ends_a_stream_and_refuses_the_next_one() -> None:
    async with served() as here:
        call = here.deliver()
        await answer_to(call, 1)
        here.edge.drain()
        assert isinstance(await refusal(call), NotServing)
        assert isinstance(await refusal(here.deliver()), NotServing)
        await until(lambda: here.calls("NOT_SERVING") == 2)
        assert here.echo.ended == 1


async def test_drain_ends_a_stream_with_a_reason_also_while_a_response_is_written() -> None:
    async with served() as here:
        here.echo.responses, here.echo.payload_bytes = 64, 1 << 20
        call = here.deliver()
        await call.write(request(1))
        await until(lambda: here.echo.written > 0)
        here.edge.drain()
        assert isinstance(await refusal(call), NotServing)
        await until(lambda: here.calls("NOT_SERVING") == 1)
        assert here.echo.ended == 1


async def test_drain_ends_a_stream_with_a_reason_while_its_first_response_is_written() -> None:
    async with served() as here:
        here.echo.payload_bytes = 16 << 20
        call = here.deliver()
        await call.write(request(1))
        await until(lambda: here.echo.yielded > 0)
        here.edge.drain()
        assert isinstance(await refusal(call), NotServing)
        assert here.echo.written == 0


async def test_caller_without_a_grant_is_refused_before_it_writes(etcd: EtcdSession) -> None:
    async with scene(etcd) as made:
        await made.know("stranger")
        for identity, kind in (("stranger", PermissionDenied), ("unknown", Unauthenticated)):
            raw: Any = made.channel.stream_stream(DELIVER)
            assert type(await refusal(raw(metadata=made.metadata(identity)))) is kind
        assert made.read == []


@pytest.mark.parametrize("by", ["token", "grant"])
async def test_stream_ends_when_its_token_or_last_grant_is_revoked(
    etcd: EtcdSession, by: str
) -> None:
    async with scene(etcd) as made:
        await made.know("app", ("consume", "topic:orders"))
        raw: Any = made.channel.stream_stream(DELIVER, lambda m: m.SerializeToString())
        call = raw(metadata=made.metadata("app"))
        await call.write(request_of(METHODS[DELIVER]))
        await next_answer(call)
        if by == "token":
            await made.store.revoke_token(made.digest("app")[:16])
        else:
            await made.store.revoke("app", None)
        async with asyncio.timeout(ENDS_S):
            error = await refusal(call)
        assert type(error) is (Unauthenticated if by == "token" else PermissionDenied)


async def test_stream_that_is_not_read_ends_with_the_reason_when_its_token_is_revoked(
    etcd: EtcdSession,
) -> None:
    async with scene(etcd) as made:
        await made.know("app", ("consume", "topic:orders"))
        payload = pb.PullResponse(batches=[bytes(1 << 20)])
        made.repeats[DELIVER] = pb.DeliverResponse(frames=[pb.DeliveryFrame(messages=payload)])
        raw: Any = made.channel.stream_stream(DELIVER, lambda m: m.SerializeToString())
        call = raw(metadata=made.metadata("app"))
        await call.write(request_of(METHODS[DELIVER]))
        await next_answer(call)
        await made.store.revoke_token(made.digest("app")[:16])
        await until(lambda: not made.knows("app"))
        assert isinstance(await refusal(call), Unauthenticated)


async def test_stream_that_ends_during_a_write_ends_with_its_reason_or_as_unreachable() -> None:
    """gRPC may lose the status of a stream that ends while its client writes."""
    async with served() as here:
        seen: Counter[type[BatonError]] = Counter()
        for _ in range(200):
            call = here.deliver()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for number in range(4):
                    await call.write(request(number))
            seen[type(await refusal(call))] += 1
        assert set(seen) <= {PermissionDenied, Unreachable}, seen


@pytest.mark.parametrize(
    ("debug", "kind"),
    [
        ("Failed grpc_call_start_batch", Unreachable),
        ("grpc_call_error value: 'GRPC_CALL_ERROR_TOO_MANY_OPERATIONS'", Internal),
    ],
)
def test_two_writes_at_the_same_time_are_an_error_of_the_program(
    debug: str, kind: type[BatonError]
) -> None:
    """gRPC reports both with the same status."""
    empty = grpc.aio.Metadata()
    status, details = grpc.StatusCode.INTERNAL, "Internal error from Core"
    error = grpc.aio.AioRpcError(status, empty, empty, details, debug)
    assert type(from_rpc_error(error)) is kind


async def test_secure_channel_carries_a_stream_with_the_token_beyond_its_replacement(
    etcd: EtcdSession, tmp_path: Path
) -> None:
    authority = CertificateAuthority(tmp_path)
    server = authority.issue(CertificateSubject(name="server", hosts=("localhost",)))
    client = authority.issue(CertificateSubject(name="client"))
    token = tmp_path / "token"
    async with scene(etcd, tls=server) as made:
        await made.know("app", ("consume", "topic:orders"))
        token.write_text(made.tokens["app"])
        secure = replace(client, token_file=str(token))
        async with connector(secure)(made.address) as channel:
            stub: Any = pb_grpc.StorageServiceStub(channel)
            call = stub.Deliver(timeout=None)
            for _ in range(2):
                await call.write(request_of(METHODS[DELIVER]))
                await next_answer(call)
                # The next call uses another gRPC channel, as after new certificates.
                secured = channel.channel  # type: ignore[attr-defined]
                secured._make(secured._identity.pems)
            assert len(made.served) == 2
            await call.done_writing()
            assert [answer async for answer in call] == []
