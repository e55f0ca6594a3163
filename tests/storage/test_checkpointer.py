"""Goal: checkpoints are taken when they are due and at a clean stop; a failed one does no harm.

Method: a node on a disk in memory, its loops as in production but without threads; then the whole
node.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batonmq_server.storage import checkpointer
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import append, batch, bodies, open_store
from tests.storage.running_node import running_node
from tests.support.conditions import until

FIRST = f"log/{0:020d}"


class WatchedDisk(MemoryDisk):
    """A disk that records the unsynced bytes at each checkpoint; fails while `failure` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: OSError | None = None
        self.unsynced: list[int] = []

    def replace(self, path: str, content: bytes) -> None:
        if path == "checkpoint":
            if self.failure is not None:
                raise self.failure
            self.unsynced.append(len(self.files[FIRST].unsynced))
        super().replace(path, content)


@dataclass(frozen=True, slots=True)
class Scene:
    disk: WatchedDisk
    node: StorageNode
    flusher: Flusher
    checkpointer: Checkpointer

    def append(self, *raw: bytes) -> None:
        append(self.node.store, *raw)
        self.flusher.notify_written()


async def at_once(function: Callable[[Any], None], argument: Any) -> None:
    function(argument)


@asynccontextmanager
async def new_scene() -> AsyncIterator[Scene]:
    disk = WatchedDisk()
    with recover_directory(disk, segment_bytes=1 << 20, monotonic_ms=lambda: 0) as node:
        flusher = Flusher(node, lambda _: None, lambda _: None, in_thread=at_once)
        async with asyncio.TaskGroup() as tasks:
            flushing = tasks.create_task(flusher.run())
            yield Scene(disk, node, flusher, Checkpointer(node, flusher, at_once))
            flushing.cancel()


async def test_log_is_safe_before_the_checkpoint_is_written() -> None:
    async with new_scene() as scene:
        scene.append(batch(b"a"), batch(b"b"))
        assert scene.disk.files[FIRST].unsynced
        assert await scene.checkpointer.take()
        assert scene.disk.unsynced == [0]
        assert scene.checkpointer.position() == scene.node.store.log.next_position


async def test_checkpoint_after_one_without_space_is_complete() -> None:
    async with new_scene() as scene:
        for number in range(5):
            scene.append(batch(b"%d" % number, queue_id=number))
            scene.disk.failure = None if number % 2 else OSError(errno.ENOSPC, "no space")
            assert await scene.checkpointer.take() == bool(number % 2)
            again = open_store(scene.disk.killed(), segment_bytes=1 << 20)
            assert again.report.batches == 1 - number % 2
            assert bodies(again.store, number) == [b"%d" % number]


async def test_disk_failure_ends_the_process() -> None:
    async with new_scene() as scene:
        scene.append(batch(b"a"))
        scene.disk.failure = OSError(errno.EIO, "broken")
        with pytest.raises(OSError, match="broken"):
            await scene.checkpointer.take()


@pytest.mark.parametrize("due", ["time", "size"])
async def test_checkpoint_is_taken_when_it_is_due(
    due: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "_LOOK_S", 0.001)
    monkeypatch.setattr(checkpointer, "INTERVAL_S", 0 if due == "time" else 3_600)
    monkeypatch.setattr(checkpointer, "BYTES_MAX", 1 << 40 if due == "time" else 500)
    async with new_scene() as scene, asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(scene.checkpointer.run())
        for number in range(1, 4):
            scene.append(batch(b"x" * 600))
            await until(lambda number=number: len(scene.disk.unsynced) == number)  # type: ignore[misc]
        assert scene.checkpointer.position() == scene.node.store.log.next_position
        taking.cancel()


async def test_restart_after_a_clean_stop_scans_nothing(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        raw = batch(b"a", b"b", producer=(5, 1))
        (receipt,) = await node.append(raw)
    async with running_node(etcd_endpoint, tmp_path) as node:
        report = json.loads((tmp_path / "recovery.json").read_text())
        assert (report["scanned_bytes"], report["rebuilt"], report["queues"]) == (0, "", 1)
        assert report["checkpoint_position"] == len(raw)
        (again,) = await node.append(raw)
        assert (again.duplicate, again.position) == (True, receipt.position)
        assert [len(one.batches) for one in [await node.pull()]] == [1]
