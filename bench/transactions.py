"""Transactions: their rate and time against plain sends, by turns in one run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from time import perf_counter

from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.figures import Figure, Goal, figure, interleaved
from bench.setup import TOPIC, Setup

QUEUES = 8
BODY = b"x" * 100
IN_FLIGHT = 200
WARM_UP_COUNT = 200


async def transactions(setup: Setup) -> list[Figure]:
    """Measure transactions and sends with 200 in flight, and one at a time."""
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    count, single = setup.sized(20_000, 1_000), setup.sized(2_000, 200)
    async with LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        async with Producer(
            cluster.nameserver, group="bench", transaction_checker=_unknown
        ) as producer:
            send, commit = partial(producer.send, TOPIC, BODY), partial(_commit, producer)
            setup.say(f"transactions and sends, {IN_FLIGHT} in flight, by turns")
            rates = await interleaved(
                {
                    "sends": partial(_rate, send, count),
                    "transactions": partial(_rate, commit, count),
                },
                rounds=setup.sized(5, 1),
            )
            setup.say("one transaction and one send, by turns")
            times_ms: dict[str, list[float]] = {"send": [], "transaction": []}
            for number in range(WARM_UP_COUNT + single):
                for name, call in (("send", send), ("transaction", commit)):
                    begin_s = perf_counter()
                    await call()
                    if number >= WARM_UP_COUNT:
                        times_ms[name].append(1_000 * (perf_counter() - begin_s))
    return [
        figure(
            f"transactions, {IN_FLIGHT} in flight, against sends",
            rates["transactions"],
            "msg/s",
            Goal(ratio_min=0.1),
            reference=rates["sends"],
        ),
        figure(
            "transaction p50 against a send",
            median(times_ms["transaction"]),
            "ms",
            Goal(ratio_max=4),
            reference=median(times_ms["send"]),
        ),
    ]


async def _unknown(_: PendingTransaction) -> TransactionState:
    return TransactionState.UNKNOWN


async def _commit(producer: Producer) -> None:
    async with producer.transaction(TOPIC, BODY):
        pass


async def _rate(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Return the calls per second with `IN_FLIGHT` at once."""
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await call()

    begin_s = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(work())
    return count / (perf_counter() - begin_s)
