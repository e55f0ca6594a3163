"""Goal: a cluster with access on admits exactly the granted calls.

A granted message passes all retries; a revocation stops a consumer within a second; tokens of an
OIDC issuer are credentials; services still call each other, replicas included; the commands show
and change grants.
Method: real clusters over TLS with access on; programs with tokens, the operator with a
certificate; the steps of an administrator.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.common.v1 import error_pb2 as error_pb
from baton.metrics.v1 import metrics_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.clock import Clock
from batonmq._connection.security import Security
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq.admin.event_watch import EventWatch
from batonmq.errors import PermissionDenied, Unauthenticated
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tests.access.issuer import AUDIENCE, ISSUER, Issuer
from tests.storage.batches import batch
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOPIC, GROUP = "orders", "billing"
PROBE = b"probe"
REVOCATIONS = 5
"""Number of measurements of a revocation; the fastest counts, as a busy machine delays some."""


def guarded(
    folder: Path, more: Mapping[str, Mapping[str, object]] | None = None, **options: Any
) -> LocalCluster:
    """Start a cluster whose administrator has the identity of the client certificate.

    Args:
        more: Further settings by service.
    """
    settings: dict[str, dict[str, object]] = {
        "storage": {"segment_bytes": SEGMENT_BYTES},
        "nameserver": {"heartbeat_interval_ms": 1_000},
    }
    for service, values in (more or {}).items():
        settings.setdefault(service, {}).update(values)
    cluster_options = ClusterOptions(secure=True, access=True, settings=settings, **options)
    return LocalCluster(folder, cluster_options, start=fork_server().start)


def security_of(cluster: LocalCluster) -> Security:
    assert cluster.security is not None
    return cluster.security


async def as_token(cluster: LocalCluster, control: AccessControl, identity: str) -> Security:
    """Return the security settings of a program with a token of this identity."""
    created = await control.create_token(identity)
    return replace(security_of(cluster), token=created.token)


def log_of(cluster: LocalCluster) -> str:
    return "".join(path.read_text() for path in (cluster.data_dir / "logs").glob("*.log"))


async def test_granted_permissions_suffice_for_retries_and_allow_nothing_else(
    tmp_path: Path,
) -> None:
    async with (
        guarded(tmp_path) as cluster,
        Admin(cluster.nameserver, security=security_of(cluster)) as admin,
    ):
        control = AccessControl(admin)
        await admin.create_topic(TOPIC, 2)
        writes, reads = [await as_token(cluster, control, one) for one in ("shop", "billing")]
        async with Producer(cluster.nameserver, ProducerSettings(security=writes)) as producer:
            rejections: list[PermissionDenied] = []
            await until(lambda: is_rejected(lambda: producer.send(TOPIC, b"too early"), rejections))
            assert "baton access grant shop" in rejections[0].remedy
            settings = ConsumerSettings(security=reads, consume_from="first")
            await until(lambda: is_rejected(lambda: received(cluster, settings), rejections))

            await grant_all(control)
            attempts: list[tuple[bytes, int]] = []

            async def handle(message: ReceivedMessage) -> None:
                attempts.append((message.body, message.attempts))
                if message.body == b"again" and message.attempts == 1:
                    raise RuntimeError("once")

            await until(lambda: sent(producer, PROBE))
            await until(lambda: is_admitted(cluster, settings), timeout_s=60)
            async with (
                Consumer(cluster.nameserver, GROUP, {TOPIC: "*"}, settings) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                running = tasks.create_task(consumer.run(handle))
                for body in (b"one", b"again"):
                    await producer.send(TOPIC, body)
                await until(lambda: {(b"one", 1), (b"again", 2)} <= set(attempts), timeout_s=60)
                running.cancel()
        await grant_stranger(control)
        outcomes = await take_sequence_of_another(cluster, victim=writes, stranger=reads)
        assert [outcome.receipt.duplicate for outcome in outcomes] == [False] * 4
        assert len({outcome.receipt.first_offset for outcome in outcomes}) == 4
        async with Admin(cluster.nameserver, security=reads) as other:
            seen_topics = {topic.name for topic in await other.list_topics()}
            assert seen_topics == {TOPIC, f"%RETRY%{GROUP}"}
            assert [group.name for group in await other.list_groups()] == [GROUP]
        log = log_of(cluster)
        assert "identity=shop role=produce" in log
        for security in (writes, reads):
            assert security.token is not None
            assert security.token.reveal() not in log


async def test_revoked_permission_stops_calls_within_a_second(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path) as cluster,
        Admin(cluster.nameserver, security=security_of(cluster)) as admin,
        Producer(cluster.nameserver, ProducerSettings(security=security_of(cluster))) as producer,
    ):
        control = AccessControl(admin)
        await admin.create_topic(TOPIC, 2)
        token = await as_token(cluster, control, "billing")
        reads = ConsumerSettings(security=token, consume_from="first")
        audits = ConsumerSettings(security=security_of(cluster), consume_from="first")
        await grant_all(control)
        await producer.send(TOPIC, PROBE)
        await until(lambda: is_admitted(cluster, reads), timeout_s=60)
        handled: dict[str, set[bytes]] = {GROUP: set(), "audit": set()}

        async def read(group: str, settings: ConsumerSettings) -> None:
            async def handle(message: ReceivedMessage) -> None:
                handled[group].add(message.body)

            async with Consumer(cluster.nameserver, group, {TOPIC: "*"}, settings) as consumer:
                await consumer.run(handle)

        async def sent_to_all(prefix: str) -> set[bytes]:
            bodies = {f"{prefix}-{number}".encode() for number in range(8)}
            for body in sorted(bodies):
                await producer.send(TOPIC, body)
            return bodies

        async def read_until_rejected() -> None:
            with pytest.raises(PermissionDenied):
                await read(GROUP, reads)

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read_until_rejected())
            auditing = tasks.create_task(read("audit", audits))
            before = await sent_to_all("before")
            both = {GROUP: before, "audit": {PROBE, *before}}
            await until(lambda: handled == both, timeout_s=30)
            earlier = await rejected_count(cluster, "storage")
            await control.revoke("billing", RoleGrant(Role.CONSUME, f"topic:{TOPIC}"))
            await until(lambda: more_rejected(cluster, earlier), timeout_s=30)
            after = await sent_to_all("after")
            await until(lambda: handled["audit"] == {PROBE, *before, *after}, timeout_s=30)
            assert handled[GROUP] == before
            await until(reading.done, timeout_s=30)
            auditing.cancel()

        took_ms = [await revoked_after_ms(cluster, control) for _ in range(REVOCATIONS)]
        assert min(took_ms) < 1_000, took_ms


async def grant_all(control: AccessControl) -> None:
    await control.grant("shop", RoleGrant(Role.PRODUCE, f"topic:{TOPIC}"))
    await control.grant("billing", RoleGrant(Role.CONSUME, f"topic:{TOPIC}"))
    await control.grant("billing", RoleGrant(Role.CONSUME, f"group:{GROUP}"))


async def sent(producer: Producer, body: bytes) -> bool:
    """Return False if the call was rejected: services see a new token or grant a moment later."""
    try:
        await producer.send(TOPIC, body)
    except (PermissionDenied, Unauthenticated):
        return False
    return True


async def received(cluster: LocalCluster, settings: ConsumerSettings) -> None:
    """Consume one message as a member of the group."""
    async with Consumer(cluster.nameserver, GROUP, {TOPIC: "*"}, settings) as consumer:

        async def handle(_: ReceivedMessage) -> None:
            consumer.stop()

        await consumer.run(handle)


async def is_admitted(cluster: LocalCluster, settings: ConsumerSettings) -> bool:
    """Return whether every service admits a member: each one sees a grant a moment later."""
    try:
        await received(cluster, settings)
    except (PermissionDenied, Unauthenticated):
        return False
    return True


async def is_rejected(
    call: Callable[[], Awaitable[object]], rejections: list[PermissionDenied]
) -> bool:
    """Return whether a known caller is rejected; False while its token is not known yet."""
    try:
        await call()
    except Unauthenticated:
        return False
    except PermissionDenied as error:
        rejections.append(error)
        return True
    raise AssertionError("the call was admitted")


async def revoked_after_ms(cluster: LocalCluster, control: AccessControl) -> int:
    """Return the time until a revoked token was rejected."""
    token = await as_token(cluster, control, "shop")
    async with Producer(cluster.nameserver, ProducerSettings(security=token)) as producer:
        await until(lambda: sent(producer, b"x"))
        (shop,) = await control.list("shop")
        await control.revoke_token(shop.tokens[-1].token_id)
        clock = Clock()
        begin_ms = clock.monotonic_ms()
        await until(lambda: is_unauthenticated(producer))
        return clock.monotonic_ms() - begin_ms


async def grant_stranger(control: AccessControl) -> None:
    """Also let the group's identity write to the topic."""
    await control.grant("billing", RoleGrant(Role.PRODUCE, f"topic:{TOPIC}"))


async def take_sequence_of_another(
    cluster: LocalCluster, *, victim: Security, stranger: Security
) -> list[storage_pb.AppendOutcome]:
    """Send a batch, then its next sequence and a high epoch as a stranger, then that sequence.

    Returns:
        The outcomes in this order.
    """
    outcomes: list[storage_pb.AppendOutcome] = []

    async def append(security: Security, body: bytes, epoch: int, sequence: int) -> None:
        raw = batch(body, topic=TOPIC, producer=(4_711, epoch), sequence=sequence)
        request = storage_pb.AppendRequest(batches=[raw])

        async def stored() -> bool:
            async with Admin(cluster.nameserver, security=security) as admin:
                stub = await admin.directory.storage("broker-0")
                (outcome,) = (await stub.Append(request, timeout=30)).outcomes
            if outcome.error.reason == error_pb.REASON_PERMISSION_DENIED:
                return False  # the grant is not known yet
            outcomes.append(outcome)
            return True

        await until(stored)

    await append(victim, b"first", 1, 0)
    await append(stranger, b"forged", 1, 1)
    await append(stranger, b"forged", 1_000_000, 0)
    await append(victim, b"second", 1, 1)
    return outcomes


async def more_rejected(cluster: LocalCluster, earlier: float) -> bool:
    return await rejected_count(cluster, "storage") > earlier


async def rejected_count(cluster: LocalCluster, name: str) -> float:
    """Return the number of calls that a process rejected for missing permissions."""
    (address,) = [one.metrics_address for one in cluster.endpoints() if one.name == name]

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    lines = (await asyncio.to_thread(scrape)).splitlines()
    counts = [line for line in lines if line.startswith("baton_access_refused_total{")]
    return sum(float(line.split()[-1]) for line in counts)


async def is_unauthenticated(producer: Producer) -> bool:
    try:
        await producer.send(TOPIC, b"x")
    except Unauthenticated:
        return True
    return False


@pytest.mark.long
async def test_services_call_each_other_and_commands_work_with_access_on(tmp_path: Path) -> None:
    async with guarded(tmp_path, storage_replicas=2, offsets=2, offsets_sets=2) as cluster:
        security = security_of(cluster)

        def baton(*words: str) -> Any:
            files = ("ca_file", "cert_file", "key_file")
            named = {f"BATON_{name.upper()}": getattr(security, name) for name in files}
            done = subprocess.run(
                [sys.executable, "-m", "batonmq", "--format", "json", *words],
                env={**named, "BATON_NAMESERVER": cluster.nameserver, "HOME": str(tmp_path),
                     "PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                check=False,
            )  # fmt: skip
            assert not done.stderr, done.stderr
            return json.loads(done.stdout) if done.stdout.strip() else None

        async def run(*words: str) -> Any:
            return await asyncio.to_thread(baton, *words)

        await run("topic", "create", TOPIC, "--queues", "4")
        settings = ConsumerSettings(security=security, consume_from="first")
        sending = ProducerSettings(security=security)
        async with (
            Producer(cluster.nameserver, sending) as producer,
            Consumer(cluster.nameserver, GROUP, {TOPIC: "*"}, settings) as consumer,
        ):
            for number in range(20):
                await producer.send(TOPIC, b"%d" % number)
            bodies = set()
            async for message in consumer:
                bodies.add(message.body)
                if len(bodies) == 20:
                    break
        await until_in_sync(run)
        await run("group", "lag", GROUP)
        await run("group", "why-stuck", GROUP)
        await run("group", "move", GROUP, "--to", "offsets-b")
        await run("group", "delete", GROUP, "--yes")
        await run("topic", "delete", TOPIC, "--yes")
        granted = await run("access", "grant", "app", "consume", "topic:orders-*")
        assert granted["changed"]
        token = await run("access", "token", "create", "app")
        listed = await run("access", "list")
        assert {(one["identity"], one["resource"]) for one in listed} == {
            ("app", "topic:orders-*"),
            ("app", None),
        }
        assert listed[-1]["by"] == "admin"
        answer = await run("access", "check", "consume", "topic:orders-1", "--identity", "app")
        assert answer["allowed"]
        assert (await run("access", "check", "admin", "cluster"))["identity"] == "admin"
        await run("access", "token", "revoke", token["token_id"])
        await run("access", "revoke", "app", "--all")
        assert await run("access", "list") == []
        for name in cluster.options.names:
            assert not await rejected_count(cluster, name), name


async def until_in_sync(run: Any) -> None:
    async def in_sync() -> bool:
        replica_rows = await run("cluster", "replication")
        return bool(replica_rows) and "PERMISSION_DENIED" not in json.dumps(replica_rows)

    await until(in_sync, timeout_s=30)


@pytest.mark.long
async def test_token_of_an_oidc_issuer_is_a_credential_until_its_identity_is_blocked(
    tmp_path: Path,
) -> None:
    issuer = Issuer(Clock())
    issuer.add_key("one")
    keys, token = tmp_path / "keys.json", tmp_path / "token"
    keys.write_bytes(issuer.document())
    token.write_text(issuer.token(sub="shop"))
    oidc = {
        "oidc_issuer": ISSUER,
        "oidc_audience": AUDIENCE,
        "oidc_jwks_file": str(keys),
    }
    services = dict.fromkeys(("storage", "offsets", "lockmgr", "nameserver"), oidc)
    events: list[pb.MetricEvent] = []
    async with (
        guarded(tmp_path / "cluster", services) as cluster,
        Admin(cluster.nameserver, security=security_of(cluster)) as admin,
        asyncio.TaskGroup() as tasks,
    ):
        watch = EventWatch(
            cluster.nameserver,
            lambda batch: events.extend(batch.events),
            security=security_of(cluster),
        )
        watching = tasks.create_task(watch.run())
        control = AccessControl(admin)
        await admin.create_topic(TOPIC, 2)
        await control.grant("oidc:shop", RoleGrant(Role.PRODUCE, f"topic:{TOPIC}"))
        await control.grant("oidc:shop", RoleGrant(Role.CONSUME, f"topic:{TOPIC}"))
        await control.grant("oidc:shop", RoleGrant(Role.CONSUME, f"group:{GROUP}"))
        security = replace(security_of(cluster), token_file=str(token))
        reads = ConsumerSettings(security=security, consume_from="first")
        async with Producer(cluster.nameserver, ProducerSettings(security=security)) as producer:
            await until(lambda: sent(producer, PROBE))
            await until(lambda: is_admitted(cluster, reads), timeout_s=60)

            bodies: list[bytes] = []

            async def handle(message: ReceivedMessage) -> None:
                bodies.append(message.body)

            async def read_until_blocked() -> None:
                with pytest.raises(Unauthenticated):
                    async with Consumer(cluster.nameserver, GROUP, {TOPIC: "*"}, reads) as consumer:
                        await consumer.run(handle)

            reading = tasks.create_task(read_until_blocked())
            await producer.send(TOPIC, b"last")
            await until(lambda: b"last" in bodies, timeout_s=60)
            await control.block("identity:oidc:shop", "laptop stolen")
            await until(lambda: is_unauthenticated(producer))
            await until(reading.done, timeout_s=60)
        await until(lambda: has_block_events(events), timeout_s=60)
        watching.cancel()


def has_block_events(events: list[pb.MetricEvent]) -> bool:
    """Return whether the stream has the call of the operator, and a refusal of the identity."""
    blocked = [event.operator_called for event in events if event.HasField("operator_called")]
    refused = [event.access_refused for event in events if event.HasField("access_refused")]
    return any("laptop stolen" in one.request for one in blocked) and any(
        one.identity == "oidc:shop" and "is blocked" in one.message for one in refused
    )
