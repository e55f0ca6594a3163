"""Compaction: the space that it leaves, and its CPU time per message."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random
from time import process_time

from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._core.ordering_key import with_ordering_key
from batonmq._core.records import BatchBuilder, Message, encode_record
from batonmq._telemetry.event_hub import EventHub
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.compaction_runner import CompactionLimits, CompactionRunner, DueQueue
from batonmq_server.storage.core.checks import check
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.core.retention import Retention, RetentionPolicy
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.flusher import Flusher, in_thread
from batonmq_server.storage.metric_stream import StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode
from batonmq_server.storage.node_role import StandaloneRole
from bench.core import SEGMENT_BYTES, TOPIC_ID, open_node, sync, topics
from bench.figures import Figure, Goal, figure
from bench.setup import TOPIC, Setup

BODY_BYTES, PER_BATCH = 100, 50
KEY = TOPIC_ID, 0


async def compaction(setup: Setup) -> list[Figure]:
    """Measure 1,000 keys that are updated 100 times each, and a second run over what is left."""
    keys, rounds = 1_000, setup.sized(100, 10)
    folder = setup.folder / "compaction"
    with open_node(folder) as node:
        setup.say(f"{keys:,} keys, each updated {rounds} times")
        random = Random(1)
        for _ in range(rounds):
            _update(node, random.choices(range(keys), k=keys))
        sync(node)
        count, stored = keys * rounds, _bytes(node.store)
        setup.say("compaction")
        first_s, kept, _ = await _compacted(node)
        _update(node, [0])
        sync(node)
        again_s, _, left = await _compacted(node)
    return [
        figure(
            f"bytes of {keys:,} keys after {rounds} updates each, compacted against stored",
            kept / 1024,
            "KiB",
            Goal(ratio_max=0.05 * 100 / rounds),
            reference=stored / 1024,
        ),
        figure(
            "CPU time of a compaction per message that it reads",
            1e6 * first_s / count,
            "µs",
            Goal(value_max=10),
        ),
        figure(
            "CPU time of another run per message that is written again",
            1e6 * again_s / left,
            "µs",
            Goal(value_max=200),
        ),
    ]


def _update(node: StorageNode, keys: list[int]) -> None:
    """Store one message of each key, in batches."""
    for at in range(0, len(keys), PER_BATCH):
        builder = BatchBuilder()
        for key in keys[at : at + PER_BATCH]:
            message = with_ordering_key(Message(os.urandom(BODY_BYTES)), f"product-{key:06d}")
            builder.add(message, encode_record(message))
        raw = builder.encode(topic=TOPIC, queue_id=0)
        node.store.append([check(raw)], topics(1), Clock().unix_ms())


def _bytes(store: MessageStore) -> int:
    """Return the bytes of the batches of the queue."""
    queue, part = store.queues[KEY], store.compacted.get(KEY)
    total = part.bytes_count if part is not None else 0
    if queue.first_offset < queue.visible_offset:
        entries = queue.read(queue.first_offset, queue.visible_offset)
        total += sum(
            dict(zip(entries.positions.tolist(), entries.sizes.tolist(), strict=True)).values()
        )
    return total


async def _compacted(node: StorageNode) -> tuple[float, int, int]:
    """Compact the queue; return the CPU time in seconds, the bytes and the messages left."""
    flusher = Flusher(node, lambda _: None, lambda _: None, in_thread=in_thread)
    retention = Retention(
        RetentionPolicy(age_ms_max=0, hours=frozenset(), log_bytes_max=0), SEGMENT_BYTES
    )
    appender = Appender(
        broker="bench",
        store=node.store,
        space=node.disk.space,
        flusher=flusher,
        retention=retention,
        role=StandaloneRole(node.store),
        metrics=StorageMetrics(CollectorRegistry()),
        stream=StorageMetricStream(EventHub("storage", 1, Clock()), "bench"),
        clock=Clock(),
    )
    limits = CompactionLimits(memory_bytes=64 * 1024 * 1024, bytes_per_s=1 << 40)
    runner = CompactionRunner(appender, node.disk, limits, in_thread, Random(1))
    due = DueQueue(KEY, CompactionPolicy(), node.store.queues[KEY].visible_offset, 0, 1.0)
    flushing = asyncio.create_task(flusher.run())
    begin_s = process_time()
    await runner.compact(due)
    used_s = process_time() - begin_s
    flushing.cancel()
    return used_s, _bytes(node.store), node.store.count_from(KEY, 0)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        for one in asyncio.run(compaction(Setup(Path(scratch), quick=False, say=print))):
            print(one)
