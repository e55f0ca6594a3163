"""Admission of calls at the edge, beyond single decisions.

Goal: a revocation takes effect at once, also for long polls and streams; items of a batch are
rejected one by one; no call is admitted before the grants are read, or by unreadable values; errors
name missing permissions and the commands that grant them, are counted, and never contain a token.
Method: the scene, whose grants are in a real etcd; certificates with real TLS.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import reply_service_pb2 as reply_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.channels import connector
from batonmq.errors import BatonError, NotServing, PermissionDenied, Unauthenticated
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.runtime.access.admission import Admission
from batonmq_server.runtime.access.authenticator import Caller
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.owner import owner_of, sign
from batonmq_server.runtime.access.permissions import AccessRole, Grant
from batonmq_server.runtime.access.stored_access import grants_key, token_key
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.tls import server_credentials
from tests.access.edge_scene import GROUP, METHODS, TOPIC, Scene, request_of, scene
from tests.storage.batches import batch
from tests.support.conditions import until

STORAGE = "/baton.storage.v1.StorageService"
PULL, APPEND, DESCRIBE = f"{STORAGE}/Pull", f"{STORAGE}/Append", f"{STORAGE}/Describe"
SCHEDULE = "/baton.storage.v1.ScheduleService/Schedule"
WATCH = "/baton.nameserver.v1.NameserverService/WatchRoute"
CONSUME = ("consume", "topic:orders"), ("consume", "group:readers")
SOON_S, TRIES = 1.0, 5
"""The shortest of so many tries counts: the others may be slow because of the machine."""


@pytest_asyncio.fixture
async def made(etcd: EtcdSession) -> AsyncIterator[Scene]:
    async with scene(etcd, "Pull") as opened:
        yield opened


async def refusal(call: Awaitable[Any]) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


# ---- revocation


@pytest.mark.parametrize("path", [PULL, WATCH])
@pytest.mark.parametrize("by", ["grant", "token"])
async def test_waiting_call_ends_within_a_second_of_the_revocation(
    made: Scene, path: str, by: str
) -> None:
    made.holds.add(path)
    await made.know("other", *CONSUME)
    request, took_s = request_of(METHODS[path]), list[float]()
    async with asyncio.TaskGroup() as tasks:
        goes_on = tasks.create_task(made.call(path, request, "other"))
        while len(took_s) < TRIES and min(took_s, default=SOON_S) >= SOON_S:
            reader = f"reader-{len(took_s)}"
            await made.know(reader, *CONSUME)
            waits = tasks.create_task(refusal(made.call(path, request, reader)))
            await until(lambda: len(made.served) == len(took_s) + 2)
            begin_s = asyncio.get_running_loop().time()
            if by == "grant":
                await made.store.revoke(reader, Grant(AccessRole.CONSUME, "topic:orders"))
            else:
                await made.store.revoke_token(made.digest(reader)[:16])
            error = await waits
            took_s.append(asyncio.get_running_loop().time() - begin_s)
            assert type(error) is (PermissionDenied if by == "grant" else Unauthenticated)
        assert min(took_s) < SOON_S
        assert not goes_on.done()
        goes_on.cancel()
    service = path.split("/")[1].rsplit(".", maxsplit=1)[-1]
    assert made.refused_count(service, error.reason) == len(took_s)


async def test_call_is_rejected_after_the_revocation_and_admitted_after_a_new_grant(
    made: Scene,
) -> None:
    request, grant = request_of(METHODS[PULL]), Grant(AccessRole.CONSUME, "group:readers")
    await made.know("reader", *CONSUME)
    await made.call(PULL, request, "reader")
    await made.store.revoke("reader", grant)
    await until(lambda: grant not in made.guard.authorizer.grants_of("reader"))
    assert type(await refusal(made.call(PULL, request, "reader"))) is PermissionDenied
    await made.store.grant("reader", grant)
    await until(lambda: grant in made.guard.authorizer.grants_of("reader"))
    await made.call(PULL, request, "reader")


async def test_unary_call_in_progress_is_not_ended_by_a_revocation(made: Scene) -> None:
    made.holds.add(DESCRIBE)
    await made.know("operator", ("admin", "cluster"))
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(made.call(DESCRIBE, request_of(METHODS[DESCRIBE]), "operator"))
        await until(lambda: made.served)
        await made.store.revoke("operator", None)
        await until(lambda: not made.guard.authorizer.grants_of("operator"))
        assert not call.done()
        call.cancel()


# ---- recorded identities


@pytest.mark.parametrize(("claimed", "recorded"), [("carol@desk", "mallory"), ("", "")])
async def test_recorded_identity_is_the_caller_not_the_one_in_the_request(
    made: Scene, claimed: str, recorded: str
) -> None:
    path = "/baton.offsets.v1.OffsetsService/Reset"
    await made.know("mallory", ("admin", "group:readers"))
    request = request_of(METHODS[path])
    request.by = claimed  # type: ignore[attr-defined]
    await made.call(path, request, "mallory")
    assert [served.by for _, served in made.served] == [recorded]


# ---- batches


async def test_append_items_are_rejected_one_by_one(made: Scene) -> None:
    await made.know("producer", ("produce", "topic:mine*"))
    names = ["mine-1", "theirs", "mine-2", "theirs"]
    request = pb.AppendRequest(
        batches=[batch(b"body", topic=name) for name in names], durability=pb.DURABILITY_MEMORY
    )
    answer = await made.call(APPEND, request, "producer")
    (_, passed) = made.served[-1]
    assert list(passed.batches) == [request.batches[0], request.batches[2]]
    assert passed.durability == request.durability
    assert [outcome.HasField("error") for outcome in answer.outcomes] == [False, True, False, True]
    error = error_from_pb(answer.outcomes[1].error)
    assert type(error) is PermissionDenied
    assert error.facts == {"identity": "producer", "role": "produce", "resource": "topic:theirs"}
    assert made.refused_count("StorageService", "PERMISSION_DENIED") == 2


async def test_schedule_items_are_rejected_one_by_one(made: Scene) -> None:
    await made.know("producer", ("produce", "topic:mine"))
    items = [
        schedule_pb.ScheduleItem(batch=batch(b"body", topic=name), deliver_unix_ms=1)
        for name in ("theirs", "mine")
    ]
    answer = await made.call(SCHEDULE, schedule_pb.ScheduleRequest(items=items), "producer")
    assert [outcome.HasField("error") for outcome in answer.outcomes] == [True, False]


async def test_malformed_batch_is_left_to_the_servicer(made: Scene) -> None:
    await made.know("producer", ("produce", "topic:mine"))
    request = pb.AppendRequest(batches=[b"short", batch(b"body", topic="mine")])
    await made.call(APPEND, request, "producer")
    assert made.served[-1][1] == request


async def test_append_without_any_permission_names_every_topic(made: Scene) -> None:
    await made.know("producer", ("produce", "topic:mine"))
    request = pb.AppendRequest(batches=[batch(b"body", topic=name) for name in ("a", "b", "a")])
    error = await refusal(made.call(APPEND, request, "producer"))
    assert error.message == "producer lacks produce on topic:a, produce on topic:b"
    assert error.remedy == (
        "baton access grant producer produce topic:a; baton access grant producer produce topic:b"
    )


async def test_many_rejected_items_hold_the_event_loop_only_for_a_moment(made: Scene) -> None:
    """Each item names another topic: a search of all rejected ones per item would take seconds."""
    await made.know("producer", ("produce", "topic:a"))
    reply = "/baton.storage.v1.ReplyService/Reply"
    request = reply_pb.ReplyRequest()
    for number in range(10_000):
        request.inboxes.add(topic=f"t{number}")
    begin_s = asyncio.get_running_loop().time()
    error = await refusal(made.call(reply, request, "producer"))
    assert asyncio.get_running_loop().time() - begin_s < SOON_S
    assert type(error) is PermissionDenied
    request.inboxes.add(topic="one-too-many")
    error = await refusal(made.call(reply, request, "producer"))
    assert error.message == "inboxes must be at most 10000, got 10001"
    assert not made.served


async def test_call_without_per_item_rule_is_rejected_as_a_whole(made: Scene) -> None:
    await made.know("reader", *CONSUME)
    path = f"{STORAGE}/QueryOffsets"
    request = pb.QueryOffsetsRequest()
    for name in ("orders", "bills"):
        request.queues.add(topic=name)
    error = await refusal(made.call(path, request, "reader"))
    assert error.message == "reader lacks produce or consume on topic:bills"
    assert not made.served


async def test_request_that_requires_a_million_permissions_is_refused_at_once(
    made: Scene,
) -> None:
    await made.know("reader", *CONSUME)
    path = f"{STORAGE}/QueryOffsets"
    request = pb.QueryOffsetsRequest(queues=[queue_pb2.QueueRef(topic="orders")] * 1_000_000)
    error = await refusal(made.call(path, request, "reader"))
    assert error.message == "the request names topics and groups more than 50000 times"
    assert not made.served
    del request.queues[50_000:]
    await made.call(path, request, "reader")


# ---- retry topics


async def test_message_to_a_retry_topic_requires_only_the_group(made: Scene) -> None:
    await made.know("reader", *CONSUME)
    request = schedule_pb.ScheduleRequest()
    request.items.add(batch=batch(b"body", topic="%RETRY%readers"), deliver_unix_ms=1)
    await made.call(SCHEDULE, request, "reader")
    request.items[0].batch = batch(b"body", topic="%DLQ%others")
    error = await refusal(made.call(SCHEDULE, request, "reader"))
    assert error.facts["resource"] == "group:others"


# ---- authentication


async def test_no_caller_is_admitted_before_the_grants_are_read(etcd: EtcdSession) -> None:
    guard = Guard(etcd, CollectorRegistry(), on=True, admins=["root"])
    with pytest.raises(NotServing):
        guard.caller(Certified({}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header", ["Basic cm9vdDpyb290", "Bearer", "Bearer ", "secret-726561646572"]
)
async def test_malformed_authorization_is_rejected(made: Scene, header: str) -> None:
    await made.know("reader", *CONSUME)
    call: Any = made.channel.unary_unary(PULL)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"", metadata=[("authorization", header)], timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert header.rsplit(maxsplit=1)[-1] not in str(refused.value.details()).split()


@pytest.mark.parametrize(
    ("subject", "identity"),
    [
        (CertificateSubject(name="cn", uri="service:storage", hosts=("a.example", "b.example")),
         "service:storage"),
        (CertificateSubject(name="cn", hosts=("127.0.0.1", "a.example", "b.example")), "a.example"),
        (CertificateSubject(name="cn"), "cn"),
    ],
)  # fmt: skip
async def test_identity_of_a_certificate_is_its_first_uri_or_dns_name_or_common_name(
    etcd: EtcdSession, tmp_path: Path, subject: CertificateSubject, identity: str
) -> None:
    guard = Guard(etcd, CollectorRegistry(), on=True)
    guard.mirror.revision = 1
    seen: list[Caller] = []

    class Servicer(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            seen.append(guard.caller(context))
            return health_pb2.HealthCheckResponse()

    authority = CertificateAuthority(tmp_path)
    server_side = authority.issue(CertificateSubject(name="server", hosts=("localhost",)))
    client_side = authority.issue(subject)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Servicer(), server)
    port = server.add_secure_port("localhost:0", server_credentials(server_side))
    await server.start()
    try:
        async with connector(client_side)(f"localhost:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(), timeout=10
            )
    finally:
        await server.stop(None)
    (caller,) = seen
    assert (caller.identity, caller.digest) == (identity, "")


# ---- values in etcd


async def test_common_name_is_never_a_service_identity(etcd: EtcdSession) -> None:
    guard = Guard(etcd, CollectorRegistry(), on=True)
    guard.mirror.revision = 1
    with pytest.raises(Unauthenticated):
        guard.caller(Certified({"x509_common_name": [b"service:storage"]}))  # type: ignore[arg-type]


class Certified:
    """The context of a call with a certificate."""

    def __init__(self, names: dict[str, list[bytes]]) -> None:
        self._names = names

    def invocation_metadata(self) -> None:
        return None

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._names


async def test_unreadable_values_in_etcd_grant_nothing(
    made: Scene, etcd: EtcdSession, caplog: pytest.LogCaptureFixture
) -> None:
    await made.know("reader", *CONSUME)
    with caplog.at_level(logging.ERROR):
        await etcd.put(grants_key("reader"), b"\xff\xff")
        await etcd.put(token_key("abc"), b"\xff\xff")
        await until(lambda: not made.guard.authorizer.grants_of("reader"))
        await until(lambda: len(caplog.records) == 2)
    error = await refusal(made.call(PULL, request_of(METHODS[PULL]), "reader"))
    assert type(error) is PermissionDenied


async def test_identities_may_have_any_characters(made: Scene) -> None:
    identity = "spiffe://example.org/ns/a%2Fb/sa/ü"
    await made.know(identity, ("admin", "cluster"))
    await made.call(DESCRIBE, request_of(METHODS[DESCRIBE]), identity)
    assert identity in await made.store.all()


async def test_tokens_are_not_in_errors_logs_or_metrics(
    made: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await made.know("reader", *CONSUME)
        errors = [
            await refusal(made.call(DESCRIBE, request_of(METHODS[DESCRIBE]), "reader")),
            await refusal(made.call(DESCRIBE, request_of(METHODS[DESCRIBE]), "unknown")),
        ]
    shown = "".join(f"{error.message}{error.remedy}{error.facts}" for error in errors)
    shown += caplog.text + generate_latest(made.registry).decode()
    for secret in (made.tokens["reader"], "unknown is no token", made.digest("reader")):
        assert secret not in shown
    assert errors[0].remedy == "baton access grant reader admin cluster"


async def test_owner_numbers_in_a_request_are_those_of_the_caller(etcd: EtcdSession) -> None:
    """A client can't act as another owner with a number in its request."""
    async with scene(etcd) as here:
        await here.know("app", ("consume", f"topic:{TOPIC}"), ("consume", f"group:{GROUP}"))
        number = owner_of("app")
        for path in (
            "/baton.lockmgr.v1.LockmgrService/Acquire",
            "/baton.lockmgr.v1.LockmgrService/KeepAlive",
            "/baton.lockmgr.v1.LockmgrService/Release",
            "/baton.lockmgr.v1.LockmgrService/Watch",
            "/baton.nameserver.v1.NameserverService/Heartbeat",
            "/baton.nameserver.v1.NameserverService/Leave",
            "/baton.nameserver.v1.NameserverService/WatchGroup",
        ):
            request: Any = request_of(METHODS[path])
            request.incarnation.client_id, request.incarnation.owner = "client-a", 4_711
            await here.call(path, request, "app")
            assert here.served[-1][1].incarnation.owner == number, path
        for path in (
            "/baton.storage.v1.StorageService/Pull",
            "/baton.offsets.v1.OffsetsService/Commit",
            "/baton.offsets.v1.OffsetsService/Close",
        ):
            request = request_of(METHODS[path])
            request.caller = 4_711
            await here.call(path, request, "app")
            assert here.served[-1][1].caller == number, path
        path = "/baton.storage.v1.StorageService/Deliver"
        request = request_of(METHODS[path])
        for _ in range(2):
            request.commands.add().start.pull.caller = 4_711
        request.commands.add().credit.number = 1
        await here.call(path, request, "app")
        commands = here.served[-1][1].commands
        assert [one.start.pull.caller for one in commands if one.HasField("start")] == [number] * 2
        assert [one.WhichOneof("command") for one in commands[1:]] == ["start", "start", "credit"]


def test_only_requests_inside_a_request_are_signed_with_it() -> None:
    """Items name the callers of other services, which those have authenticated."""
    record = offsets_pb.RecordDeliveredRequest(items=[offsets_pb.DeliveryItem(caller=7)])
    fence = offsets_pb.FenceRequest(items=[offsets_pb.FenceItem()])
    fence.items[0].holder.owner = 7
    for request in (record, fence):
        sign(request, "service:storage")
    assert record.items[0].caller == fence.items[0].holder.owner == 7
    delivering = pb.DeliverRequest(commands=[pb.DeliveryCommand(delivery_id=1)])
    sign(delivering, "app")
    assert not delivering.commands[0].HasField("start"), "a signature adds no message"


def test_every_request_with_an_incarnation_has_it_at_the_top() -> None:
    """Admission looks for it there; items of services name holders that services have checked."""
    nested = {
        field.message_type.full_name + "." + inner.name
        for method in METHODS.values()
        for field in method.input_type.fields
        if field.message_type is not None
        for inner in field.message_type.fields
        if inner.message_type is not None and inner.message_type.name == "Incarnation"
    }
    assert nested == {"baton.offsets.v1.FenceItem.holder"}


# ---- tokens that expire, and scopes


async def with_token(
    made: Scene, name: str, identity: str, *scopes: Grant, ttl_ms: int = 0
) -> None:
    """Give an identity one more token, by which calls of `name` are made."""
    made.tokens[name] = f"secret-of-{name}"
    digest = made.digest(name)
    await made.store.add_token(digest, identity, "", ttl_ms=ttl_ms, scopes=scopes)

    def known() -> bool:
        try:
            return made.guard.authorizer.token_of(digest, 0).identity == identity
        except Unauthenticated:
            return False

    await until(known)


@pytest.mark.parametrize("path", [PULL, WATCH])
async def test_token_is_rotated_without_a_gap_and_the_old_one_ends_its_open_calls(
    made: Scene, path: str
) -> None:
    """Until the old token expires both are valid; then its waiting calls and streams end."""
    made.holds.add(path)
    await made.know("reader", *CONSUME)
    request = request_of(METHODS[path])
    ttl_ms = 2_000
    await with_token(made, "old", "reader", ttl_ms=ttl_ms)
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    async with asyncio.TaskGroup() as tasks:
        old = tasks.create_task(refusal(made.call(path, request, "old")))
        await until(lambda: len(made.served) == 1)
        await with_token(made, "new", "reader")
        new = tasks.create_task(made.call(path, request, "new"))
        await until(lambda: len(made.served) == 2)
        assert type(await old) is Unauthenticated
        assert loop.time() - begin_s < ttl_ms / 1000 + 5
        assert type(await refusal(made.call(path, request, "old"))) is Unauthenticated
        assert not new.done()
        new.cancel()


async def test_expired_token_is_deleted_from_etcd(made: Scene) -> None:
    await with_token(made, "old", "reader", ttl_ms=1_000)
    await until(lambda: is_deleted(made, "reader"))


async def is_deleted(made: Scene, identity: str) -> bool:
    held = (await made.store.all()).get(identity)
    return held is None or not held.tokens


async def test_token_gives_only_permissions_that_its_scopes_and_the_grants_cover(
    made: Scene,
) -> None:
    await made.know("app", ("produce", "topic:orders"), *CONSUME)
    reads = [Grant(AccessRole(role), resource) for role, resource in CONSUME]
    await with_token(made, "reads", "app", *reads)
    await made.call(PULL, request_of(METHODS[PULL]), "reads")
    refused = await refusal(made.call(APPEND, request_of(METHODS[APPEND]), "reads"))
    assert type(refused) is PermissionDenied
    assert "or its token does not cover it" in refused.message
    await made.call(APPEND, request_of(METHODS[APPEND]), "app")
    await with_token(made, "all", "app", Grant(AccessRole.ADMIN, "cluster"))
    assert type(await refusal(made.call(DESCRIBE, request_of(METHODS[DESCRIBE]), "all"))) is (
        PermissionDenied
    ), "a scope is no grant"


async def test_expiry_of_a_token_checks_the_calls_of_that_token_only() -> None:
    checked: list[str] = []

    class CheckedGuard:
        on_change: list[object] = []  # noqa: RUF012
        clock = Clock()

        def rule(self, _: str) -> None:
            return None

        def seconds_left(self, caller: Caller) -> float:
            return 0 if caller.identity == "expires" else 3_600

        def recheck(self, _: str, caller: Caller, __: object) -> None:
            checked.append(caller.identity)

    admission = Admission(cast("Guard", CheckedGuard()), frozenset())
    done = asyncio.Event()

    async def call(identity: str) -> None:
        with admission._until_revoked(PULL, Caller(identity), ()):
            await done.wait()

    async with asyncio.TaskGroup() as tasks:
        for identity in ("expires", "stays", "stays"):
            tasks.create_task(call(identity))
        await until(lambda: bool(checked))
        done.set()
    assert checked == ["expires"]
