"""Goal: a call is answered only when the state that the answer is about is durable.

Method: a disk whose writes end when the test decides, and waiting callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from batonmq.errors import DiskFull, Unreachable
from batonmq_server.offsets import group_commit
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.group_commit import GroupCommit


class Scene:
    """Keys are words, their state is a number; `begun` has the started writes, `end` ends one."""

    def __init__(self) -> None:
        self.state = dict.fromkeys("abc", 0)
        self.begun: asyncio.Queue[list[Entry]] = asyncio.Queue(maxsize=100)
        self._ends: asyncio.Queue[OSError | DiskFull | None] = asyncio.Queue(maxsize=100)
        self.commits: GroupCommit[str] = GroupCommit(self.write, self.entries)

    def entries(self, key: str) -> list[Entry]:
        return [(key.encode(), b"%d" % self.state[key])]

    async def write(self, entries: Sequence[Entry]) -> None:
        self.begun.put_nowait(list(entries))
        failure = await self._ends.get()
        if failure is not None:
            raise failure

    def end(self, failure: OSError | DiskFull | None = None) -> None:
        self._ends.put_nowait(failure)

    def change(self, key: str) -> None:
        self.state[key] += 1
        self.commits.mark_changed(key)


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as tasks:
        writer = tasks.create_task(scene.commits.run())
        yield tasks
        writer.cancel()


async def test_key_without_pending_change_does_not_wait() -> None:
    scene = Scene()
    scene.change("a")
    await scene.commits.wait_durable(["b", "c"])


async def test_change_is_durable_when_its_write_has_ended() -> None:
    scene = Scene()
    async with running(scene) as tasks:
        scene.change("a")
        waiting = tasks.create_task(scene.commits.wait_durable(["a"]))
        assert await scene.begun.get() == [(b"a", b"1")]
        assert not waiting.done()
        scene.end()
        await waiting


async def test_reader_waits_for_a_change_of_another_call() -> None:
    scene = Scene()
    async with running(scene) as tasks:
        scene.change("a")
        await scene.begun.get()
        reader = tasks.create_task(scene.commits.wait_durable(["a", "b"]))
        all_reader = tasks.create_task(scene.commits.wait_all_durable())
        await scene.commits.wait_durable(["b"])
        assert not reader.done()
        assert not all_reader.done()
        scene.end()
        await reader
        await all_reader


async def test_keys_changed_during_a_write_go_into_the_next_write() -> None:
    scene = Scene()
    async with running(scene) as tasks:
        scene.change("a")
        await scene.begun.get()
        scene.change("b")
        scene.change("a")
        scene.change("c")
        scene.change("a")
        waiting = tasks.create_task(scene.commits.wait_durable(["a"]))
        scene.end()
        assert sorted(await scene.begun.get()) == [(b"a", b"3"), (b"b", b"1"), (b"c", b"1")]
        assert not waiting.done()
        scene.end()
        await waiting
        await scene.commits.wait_all_durable()
        assert scene.begun.empty()


async def test_failed_write_ends_the_writer_without_answers() -> None:
    scene = Scene()
    answered = False

    async def wait() -> None:
        nonlocal answered
        await scene.commits.wait_durable(["a"])
        answered = True

    with pytest.raises(ExceptionGroup) as raised:
        async with running(scene) as tasks:
            scene.change("a")
            waiting = tasks.create_task(wait())
            await scene.begun.get()
            scene.end(OSError("no space left"))
            await asyncio.wait([waiting])
    assert raised.group_contains(OSError, match="no space left")
    assert not answered


async def test_waiting_calls_get_unreachable_when_the_writer_is_cancelled() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(scene.commits.run())
        scene.change("a")
        one = tasks.create_task(refusal(scene, "a"))
        await scene.begun.get()
        scene.change("a")
        scene.change("b")
        others = [tasks.create_task(refusal(scene, key)) for key in "ab"]
        await asyncio.sleep(0)
        writing.cancel()
    assert [each.result() for each in (one, *others)] == ["UNREACHABLE"] * 3
    scene.change("c")
    assert await refusal(scene, "c") == "UNREACHABLE"


async def refusal(scene: Scene, key: str) -> str:
    with pytest.raises(Unreachable) as raised:
        await scene.commits.wait_durable([key])
    return raised.value.reason


async def test_write_rejected_by_a_full_disk_is_retried_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_commit, "RETRY_MS", 1)
    scene = Scene()
    async with running(scene) as tasks:
        scene.change("a")
        waiting = tasks.create_task(scene.commits.wait_durable(["a"]))
        assert await scene.begun.get() == [(b"a", b"1")]
        scene.change("a")
        scene.change("b")
        scene.end(DiskFull("full"))
        assert await scene.begun.get() == [(b"a", b"1")], "a later state belongs to the next write"
        with pytest.raises(DiskFull):
            scene.commits.check_room()
        await scene.commits.drain()
        assert not waiting.done()
        scene.end()
        assert await scene.begun.get() == [(b"a", b"2"), (b"b", b"1")]
        await waiting
        scene.commits.check_room()
        scene.end()
        await scene.commits.wait_all_durable()
