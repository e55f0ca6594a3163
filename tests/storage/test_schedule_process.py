"""Goal: a node that is killed again and again delivers each scheduled message once, and none early.

Method: real storage processes, killed while messages are due; the
store time of a delivered batch is compared with the delivery time in its body.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import grpc.aio
import pytest

from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import schedule_service_pb2_grpc as schedule_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._connection.channels import connect
from batonmq._core.records import check_batch, decode_records
from tests.storage.batches import batch
from tests.storage.running_node import WATERMARKS, pull_request
from tests.storage.test_process import QUEUES, TIMEOUT_S, ProcessSite, process_site
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROUNDS = 5
ROUND_COUNT, REQUEST_COUNT = 2_000, 500
COUNT = ROUNDS * ROUND_COUNT
SPREAD_MS = 5_000
"""Much longer than two requests take, so that the process is killed between deliveries."""
ENV = {f"BATON_STORAGE_{name.upper()}": str(value) for name, value in WATERMARKS.items()}


async def schedule(
    stub: schedule_grpc.ScheduleServiceAsyncStub, numbers: range, clock: Clock
) -> list[str]:
    """Schedule some batches; return the ids of those that are due last."""
    receipts = []
    for begin in range(numbers.start, numbers.stop, REQUEST_COUNT):
        items, begin_unix_ms = [], clock.unix_ms() + 200
        for number in range(begin, begin + REQUEST_COUNT):
            at = begin_unix_ms + number * 7_919 % SPREAD_MS
            raw = batch(b"%d %d" % (number, at), queue_id=number % QUEUES, producer=(number + 1, 0))
            items.append(schedule_pb.ScheduleItem(batch=raw, deliver_unix_ms=at))
        request = schedule_pb.ScheduleRequest(items=items)
        for _ in range(2):  # the second call is a retry
            answer = await stub.Schedule(request, timeout=TIMEOUT_S)
        refused = [one for one in answer.outcomes if not one.receipt.duplicate]
        assert not refused, refused[0]
        receipts += [one.receipt for one in answer.outcomes]
    receipts.sort(key=lambda one: one.deliver_unix_ms)
    return [one.schedule_id for one in receipts[-10:]]


async def visible(stub: pb_grpc.StorageServiceAsyncStub) -> list[tuple[int, int, int]]:
    """Return number, delivery time and store time of every message in the queues."""
    rows = []
    for queue_id in range(QUEUES):
        offset = 0
        while True:
            request = pull_request(queue_id=queue_id, offset=offset)
            answer = await stub.Pull(request, timeout=TIMEOUT_S)
            if answer.next_offset == offset:
                break
            for raw in answer.batches:
                header = check_batch(raw, stamped=True)
                for record in decode_records(raw, header, range(header.count)):
                    number, at = map(int, record.body.split())
                    rows.append((number, at, header.store_unix_ms))
            offset = answer.next_offset
    return rows


async def describe(stub: pb_grpc.StorageServiceAsyncStub) -> pb.DescribeResponse:
    return await stub.Describe(pb.DescribeRequest(), timeout=TIMEOUT_S)


class KillRounds:
    """Start nodes, schedule batches, and kill the nodes while they deliver."""

    def __init__(self, site: ProcessSite) -> None:
        self._site, self._clock = site, Clock()
        self.started_ms = self.in_the_middle_count = 0
        self.last_ids: list[str] = []

    async def run(self, number: int) -> None:
        process = self._site.start(**ENV)
        node = await self._site.serving(self.started_ms)
        self.started_ms = node.start_unix_ms
        async with connect(node.address) as channel:
            numbers = range(number * ROUND_COUNT, (number + 1) * ROUND_COUNT)
            scheduling = schedule_grpc.ScheduleServiceStub(channel)
            self.last_ids = await schedule(scheduling, numbers, self._clock)
            stub = pb_grpc.StorageServiceStub(channel)

            waiting = (await describe(stub)).scheduled_count

            async def delivers() -> bool:
                return not waiting or (await describe(stub)).scheduled_count < waiting

            await until(delivers)
            left = (await describe(stub)).scheduled_count
            process.kill_now()
        self.in_the_middle_count += 0 < left < COUNT


@pytest.mark.long
async def test_kill_9_delivers_each_message_once_and_none_early(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with process_site(etcd_endpoint, tmp_path) as site:
        rounds = KillRounds(site)
        for number in range(ROUNDS):
            await rounds.run(number)
        assert rounds.in_the_middle_count, "no kill came during a delivery"
        site.start(**ENV)
        node = await site.serving(rounds.started_ms)
        async with connect(node.address) as channel:
            stub = pb_grpc.StorageServiceStub(channel)

            async def idle() -> bool:
                return (await describe(stub)).scheduled_count == 0

            await until(idle, timeout_s=60)
            rows = await visible(stub)
            for schedule_id in rounds.last_ids:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await schedule_grpc.ScheduleServiceStub(channel).CancelScheduled(
                        schedule_pb.CancelScheduledRequest(schedule_id=schedule_id),
                        timeout=TIMEOUT_S,
                    )
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    times = Counter(number for number, _, _ in rows)
    assert set(times) == set(range(COUNT)), "a message is lost"
    assert [number for number, count in times.items() if count > 1] == [], (
        "a message was delivered twice"
    )
    assert all(stored >= at for _, at, stored in rows), "a message was delivered early"
