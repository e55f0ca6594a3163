"""Goal: a rolling change of tags loses no message and delivers none to a member that filters it.

Method: a real cluster, a group with the policy STAGED and five member processes that subscribe to
`even`. Under load, each is replaced by one that subscribes to both tags. By section 14 of the
protocol the filter that is active when an offset is passed decides, so in each queue the handled
`odd` messages are those from some offset on.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from batonmq._connection.channels import connect
from batonmq._core.queues import QueueRef
from batonmq._producer.receipts import Receipt
from batonmq.admin.admin import Admin
from tests.e2e.worker_group import send, started_again, worker_group
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TOPIC = "numbers"
QUEUES, MEMBERS, ROUND = 8, 5, 500
TAGS = ("even", "odd")


@pytest.mark.long
async def test_rolling_change_of_tags_loses_no_message_and_delivers_no_unmatched_message(
    tmp_path: Path,
) -> None:
    async with local_cluster(tmp_path / "cluster") as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        async with worker_group(cluster.nameserver, TOPIC, tmp_path) as workers:
            await _set_policy(cluster.nameserver, workers.group)
            receipts: dict[int, Receipt] = {}
            stop = asyncio.Event()

            async def keep_sending() -> None:
                while not stop.is_set():
                    numbers = range(len(receipts), len(receipts) + ROUND)
                    receipts.update(await send(cluster.nameserver, TOPIC, numbers, *TAGS))

            old = [await workers.join(f"old{n}", expression="even") for n in range(MEMBERS)]
            await until(lambda: all(worker.owned for worker in old), timeout_s=60)
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(keep_sending())
                await until(lambda: len(workers.done()) > ROUND, timeout_s=60)
                new = []
                for number, worker in enumerate(old):
                    assert await worker.leave() == 0
                    new.append(await workers.join(f"new{number}", expression="even || odd"))
                    await until(lambda: new[-1].lines, timeout_s=60)
                    if number < MEMBERS - 1:
                        assert not any(one.owned for one in new), (
                            "a new member owns a queue while the old filter is active"
                        )
                await until(
                    lambda: sum(len(worker.owned) for worker in new) == QUEUES, timeout_s=60
                )
                stop.set()
                await sending
            before = len(receipts)
            numbers = range(before, before + ROUND)
            receipts.update(await send(cluster.nameserver, TOPIC, numbers, *TAGS))
            even = {number for number in receipts if number % 2 == 0}
            await until(lambda: workers.done() >= even | set(numbers), timeout_s=60)

            for worker in old:
                assert all(handling.number % 2 == 0 for handling in worker.handlings())
            assert started_again(workers.handlings()) == []
            _assert_odd_numbers_are_handled_from_some_offset_on(receipts, workers.done())


def _assert_odd_numbers_are_handled_from_some_offset_on(
    receipts: dict[int, Receipt], done: set[int]
) -> None:
    by_queue: dict[QueueRef, list[tuple[int, bool]]] = defaultdict(list)
    for number, receipt in receipts.items():
        if number % 2:
            by_queue[receipt.queue].append((receipt.offset, number in done))
    assert len(by_queue) == QUEUES
    for queue, odd in by_queue.items():
        handled = [is_done for _, is_done in sorted(odd)]
        assert handled == sorted(handled), f"{queue}: a message after the change is missing"
        assert handled[-1]


async def _set_policy(nameserver: str, group: str) -> None:
    async with connect(nameserver) as channel:
        await pb_grpc.NameserverServiceStub(channel).UpdateGroup(
            pb.UpdateGroupRequest(group=group, policy=pb.SUBSCRIPTION_POLICY_STAGED), timeout=5
        )
