"""Calls that block in a thread while the waiting task is cancelled.

Goal: no thread works on a directory that is closed or used by another component, even if the caller
was cancelled: the descriptor of a closed file may belong to another file by then.
Method: a real folder and a node with a sync that waits for the test; a real replica set in one
process, in which an elected node loses its lease before its epoch is recorded.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from batonmq.errors import NotServing
from batonmq_server.storage.core import epochs
from batonmq_server.storage.disk import RealDisk
from batonmq_server.storage.flusher import Flusher, in_thread
from tests.storage.batches import append, batch
from tests.storage.replicas import Scene
from tests.storage.test_flusher import SlowNode, slow_node
from tests.storage.test_replication import numbered, others, three
from tests.support.conditions import until


async def turns() -> None:
    """Run the event loop until no task is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_cancelled_call_waits_for_its_thread_however_often() -> None:
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def call(_: None) -> None:
        begun.set()
        assert go.wait(20)
        done.set()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(in_thread(call, None))
        await until(begun.is_set)
        for _ in range(3):
            task.cancel()
            await turns()
            assert not task.done()
        go.set()
    assert done.is_set()
    assert task.cancelled()


async def test_error_of_the_thread_is_raised() -> None:
    def call(text: str) -> None:
        raise OSError(errno.EIO, text)

    with pytest.raises(OSError, match="it fails"):
        await in_thread(call, "it fails")


async def cancelled(node: SlowNode, failure: OSError | None = None) -> Flusher:
    """Return a flusher after a sync that was cancelled while the disk was blocked."""
    append(node.store, batch(b"a"))
    flusher = Flusher(node, lambda _: None, lambda _: None)
    node.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(flusher.sync())
        await until(lambda: node.synced)
        task.cancel()
        await turns()
        assert flusher.one_at_a_time.locked(), "the disk still syncs"
        assert not task.done()
        node.failure = failure
        node.gate.set()
    assert task.cancelled()
    assert not flusher.one_at_a_time.locked()
    return flusher


async def test_cancelled_sync_keeps_the_log_locked_until_it_ends(tmp_path: Path) -> None:
    with slow_node(tmp_path) as node:
        flusher = await cancelled(node)
        await flusher.sync()
        assert node.store.log.synced_position == node.store.log.next_position


async def test_sync_that_fails_after_it_was_cancelled_has_failed(tmp_path: Path) -> None:
    """A second sync would succeed, because the kernel may have dropped the unwritten pages."""
    with slow_node(tmp_path) as node:
        flusher = await cancelled(node, OSError(errno.EIO, "input/output error"))
        node.failure = None
        with pytest.raises(NotServing, match="input/output"):
            flusher.check()
        with pytest.raises(OSError, match="input/output"):
            await flusher.sync()
        assert node.store.log.synced_position == 0


async def test_closed_log_is_not_synced(tmp_path: Path) -> None:
    with slow_node(tmp_path) as node:
        append(node.store, batch(b"a"))
        flusher = Flusher(node, lambda _: None, lambda _: None)
        flusher.close("cut")
        await flusher.sync()
        assert node.synced == []


@dataclass
class BlockedDisk:
    """Blocks the first node that records an epoch, and counts the threads that do so there.

    Attributes:
        folder: Folder of that node.
        most: Largest number of threads at the same time.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    folder: Path | None = None
    inside: int = 0
    most: int = 0

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        real, lock = RealDisk.replace, threading.Lock()

        def replace(disk: RealDisk, path: str, content: bytes) -> None:
            if path != epochs.PATH:
                return real(disk, path, content)
            with lock:
                self.folder = self.folder or disk._folder
                blocked = disk._folder == self.folder
                self.inside += blocked
                self.most = max(self.most, self.inside)
            try:
                if blocked:
                    assert self.gate.wait(60)
                return real(disk, path, content)
            finally:
                with lock:
                    self.inside -= blocked

        patch.setattr(RealDisk, "replace", replace)


@pytest.mark.long
async def test_epoch_recorded_late_does_not_overlap_the_next_leader(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await three(scene)
    await first.append(*numbered(0, 3))
    await scene.wait_equal()
    disk = BlockedDisk()
    disk.patch(monkeypatch)
    try:
        await first.crash()
        await until(lambda: disk.folder)
        successor, third = sorted(
            (scene.nodes[name] for name in others(scene, first)),
            key=lambda node: node.folder != disk.folder,
        )
        successor.session.cut = True
        assert await scene.leader() is third
        await scene.wait_in_sync(third.name)
        assert disk.most == 1
    finally:
        disk.gate.set()
    successor.session.cut = False
    await scene.wait_in_sync(successor.name, third.name)
    await scene.wait_equal(successor.name, third.name)
    assert disk.most == 1
    assert epochs.decode((successor.folder / epochs.PATH).read_bytes()) == epochs.decode(
        (third.folder / epochs.PATH).read_bytes()
    )
