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

from batonmq._common.threads import BegunCall
from batonmq.errors import NotServing
from batonmq_server.storage import kernel_sync
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.kernel_sync import KernelSync
from batonmq_server.storage.node import StorageNode, open_directory
from tests.storage.batches import append, batch
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
        append(node.store, batch(b"x" * 40_000))  # more than half of a segment
        await flusher.sync()
        assert node.store.log.synced_position == node.store.log.next_position
        assert len(took) == count
    kernel.close()


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
    assert "no syncs" in own_warnings(caplog)[0].getMessage()
    assert kernel.begin(descriptor) is None
    kernel.close()


async def test_file_without_a_descriptor_is_left_to_threads() -> None:
    assert KernelSync().begin(-1) is None


async def test_without_the_library_threads_sync(
    monkeypatch: pytest.MonkeyPatch, descriptor: int
) -> None:
    monkeypatch.setattr(kernel_sync, "_INSTALLED", False)
    assert KernelSync().begin(descriptor) is None


async def test_error_of_the_kernel_is_an_error_of_the_call() -> None:
    begun = BegunCall[None]()
    kernel_sync._end(begun, 2**64 - errno.ENOSPC)
    with pytest.raises(OSError) as raised:
        await begun.finish()
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.strerror == os.strerror(errno.ENOSPC)


async def test_sync_that_fails_after_it_was_cancelled_has_failed(node: StorageNode) -> None:
    append(node.store, batch(b"a"))
    begun = BegunCall[None]()
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
    begun = BegunCall[None]()
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
