"""Time to open a data directory: after a clean stop, after a crash, and without indexes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from batonmq._core.records import BatchBuilder, Message, encode_record
from batonmq_server.storage.core.checks import check
from batonmq_server.storage.node import StorageNode
from bench.core import open_node, sync, topics
from bench.figures import Figure, Goal, figure
from bench.pulls import forget_pages
from bench.setup import TOPIC, Setup

LOG_BYTES = 5 << 30
RECORD_BYTES, RECORDS = 1_024, 500
MANY_QUEUES = 10_000
TAIL_BYTES = 256 << 20
"""Written behind the last checkpoint: the most that a node writes between two checkpoints."""


async def rebuilds(setup: Setup) -> list[Figure]:
    """Measure every kind of start with a log of 5 GiB, few and many queues, and keys."""
    figures: list[Figure] = []
    for queue_count in (8, MANY_QUEUES):
        folder = setup.folder / f"queues-{queue_count}"
        log_bytes = setup.sized(LOG_BYTES, LOG_BYTES // 64)
        setup.say(f"filling for {queue_count} queues")
        await asyncio.to_thread(_fill, folder, queue_count, log_bytes)
        for name, spoil, bound_s in (
            ("a clean stop", _nothing, 2),
            ("a crash", _crash, 15),
            ("all indexes are lost", _lose, 15),
        ):
            setup.say(f"{queue_count} queues, after {name}")
            await asyncio.to_thread(spoil, folder, queue_count)
            await asyncio.to_thread(forget_pages, folder)
            spent = await asyncio.to_thread(_open, folder)
            figures.append(
                figure(
                    f"open a 5 GiB log of {queue_count:,} queues after {name}",
                    spent,
                    "s",
                    Goal(value_max=bound_s),
                )
            )
        await asyncio.to_thread(shutil.rmtree, folder)
    return figures


def _fill(folder: Path, queue_count: int, log_bytes: int) -> None:
    batches = [_batch(queue_id) for queue_id in range(queue_count)]
    with open_node(folder) as node:
        _write(node, batches, log_bytes)
        node.checkpointing.run()


def _write(node: StorageNode, batches: Sequence[bytes], size: int) -> None:
    """Append `batches` in turn, in requests of 64, until the log has grown by `size`."""
    queues = topics(len(batches))
    end, turn = node.store.log.next_position + size, 0
    while node.store.log.next_position < end:
        chosen = [batches[(turn + index) % len(batches)] for index in range(64)]
        turn += len(chosen)
        node.store.append([check(one) for one in chosen], queues, 1)
        if node.store.log.next_position - node.store.log.synced_position > TAIL_BYTES:
            sync(node)
    sync(node)


def _batch(queue_id: int) -> bytes:
    """Return a batch of messages with keys and arbitrary bodies."""
    builder = BatchBuilder()
    count = RECORDS if queue_id < 1_000 else RECORDS // 50
    for index in range(count):
        message = Message(b"x" * RECORD_BYTES, keys=(f"{queue_id}-{index}",))
        builder.add(message, encode_record(message))
    return builder.encode(topic=TOPIC, queue_id=queue_id)


def _open(folder: Path) -> float:
    begin = perf_counter()
    with open_node(folder) as node:
        spent = perf_counter() - begin
        assert node.report.truncated_bytes == 0, node.report
    return spent


def _nothing(folder: Path, queue_count: int) -> None:
    return


def _crash(folder: Path, queue_count: int) -> None:
    """Write without a checkpoint, as a node does before it is killed."""
    with open_node(folder) as node:
        _write(node, [_batch(queue_id) for queue_id in range(min(queue_count, 100))], TAIL_BYTES)


def _lose(folder: Path, queue_count: int) -> None:
    for name in ("consumequeue", "keyindex"):
        shutil.rmtree(folder / name)
    (folder / "checkpoint").unlink()
