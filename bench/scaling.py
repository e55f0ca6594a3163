"""How the work of one topic divides over several brokers on one machine.

A storage process has one event loop, so it uses about one core. The figures are the rates at which
the busiest storage process would use a whole core: the messages of the work divided by that
process's CPU time. So they do not depend on how many cores this machine has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from baton.common.v1 import queue_pb2
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._connection.channels import connect
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.bench_cluster import TIMEOUT_S
from bench.figures import Figure, Goal, figure, interleaved
from bench.setup import TOPIC, Setup, batch

QUEUES = 8
BROKERS = (1, 2, 4)
RECORD_BYTES, BATCH_RECORDS = 100, 10
IN_FLIGHT = 64
GROUP = "bench"


class _Brokers:
    """A cluster of several brokers that share the queues of a topic.

    Args:
        stubs: One for each broker.
    """

    def __init__(
        self, cluster: LocalCluster, stubs: Sequence[storage_grpc.StorageServiceAsyncStub]
    ) -> None:
        self._cluster, self._stubs = cluster, stubs
        self._pids = [cluster.pid(name) for name in cluster.options.names_of("storage")]
        self._batches = [
            batch(RECORD_BYTES, queue_id=queue_id, count=BATCH_RECORDS)
            for queue_id in range(QUEUES // len(stubs))
        ]

    async def append(self, count: int) -> float:
        """Return the messages per CPU second of the busiest process, of `count` appends."""

        async def call(index: int) -> None:
            stub = self._stubs[index % len(self._stubs)]
            raw = self._batches[index // len(self._stubs) % len(self._batches)]
            request = pb.AppendRequest(batches=[raw], durability=pb.DURABILITY_MEMORY)
            answer = await stub.Append(request, timeout=TIMEOUT_S)
            assert answer.outcomes[0].HasField("receipt"), answer

        return await self._rate(call, count)

    async def pull(self, count: int) -> float:
        """Return the messages per CPU second of the busiest process, of `count` pulls."""

        async def call(index: int) -> None:
            broker = index % len(self._stubs)
            queue = queue_pb2.QueueRef(
                topic=TOPIC,
                broker=f"broker-{broker}",
                queue_id=index // len(self._stubs) % len(self._batches),
            )
            request = pb.PullRequest(
                queue=queue_pb2.GroupQueue(group=GROUP, queue=queue), messages_max=BATCH_RECORDS
            )
            answer = await self._stubs[broker].Pull(request, timeout=TIMEOUT_S)
            assert answer.batches, answer

        return await self._rate(call, count)

    async def _rate(self, call: Callable[[int], Awaitable[None]], count: int) -> float:
        left = iter(range(count))

        async def worker() -> None:
            for index in left:
                await call(index)

        begin_s = [cpu_s(pid) for pid in self._pids]
        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(worker())
        used_s = [cpu_s(pid) - begin for pid, begin in zip(self._pids, begin_s, strict=True)]
        return count * BATCH_RECORDS / max(used_s)


async def scaling(setup: Setup) -> list[Figure]:
    """Measure small appends and pulls of one topic with 8 queues on 1, 2 and 4 brokers."""
    count = setup.sized(8_000, 400)
    async with AsyncExitStack() as stack:
        started = {n: await _start(stack, setup.folder, n) for n in BROKERS}
        setup.say("appends")
        appends = await interleaved(
            {str(n): partial(brokers.append, count) for n, brokers in started.items()},
            setup.sized(5, 1),
        )
        setup.say("pulls")
        pulls = await interleaved(
            {str(n): partial(brokers.pull, count) for n, brokers in started.items()},
            setup.sized(5, 1),
        )
    return [
        figure(
            f"{name} of 10 messages of 100 B, {n} brokers, whole core of the busiest",
            rates[str(n)],
            "messages/s",
            Goal(ratio_min=0.75 * n),
            reference=rates["1"],
        )
        for name, rates in (("appends", appends), ("pulls", pulls))
        for n in BROKERS[1:]
    ]


async def _start(stack: AsyncExitStack, folder: Path, count: int) -> _Brokers:
    options = ClusterOptions(
        brokers=count,
        auto_restart=False,
        log_level="WARNING",
        settings={"storage": {"flush": "async", "segment_bytes": 1 << 28}},
    )
    cluster = await stack.enter_async_context(
        LocalCluster(folder / f"brokers-{count}", options, start=start_program)
    )
    async with Admin(cluster.nameserver) as admin:
        await admin.create_topic(TOPIC, QUEUES)
        await admin.update_group(GROUP, ownership="off")
    names = cluster.options.names_of("storage")
    channels = [await stack.enter_async_context(connect(cluster.addresses[name])) for name in names]
    return _Brokers(cluster, [storage_grpc.StorageServiceStub(channel) for channel in channels])


def cpu_s(pid: int | None) -> float:
    """Return the CPU time that a process has used, in seconds."""
    assert pid is not None
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((path / "schedstat").read_text().split()[0]) for path in threads) / 1e9
