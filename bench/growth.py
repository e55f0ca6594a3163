"""The cost of an append with many queues."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter

from batonmq_server.storage.core.checks import check
from batonmq_server.storage.node import StorageNode
from bench.core import open_node, sync, topics
from bench.figures import Figure, Goal, figure, interleaved
from bench.setup import Setup, batch

QUEUE_COUNTS = (1, 100, 10_000)
MESSAGES_PER_BATCH = 10


async def growth(setup: Setup) -> list[Figure]:
    """Measure the median time of an append of 10 messages of 100 B, by the number of queues."""
    with ExitStack() as stack:
        subjects = {}
        for queue_count in QUEUE_COUNTS:
            setup.say(f"making {queue_count:,} queues")
            node = stack.enter_context(open_node(setup.folder / str(queue_count)))
            batches = [
                batch(100, queue_id=queue_id, count=MESSAGES_PER_BATCH)
                for queue_id in range(queue_count)
            ]
            turns = cycle(batches)
            await _p50(node, turns, queue_count, queue_count)
            subjects[str(queue_count)] = partial(
                _p50, node, turns, queue_count, setup.sized(10_000, 500)
            )
        setup.say("appending")
        times = await interleaved(subjects, rounds=7)
    one = times["1"] * 1e6
    return [
        figure(
            f"append p50 with {queue_count:,} queues",
            times[str(queue_count)] * 1e6,
            "µs",
            Goal(ratio_max=2),
            reference=one,
        )
        for queue_count in QUEUE_COUNTS
    ]


async def _p50(node: StorageNode, turns: cycle[bytes], queue_count: int, count: int) -> float:
    queues = topics(queue_count)
    times = []
    for _ in range(count):
        raw = next(turns)
        begin = perf_counter()
        node.store.append([check(raw)], queues, 1)
        times.append(perf_counter() - begin)
    sync(node)
    return median(times)
