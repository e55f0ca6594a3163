"""The cost of ownership and the speed of hand-overs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Literal

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._connection.channels import connect
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.demo.delivery_report import handovers_ms
from batonmq_server.demo.journal import read
from batonmq_server.demo.member_processes import MemberGroup, MemberOptions, MemberProcess
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.bench_cluster import BROKER, TIMEOUT_S, BenchCluster, bench_cluster, group_queue
from bench.figures import Figure, Goal, figure, interleaved
from bench.pulls import fill
from bench.setup import TOPIC, Setup

QUEUES, MEMBERS = 64, 4
SENT_PER_S, TICKS_PER_S = 1_000, 20
LOCKS, LOCK_TOPICS = 10_000, 10
KEEP_ALIVE_S = 5
CHECKED_QUEUES = 8
_groups = count()


async def handovers(setup: Setup) -> list[Figure]:
    """Measure hand-overs: members join and leave while 1,000 messages a second are sent."""
    folder = setup.folder / "members"
    folder.mkdir()
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    rounds = setup.sized(4, 1)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            LocalCluster(setup.folder / "cluster", options, start=start_program)
        )
        admin = await stack.enter_async_context(Admin(cluster.nameserver))
        await admin.create_topic(TOPIC, QUEUES)
        part = MemberOptions(
            nameserver=cluster.nameserver,
            group="bench",
            topic=TOPIC,
            expression="*",
            folder=folder,
        )
        setup.say("starting members")
        crew = await stack.enter_async_context(MemberGroup(part, 1 + rounds * (MEMBERS - 1)))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        sending = tasks.create_task(_send_steadily(cluster.nameserver))
        setup.say("hand-overs")
        stable = await _come_and_go(admin, crew, rounds)
        sending.cancel()
        crew.members[0].leave()
        await crew.ended(crew.members[:1])
        _, events = read(crew.journals)
    took = handovers_ms(events)
    p50, p99 = quantiles(took, n=100)[49], quantiles(took, n=100)[98]
    return [
        figure("graceful hand-over, p50", p50, "ms", Goal(value_max=150)),
        figure("graceful hand-over, p99", p99, "ms", Goal(value_max=150)),
        figure(
            f"stable after a join, {QUEUES} queues, worst",
            max(stable),
            "ms",
            Goal(value_max=2_000),
        ),
    ]


async def _come_and_go(admin: Admin, crew: MemberGroup, rounds: int) -> list[float]:
    """Let all members but the first join one by one, then leave one by one.

    Returns:
        Milliseconds from each join to the moment when every member owns its share.
    """
    stable = []
    crew.members[0].join()
    await _owned(admin, crew.members[:1])
    for index in range(rounds):
        first = 1 + index * (MEMBERS - 1)
        others = crew.members[first : first + MEMBERS - 1]
        for joined in range(1, len(others) + 1):
            begin = perf_counter()
            others[joined - 1].join()
            await _owned(admin, [crew.members[0], *others[:joined]])
            stable.append((perf_counter() - begin) * 1_000)
        for left in range(1, len(others) + 1):
            others[left - 1].leave()
            await crew.ended(others[left - 1 : left])
            await _owned(admin, [crew.members[0], *others[left:]])
    return stable


async def _owned(admin: Admin, members: Sequence[MemberProcess]) -> None:
    """Return once the members own all queues of the topic in equal shares.

    The queue of the retry topic is assigned with them, so a share may lack one queue.
    """
    least = QUEUES // len(members) - 1
    async with asyncio.timeout(60):
        while True:
            locks = await admin.list_locks("bench")
            owners = [lock.client_id for lock in locks if lock.topic == TOPIC]
            shares = [owners.count(member.name) for member in members]
            if sum(shares) == QUEUES and min(shares) >= least:
                return
            await asyncio.sleep(0.05)


async def _send_steadily(nameserver: str) -> None:
    async with Producer(nameserver) as producer:
        for number in count():
            await producer.submit(
                TOPIC, Message(b"x" * 100, keys=(str(number),)), ordering_key=str(number)
            )
            if number % (SENT_PER_S // TICKS_PER_S) == 0:
                await asyncio.sleep(1 / TICKS_PER_S)


async def checks(setup: Setup) -> list[Figure]:
    """Measure pulls of a cached backlog by a group with ownership, and by one without."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            bench_cluster(setup.folder, queue_count=CHECKED_QUEUES)
        )
        nameserver = nameserver_grpc.NameserverServiceStub(
            await stack.enter_async_context(connect(cluster.local.nameserver))
        )
        setup.say("filling")
        await fill(cluster, CHECKED_QUEUES, setup.sized(64, 8), record_bytes=100)
        await nameserver.UpdateGroup(
            nameserver_pb.UpdateGroupRequest(group="free", ownership=nameserver_pb.OWNERSHIP_OFF),
            timeout=TIMEOUT_S,
        )
        await _gate_seen(cluster)
        setup.say("pulling")

        async def owned() -> float:
            group = f"owned-{next(_groups)}"
            token = await cluster.own(group, CHECKED_QUEUES)
            return await _pull_rate(partial(_pull_all, cluster, group, token))

        async def free() -> float:
            return await _pull_rate(partial(_pull_all, cluster, "free", 0))

        await owned()
        rates = await interleaved({"owned": owned, "free": free}, setup.sized(9, 1))
    return [
        figure(
            "pulls with ownership checks, 100 B records",
            rates["owned"],
            "messages/s",
            Goal(ratio_min=0.9),
            reference=rates["free"],
        )
    ]


async def consumption(setup: Setup) -> list[Figure]:
    """Measure one consumer with a backlog of 100 B messages, with ownership and without."""
    total = setup.sized(400_000, 40_000)
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    async with (
        LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, CHECKED_QUEUES)
        setup.say("filling")
        async with Producer(cluster.nameserver) as producer:
            for number in range(total):
                await producer.submit(TOPIC, Message(b"x" * 100), ordering_key=str(number))
        setup.say("consuming")

        async def rate(ownership: Literal["on", "off"]) -> float:
            group = f"{ownership}-{next(_groups)}"
            await admin.update_group(group, ownership=ownership)
            settings = ConsumerSettings(consume_from="first")
            async with Consumer(cluster.nameserver, group, {TOPIC: "*"}, settings) as consumer:
                handled, begin = 0, 0.0
                async for _ in consumer:
                    begin = begin or perf_counter()
                    handled += 1
                    if handled == total:
                        consumer.stop()
                return total / (perf_counter() - begin)

        rates = await interleaved(
            {"on": lambda: rate("on"), "off": lambda: rate("off")}, setup.sized(5, 1)
        )
    return [
        figure(
            "one consumer with ownership, 100 B messages",
            rates["on"],
            "messages/s",
            Goal(ratio_min=0.9),
            reference=rates["off"],
        )
    ]


async def _gate_seen(cluster: BenchCluster) -> None:
    """Wait until storage knows that the queues of `free` have no owner."""
    while True:
        try:
            await _pull(cluster, "free", 0, 0, 0)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.01)
        else:
            return


async def _pull_rate(pull_queue: Callable[[int], Coroutine[None, None, int]]) -> float:
    """Return the messages per second of all queues, each with one pull in flight."""
    begin = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(pull_queue(queue_id)) for queue_id in range(CHECKED_QUEUES)]
    return sum(task.result() for task in found) / (perf_counter() - begin)


async def _pull_all(cluster: BenchCluster, group: str, token: int, queue_id: int) -> int:
    offset = 0
    while (next_offset := await _pull(cluster, group, token, queue_id, offset)) > offset:
        offset = next_offset
    return offset


async def _pull(cluster: BenchCluster, group: str, token: int, queue_id: int, offset: int) -> int:
    request = pb.PullRequest(queue=group_queue(group, queue_id), offset=offset, token=token)
    return (await cluster.storage.Pull(request, timeout=TIMEOUT_S)).next_offset


async def keep_alives(setup: Setup) -> list[Figure]:
    """Measure the CPU time of the lock manager for the keep-alives of 10,000 locks."""
    locks = setup.sized(LOCKS, 1_000)
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            LocalCluster(setup.folder / "cluster", options, start=start_program)
        )
        nameserver = nameserver_grpc.NameserverServiceStub(
            await stack.enter_async_context(connect(cluster.nameserver))
        )
        lockmgr = lockmgr_grpc.LockmgrServiceStub(
            await stack.enter_async_context(connect(cluster.addresses["lockmgr"]))
        )
        setup.say(f"acquiring {locks:,} locks")
        me = queue_pb2.Incarnation(client_id="bench", incarnation_id=1)
        holds = await _own_many(nameserver, lockmgr, me, locks)
        request = lockmgr_pb.KeepAliveRequest(incarnation=me, acquire_seq=1 << 40, holds=holds)
        pid = cluster.pid("lockmgr")
        assert pid is not None
        setup.say("keep-alives")
        calls, before = setup.sized(50, 5), _cpu_s(pid)
        for _ in range(calls):
            answer = await lockmgr.KeepAlive(request, timeout=TIMEOUT_S)
            assert {report.state for report in answer.reports} == {lockmgr_pb.HOLD_STATE_OK}
        spent_s = (_cpu_s(pid) - before) / calls
    return [
        figure(
            f"keep-alives of {locks:,} locks, CPU of lockmgr",
            100 * spent_s / KEEP_ALIVE_S,
            "% of a core",
            Goal(value_max=5),
        )
    ]


async def _own_many(
    nameserver: nameserver_grpc.NameserverServiceAsyncStub,
    lockmgr: lockmgr_grpc.LockmgrServiceAsyncStub,
    me: queue_pb2.Incarnation,
    locks: int,
) -> list[lockmgr_pb.Hold]:
    """Join a group of many topics and acquire every queue of them."""
    each = locks // LOCK_TOPICS
    names = [f"{TOPIC}-{index}" for index in range(LOCK_TOPICS)]
    for name in names:
        await nameserver.CreateTopic(
            nameserver_pb.CreateTopicRequest(topic=name, queue_count=each), timeout=TIMEOUT_S
        )
    joined = await nameserver.Heartbeat(
        nameserver_pb.HeartbeatRequest(
            group="bench",
            incarnation=me,
            subscriptions=[nameserver_pb.Subscription(topic=name) for name in names],
        ),
        timeout=TIMEOUT_S,
    )
    holds = []
    for seq, name in enumerate(names, start=1):
        keys = [
            queue_pb2.GroupQueue(
                group="bench",
                queue=queue_pb2.QueueRef(topic=name, broker=BROKER, queue_id=queue_id),
            )
            for queue_id in range(each)
        ]
        request = lockmgr_pb.AcquireRequest(
            incarnation=me,
            acquire_seq=seq,
            generation=joined.group.generation,
            items=[lockmgr_pb.AcquireItem(queue=key) for key in keys],
        )
        async for answer in lockmgr.Acquire(request, timeout=TIMEOUT_S):
            assert answer.HasField("grant"), answer
            holds.append(lockmgr_pb.Hold(queue=answer.queue, token=answer.grant.token))
    return holds


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
