"""Access control of calls that share one stream.

Goal: each call has the permissions, the quota and the errors of the same call alone, and the stream
ends when the credentials with which it was opened have ended.
Method: the scene, with real TLS; clients have their tokens in files, as in production.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.calls.v1 import call_service_pb2 as calls_pb
from baton.calls.v1 import call_service_pb2_grpc as calls_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection import secure_channel
from batonmq._connection.channels import connector
from batonmq._connection.security import Security
from batonmq.errors import BatonError, PermissionDenied, Throttled, Unauthenticated
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.runtime import call_streams
from batonmq_server.runtime.access.permissions import AccessRole, Grant
from batonmq_server.runtime.access.quotas import Quota
from batonmq_server.runtime.access.stored_access import digest_of
from batonmq_server.runtime.access.stored_quotas import quota_key, quota_to_pb
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.access.edge_scene import METHODS, Scene, request_of, scene
from tests.storage.batches import batch
from tests.support.conditions import until
from tests.support.own_logs import own_records

APPEND = "/baton.storage.v1.StorageService/Append"
COMMIT = "/baton.offsets.v1.OffsetsService/Commit"
EXCHANGE = "/baton.calls.v1.CallService/Exchange"
PRODUCE = ("produce", "topic:orders")


@dataclass
class Here:
    """The scene over TLS, and a folder for the files of its clients."""

    edge: Scene
    server: Security
    folder: Path

    def token_file(self, identity: str) -> Path:
        return self.folder / f"{identity}.token"

    @asynccontextmanager
    async def client(self, identity: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yield a channel with the token of an identity."""
        file = self.token_file(identity)
        file.write_text(self.edge.tokens[identity])
        security = Security(ca_file=self.server.ca_file, token_file=str(file))
        async with connector(security)(self.edge.address) as channel:
            yield channel

    def metric(self, name: str, service: str = "CallService", **labels: str) -> float:
        method = {"CallService": "Exchange", "StorageService": "Append"}[service]
        every = {"service": service, "method": method} | labels
        return self.edge.registry.get_sample_value(f"baton_rpc_{name}", every) or 0

    def served(self, path: str) -> int:
        return [one for one, _ in self.edge.served].count(path)


@pytest_asyncio.fixture
async def here(
    etcd: EtcdSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Here]:
    monkeypatch.setattr(secure_channel, "CHECK_INTERVAL_S", 0.0)
    authority = CertificateAuthority(tmp_path)
    server = authority.issue(CertificateSubject(name="server", hosts=("localhost",)))
    async with (
        scene(etcd, tls=server, certificates=False) as edge,
        asyncio.TaskGroup() as tasks,
    ):
        following = tasks.create_task(edge.guard.quota_mirror.run())
        yield Here(edge, server, tmp_path)
        following.cancel()


async def ask(channel: grpc.aio.Channel, path: str, request: Message | None = None) -> Any:
    """Make a call as the stubs of clients do."""
    method = METHODS[path]
    answer = GetMessageClass(method.output_type).FromString
    call: Any = channel.unary_unary(path, lambda sent: sent.SerializeToString(), answer)
    return await call(request or request_of(method), timeout=30)


async def refusal(call: Awaitable[object]) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


async def replies(
    channel: grpc.aio.Channel, *methods: str
) -> tuple[list[grpc.StatusCode], list[str]]:
    """Make calls over a stream of their own; return the codes and messages of their replies."""
    stream: Any = calls_grpc.CallServiceStub(channel).Exchange()
    assert not (await stream.read()).replies  # the stream is accepted
    codes: list[grpc.StatusCode] = []
    messages: list[str] = []
    for number, method in enumerate(methods):
        call = calls_pb.Call(call_id=number, method=method, timeout_ms=30_000)
        await stream.write(calls_pb.ExchangeRequest(calls=[call]))
        (reply,) = (await stream.read()).replies
        codes += [code for code in grpc.StatusCode if code.value[0] == reply.code]
        messages.append(reply.message)
    stream.cancel()
    return codes, messages


# ---- permissions


async def test_permissions_are_checked_for_each_call_of_a_stream(here: Here) -> None:
    await here.edge.know("writer", PRODUCE)
    async with here.client("writer") as channel:
        await ask(channel, APPEND)
        error = await refusal(ask(channel, COMMIT))
        await ask(channel, APPEND)
        assert type(error) is PermissionDenied
        assert error.facts["identity"] == "writer"
        assert (here.served(APPEND), here.served(COMMIT)) == (2, 0)
        assert here.edge.refused_count("OffsetsService", "PERMISSION_DENIED") == 1
        assert (here.metric("open"), here.metric("seconds_count")) == (1, 0), "one stream"


async def test_revoked_grant_denies_the_next_call_and_a_new_one_admits_it(here: Here) -> None:
    grant = Grant(AccessRole.PRODUCE, "topic:orders")
    await here.edge.know("writer", PRODUCE, ("produce", "topic:other"))
    async with here.client("writer") as channel:
        await ask(channel, APPEND)
        await here.edge.store.revoke("writer", grant)
        await until(lambda: grant not in here.edge.guard.authorizer.grants_of("writer"))
        assert type(await refusal(ask(channel, APPEND))) is PermissionDenied
        await here.edge.store.grant("writer", grant)
        await until(lambda: grant in here.edge.guard.authorizer.grants_of("writer"))
        await ask(channel, APPEND)
        assert (here.metric("open"), here.metric("seconds_count")) == (1, 0), "one stream"


async def test_items_of_one_call_are_denied_one_by_one(here: Here) -> None:
    await here.edge.know("writer", PRODUCE)
    batches = [batch(b"one", topic="secret"), batch(b"two")]
    async with here.client("writer") as channel:
        answer = await ask(channel, APPEND, pb.AppendRequest(batches=batches))
        first, second = answer.outcomes
        assert type(error_from_pb(first.error)) is PermissionDenied
        assert not second.HasField("error")
        ((_, request),) = here.edge.served
        assert list(request.batches) == batches[1:]
        assert here.metric("open") == 1


async def test_streams_of_two_callers_have_their_own_permissions(here: Here) -> None:
    await here.edge.know("writer", PRODUCE)
    await here.edge.know("reader", ("consume", "topic:orders"))
    async with here.client("writer") as writer, here.client("reader") as reader:
        for _ in range(3):
            await ask(writer, APPEND)
            assert type(await refusal(ask(reader, APPEND))) is PermissionDenied
        assert here.metric("open") == 2


async def test_method_that_no_stream_may_call_is_unimplemented(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    await here.edge.know("root")
    methods = "", "nothing", "/a/b/c", "/baton.storage.v1.StorageService/Unknown", EXCHANGE
    async with here.client("root") as channel:
        codes, _ = await replies(channel, *methods)
    assert codes == [grpc.StatusCode.UNIMPLEMENTED] * len(methods)
    assert not [record for record in own_records(caplog) if record.exc_info]


async def test_methods_that_streams_may_call_do_not_depend_on_earlier_calls(here: Here) -> None:
    await here.edge.know("root")
    check = "/grpc.health.v1.Health/Check"
    async with here.client("root") as channel:
        before, _ = await replies(channel, check)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        after, _ = await replies(channel, check)
    assert before == after == [grpc.StatusCode.UNIMPLEMENTED]


# ---- credentials


async def test_unauthenticated_caller_cannot_open_a_stream(here: Here) -> None:
    here.edge.tokens["stranger"] = "unknown"
    async with here.client("stranger") as channel:
        assert type(await refusal(ask(channel, APPEND))) is Unauthenticated
        stream: Any = calls_grpc.CallServiceStub(channel).Exchange()
        assert type(await refusal(stream.read())) is Unauthenticated
    assert here.edge.read == []
    assert here.edge.refused_count("CallService", "UNAUTHENTICATED") == 2


async def test_revoked_token_refuses_the_next_call_and_closes_no_other_stream(here: Here) -> None:
    await here.edge.know("victim", PRODUCE)
    await here.edge.know("other", PRODUCE)
    async with (
        here.client("victim") as victim,
        here.client("other") as other,
        asyncio.TaskGroup() as tasks,
    ):
        await ask(victim, APPEND)
        await ask(other, APPEND)
        here.edge.holds.add(APPEND)
        held = tasks.create_task(refusal(ask(victim, APPEND)))
        goes_on = tasks.create_task(ask(other, APPEND))
        await until(lambda: here.served(APPEND) == 4)
        await here.edge.store.revoke_token(here.edge.digest("victim")[:16])
        await until(lambda: not here.edge.knows("victim"))
        here.edge.holds.clear()
        for _ in range(3):  # by the open stream, and by those that the client opens after it
            assert type(await refusal(ask(victim, APPEND))) is Unauthenticated
        await ask(other, APPEND)
        assert (held.done(), goes_on.done()) == (False, False), "they had begun, as calls alone"
        assert here.metric("open", "StorageService") == 2
        held.cancel()
        goes_on.cancel()


async def test_stream_of_a_revoked_token_is_ended_though_its_client_keeps_it(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_streams, "CLOSING_S", 0.05)
    await here.edge.know("victim", PRODUCE)
    async with here.client("victim") as channel:
        stream: Any = calls_grpc.CallServiceStub(channel).Exchange()
        assert not (await stream.read()).replies  # the stream is accepted
        await here.edge.store.revoke_token(here.edge.digest("victim")[:16])
        await until(lambda: not here.edge.knows("victim"))
        call = calls_pb.Call(call_id=1, method=APPEND, timeout_ms=30_000)
        await stream.write(calls_pb.ExchangeRequest(calls=[call]))
        assert (await stream.read()).closing
        (reply,) = (await stream.read()).replies
        assert reply.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
        assert type(await refusal(stream.read())) is Unauthenticated
        await until(lambda: here.metric("open") == 0)


async def test_call_that_begins_after_the_token_was_renewed_outlives_the_old_token(
    here: Here,
) -> None:
    """As a call alone, which carries the token of its time."""
    await here.edge.know("writer", PRODUCE)
    old = here.edge.digest("writer")
    async with here.client("writer") as channel, asyncio.TaskGroup() as tasks:
        await ask(channel, APPEND)
        here.edge.tokens["writer"] = "another-secret"
        await here.edge.store.add_token(digest_of("another-secret"), "writer", "")
        await until(lambda: here.edge.knows("writer"))
        here.token_file("writer").write_text("another-secret")
        here.edge.holds.add(APPEND)
        held = tasks.create_task(ask(channel, APPEND))
        await until(lambda: here.served(APPEND) == 2)
        await here.edge.store.revoke_token(old[:16])
        await until(lambda: not is_valid(here, old))
        here.edge.holds.clear()
        await ask(channel, APPEND)
        assert not held.done()
        held.cancel()


def is_valid(here: Here, digest: str) -> bool:
    try:
        here.edge.guard.authorizer.token_of(digest, 0)
    except Unauthenticated:
        return False
    return True


# ---- quotas


async def test_throttled_call_fails_alone_with_the_wait(here: Here, etcd: EtcdSession) -> None:
    quota = Quota(produce_bytes_per_s=100)
    await here.edge.know("tenant", PRODUCE, ("consume", "group:readers"), ("admin", "cluster"))
    await etcd.put(quota_key("tenant"), quota_to_pb(quota).SerializeToString())
    await until(lambda: here.edge.guard.quotas.quota_of("tenant") == quota)
    request = pb.AppendRequest(batches=[batch(bytes(1_000))])
    async with here.client("tenant") as channel, asyncio.TaskGroup() as tasks:
        await ask(channel, APPEND, request)
        throttled = tasks.create_task(refusal(ask(channel, APPEND, request)))
        await ask(channel, COMMIT)
        error = await throttled
        assert type(error) is Throttled
        assert error.facts == {"identity": "tenant", "quota": "produce_bytes_per_s", "limit": "100"}
        assert error.retry_after_ms > 0
        assert here.edge.read.count(APPEND) == 1, "the second request is not read"
        assert (here.metric("open"), here.metric("seconds_count")) == (1, 0), "one stream"
        assert here.metric("calls_total", "StorageService", reason="THROTTLED") == 1
