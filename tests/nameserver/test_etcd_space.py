"""A nameserver on an etcd whose space quota is used up.

Goal: changes are refused with the reason and the remedy, all else continues, operators are alerted,
and after compaction, defragmentation and disarming everything works again without a restart.
Method: an etcd with a small quota that the test fills with one key.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import NoQuorum
from batonmq_server.etcd_api import rpc_pb2 as pb
from batonmq_server.etcd_api import rpc_pb2_grpc as pb_grpc
from batonmq_server.local.etcd import EtcdProcess
from batonmq_server.nameserver.group_proto import REFUSED_BYTES_MAX, group_to_stored
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.counted_store import counted_store, incarnation_of, join_all, member
from tests.nameserver.replica import (
    CALL_TIMEOUT_S,
    Replica,
    grant,
    heartbeat,
    offsets_service,
    refusal,
    register_broker,
    replica,
)
from tests.runtime.etcd_compaction import compact
from tests.support.conditions import until

QUOTA_BYTES = 4 * 1024 * 1024
LEASE_MS = 600_000
"""So long that no member's lease expires on a busy machine."""
TOPIC_COUNT = 16
CHUNK = os.urandom(256 * 1024)

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


@pytest_asyncio.fixture
async def small_etcd(tmp_path: Path) -> AsyncIterator[str]:
    async with EtcdProcess(tmp_path / "etcd", quota_bytes=QUOTA_BYTES, fsync=False) as etcd:
        yield etcd.endpoint


@asynccontextmanager
async def broker(session: EtcdSession) -> AsyncIterator[None]:
    """A registered broker; a replica that starts later has it from the start."""
    await register_broker(session, "broker-a")
    yield


async def fill(session: EtcdSession) -> NoQuorum:
    """Write one key again and again until etcd refuses; return the error."""
    for _ in range(1_000):
        try:
            await session.put("filler", CHUNK)
        except NoQuorum as error:
            return error
    raise AssertionError("etcd has no quota")


async def free(endpoint: str, session: EtcdSession) -> None:
    """Follow the runbook: compact, defragment, disarm."""
    await session.delete("filler")
    _, revision = await session.get_prefix("none/")
    await compact(endpoint, revision)
    async with grpc.aio.insecure_channel(endpoint) as channel:
        maintenance = pb_grpc.MaintenanceStub(channel)
        await maintenance.Defragment(pb.DefragmentRequest(), timeout=30)
        raised = await maintenance.Alarm(pb.AlarmRequest(), timeout=10)
        for one in raised.alarms:
            disarm = pb.AlarmRequest(
                action=pb.AlarmRequest.DEACTIVATE, memberID=one.memberID, alarm=one.alarm
            )
            await maintenance.Alarm(disarm, timeout=10)


async def alarms(at: Replica) -> list[str]:
    request = nameserver_pb.DescribeClusterRequest()
    return list((await at.stub.DescribeCluster(request, timeout=CALL_TIMEOUT_S)).etcd_alarms)


async def test_full_etcd_refuses_changes_with_the_remedy_and_recovers(
    small_etcd: str, tmp_path: Path
) -> None:
    """Members stay, routes are answered; only changes are refused."""
    cluster = "full"
    async with (
        EtcdSession(small_etcd, cluster, Clock()) as session,
        offsets_service(session, tmp_path / "offsets"),
        broker(session),
        replica(
            small_etcd, cluster, etcd_check_interval_ms=100, member_lease_ms=LEASE_MS
        ) as nameserver,
    ):
        await nameserver.create("flights")
        await nameserver.join("g", "before")
        error = await fill(session)
        assert error.facts == {"alarm": "NOSPACE"}
        assert "BatonEtcdAlarm" in error.remedy

        no_quorum = await refusal(nameserver.create("trains"))
        assert no_quorum.reason == "NO_QUORUM"
        assert no_quorum.facts == {"alarm": "NOSPACE"}
        assert (await refusal(nameserver.join("g", "new"))).facts == {"alarm": "NOSPACE"}
        assert [
            one.incarnation.client_id for one in (await nameserver.join("g", "before")).members
        ] == ["before"]
        assert (await nameserver.route("flights")).topic.name == "flights"
        await until(lambda: _has(nameserver, ["NOSPACE"]))
        assert nameserver.metric("etcd_alarm", alarm="NOSPACE") == 1
        # etcd refuses a write that would pass its quota: it may itself be below it.
        await until(lambda: nameserver.metric("etcd_db_bytes") > QUOTA_BYTES - 2 * len(CHUNK))

        output = await asyncio.to_thread(cluster_status, nameserver.address)
        assert "etcd has the alarm NOSPACE: it accepts no writes" in output

        await free(small_etcd, session)
        await until(lambda: _has(nameserver, []))
        await nameserver.create("trains")
        assert len((await nameserver.join("g", "new")).members) == 2
        await until(lambda: nameserver.metric("etcd_db_bytes") < QUOTA_BYTES / 2)
        assert nameserver.metric("etcd_alarm", alarm="NOSPACE") == 0


def cluster_status(nameserver: str) -> str:
    """Return the output of `baton cluster status`."""
    command = [sys.executable, "-m", "batonmq", "--nameserver", nameserver, "cluster", "status"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    return process.stdout + process.stderr


async def _has(at: Replica, expected: list[str]) -> bool:
    return await alarms(at) == expected


async def test_member_beyond_the_limit_of_the_group_is_refused(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster, group_members_max=2) as nameserver:
        await nameserver.create("flights")
        for client_id in ("a", "b"):
            await nameserver.join("g", client_id)
        error = await refusal(nameserver.join("g", "c"))
        assert (error.reason, error.facts) == ("OVERLOADED", {"limit": "2"})
        assert await nameserver.leave("g", "a")
        await nameserver.join("g", "c")


async def test_joins_of_one_identity_are_bounded_and_others_join(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster, joins_per_s_max=1) as nameserver:
        await nameserver.create("flights")

        async def join(number: int, owner: int) -> nameserver_pb.Group:
            request = nameserver_pb.HeartbeatRequest()
            request.incarnation.owner = owner
            answer = await nameserver.beat(
                "g", f"c{owner}-{number}", incarnation=request.incarnation
            )
            return answer.group

        joined = 0
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while joined < 200:  # a slow machine allows the joins of another second
                await join(joined, 1)
                joined += 1
        assert joined >= 10
        error = from_rpc_error(raised.value)
        assert error.reason == "OVERLOADED"
        assert error.retry_after_ms > 0
        assert error.facts == {"limit": "1"}
        await join(0, 1)
        await join(0, 2)


async def test_heartbeats_that_change_nothing_take_no_joins_while_a_group_drains(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster, joins_per_s_max=1) as nameserver:
        await nameserver.create("flights")

        async def beat(expression: str) -> nameserver_pb.Group:
            request = nameserver_pb.HeartbeatRequest()
            request.incarnation.owner = 1
            return (
                await nameserver.beat("g", "c1", expression, incarnation=request.incarnation)
            ).group

        await beat("old")
        await grant(etcd, "g", "c1")
        assert (await beat("new")).staged.draining
        for _ in range(100):
            assert (await beat("new")).staged.draining


def conflicting(client_id: str, number: int) -> nameserver_pb.HeartbeatRequest:
    """Return a heartbeat with long expressions, which depend on `number`, for all topics."""
    request = heartbeat("g", client_id)
    del request.subscriptions[:]
    tags = "||".join(f"{number:03}-{tag:02}-{'x' * 90}" for tag in range(20))
    for topic in range(TOPIC_COUNT):
        request.subscriptions.add(topic=f"t{topic}", expression=tags)
    return request


@asynccontextmanager
async def group_of_many_topics(
    endpoint: str, cluster: str, **settings: Any
) -> AsyncIterator[Replica]:
    async with replica(endpoint, cluster, **settings) as nameserver:
        for topic in range(TOPIC_COUNT):
            await nameserver.create(f"t{topic}", 1)
        await nameserver.stub.Heartbeat(conflicting("member", 0), timeout=CALL_TIMEOUT_S)
        yield nameserver


async def test_record_of_a_refused_client_has_as_many_differences_as_fit(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with group_of_many_topics(etcd_endpoint, cluster) as nameserver:
        error = await refusal(
            nameserver.stub.Heartbeat(conflicting("c", 1), timeout=CALL_TIMEOUT_S)
        )
        assert len(error.differences) == TOPIC_COUNT
        stored = await etcd.get("refused/g/c")
        assert stored is not None
        assert len(stored.value) < REFUSED_BYTES_MAX
        (client,) = await nameserver.refused("g")
        assert "and 13 more" in client.error.message
        assert [one.topic for one in client.error.differences] == ["t0"]
        assert client.error.differences[0].member_client_id == "member"


async def test_refused_clients_of_a_group_are_written_at_its_rate(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    rate = 8_192
    async with group_of_many_topics(
        etcd_endpoint, cluster, group_write_bytes_per_s=rate
    ) as nameserver:
        begin_ms = etcd.clock.monotonic_ms()
        for number in range(1, 21):
            call = nameserver.stub.Heartbeat(
                conflicting(f"c{number}", number), timeout=CALL_TIMEOUT_S
            )
            assert (await refusal(call)).reason == "SUBSCRIPTION_CONFLICT"
        took_ms = etcd.clock.monotonic_ms() - begin_ms
        sizes = [len(one.value) for one in (await etcd.get_prefix("refused/g/"))[0]]
        assert sizes
        assert (sum(sizes) - max(sizes)) * 1000 <= rate * took_ms


async def test_large_group_changes_at_its_rate(etcd_endpoint: str, cluster: str) -> None:
    """A change counts as the whole record, which each member gets."""
    rate, sizes = 4_096, list[int]()
    async with counted_store(etcd_endpoint, cluster, write_bytes_per_s=rate) as (session, store):
        begin_ms = session.clock.monotonic_ms()
        for number in range(8):
            group = (await store.join(member(number))).group
            assert group is not None
            sizes.append(group_to_stored(group).ByteSize())
        took_ms = session.clock.monotonic_ms() - begin_ms
        assert took_ms >= sum(sizes[:-1]) * 1000 // rate - len(sizes)


@pytest.mark.parametrize(("count", "queue_count"), [(10, 64), (100, 64), (999, 64), (999, 1_024)])
async def test_join_and_leave_write_less_than_2_kib_whatever_the_size_of_the_group(
    small_etcd: str, count: int, queue_count: int
) -> None:
    async with counted_store(small_etcd, "counted", queue_count) as (session, store):
        await join_all(store, count)
        await store.join(member(count))
        assert session.last_bytes < 2_048
        await store.leave("g", *incarnation_of(0))
        assert session.last_bytes < 2_048


@pytest.mark.long
async def test_members_that_join_and_leave_a_large_group_do_not_fill_etcd(small_etcd: str) -> None:
    """300 members, of which one joins and leaves 100 times: the whole records have 5 MB."""
    async with counted_store(small_etcd, "counted") as (session, store):
        await join_all(store, 300)
        for _ in range(100):
            await store.join(member(300))
            assert (await store.leave("g", *incarnation_of(300))).left
        space = await session.space()
        assert space.alarms == ()
        assert space.db_bytes < QUOTA_BYTES / 4
