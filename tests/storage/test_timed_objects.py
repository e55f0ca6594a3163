"""Goal: an object store that hangs blocks only the readers of what it does not return.

Method: objects in memory that wait for the test; a whole node over gRPC with a folder as the store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from batonmq.admin.backup_store import FolderStore
from batonmq.errors import Unreachable
from batonmq_server.storage.timed_objects import ABANDONED_MAX, TimedObjects
from batonmq_server.testing.memory_objects import MemoryObjects
from tests.storage.running_node import running_node
from tests.storage.test_tiers import COUNT, body, fill, moved, pulled, tier
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(120)

TIMEOUT_MS = 100


@contextmanager
def hanging(objects: MemoryObjects) -> Iterator[threading.Event]:
    """Let all calls wait until the event is set, or the block ends."""
    answer = threading.Event()

    def wait(operation: str, name: str) -> None:
        answer.wait()

    objects.before = wait
    try:
        yield answer
    finally:
        answer.set()


def test_calls_pass_with_their_results_and_errors() -> None:
    objects = TimedObjects(MemoryObjects(), TIMEOUT_MS)
    objects.write("a/b", b"content")
    assert objects.read("a/b") == b"content"
    assert objects.read_range("a/b", 1, 3) == b"on"
    assert objects.names("a") == ["a/b"]
    objects.remove("a/b")
    with pytest.raises(FileNotFoundError):
        objects.read("a/b")


def test_timeout_of_the_store_itself_is_its_error() -> None:
    memory = MemoryObjects()

    def late(operation: str, name: str) -> None:
        raise TimeoutError("read timed out")

    memory.before = late
    with pytest.raises(TimeoutError, match="read timed out"):
        TimedObjects(memory, TIMEOUT_MS).read("a")


def test_call_without_an_answer_is_abandoned_and_goes_on() -> None:
    memory = MemoryObjects()
    objects = TimedObjects(memory, 1)
    refused = pytest.raises(Unreachable, match=r"failed with a: no answer within 0\.012 s")
    with hanging(memory), refused:
        objects.write("a", b"late")
    written = threading.Event()
    memory.before = lambda operation, name: written.set()
    while not memory.files:
        written.wait(0.01)
    assert memory.files == {"a": b"late"}


def test_number_of_abandoned_calls_is_bounded_and_the_error_has_it() -> None:
    memory = MemoryObjects()
    objects = TimedObjects(memory, 1)
    with hanging(memory) as answer:
        with ThreadPoolExecutor(ABANDONED_MAX) as pool:
            errors = list(pool.map(lambda _: _refused(objects), range(ABANDONED_MAX)))
        assert all("no answer within" in error for error in errors)
        assert "64 earlier calls have not returned" in _refused(objects)
        answer.set()
        while "earlier calls" in _refused(objects):
            pass
    memory.files["a"] = b"content"
    assert TimedObjects(memory, TIMEOUT_MS).read("a") == b"content"


def _refused(objects: TimedObjects) -> str:
    """Return why a read of an object that does not exist has failed."""
    try:
        objects.read("a")
    except (Unreachable, FileNotFoundError) as error:
        return str(error)
    raise AssertionError


async def test_objects_that_hang_block_no_reader_of_others(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, store = tmp_path / "data", tmp_path / "store"
    settings = tier(store, tier_timeout_ms=TIMEOUT_MS)
    async with running_node(etcd_endpoint, data, **settings) as node:
        await fill(node.append)
        await until(lambda: moved(data) == 9)
    cluster, answer = node.settings.cluster, threading.Event()
    last = max(path.name for path in store.rglob("*.00000"))
    read_range = FolderStore.read_range

    def read(files: FolderStore, name: str, begin: int, end: int) -> bytes:
        if not name.endswith(last):
            answer.wait()
        return read_range(files, name, begin, end)

    monkeypatch.setattr(FolderStore, "read_range", read)
    per_segment = 6
    try:
        async with running_node(etcd_endpoint, data, cluster=cluster, **settings) as node:
            for offset in range(0, 8 * per_segment, per_segment):
                with pytest.raises(Unreachable, match="no answer within"):
                    await node.pull(offset=offset)
            for offset in (8 * per_segment, COUNT - 1):  # the last in the store, and a local one

                async def is_read(offset: int = offset) -> bool:
                    try:
                        return (await pulled(node, offset))[0] == body(offset)
                    except Unreachable:
                        return False

                await until(is_read)
            answer.set()
            assert await pulled(node) == [body(number) for number in range(COUNT)]
    finally:
        answer.set()
