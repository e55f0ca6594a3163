"""Goal: consumers continue with the next leader and keep their progress; the old leader returns
with old data and may lead again: no message is handled again, no committed offset goes back.

Method: real processes; leaders of offsets and of storage; acks within pulls, and acks in calls of
their own. Committed offsets are sampled throughout. After the return all members leave, and new
members join: they know the progress only from the cluster. Then the old leader leads again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from batonmq._consumer.puller import Puller
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError, Unreachable
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tests.e2e.leadership import in_sync, leader
from tests.e2e.worker_group import WorkerGroup, send, worker_group
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TOPIC, QUEUES, STEP = "numbers", 4, 400
BROKER = "broker-0"


@dataclass(slots=True)
class ConsumerGroup:
    """One group and the samples of its committed offsets."""

    admin: Admin
    workers: WorkerGroup
    commit_on_pull: int
    committed: dict[int, int] = field(default_factory=dict)
    went_back: list[str] = field(default_factory=list)

    async def join(self, client_id: str) -> None:
        await self.workers.join(
            f"{client_id}-{self.workers.group}", commit_on_pull=self.commit_on_pull
        )

    async def leave(self) -> None:
        for worker in self.workers.members:
            if worker.process.returncode is None:
                assert await worker.leave() == 0

    async def until_committed(self, count: int) -> None:
        """Wait until that many messages are handled and committed."""
        await until(lambda: self.workers.done() >= set(range(count)), timeout_s=90)
        await until(lambda: sum(self.committed.values()) == count, timeout_s=60)

    async def sample(self) -> None:
        """Sample the committed offsets until cancelled."""
        while True:
            with suppress(BatonError):
                for one in await self.admin.progress(self.workers.group):
                    queue_id, offset = one.queue.queue.queue_id, one.committed_offset
                    before = self.committed.get(queue_id, 0)
                    if offset < before:
                        self.went_back.append(f"queue {queue_id} from {before} to {offset}")
                    self.committed[queue_id] = offset
            await asyncio.sleep(0.1)

    def check(self, count: int) -> None:
        """Assert that each message was handled once and no committed offset went back."""
        assert self.went_back == []
        times = Counter(handling.number for handling in self.workers.handlings())
        assert times == Counter(range(count))


@dataclass(slots=True)
class ReturningLeaderRun:
    """The cluster, its groups and the steps of the test."""

    cluster: LocalCluster
    admin: Admin
    groups: list[ConsumerGroup]
    sent: int = 0

    async def send_and_handle(self) -> None:
        """Send more messages and wait until every group has handled them."""
        numbers = range(self.sent, self.sent + STEP)
        self.sent += STEP
        await send(self.cluster.nameserver, TOPIC, numbers)
        for group in self.groups:
            await group.until_committed(self.sent)

    async def replace_members(self, *client_ids: str) -> None:
        """Stop all members, then start new ones."""
        for group in self.groups:
            await group.leave()
            for client_id in client_ids:
                await group.join(client_id)

    async def leader_fails_and_returns(self, service: str, broker: str = "") -> None:
        """Kill the leader, wait for a new leader, restart the old one, and make it lead again."""
        await in_sync(self.admin, service, broker)
        old = await leader(self.admin, self.cluster, service, broker=broker)
        await self.cluster.kill(old)
        await leader(self.admin, self.cluster, service, old, broker)
        await self.send_and_handle()
        await self.cluster.start(old)
        await in_sync(self.admin, service, broker)
        await self.replace_members("third", "fourth")
        await self.send_and_handle()
        while (current := await leader(self.admin, self.cluster, service, broker=broker)) != old:
            await self.cluster.stop(current)
            await leader(self.admin, self.cluster, service, current, broker)
            await self.cluster.start(current)
            await in_sync(self.admin, service, broker)
        await self.send_and_handle()
        await self.replace_members("fifth")
        await self.send_and_handle()


@asynccontextmanager
async def returning_leader_run(
    folder: Path, options: ClusterOptions
) -> AsyncIterator[ReturningLeaderRun]:
    """Start two groups: one sends acks within pulls, one in calls of their own."""
    # A slow machine must not remove the only possible successor from the in-sync set.
    slow = {"replica_lag_ms_max": 10_000}
    settings = {"storage": {"segment_bytes": SEGMENT_BYTES, **slow}, "offsets": slow}
    options = replace(options, auto_restart=False, settings=settings)
    async with (
        LocalCluster(folder / "cluster", options, start=fork_server().start) as cluster,
        Admin(cluster.nameserver) as admin,
        worker_group(cluster.nameserver, TOPIC, folder) as in_calls,
        worker_group(cluster.nameserver, TOPIC, folder) as in_pulls,
        asyncio.TaskGroup() as tasks,
    ):
        await admin.create_topic(TOPIC, QUEUES)
        in_calls.group, in_pulls.group = "in-calls", "in-pulls"
        run = ReturningLeaderRun(
            cluster, admin, [ConsumerGroup(admin, in_calls, 0), ConsumerGroup(admin, in_pulls, 1)]
        )
        sampling = [tasks.create_task(group.sample()) for group in run.groups]
        await run.replace_members("first", "second")
        await run.send_and_handle()
        yield run
        for group in run.groups:
            await group.leave()
            group.check(run.sent)
        for task in sampling:
            task.cancel()


@pytest.mark.long
async def test_committed_offsets_never_go_back_when_an_old_offsets_leader_returns(
    tmp_path: Path,
) -> None:
    async with returning_leader_run(tmp_path, ClusterOptions(offsets=3)) as run:
        await run.leader_fails_and_returns("offsets")


@pytest.mark.long
async def test_no_message_is_lost_when_an_old_storage_leader_returns(tmp_path: Path) -> None:
    async with returning_leader_run(tmp_path, ClusterOptions(storage_replicas=2)) as run:
        await run.leader_fails_and_returns("storage", BROKER)


@pytest.mark.long
async def test_repeated_commit_reaches_the_next_leader(tmp_path: Path) -> None:
    options = ClusterOptions(offsets=3, auto_restart=False)
    async with (
        LocalCluster(tmp_path / "cluster", options, start=fork_server().start) as cluster,
        Admin(cluster.nameserver) as admin,
        Puller(cluster.nameserver, "readers") as puller,
        Producer(cluster.nameserver) as producer,
    ):
        await admin.create_topic(TOPIC, 1)
        await admin.update_group("readers", ownership="off")
        queue = (await producer.send(TOPIC, b"1")).queue
        await puller.commit({queue: 0})
        await cluster.kill(await leader(admin, cluster, "offsets"))

        async def is_committed() -> bool:
            try:
                await puller.commit({queue: 1})
            except Unreachable:
                return False
            return True

        await until(is_committed, timeout_s=60)
        assert await puller.committed(queue) == 1
