"""Goal: the kernel syncs the log without a thread, and a failure of the disk is never missed.

Method: real files and the real kernel; syncs that the test ends itself, for failures.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batonmq._common.outside_call import OutsideCall
from batonmq.errors import NotServing
from batonmq_server.storage import kernel_sync
from batonmq_server.storage.disk import RealFile
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.kernel_sync import KernelSync
from batonmq_server.storage.node import StorageNode, open_directory
from tests.storage.batches import append, batch
from tests.storage.test_purge_machine import at_once
from tests.support.own_logs import own_warnings

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux syncs without a thread")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StorageNode]:
    with open_directory(tmp_path, segment_bytes=1 << 16, monotonic_ms=lambda: 0) as node:
        yield node


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


async def no_thread(call: Callable[[Any], None], argument: Any) -> None:
    raise AssertionError("a thread syncs the log")


@on_linux
async def test_log_is_synced_without_a_thread(node: StorageNode) -> None:
    kernel = KernelSync()
    took: list[float] = []
    flusher = Flusher(
        node, lambda _: None, took.append, in_thread=no_thread, begin_sync=kernel.begin
    )
    for count in range(1, 4):
        append(node.store, batch(b"x"))
        await flusher.sync()
        assert node.store.log.synced_position == node.store.log.next_position
        assert len(took) == count
    kernel.close()


@on_linux
async def test_all_segments_with_new_bytes_are_synced(node: StorageNode) -> None:
    kernel = KernelSync()
    synced: list[int] = []

    def noted(descriptor: int) -> OutsideCall[None] | None:
        synced.append(descriptor)
        return kernel.begin(descriptor)

    flusher = Flusher(node, lambda _: None, lambda _: None, in_thread=no_thread, begin_sync=noted)
    for _ in range(3):
        append(node.store, batch(b"x" * 40_000))  # more than half of a segment
    files = node.store.log.unsynced().files
    await flusher.sync()
    assert len(files) == 3
    assert synced == [file.descriptor for file in files]
    kernel.close()


async def test_thread_syncs_all_segments_if_the_kernel_refuses_one(
    node: StorageNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[OutsideCall[None] | None] = [OutsideCall(), None]
    for one in begun[:1]:
        assert one is not None
        one.end(None, None)
    by_thread: list[int] = []

    def sync(file: RealFile) -> None:
        by_thread.append(file.descriptor)

    monkeypatch.setattr(RealFile, "sync", sync)
    flusher = Flusher(
        node, lambda _: None, lambda _: None, in_thread=at_once, begin_sync=lambda _: begun.pop(0)
    )
    for _ in range(2):
        append(node.store, batch(b"x" * 40_000))
    files = node.store.log.unsynced().files
    await flusher.sync()
    assert by_thread == [file.descriptor for file in files]
    assert len(files) == 2
    monkeypatch.undo()


@on_linux
async def test_syncs_at_the_same_time_all_end(descriptor: int) -> None:
    kernel = KernelSync()
    for _ in range(50):
        os.write(descriptor, b"x" * 5_000)
        begun = [kernel.begin(descriptor) for _ in range(3)]
        for one in begun:
            assert one is not None
            await one.finish()
    kernel.close()


@on_linux
async def test_request_that_the_kernel_refuses_is_left_to_threads(
    caplog: pytest.LogCaptureFixture, descriptor: int
) -> None:
    kernel = KernelSync()
    assert kernel.begin(1 << 20) is None
    assert kernel.begin(descriptor) is None
    (warning,) = own_warnings(caplog)
    assert "threads do" in warning.getMessage()
    kernel.close()


async def test_file_without_a_descriptor_is_left_to_threads() -> None:
    assert KernelSync().begin(-1) is None


async def test_without_the_library_threads_sync(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, descriptor: int
) -> None:
    monkeypatch.setattr(kernel_sync, "_MISSING", "io_setup is not allowed")
    kernel = KernelSync()
    assert [kernel.begin(descriptor), kernel.begin(descriptor)] == [None, None]
    (warning,) = own_warnings(caplog)
    assert "io_setup is not allowed" in warning.getMessage()


@pytest.mark.parametrize(
    ("result", "number", "why"),
    [
        (2**64 - errno.ENOSPC, errno.ENOSPC, os.strerror(errno.ENOSPC)),
        (7, 2**64 - 7, "unknown outcome of a sync"),
    ],
)
async def test_error_of_the_kernel_is_an_error_of_the_call(
    result: int, number: int, why: str
) -> None:
    begun = OutsideCall[None]()
    KernelSync()._end(begun, result)
    with pytest.raises(OSError) as raised:
        await begun.finish()
    assert (raised.value.errno, raised.value.strerror) == (number, why)


class MuteContext:
    """Does not say how syncs have ended."""

    fileno = -1

    def poll(self) -> int:
        raise BlockingIOError

    def process_events(self) -> int:
        raise SystemError("not permitted")


@pytest.mark.parametrize("close", [False, True])
async def test_sync_without_an_outcome_has_failed(close: bool) -> None:
    kernel, begun = KernelSync(), OutsideCall[None]()
    kernel._begun.add(begun)
    if close:
        kernel.close()
    else:
        mute: Any = MuteContext()
        kernel._take_ended(mute)
    with pytest.raises(OSError, match="kernel"):
        await begun.finish()
    assert not kernel._begun


@on_linux
async def test_children_do_not_inherit_the_descriptor(descriptor: int) -> None:
    kernel = KernelSync()
    begun = kernel.begin(descriptor)
    assert begun is not None
    await begun.finish()
    assert kernel._context is not None
    assert not os.get_inheritable(kernel._context.fileno)
    kernel.close()


async def test_sync_that_fails_after_it_was_cancelled_has_failed(node: StorageNode) -> None:
    append(node.store, batch(b"a"))
    begun = OutsideCall[None]()
    flusher = Flusher(
        node, lambda _: None, lambda _: None, in_thread=no_thread, begin_sync=lambda _: begun
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(flusher.sync())
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert flusher.one_at_a_time.locked(), "the disk still syncs"
        begun.end(None, OSError(errno.EIO, "input/output error"))
    assert task.cancelled()
    with pytest.raises(NotServing, match="input/output"):
        flusher.check()
    assert node.store.log.synced_position == 0


async def test_position_that_cannot_be_recorded_is_a_failure(
    node: StorageNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    append(node.store, batch(b"a"))
    begun = OutsideCall[None]()
    begun.end(None, None)
    flusher = Flusher(
        node, lambda _: None, lambda _: None, in_thread=no_thread, begin_sync=lambda _: begun
    )
    monkeypatch.setattr(node, "note_synced", fail)
    with pytest.raises(OSError, match="input/output"):
        await flusher.sync()
    with pytest.raises(NotServing, match="input/output"):
        flusher.check()
    monkeypatch.undo()
