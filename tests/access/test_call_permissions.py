"""The permissions that each method requires.

Goal: for every method of every contract, and of gRPC's own services, and for each kind of caller,
the edge admits or rejects the call as the table below says; a method without a line in the table or
a rule in the code fails.
Method: all methods are taken from the descriptors; each is called over gRPC by every identity, with
a request that names a topic and a group wherever it can. The table is written by hand.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import PermissionDenied, Unauthenticated
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.access.edge_scene import ALL, GROUP, METHODS, TOPIC, Scene, request_of, scene

in_one_loop = pytest.mark.asyncio(loop_scope="module")

GRANTS = {
    "stranger": [],
    "producer": [("produce", f"topic:{TOPIC}")],
    "reader": [("consume", f"topic:{TOPIC}")],
    "member": [("consume", f"group:{GROUP}")],
    "consumer": [("consume", f"topic:{TOPIC}"), ("consume", f"group:{GROUP}")],
    "topic-admin": [("admin", f"topic:{TOPIC}")],
    "group-admin": [("admin", f"group:{GROUP}"), ("consume", f"topic:{TOPIC}")],
    "all-but-admin": [("produce", "topic:*"), ("consume", "topic:*"), ("consume", "group:*")],
    "elsewhere": [("admin", f"topic:{TOPIC}-2"), ("admin", f"group:x{GROUP}")],
    "watcher": [("consume", "topic:BATON_SYS_METRICS")],
    "operator": [("admin", "cluster")],
}
SERVICES = [f"service:{name}" for name in ("storage", "offsets", "lockmgr", "nameserver")]
KNOWN = [*GRANTS, "root", *SERVICES]
GRANTED = [identity for identity in KNOWN if identity != "stranger"]
"""Services have the topic of the metrics."""
GROUPS = {
    "write": "producer topic-admin all-but-admin",
    "read": "reader consumer topic-admin group-admin all-but-admin",
    "use": "producer reader consumer topic-admin group-admin all-but-admin",
    "join": "member consumer group-admin all-but-admin",
    "both": "consumer group-admin all-but-admin",
    "storage": "service:storage",
    "offsets": "service:offsets",
    "lockmgr": "service:lockmgr",
    "nameserver": "service:nameserver",
    "granted": " ".join(GRANTED),
    "known": " ".join(KNOWN),
    "": "",
}
TABLE = """
StorageService      Append             write
StorageService      Pull               both
StorageService      Deliver            granted
StorageService      QueryOffsets       use nameserver offsets
StorageService      Describe
StorageService      PurgeTopic         topic-admin
StorageService      QueryHeld          nameserver
QueryService        SearchOffset       read
QueryService        Read               read nameserver
QueryService        FindByKey          read
QueryService        GetMessage         granted
ScheduleService     Schedule           write
ScheduleService     CancelScheduled    granted
ScheduleService     ListScheduled
TransactionService  Begin              write
TransactionService  End                granted
TransactionService  WatchChecks        granted
TransactionService  ListTransactions   granted
OutputService       OpenOutputs        granted
OutputService       ListOutputSources  granted
ReplyService        WatchReplies       granted
ReplyService        Reply              read
storage.Replication Fetch              only storage
storage.Replication DescribeReplicas
OffsetsService      Announce           only lockmgr
OffsetsService      Fence              only lockmgr
OffsetsService      RecordDelivered    only storage
OffsetsService      Touch              only storage
OffsetsService      Commit             both
OffsetsService      Close              both
OffsetsService      Query              both lockmgr nameserver
OffsetsService      QueryGroup         join nameserver
OffsetsService      DeleteTopic        only nameserver
OffsetsService      DeleteGroup        only nameserver
OffsetsService      Reset              group-admin
OffsetsService      Clone              group-admin
OffsetsService      ListResets         join
OffsetsService      ListHolds          both
OffsetsService      ExportGroup        only offsets
OffsetsService      ForgetGroup        only offsets
offsets.Replication Fetch              only offsets
offsets.Replication ReadAll            only offsets
offsets.Replication Digest             only offsets
offsets.Replication DescribeReplicas
LockmgrService      Acquire            both
LockmgrService      KeepAlive          both
LockmgrService      Release            both
LockmgrService      ReleaseAll         join
LockmgrService      ForceRelease       group-admin
LockmgrService      Watch              granted
LockmgrService      Describe           both nameserver
LockmgrService      List               join nameserver
QuotaService        SetQuota
QuotaService        DeleteQuota
QuotaService        ListQuotas
NameserverService   CreateTopic        topic-admin
NameserverService   EnsureUnresolvedTopic only storage
NameserverService   UpdateTopic        topic-admin
NameserverService   ListTopics         granted
NameserverService   DescribeTopic      use
NameserverService   DeleteTopic        topic-admin
NameserverService   QueryRoute         use
NameserverService   WatchRoute         use
NameserverService   DescribeCluster    granted
NameserverService   ElectReplica
NameserverService   DrainNode
NameserverService   UndrainNode
NameserverService   MoveLeader
NameserverService   MoveQueues
NameserverService   QueryRetiring      topic-admin
NameserverService   RemoveBroker
NameserverService   Heartbeat          both
NameserverService   Leave              join
NameserverService   WatchGroup         join
NameserverService   ListGroups         granted
NameserverService   DescribeGroup      join
NameserverService   UpdateGroup        group-admin
NameserverService   DeleteGroup        group-admin
NameserverService   WhyStuck           join
NameserverService   LocateGroup        join
NameserverService   MoveGroup
AccessService       Grant
AccessService       Revoke
AccessService       ListAccess
AccessService       Check              known
AccessService       CreateToken
AccessService       RevokeToken
AccessService       CreateAccessKey
AccessService       RotateAccessKey
AccessService       RevokeAccessKey
AccessService       Block
AccessService       Unblock
AccessService       ListBlocks
GatewayService      ListClients        join
GatewayService      ListHeldMessages   join nameserver
GatewayService      VerifyMessage      group-admin
GatewayService      GetStackTraces     group-admin
MetricsService      Watch              watcher
SettingsService     Describe
"""


def _table() -> dict[str, set[str]]:
    """Return the identities that may call each path."""
    table: dict[str, set[str]] = {}
    for line in TABLE.strip().splitlines():
        service, method, *words = line.split()
        always = {"operator", "root"}
        if words[:1] == ["only"]:
            always, words = set(), words[1:]
        allowed = {one for word in words for one in GROUPS.get(word, word).split()}
        table[_path(service, method)] = allowed | always
    return table


def _path(service: str, method: str) -> str:
    package, _, name = service.rpartition(".")
    wanted = f"{name}Service" if package else name
    (full_path,) = [
        path
        for path in METHODS
        if path.endswith(f".{wanted}/{method}") and (not package or f".{package}." in path)
    ]
    return full_path


MAY = _table()


CHECKED_INSIDE = {
    "StorageService/Deliver": "the queue of each delivery, which needs the permissions of Pull",
    "QueryService/GetMessage": "the header of the batch, which names the topic",
    "ReplyService/WatchReplies": "nothing: a new inbox gets replies to requests of the caller only",
    "ScheduleService/CancelScheduled": "the head of the scheduled batch, which names the topic",
    "TransactionService/End": "the half message, which names the topic",
    "TransactionService/WatchChecks": "nothing: each check needs the permission of Begin",
    "TransactionService/ListTransactions": "half messages, of which the answer has those allowed",
    "OutputService/OpenOutputs": "the group of each source, as a member of which the caller reads",
    "OutputService/ListOutputSources": "sources, of which the answer has those of allowed groups",
    "LockmgrService/Watch": "nothing: it shows the changes of the caller's own incarnation",
    "NameserverService/ListTopics": "names, of which the answer has those that are allowed",
    "NameserverService/ListGroups": "names, of which the answer has those that are allowed",
    "NameserverService/DescribeCluster": "the addresses of services, which need any grant",
    "AccessService/Check": "the grants of the caller itself",
}
"""The methods that a caller without a permission for the topic and the group reaches, and what they
read before they check it; for the first two see tests/storage/test_authorization.py. Every other
method is rejected before its servicer runs."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_scene(etcd_endpoint: str) -> AsyncIterator[Scene]:
    """The scene, with grants and tokens of all identities."""
    async with (
        EtcdSession(etcd_endpoint, f"test-{secrets.token_hex(8)}", Clock()) as etcd,
        scene(etcd) as made,
    ):
        for identity in KNOWN:
            await made.know(identity, *GRANTS.get(identity, []))
        yield made


def test_every_method_has_a_line_and_a_rule() -> None:
    assert MAY.keys() == METHODS.keys()
    assert METHODS.keys() <= ALL.keys()


def test_methods_that_read_before_their_permission_is_checked_are_listed() -> None:
    reached = {path.rpartition(".")[2] for path in METHODS if "elsewhere" in MAY[path]}
    assert reached == CHECKED_INSIDE.keys()


@in_one_loop
@pytest.mark.parametrize("path", METHODS)
async def test_method_may_be_called_by_the_listed_identities_only(
    shared_scene: Scene, path: str
) -> None:
    made, request = shared_scene, request_of(METHODS[path])
    for identity in ["", "unknown", *KNOWN]:
        made.served.clear()
        try:
            await made.call(path, request, identity)
            outcome: type[Exception] | None = None
        except grpc.aio.AioRpcError as error:
            outcome = type(from_rpc_error(error))
            wanted_code = {
                Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
                PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
            }
            assert error.code() is wanted_code.get(outcome), identity
        known = identity in KNOWN
        wanted = None if identity in MAY[path] else PermissionDenied if known else Unauthenticated
        assert outcome is wanted, identity
        assert [served for served, _ in made.served] == ([] if wanted else [path]), identity


@in_one_loop
@pytest.mark.parametrize("identity", ["", "unknown", *KNOWN])
async def test_health_checks_require_a_known_caller(shared_scene: Scene, identity: str) -> None:
    stub: Any = health_pb2_grpc.HealthStub(shared_scene.channel)
    request, metadata = health_pb2.HealthCheckRequest(), shared_scene.metadata(identity)
    check = stub.Check(request, metadata=metadata, timeout=10)
    watch = stub.Watch(request, metadata=metadata, timeout=10)
    if identity in KNOWN:
        assert (await check).status == health_pb2.HealthCheckResponse.SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert watch.cancel()
    else:
        assert await check.code() is await watch.code() is grpc.StatusCode.UNAUTHENTICATED


@in_one_loop
@pytest.mark.parametrize(
    ("identity", "code"),
    [
        ("", grpc.StatusCode.UNAUTHENTICATED),
        ("unknown", grpc.StatusCode.UNAUTHENTICATED),
        ("stranger", grpc.StatusCode.PERMISSION_DENIED),
        ("producer", grpc.StatusCode.OK),
        ("operator", grpc.StatusCode.OK),
    ],
)
async def test_reflection_requires_any_grant(
    shared_scene: Scene, identity: str, code: grpc.StatusCode
) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(shared_scene.channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call: Any = stub.ServerReflectionInfo
    answers = call(metadata=shared_scene.metadata(identity))
    names: list[str] = []
    async with asyncio.timeout(30):
        if code is grpc.StatusCode.OK:  # a write to a call that has ended would make it INTERNAL
            await answers.write(request)
            await answers.done_writing()
            async for answer in answers:
                names += [service.name for service in answer.list_services_response.service]
        assert await answers.code() is code
    assert bool(names) is (code is grpc.StatusCode.OK)


async def test_method_without_a_rule_is_rejected_for_every_caller(etcd: EtcdSession) -> None:
    path = "/baton.storage.v1.StorageService/Describe"
    others = {other: rule for other, rule in ALL.items() if other != path}
    async with scene(etcd, rules=others) as made:
        await made.know("operator", ("admin", "cluster"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.call(path, request_of(METHODS[path]), "operator")
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert not made.served
