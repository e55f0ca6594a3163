"""Goal: the cluster reports the reason why a queue does not move, with correct values.

Method: a real cluster. Consumers are stopped in a handler, between membership and ownership, or
before they pull; services are killed. `why_stuck` is polled until it reports the expected reason,
and its values are compared with those of the test.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._producer.producer import Producer
from batonmq._producer.receipts import Receipt
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq.errors import SubscriptionConflict
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.nameserver.core.diagnosis import LATELY_MS
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TOPIC, GROUP = "flights", "planners"


@dataclass(frozen=True)
class DiagnosisCluster:
    """A cluster with one topic of one queue."""

    local: LocalCluster
    admin: Admin

    async def why(self, topic: str = "", group: str = GROUP) -> QueueDiagnosis:
        """Return the diagnosis of the only queue."""
        (diagnosis,) = await self.admin.why_stuck(group, topic)
        return diagnosis

    async def until(
        self, reason: str, topic: str = "", group: str = GROUP, **evidence: str
    ) -> QueueDiagnosis:
        """Return the diagnosis once it has this reason and this evidence."""
        diagnoses: list[QueueDiagnosis] = []

        async def is_reported() -> bool:
            diagnoses.append(await self.why(topic, group))
            return (
                diagnoses[-1].reason == reason
                and evidence.items() <= diagnoses[-1].evidence.items()
            )

        try:
            await until(is_reported, timeout_s=60)
        except TimeoutError:
            raise AssertionError(
                f"not {reason} but {diagnoses[-1] if diagnoses else None}"
            ) from None
        return diagnoses[-1]

    async def send(self, count: int, *, tag: str = "", topic: str = TOPIC) -> list[Receipt]:
        """Send that many messages; return their receipts."""
        async with Producer(self.local.nameserver) as producer:
            return [
                await producer.send(topic, str(number).encode(), tag=tag) for number in range(count)
            ]

    @asynccontextmanager
    async def consuming(
        self,
        client_id: str,
        handle: Callable[[ReceivedMessage], object],
        *,
        group: str = GROUP,
        queue_concurrency: int = 8,
    ) -> AsyncIterator[Consumer]:
        """Run a member that reads from the first message on, until the block ends."""
        settings = ConsumerSettings(
            consume_from="first",
            commit_interval_ms=100,
            queue_concurrency=queue_concurrency,
            drain_timeout_ms=500,
            send_back=False,  # the group has one queue only
        )
        nameserver = self.local.nameserver
        async with (
            Consumer(nameserver, group, {TOPIC: "*"}, settings, client_id=client_id) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            running = tasks.create_task(consumer.run(handle))
            yield consumer
            consumer.stop()
            await running

    async def heartbeat(self, client_id: str, subscriptions: dict[str, str]) -> None:
        """Send one heartbeat of a member that never acquires or pulls."""
        request = pb.HeartbeatRequest(
            group=GROUP,
            incarnation=queue_pb2.Incarnation(client_id=client_id, incarnation_id=1),
            subscriptions=[
                pb.Subscription(topic=topic, expression=expression)
                for topic, expression in subscriptions.items()
            ],
            consume_from=pb.CONSUME_FROM_FIRST,
        )
        await self.admin.directory.nameserver().Heartbeat(request, timeout=5)

    async def acquire(self, client_id: str) -> None:
        """Acquire the queue and do not use it."""
        group = await self.admin.describe_group(GROUP)
        queue = queue_pb2.QueueRef(topic=TOPIC, broker="broker-0", queue_id=0)
        request = lockmgr_pb.AcquireRequest(
            incarnation=queue_pb2.Incarnation(client_id=client_id, incarnation_id=1),
            acquire_seq=1,
            generation=group.generation,
            items=[lockmgr_pb.AcquireItem(queue=queue_pb2.GroupQueue(group=GROUP, queue=queue))],
            hold_ms=5_000,
        )
        stub = await self.admin.directory.lockmgr()
        async for answer in stub.Acquire(request, timeout=10):
            assert answer.HasField("grant"), answer

    async def leave(self, client_id: str) -> None:
        """Leave the group without releasing the queue."""
        request = pb.LeaveRequest(
            group=GROUP,
            incarnation=queue_pb2.Incarnation(client_id=client_id, incarnation_id=1),
        )
        await self.admin.directory.nameserver().Leave(request, timeout=5)


@asynccontextmanager
async def diagnosis_cluster(
    folder: Path, *, auto_restart: bool = True
) -> AsyncIterator[DiagnosisCluster]:
    """Start a cluster that diagnoses groups twice a second and tolerates silent members."""
    nameserver = {"inspect_interval_ms": 500, "member_lease_ms": 120_000}
    async with (
        local_cluster(folder, auto_restart=auto_restart, nameserver=nameserver) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, 1)
        yield DiagnosisCluster(cluster, admin)


async def series(cluster: DiagnosisCluster, name: str) -> set[str]:
    """Return the series of a nameserver metric without values."""
    (node,) = (n for n in (await cluster.admin.cluster()).nodes if n.service == "nameserver")

    def read() -> str:
        with urllib.request.urlopen(f"http://{node.metrics_address}/metrics") as answer:
            return str(answer.read(), "utf-8")

    lines = (await asyncio.to_thread(read)).splitlines()
    return {line.rpartition(" ")[0] for line in lines if line.startswith(f"{name}{{")}


async def test_stuck_message_is_reported_with_its_id_and_age(tmp_path: Path) -> None:
    async with diagnosis_cluster(tmp_path) as cluster:
        let_go, clock = asyncio.Event(), Clock()

        async def handle(message: ReceivedMessage) -> None:
            if message.offset == 3:
                await let_go.wait()

        async with cluster.consuming("c1", handle):
            receipts = await cluster.send(20)
            await cluster.until("HEAD_OF_LINE", unacked="1")
            begin_ms = clock.unix_ms()
            diagnosis = await cluster.why()
            end_ms, stored_ms = clock.unix_ms(), receipts[3].store_unix_ms
            assert diagnosis.evidence["message_id"] == receipts[3].message_id
            assert diagnosis.evidence["offset"] == "3"
            assert diagnosis.evidence["owner"] == diagnosis.client_id == "c1"
            assert diagnosis.evidence["unacked"] == "1"
            assert diagnosis.lag == 17
            assert diagnosis.lag_ms is not None
            assert begin_ms - stored_ms <= diagnosis.lag_ms <= end_ms - stored_ms
            assert diagnosis.evidence["age_ms"] == str(diagnosis.lag_ms)
            assert "16 after offset 3 are acknowledged" in diagnosis.message
            assert diagnosis.evidence["running_offset"] == "3"

            stuck = {
                f'baton_queue_stuck{{broker="broker-0",group="{GROUP}",queue_id="0",'
                f'reason="HEAD_OF_LINE",topic="{TOPIC}"}}'
            }
            await until(partial(_shows, cluster, stuck))
            let_go.set()
            idle = await cluster.until("IDLE")
            assert (idle.lag, idle.lag_ms, idle.committed_offset) == (0, 0, 20)
            await until(partial(_shows, cluster, set()))


@pytest.mark.long
async def test_moving_queue_is_not_stuck(tmp_path: Path) -> None:
    async with diagnosis_cluster(tmp_path) as cluster:

        async def handle(_: ReceivedMessage) -> None:
            await asyncio.sleep(0.08)

        async with cluster.consuming("c1", handle, queue_concurrency=1):
            await cluster.send(240)

            async def is_late() -> bool:
                return ((await cluster.why()).lag_ms or 0) > LATELY_MS

            await until(is_late)
            diagnosis = await cluster.why()
            assert (diagnosis.reason, diagnosis.stuck) == ("MOVING", False)
            assert diagnosis.lag is not None
            assert 0 < diagnosis.lag < 240
            await cluster.until("IDLE")


async def test_group_without_members_and_paused_group_are_reported(tmp_path: Path) -> None:
    async with diagnosis_cluster(tmp_path) as cluster:
        async with cluster.consuming("c1", lambda _: None):
            await cluster.send(10)
            await cluster.until("IDLE")
        await cluster.send(5)
        diagnosis = await cluster.until("NO_MEMBER")
        assert (diagnosis.lag, diagnosis.committed_offset, diagnosis.log_end_offset) == (5, 10, 15)
        assert diagnosis.client_id is None
        await cluster.admin.pause_group(GROUP, "ops", "a deploy")
        async with cluster.consuming("c2", lambda _: None):
            diagnosis = await cluster.until("PAUSED")
            assert (diagnosis.evidence["by"], diagnosis.evidence["reason"]) == ("ops", "a deploy")
            assert 0 <= int(diagnosis.evidence["since_ms"]) < 30_000
            await cluster.admin.resume_group(GROUP, "ops")
            await cluster.until("IDLE")


@pytest.mark.long
async def test_filtered_messages_and_an_owner_that_does_not_release_are_reported(
    tmp_path: Path,
) -> None:
    async with diagnosis_cluster(tmp_path) as cluster:
        await cluster.send(10, tag="EWR")
        await cluster.heartbeat("c1", {TOPIC: "JFK"})
        diagnosis = await cluster.until("NOT_ACQUIRED")
        assert diagnosis.evidence == {"assigned": "c1"}
        await cluster.acquire("c1")
        diagnosis = await cluster.until("FILTERED")
        assert diagnosis.evidence == {"expression": "JFK", "scanned": "10"}
        assert not diagnosis.stuck
        await cluster.leave("c1")
        await cluster.heartbeat("c2", {TOPIC: "JFK"})
        diagnosis = await cluster.until("HELD")
        assert (diagnosis.evidence["owner"], diagnosis.client_id) == ("c1", "c1")
        assert "assigned to c2" in diagnosis.message
        assert 0 < int(diagnosis.evidence["held_ms"]) < 60_000
        diagnosis = await cluster.until("OWNER_SILENT")
        assert diagnosis.evidence["owner"] == "c1"
        assert 0 < int(diagnosis.evidence["lease_left_ms"]) <= 18_000


async def test_refused_client_is_reported_with_its_subscription(tmp_path: Path) -> None:
    async with diagnosis_cluster(tmp_path) as cluster:
        await cluster.admin.create_topic("orders", 1)
        await cluster.send(3, topic="orders")
        await cluster.heartbeat("c1", {TOPIC: "*"})
        with pytest.raises(SubscriptionConflict):
            await _refused(cluster.heartbeat("c2", {TOPIC: "*", "orders": "paid"}))
        diagnosis = await cluster.until("REFUSED_SUBSCRIPTION", topic="orders")
        assert diagnosis.evidence == {
            "client_id": "c2",
            "member_client_id": "c1",
            "topic": "orders",
            "wants": "paid",
            "has": "",
        }


async def test_each_unavailable_service_is_reported(tmp_path: Path) -> None:
    async with diagnosis_cluster(tmp_path, auto_restart=False) as cluster:
        await cluster.heartbeat("c1", {TOPIC: "*"})
        await cluster.send(5)
        await cluster.until("NOT_ACQUIRED")
        for service in ("storage", "offsets", "lockmgr"):
            reason = f"{service.upper()}_UNREACHABLE"
            await cluster.local.kill(service)
            diagnosis = await cluster.until(reason)
            assert diagnosis.evidence["error"].startswith("UNREACHABLE")
            await until(partial(_has, cluster, f'reason="{reason}"'))
            await cluster.local.start(service)
            await cluster.local.serving(service)
            await cluster.until("NOT_ACQUIRED")


async def _refused(call: Awaitable[None]) -> None:
    """Raise the error of a call."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def _shows(cluster: DiagnosisCluster, stuck: set[str]) -> bool:
    return await series(cluster, "baton_queue_stuck") == stuck


async def _has(cluster: DiagnosisCluster, part: str) -> bool:
    return any(part in line for line in await series(cluster, "baton_queue_stuck"))
