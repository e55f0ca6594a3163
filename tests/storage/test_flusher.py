"""Goal: one sync serves all waiting calls, and nothing is acknowledged after a failed sync.

Method: a real folder; a node with a sync that the test blocks or lets fail.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from batonmq.errors import NotServing
from batonmq_server.storage.core.commitlog import UnsyncedFiles
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.disk import RealDisk
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode, open_directory
from tests.storage.batches import TOPIC_ID, append, batch
from tests.support.conditions import until


class SlowNode(StorageNode):
    """A node with syncs that wait for `gate` and may fail."""

    def __init__(self, disk: RealDisk, node: StorageNode) -> None:
        super().__init__(disk, node.recovery, node.report, node.history)
        self.gate = threading.Event()
        self.gate.set()
        self.failure: OSError | None = None
        self.synced: list[int] = []

    def sync(self, unsynced: UnsyncedFiles) -> None:
        self.synced.append(unsynced.position)
        assert self.gate.wait(timeout=20)
        if self.failure is not None:
            raise self.failure
        super().sync(unsynced)


@contextmanager
def slow_node(folder: Path) -> Iterator[SlowNode]:
    with open_directory(folder, segment_bytes=1 << 16, monotonic_ms=lambda: 0) as node:
        slow = SlowNode(RealDisk(folder), node)
        try:
            yield slow
        finally:
            slow.gate.set()
            slow.close()


class Scene:
    """A running flusher, and what it reported."""

    def __init__(self, node: SlowNode, interval_ms: int) -> None:
        self.grown: list[frozenset[QueueKey]] = []
        self.node = node
        self.flusher = Flusher(
            node,
            self.grown.append,
            StorageMetrics(CollectorRegistry()).fsync_seconds.observe,
            interval_ms=interval_ms,
        )

    @property
    def store(self) -> MessageStore:
        return self.node.store

    def write(self, body: bytes = b"x", queue_id: int = 0) -> int:
        """Write a batch; return the position after it."""
        (receipt,) = append(self.store, batch(body, queue_id=queue_id))
        assert isinstance(receipt, StoreReceipt)
        self.flusher.notify_written()
        return receipt.next_position


@asynccontextmanager
async def flushing(folder: Path, *, interval_ms: int = 0) -> AsyncIterator[Scene]:
    with slow_node(folder) as node:
        scene = Scene(node, interval_ms)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scene.flusher.run())
            yield scene
            node.gate.set()
            await scene.flusher.sync()
            running.cancel()


async def test_write_is_synced_and_becomes_visible(tmp_path: Path) -> None:
    async with flushing(tmp_path) as scene:
        position = scene.write(queue_id=3)
        await scene.flusher.wait_until_safe(position)
        assert scene.store.log.synced_position == position
        assert scene.grown == [frozenset({(TOPIC_ID, 3)})]


async def test_calls_that_wait_during_a_sync_share_the_next_one(tmp_path: Path) -> None:
    async with flushing(tmp_path) as scene, asyncio.TaskGroup() as tasks:
        scene.node.gate.clear()
        first = tasks.create_task(scene.flusher.wait_until_safe(scene.write()))
        await until(lambda: len(scene.node.synced) == 1)
        others = [
            tasks.create_task(scene.flusher.wait_until_safe(scene.write())) for _ in range(50)
        ]
        await until(lambda: len(scene.flusher._waiting) == 51)
        assert scene.store.log.synced_position == 0
        scene.node.gate.set()
        for one in (first, *others):
            await one
        assert len(scene.node.synced) == 2


async def test_write_during_a_sync_is_not_safe_after_it(tmp_path: Path) -> None:
    async with flushing(tmp_path) as scene:
        scene.node.gate.clear()
        first = scene.write()
        await until(lambda: len(scene.node.synced) == 1)
        scene.write()
        assert scene.node.synced == [first]


async def test_safe_position_is_reached_at_once(tmp_path: Path) -> None:
    async with flushing(tmp_path) as scene:
        position = scene.write()
        await scene.flusher.wait_until_safe(position)
        syncs = len(scene.node.synced)
        await scene.flusher.wait_until_safe(position)
        assert len(scene.node.synced) == syncs


async def test_waiting_call_ends_the_sync_interval(tmp_path: Path) -> None:
    async with flushing(tmp_path, interval_ms=60_000) as scene:
        first = scene.write()
        assert scene.node.synced == []
        second = scene.write()
        await scene.flusher.wait_until_safe(second)
        assert scene.node.synced == [second]
        assert first < second


async def test_interval_sync_runs_without_a_waiting_call(tmp_path: Path) -> None:
    async with flushing(tmp_path, interval_ms=20) as scene:
        position = scene.write()
        await until(lambda: scene.store.log.synced_position == position)


async def test_failed_sync_acknowledges_nothing_and_ends_the_process(tmp_path: Path) -> None:
    failure = OSError(errno.EIO, "input/output error")
    with slow_node(tmp_path) as node:
        scene = Scene(node, 0)
        node.gate.clear()
        with pytest.raises(ExceptionGroup) as ended:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(scene.flusher.run())
                tasks.create_task(wait_fails(scene))
                await until(lambda: len(node.synced) == 1)
                node.failure = failure
                node.gate.set()
        assert ended.value.exceptions == (failure,)
        assert scene.store.log.synced_position == 0
        assert scene.grown == []
        with pytest.raises(NotServing):
            scene.flusher.check()
        node.failure = None
        with pytest.raises(OSError, match="input/output"):
            await scene.flusher.sync()


async def wait_fails(scene: Scene) -> None:
    with pytest.raises(NotServing, match="input/output"):
        await scene.flusher.wait_until_safe(scene.write())


async def test_failed_write_ends_the_process_too(tmp_path: Path) -> None:
    with slow_node(tmp_path) as node:
        scene = Scene(node, 0)
        scene.flusher.fail(OSError(errno.EIO, "input/output error"))
        with pytest.raises(NotServing):
            await scene.flusher.wait_until_safe(10)
        with pytest.raises(OSError, match="input/output"):
            await scene.flusher.run()


async def test_position_is_safe_once_the_replicas_have_it_too(tmp_path: Path) -> None:
    async with flushing(tmp_path) as scene, asyncio.TaskGroup() as tasks:
        scene.store.confirmed(0)
        position = scene.write()
        waiting = tasks.create_task(scene.flusher.wait_until_safe(position))
        await until(lambda: scene.store.log.synced_position == position)
        assert not waiting.done()
        assert scene.store.offsets((TOPIC_ID, 0)).next_offset == 0
        scene.flusher.confirmed(position)
        await waiting
        assert scene.store.offsets((TOPIC_ID, 0)).next_offset == 1
    assert [queues for queues in scene.grown if queues] == [{(TOPIC_ID, 0)}]


async def test_waiting_calls_fail_with_an_unknown_result_when_the_leader_resigns(
    tmp_path: Path,
) -> None:
    async with flushing(tmp_path) as scene, asyncio.TaskGroup() as tasks:
        scene.store.confirmed(0)
        position = scene.write()

        async def fails() -> None:
            with pytest.raises(NotServing, match="no leader"):
                await scene.flusher.wait_until_safe(position)

        waiting = tasks.create_task(fails())
        await until(lambda: scene.store.log.synced_position == position)
        scene.flusher.fail_waiters("no leader any more")
        await waiting
        scene.flusher.confirmed(position)
        await scene.flusher.wait_until_safe(position)


async def test_wait_for_a_closed_log_fails(tmp_path: Path) -> None:
    async with flushing(tmp_path) as scene:
        scene.flusher.close("cut")
        with pytest.raises(NotServing, match="cut"):
            await scene.flusher.wait_until_safe(1)
