"""Goal: a gateway with access control on decides each call for the identity of its remote client.

Signatures, tokens and certificates name the client; wrong, unknown, revoked, expired and missing
credentials are refused with the codes of the contract and a reason; what is not granted is refused;
a revocation ends what waits; quotas count. Nothing is answered as INTERNAL.
Method: one cluster over TLS with access on serves all steps, as its start takes seconds; stubs with
the credentials of several clients, on the three ports of the gateway; the operator uses the
commands' library.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from baton.gateway.v1 import gateway_service_pb2 as gateway_pb
from baton.gateway.v1 import gateway_service_pb2_grpc as gateway_grpc
from batonmq import Admin
from batonmq._common.clock import Clock
from batonmq._common.secret import Secret
from batonmq._connection.channels import connect, connector
from batonmq._connection.security import Security
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.access_keys import AccessKeys
from batonmq.admin.quotas import QuotaLimits, Quotas
from batonmq.admin.remote_clients import RemoteClients
from batonmq.errors import GroupNotFound
from batonmq_server.gateway.access import METHODS
from batonmq_server.gateway.core.signatures import DATE_HEADER, sign
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.ports import keep_ports
from tests.gateway.official_clients import COMPILE_S, FEATURES, LACKS, official_client
from tests.gateway.remote_stub import RemoteStub, handle_of
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
Headers = Sequence[tuple[str, str]]
REFUSED = {
    "python": "failed to fetch topic",  # it names no reason
    "node": "Failed to fetch topic routes",
    "java": "signature was not made",
    "go": "signature was not made",
    "rust": "signature was not made",
}
"""What an official client writes about a wrong secret."""
SHOP = (
    RoleGrant(Role.PRODUCE, "topic:orders"),
    RoleGrant(Role.CONSUME, "topic:orders"),
    RoleGrant(Role.CONSUME, "group:billing"),
)


def signed(access_key: str, secret: Secret, ahead_s: int = 0) -> Headers:
    """Return the headers of a signed call."""
    now = datetime.fromtimestamp(Clock().unix_ms() / 1_000 + ahead_s, UTC)
    date = now.strftime("%Y%m%dT%H%M%SZ")
    return [(DATE_HEADER, date), ("authorization", sign(access_key, secret, date))]


class Scene:
    """A cluster with access on, its administrator, and the ports of its gateway."""

    def __init__(self, cluster: LocalCluster, admin: Admin, plain_port: int) -> None:
        self.cluster, self.admin = cluster, admin
        self.control, self.keys = AccessControl(admin), AccessKeys(admin)
        assert cluster.security is not None
        self.security = cluster.security
        (self.tls_address,) = cluster.remote_addresses
        self.plain_address = f"127.0.0.1:{plain_port}"
        self._channels: list[grpc.aio.Channel] = []

    def client(
        self, headers: Headers = (), *, client_id: str = "host@1@0@a", port: str = "tls"
    ) -> RemoteStub:
        """Return a client with these headers, on a port of this kind."""
        return RemoteStub(self.channel(port), client_id, headers)

    def channel(self, port: str) -> grpc.aio.Channel:
        """Return a channel to a port of this kind."""
        trusting = Security(ca_file=self.security.ca_file)
        channel = {
            "tls": lambda: connector(trusting)(self.tls_address),
            "plain": lambda: connect(self.plain_address),
            "main": lambda: connector(self.security)(self.cluster.addresses["gateway"]),
        }[port]()
        self._channels.append(channel)
        return channel

    def has_no_tls(self, language: str) -> bool:
        """Whether the official client of a language has no TLS."""
        return "tls" in LACKS.get(language, ())

    def port_of(self, language: str) -> dict[str, Any]:
        """Return the part of a task that says where an official client calls, and how."""
        if self.has_no_tls(language):
            return {"endpoints": self.plain_address, "tls": False}
        return {"endpoints": self.tls_address, "tls": True}

    async def grant_shop(self) -> None:
        for one in SHOP:
            await self.control.grant("shop", one)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def first_status(stream: Any) -> int:
    """Return the code of the next command of a telemetry stream."""
    command: service_pb2.TelemetryCommand = await stream.read()
    return command.status.code


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    plain_port = keep_ports(folder / "plain.json", ["plain"])["plain"]
    settings = {
        "storage": {"segment_bytes": SEGMENT_BYTES},
        "gateway": {"plain_port": plain_port, "invisible_ms_min": 100},
    }
    options = ClusterOptions(
        secure=True, access=True, gateways=1, etcd_fsync=False, settings=settings
    )
    async with (
        LocalCluster(folder, options, start=fork_server().start) as cluster,
        Admin(cluster.nameserver, security=cluster.security) as admin,
    ):
        await admin.create_topic("orders", 1)
        at = Scene(cluster, admin, plain_port)
        try:
            yield at
        finally:
            await at.close()


@pytest.mark.long
async def test_remote_clients_have_the_rights_of_their_own_identity(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        pair = await at.keys.create("shop")
        key, secret = pair.access_key, pair.secret
        shop = at.client(signed(key, secret))

        # Nothing is granted yet: each call is refused, and says what is missing.
        async def known() -> bool:
            return (await shop.send("orders", b"early")).code == pb.FORBIDDEN

        await until(known)
        status = await shop.send("orders", b"early")
        assert "shop lacks produce on topic:orders" in status.message
        assert "baton access grant shop produce topic:orders" in status.message
        await no_call_is_admitted(shop, pb.FORBIDDEN)

        await bad_credentials_are_refused(at, key, secret)

        await at.grant_shop()
        await until(lambda: is_ok(shop))
        (message,) = await shop.receive_until("billing", "orders", 1)
        assert await shop.ack("billing", "orders", [handle_of(message)]) == [pb.OK]
        assert (await shop.send("refunds", b"x")).code == pb.FORBIDDEN
        assert (await shop.receive("auditing", "orders"))[0].code == pb.FORBIDDEN
        assert (await shop.receive("billing", "refunds"))[0].code == pb.FORBIDDEN
        assert (await shop.send("%DLQ%auditing", b"x")).code == pb.ILLEGAL_TOPIC

        await operators_see_clients_by_their_grants(at, signed(key, secret))
        await identities_do_not_share_a_client_id(at)
        await settings_are_checked_like_calls(at, signed(key, secret))
        await every_credential_names_a_client_on_its_port(at, signed(key, secret))
        await secret_is_rotated_with_an_overlap(at, key, secret)
        await quota_of_the_identity_counts(at, shop)
        await revocations_end_what_waits(at)
        # The services know the gateway by its certificate: as a client it has no right.
        await the_gateway_has_no_rights_to_lend(at)


async def is_ok(client: RemoteStub) -> bool:
    return (await client.send("orders", b"hello")).code == pb.OK


async def no_call_is_admitted(client: RemoteStub, code: int) -> None:
    """Call every method but the stream, and check the code of its answer."""
    topic, group = pb.Resource(name="orders"), pb.Resource(name="billing")
    queue = pb.MessageQueue(topic=topic)
    for name in METHODS:
        if name in ("SendMessage", "Telemetry"):
            continue
        kind = getattr(service_pb2, f"{name}Request")
        fields = kind.DESCRIPTOR.fields_by_name
        values = {"topic": topic, "group": group, "message_queue": queue}
        request = kind(**{field: value for field, value in values.items() if field in fields})
        if name in ("ReceiveMessage", "PullMessage"):
            frames = getattr(client.stub, name)(request, timeout=5, metadata=client.metadata)
            codes = [frame.status.code async for frame in frames]
            assert codes == [code], name
        else:
            answer = await client.call(name, request)
            assert answer.status.code == code, name


async def bad_credentials_are_refused(at: Scene, key: str, secret: Secret) -> None:
    cases: list[tuple[Headers, str]] = [
        (signed(key, Secret("wrong-secret")), f"access key {key}: the signature was not made"),
        (signed("AKNOWN", secret), "access key 'AKNOWN' is unknown, was revoked or has expired"),
        (signed(key, secret, ahead_s=3_600), "ahead of the clock of the gateway"),
        (signed(key, secret, ahead_s=-1_000), "behind the clock of the gateway"),
        ([("authorization", f"MQv2-HMAC-SHA1 Credential={key}")], "authorization header must be"),
        ([("authorization", "Basic c2hvcDpwdw==")], "not a bearer token"),
        ([("authorization", "Bearer baton_unknown")], "bearer token is unknown"),
        (signed("", Secret("")), "neither a bearer token nor a client certificate"),
        ([], "neither a bearer token nor a client certificate"),
    ]
    for headers, reason in cases:
        status = await at.client(headers).send("orders", b"x")
        assert (status.code, reason in status.message) == (pb.UNAUTHORIZED, True), status
    await no_call_is_admitted(at.client(), pb.UNAUTHORIZED)


async def operators_see_clients_by_their_grants(at: Scene, headers: Headers) -> None:
    """All clients need the role admin; those of a group, the right to be a member."""
    seen = (await RemoteClients(at.admin).clients()).clients
    assert {(one.client_id, one.identity) for one in seen} == {("host@1@0@a", "shop")}
    token = (await at.control.create_token("shop")).token
    as_shop = Security(ca_file=at.security.ca_file, token=token)
    async with connector(as_shop)(at.tls_address) as channel:
        stub = gateway_grpc.GatewayServiceStub(channel)
        for group, allowed in (("billing", True), ("auditing", False), ("", False)):
            request = gateway_pb.ListClientsRequest(group=group)
            try:
                answer = await stub.ListClients(request, timeout=5)
                assert [one.client_id for one in answer.clients] == ["host@1@0@a"]
                assert allowed
            except grpc.aio.AioRpcError as error:
                assert (error.code(), allowed) == (grpc.StatusCode.PERMISSION_DENIED, False)
    request = gateway_pb.ListClientsRequest(group="billing")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway_grpc.GatewayServiceStub(at.channel("plain")).ListClients(request, timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def identities_do_not_share_a_client_id(at: Scene) -> None:
    pair = await at.keys.create("thief")
    for one in SHOP:
        await at.control.grant("thief", one)
    other = at.client(signed(pair.access_key, pair.secret), client_id="host@2@0@b")
    await until(lambda: is_ok(other))
    thief = at.client(signed(pair.access_key, pair.secret))
    request = service_pb2.NotifyClientTerminationRequest(group=pb.Resource(name="billing"))
    status = (await thief.call("NotifyClientTermination", request)).status
    assert (status.code, "another identity" in status.message) == (pb.FORBIDDEN, True)
    assert await at.control.revoke("thief") == len(SHOP)
    assert await at.keys.revoke(pair.access_key)
    assert not await at.keys.revoke(pair.access_key)


async def settings_are_checked_like_calls(at: Scene, headers: Headers) -> None:
    def subscription(group: str) -> service_pb2.TelemetryCommand:
        wanted = pb.Subscription(
            group=pb.Resource(name=group),
            subscriptions=[pb.SubscriptionEntry(topic=pb.Resource(name="orders"))],
        )
        return service_pb2.TelemetryCommand(
            settings=pb.Settings(client_type=pb.SIMPLE_CONSUMER, subscription=wanted)
        )

    for group, code in (("auditing", pb.FORBIDDEN), ("billing", pb.OK)):
        client = at.client(headers)
        stream = client.stub.Telemetry(metadata=client.metadata)
        await stream.write(subscription(group))
        assert await first_status(stream) == code
        if code != pb.OK:
            assert await stream.read() == grpc.aio.EOF, "it ends"
        stream.cancel()
    client = at.client()
    stream = client.stub.Telemetry(metadata=client.metadata)
    assert await first_status(stream) == pb.UNAUTHORIZED


async def every_credential_names_a_client_on_its_port(at: Scene, headers: Headers) -> None:
    token = (await at.control.create_token("shop")).token
    bearer = [("authorization", f"Bearer {token.reveal()}")]
    await until(lambda: is_ok(at.client(bearer)))
    assert await is_ok(at.client(headers, port="plain")), "a signature is no secret"
    assert await is_ok(at.client(headers, port="main")), "before the certificate"
    status = await at.client(bearer, port="plain").send("orders", b"x")
    assert (status.code, "no TLS" in status.message) == (pb.UNAUTHORIZED, True)
    await the_main_port_admits_known_certificates_only(at, headers)
    # With a client certificate: its common name, or the administrator's.
    assert await is_ok(at.client(port="main", client_id="host@5@0@e")), "the administrator"
    authority = CertificateAuthority(Path(at.security.ca_file).parent)
    made = authority.issue(CertificateSubject(name="stranger"))
    at.security, before = made, at.security
    status = await at.client(port="main", client_id="host@3@0@c").send("orders", b"x")
    assert (status.code, "stranger lacks" in status.message) == (pb.FORBIDDEN, True)
    empty = at.client(signed("", Secret("")), port="main", client_id="host@3@0@c")
    assert "stranger lacks" in (await empty.send("orders", b"x")).message
    at.security = before


async def the_main_port_admits_known_certificates_only(at: Scene, headers: Headers) -> None:
    """Mutual TLS: a signature does not help without a certificate of the authority."""
    own = CertificateAuthority(Path(at.security.ca_file).parent.parent / "foreign")
    foreign = own.issue(CertificateSubject(name="shop"))
    nobody = Security(ca_file=at.security.ca_file)
    for security in (nobody, replace(foreign, ca_file=at.security.ca_file)):
        async with connector(security)(at.cluster.addresses["gateway"]) as channel:
            client = RemoteStub(channel, "host@6@0@f", headers)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.send("orders", b"x")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert refused.value.details() != "", "the handshake failed"
    async with connector(at.security)(at.cluster.addresses["gateway"]) as channel:
        status = await RemoteStub(channel, "host@6@0@f", headers).send("orders", b"x")
    assert status.code == pb.OK, "with one it does"


@pytest.mark.long
@pytest.mark.timeout(600 + COMPILE_S)  # the clients may have to be installed
async def test_official_clients_use_tls_and_sign_with_their_access_keys(tmp_path: Path) -> None:
    clients = [official_client(language) for language in FEATURES]
    async with scene(tmp_path) as at:
        pair = await at.keys.create("shop")
        await at.grant_shop()
        await until(lambda: is_ok(at.client(signed(pair.access_key, pair.secret))))
        task: dict[str, Any] = {"topic": "orders", "group": "billing"}
        task |= {"access_key": pair.access_key}
        task |= {"secret": pair.secret.reveal(), "seconds": 60, "invisible_s": 60}
        # The clients of Python and Go sign their local time.
        settings = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": at.security.ca_file, "TZ": "UTC"}
        for client in clients:
            send = task | at.port_of(client.language) | {"op": "send"}
            sent = await client.run(
                send | {"messages": [{"body": f"by {client.language}"}]}, **settings
            )
            assert len(sent["sent"]) == 1
            forged = send | {"messages": [{"body": "forged"}], "secret": "wrong"}
            with pytest.raises(AssertionError, match=REFUSED[client.language]):
                await client.run(forged, **settings)
            if at.has_no_tls(client.language):
                over_tls = send | {"endpoints": at.tls_address, "tls": True, "messages": []}
                with pytest.raises(AssertionError, match="failed to connect to peer"):
                    await client.run(over_tls, **settings)
        wanted = {"hello", *(f"by {client.language}" for client in clients)}
        receive = task | at.port_of(clients[-1].language) | {"op": "simple", "count": len(wanted)}
        received = (await clients[-1].run(receive, **settings))["received"]
        assert {one["body"] for one in received} == wanted


async def secret_is_rotated_with_an_overlap(at: Scene, key: str, secret: Secret) -> None:
    new = await at.keys.rotate(key, overlap_ms=60_000)
    await until(lambda: is_ok(at.client(signed(key, new.secret))))
    assert await is_ok(at.client(signed(key, secret))), "the overlap"
    (listed,) = (await at.control.list("shop"))[0].access_keys
    assert (listed.access_key, listed.previous_expire_unix_ms > 0) == (key, True)
    back = await at.keys.rotate(key, secret=secret)
    assert back.secret == secret
    refused = at.client(signed(key, new.secret))

    async def is_refused() -> bool:
        return (await refused.send("orders", b"x")).code == pb.UNAUTHORIZED

    await until(is_refused)
    assert await is_ok(at.client(signed(key, secret)))


async def quota_of_the_identity_counts(at: Scene, shop: RemoteStub) -> None:
    quotas = Quotas(at.admin)
    await quotas.set("shop", QuotaLimits(produce_calls_per_s=1))

    async def is_throttled() -> bool:
        status = await shop.send("orders", b"x")
        return status.code == pb.TOO_MANY_REQUESTS and "produce_calls_per_s=1" in status.message

    await until(is_throttled)
    await quotas.delete("shop")
    await until(lambda: is_ok(shop))


async def has_nothing_left(at: Scene, group: str) -> bool:
    """Whether a member of the group owns the queue, and each message is acknowledged."""
    try:
        queues = (await at.admin.group_progress(group)).queues
    except GroupNotFound:
        return False
    return any(one.topic == "orders" for one in queues) and all(
        one.client_id is not None and one.lag == 0 for one in queues
    )


async def revocations_end_what_waits(at: Scene) -> None:
    """A receive call and a telemetry stream end when a grant or the access key is revoked."""
    pair = await at.keys.create("temp", access_key="temp-key", secret=Secret("chosen-secret"))
    assert (pair.access_key, pair.secret) == ("temp-key", Secret("chosen-secret"))
    client = at.client(signed("temp-key", pair.secret), client_id="host@4@0@d")
    grants = [RoleGrant(Role.CONSUME, "topic:orders"), RoleGrant(Role.CONSUME, "group:idle")]
    for end in ("grant", "block", "key"):
        for one in grants:
            await at.control.grant("temp", one)

        async def is_admitted() -> bool:
            status, messages = await client.receive("idle", "orders", wait_ms=100)
            await client.ack("idle", "orders", [handle_of(one) for one in messages])
            return status.code == pb.MESSAGE_NOT_FOUND and await has_nothing_left(at, "idle")

        await until(is_admitted)
        stream = client.stub.Telemetry(metadata=client.metadata)
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(client.receive("idle", "orders", wait_ms=9_000))
            ended = tasks.create_task(first_status(stream))
            if end == "grant":
                assert await at.control.revoke("temp") == len(grants)
            elif end == "block":
                assert await at.control.block("identity:temp")
            else:
                assert await at.keys.revoke("temp-key")
        wanted = pb.FORBIDDEN if end == "grant" else pb.UNAUTHORIZED
        assert receiving.result()[0].code == wanted, end
        assert ended.result() == wanted, end
        if end == "block":
            assert await at.control.unblock("identity:temp")


async def the_gateway_has_no_rights_to_lend(at: Scene) -> None:
    folder = Path(at.security.ca_file).parent
    own = replace(
        at.security, cert_file=str(folder / "gateway.pem"), key_file=str(folder / "gateway.key")
    )
    async with Admin(at.cluster.nameserver, security=own) as gateway:
        for refused in (
            gateway.create_topic("mine", 1),
            gateway.delete_topic("orders"),
            AccessControl(gateway).list(),
        ):
            with pytest.raises(Exception, match="service:gateway lacks admin"):
                await refused
