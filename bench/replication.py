"""The cost of replication: appends with one to three replicas, and a catch-up under load."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._connection.channels import connect
from batonmq.admin.admin import Admin
from batonmq.admin.replication import Replica, replicas_of
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.bench_cluster import BROKER, TIMEOUT_S
from bench.figures import MIB, Figure, Goal, figure, interleaved
from bench.setup import TOPIC, Setup, batch

COPIES = (1, 2, 3)
QUEUES = 8
IN_FLIGHT = 16
_LOOK_S = 0.05
_CATCH_UP_S = 10
_SYNC_S = 120


@dataclass(frozen=True, slots=True)
class _Set:
    """A cluster with a replicated broker, and clients for its leader."""

    cluster: LocalCluster
    admin: Admin
    leader: storage_grpc.StorageServiceAsyncStub
    requests: list[pb.AppendRequest]

    async def write(self, count: int) -> float:
        """Return the MiB per second of `count` appends that wait for all replicas."""
        left = iter(range(count))

        async def sender() -> None:
            for number in left:
                request = self.requests[number % len(self.requests)]
                answer = await self.leader.Append(request, timeout=TIMEOUT_S)
                assert all(outcome.HasField("receipt") for outcome in answer.outcomes), answer

        await asyncio.to_thread(os.sync)  # else the disk is busy with the previous round
        begin = perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(sender())
        size = len(self.requests[0].batches[0])
        return count * size / MIB / (perf_counter() - begin)

    async def copies(self) -> list[Replica]:
        """Return the replicas as the leader reports them."""
        return await replicas_of(self.admin, "storage", BROKER)


async def replication(setup: Setup) -> list[Figure]:
    """Measure appends of 512 KiB of 100 B messages, and the catch-up of a follower.

    All replicas share one disk, so each gets at most an equal share of its throughput.
    """
    async with AsyncExitStack() as stack:
        sets = {
            copies: await _set(stack, setup.folder / f"copies-{copies}", copies)
            for copies in COPIES
        }
        setup.say("writing")
        count = setup.sized(400, 40)
        for one in sets.values():
            await one.write(IN_FLIGHT)
        rates = await interleaved(
            {str(copies): partial(one.write, count) for copies, one in sets.items()},
            rounds=setup.sized(5, 1),
        )
        figures = [
            figure(
                f"durable writes with {copies} copies, 100 B",
                rates[str(copies)],
                "MiB/s",
                Goal(ratio_min=round(0.9 / copies, 2)),
                reference=rates["1"],
            )
            for copies in COPIES[1:]
        ]
        setup.say("catching up")
        caught, written = await _catch_up(sets[2], setup.sized(1_500, 100))
        figures.append(
            figure(
                "catching up beside a writer",
                caught,
                "MiB/s",
                Goal(ratio_min=0.6),
                reference=written,
            )
        )
    return figures


async def _set(stack: AsyncExitStack, folder: Path, copies: int) -> _Set:
    options = ClusterOptions(storage_replicas=copies, auto_restart=False, log_level="WARNING")
    cluster = await stack.enter_async_context(LocalCluster(folder, options, start=start_program))
    admin = await stack.enter_async_context(Admin(cluster.nameserver))
    await admin.create_topic(TOPIC, QUEUES)
    (leader,) = [
        node.address
        for node in (await admin.cluster()).nodes
        if node.service == "storage" and node.leader
    ]
    channel = await stack.enter_async_context(connect(leader))
    requests = [
        pb.AppendRequest(batches=[batch(100, queue_id=queue_id)], durability=pb.DURABILITY_FSYNCED)
        for queue_id in range(QUEUES)
    ]
    return _Set(cluster, admin, storage_grpc.StorageServiceStub(channel), requests)


async def _catch_up(one: _Set, count: int) -> tuple[float, float]:
    """Return the MiB per second of a follower that catches up, and of a writer meanwhile.

    The follower was down during `count` appends. The time starts with its first fetched bytes.
    """
    name, behind = await _follower(one), await _position(one)
    await one.cluster.stop(name)
    await one.write(count)
    over = asyncio.Event()
    written = 0

    async def write() -> None:
        nonlocal written
        while not over.is_set():
            request = one.requests[written % len(one.requests)]
            await one.leader.Append(request, timeout=TIMEOUT_S)
            written += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(write())
        await one.cluster.start(name)
        async with asyncio.timeout(_SYNC_S):
            while True:
                begin, before, first = perf_counter(), written, await _position(one)
                if first > behind:
                    break
                await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(_CATCH_UP_S)
        took, last = perf_counter() - begin, await _position(one)
        rate = (written - before) * len(one.requests[0].batches[0]) / MIB / took
        over.set()
    return (last - first) / MIB / took, rate


async def _position(one: _Set) -> int:
    """Return the end of the follower's log, in bytes."""
    return min(copy.position for copy in await one.copies())


async def _follower(one: _Set) -> str:
    """Return the name of the follower's process."""
    nodes = {node.node_id: node.address for node in (await one.admin.cluster()).nodes}
    (follower,) = [nodes[copy.node_id] for copy in await one.copies() if not copy.leader]
    names = one.cluster.options.names_of("storage")
    return next(name for name in names if one.cluster.addresses[name] == follower)
