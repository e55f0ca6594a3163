"""The mirror of a prefix of etcd.

Goal: the mirror follows, through restarts of etcd and compactions, and never has a revision without
its changes.
Method: a real etcd, and one of its own where the test stops it. A session that runs code just
before each watch starts makes the gap between the read and the watch visible.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batonmq._common.clock import Clock
from batonmq.errors import NoQuorum
from batonmq_server.etcd_api import kv_pb2
from batonmq_server.etcd_api import rpc_pb2 as pb
from batonmq_server.local.etcd import EtcdProcess
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Put
from tests.runtime.etcd_compaction import compact
from tests.support.conditions import until


@asynccontextmanager
async def following(session: EtcdSession, prefix: str = "topics/") -> AsyncIterator[EtcdMirror]:
    mirror = EtcdMirror(session, prefix)
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(mirror.run())
        async with asyncio.timeout(20):
            await mirror.ready()
        yield mirror
        loop.cancel()


async def reached(mirror: EtcdMirror, revision: int) -> None:
    async with asyncio.timeout(20):
        await mirror.reached(revision)


def shown(mirror: EtcdMirror) -> dict[str, bytes]:
    return {key: stored.value for key, stored in mirror.values.items()}


class GapSession(EtcdSession):
    """Runs code between the read of a prefix and the watch that follows."""

    before_watch: Callable[[], Awaitable[object]] | None = None

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Any]:
        happening, self.before_watch = self.before_watch, None
        if happening is not None:
            await happening()
        async for answer in super().watch(prefix, revision):
            yield answer


async def test_first_read_has_existing_keys(etcd: EtcdSession) -> None:
    await etcd.put("topics/a", b"1")
    await etcd.put("groups/a", b"2")
    async with following(etcd) as mirror:
        assert shown(mirror) == {"a": b"1"}


async def test_puts_and_deletes_are_followed(etcd: EtcdSession) -> None:
    await etcd.put("topics/a", b"1")
    async with following(etcd) as mirror:
        await etcd.put("topics/b", b"2")
        revision = await etcd.put("topics/a", b"3")
        await reached(mirror, revision)
        assert shown(mirror) == {"a": b"3", "b": b"2"}
        assert mirror.values["a"].mod_revision == revision
        await etcd.delete("topics/a")
        await until(lambda: shown(mirror) == {"b": b"2"})


async def test_key_is_removed_when_its_lease_ends(etcd: EtcdSession) -> None:
    lease = await etcd.lease(60_000)
    await etcd.put("topics/a", b"", lease)
    async with following(etcd) as mirror:
        assert mirror.values["a"].lease_id == lease.lease_id
        await lease.revoke()
        await until(lambda: not mirror.values)


async def test_reached_returns_at_once_for_an_old_revision(etcd: EtcdSession) -> None:
    revision = await etcd.put("topics/a", b"")
    async with following(etcd) as mirror:
        await reached(mirror, revision)


async def test_reached_returns_when_the_change_is_visible(etcd_endpoint: str, cluster: str) -> None:
    """The first answer to a watch has a revision whose changes come only later."""
    revisions: list[int] = []
    async with GapSession(etcd_endpoint, cluster, Clock()) as session:

        async def put() -> None:
            revisions.append(await session.put("topics/a", b"in the gap"))

        session.before_watch = put
        async with following(session) as mirror:
            await until(lambda: revisions)
            await reached(mirror, revisions[0])
            assert shown(mirror) == {"a": b"in the gap"}


async def test_mirror_survives_a_compaction_in_the_gap(etcd_endpoint: str, cluster: str) -> None:
    async with GapSession(etcd_endpoint, cluster, Clock()) as session:
        await session.put("topics/a", b"1")
        await session.put("topics/b", b"1")

        async def forget_history() -> None:
            await session.delete("topics/a")
            for value in (b"2", b"3"):
                revision = await session.put("topics/b", value)
            await compact(etcd_endpoint, revision)

        session.before_watch = forget_history
        async with following(session) as mirror:
            await until(lambda: shown(mirror) == {"b": b"3"})
            revision = await session.put("topics/c", b"4")
            await reached(mirror, revision)
            assert shown(mirror) == {"b": b"3", "c": b"4"}


# ---- whole revisions


async def test_etcd_splits_a_large_response(etcd: EtcdSession) -> None:
    """etcd splits a response above 1.5 MiB, which one revision alone may have."""
    value = os.urandom(700_000)
    begun = await etcd.put("topics/begin", b"")
    for name in ("a", "b"):
        await etcd.put(f"topics/{name}", value)
    await etcd.txn(compare=(), put=[Put("topics/c", value), Put("topics/d", value)])
    answers: list[pb.WatchResponse] = []
    async with aclosing(etcd.watch("topics/", begun + 1)) as watch:
        while not answers or answers[-1].created or answers[-1].fragment:
            answers.append(await anext(watch))
    assert any(answer.fragment for answer in answers), "etcd has split it"
    assert sum(len(answer.events) for answer in answers) == 4


async def test_mirror_follows_a_response_in_fragments(etcd_endpoint: str, cluster: str) -> None:
    value = os.urandom(700_000)
    async with GapSession(etcd_endpoint, cluster, Clock()) as session:
        await session.put("topics/a", b"old")

        async def write_much() -> None:
            for name in ("b", "c", "d"):
                await session.put(f"topics/{name}", value)
            await session.put("topics/a", b"new")

        session.before_watch = write_much
        async with following(session) as mirror:
            changes: list[frozenset[str]] = []
            mirror.on_change.append(changes.append)
            await until(lambda: "d" in mirror.values)
            assert changes == [{"a", "b", "c", "d"}]
            assert mirror.values["a"].value == b"new"


class ScriptedSession(EtcdSession):
    """Answers each read of the prefix and each watch as a test has written down."""

    def __init__(self, reads: Sequence[tuple[list[KeyValue], int]]) -> None:
        super().__init__("unused:1", "c", Clock())
        self.reads = list(reads)
        self.answers: asyncio.Queue[pb.WatchResponse | None] = asyncio.Queue()

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        return self.reads.pop(0)

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Any]:
        while (answer := await self.answers.get()) is not None:
            yield answer

    def answer(self, *events: tuple[str, int], fragment: bool = False) -> None:
        """Send puts of keys at revisions."""
        put = [
            kv_pb2.Event(
                type=kv_pb2.Event.PUT,
                kv=kv_pb2.KeyValue(
                    key=f"{self.prefix}topics/{key}".encode(),
                    value=str(revision).encode(),
                    mod_revision=revision,
                ),
            )
            for key, revision in events
        ]
        header = pb.ResponseHeader(revision=99)
        self.answers.put_nowait(pb.WatchResponse(header=header, events=put, fragment=fragment))


def stored_topic(key: str, revision: int) -> KeyValue:
    return KeyValue(f"topics/{key}", str(revision).encode(), revision, revision)


async def test_revision_that_ends_in_the_next_fragment_is_not_shown_before() -> None:
    session = ScriptedSession([([stored_topic("a", 1)], 1)])
    async with following(session) as mirror:
        changes: list[frozenset[str]] = []
        mirror.on_change.append(changes.append)
        session.answer(("a", 2), ("b", 3), fragment=True)
        session.answer(("c", 3), fragment=True)
        await until(session.answers.empty)
        assert (shown(mirror), mirror.revision, changes) == ({"a": b"1"}, 1, [])
        session.answer(("d", 3))
        await reached(mirror, 3)
        assert shown(mirror) == {"a": b"2", "b": b"3", "c": b"3", "d": b"3"}
        assert mirror.revision == 3
        assert changes == [{"a", "b", "c", "d"}]


async def test_two_revisions_in_one_response_are_one_change() -> None:
    session = ScriptedSession([([], 1)])
    async with following(session) as mirror:
        changes: list[frozenset[str]] = []
        mirror.on_change.append(changes.append)
        session.answer(("a", 2), ("b", 2), ("a", 3))
        await reached(mirror, 3)
        assert shown(mirror) == {"a": b"3", "b": b"2"}
        assert changes == [{"a", "b"}]


async def test_fragment_is_dropped_when_its_watch_ends_before_the_rest() -> None:
    """After a compaction or a broken connection the prefix is read again."""
    again = [stored_topic("a", 5), stored_topic("c", 5)]
    session = ScriptedSession([([stored_topic("a", 1)], 1), (again, 5)])
    async with following(session) as mirror:
        session.answer(("a", 2), ("b", 2), fragment=True)
        session.answers.put_nowait(None)
        await reached(mirror, 5)
        assert shown(mirror) == {"a": b"5", "c": b"5"}
        session.answer(("d", 6))
        await reached(mirror, 6)
        assert shown(mirror) == {"a": b"5", "c": b"5", "d": b"6"}


# ---- callbacks and watchers


async def test_callbacks_get_changed_keys(etcd: EtcdSession) -> None:
    changes: list[frozenset[str]] = []
    async with following(etcd) as mirror:
        mirror.on_change.append(changes.append)
        await etcd.put("topics/a", b"")
        await until(lambda: changes == [frozenset({"a"})])
        await etcd.delete("topics/a")
        await until(lambda: changes == [frozenset({"a"})] * 2)


async def test_watch_yields_all_keys_first_and_then_changes(etcd: EtcdSession) -> None:
    for name in ("a", "b"):
        await etcd.put(f"topics/{name}", b"")
    async with following(etcd) as mirror:
        changes = mirror.watch()
        assert await anext(changes) == {"a", "b"}
        await etcd.put("topics/c", b"")
        assert await anext(changes) == {"c"}


async def test_watch_merges_changes_between_reads(etcd: EtcdSession) -> None:
    async with following(etcd) as mirror:
        changes = mirror.watch()
        assert await anext(changes) == frozenset()
        for name in ("a", "b", "a"):
            revision = await etcd.put(f"topics/{name}", b"")
        await reached(mirror, revision)
        assert await anext(changes) == {"a", "b"}


async def test_watchers_are_independent(etcd: EtcdSession) -> None:
    async with following(etcd) as mirror:
        first, second = mirror.watch(), mirror.watch()
        await anext(first)
        await anext(second)
        await etcd.put("topics/a", b"")
        assert await anext(first) == await anext(second) == {"a"}


async def test_watch_before_the_first_read_waits_for_it(etcd: EtcdSession) -> None:
    await etcd.put("topics/a", b"")
    mirror = EtcdMirror(etcd, "topics/")
    changes = mirror.watch()
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(mirror.run())
        assert await anext(changes) == {"a"}
        loop.cancel()


# ---- outages


async def is_written(session: EtcdSession, key: str, value: bytes) -> bool:
    """Write a value; return whether etcd was reached."""
    try:
        await session.put(key, value)
    except NoQuorum:
        return False
    return True


@pytest.mark.e2e
async def test_mirror_keeps_its_values_over_a_restart_of_etcd_and_follows_again(
    tmp_path: Path,
) -> None:
    async with (
        EtcdProcess(tmp_path) as process,
        EtcdSession(process.endpoint, "c", Clock()) as session,
    ):
        await session.put("topics/a", b"1")
        await session.put("topics/b", b"1")
        async with following(session) as mirror:
            changes: list[frozenset[str]] = []
            mirror.on_change.append(changes.append)
            await process.stop()
            assert shown(mirror) == {"a": b"1", "b": b"1"}, "the last known values stay"
            await process.start()
            async with EtcdSession(process.endpoint, "c", Clock()) as other:
                await until(lambda: is_written(other, "topics/a", b"2"))
                await other.delete("topics/b")
                revision = await other.put("topics/c", b"3")
            await reached(mirror, revision)
            assert shown(mirror) == {"a": b"2", "c": b"3"}
            assert frozenset[str]().union(*changes) == {"a", "b", "c"}


async def test_watchers_see_a_change_in_the_order_in_which_they_began(etcd: EtcdSession) -> None:
    began: list[int] = []
    seen: list[int] = []

    async def follow(mirror: EtcdMirror, number: int) -> None:
        async with aclosing(mirror.watch()) as changes:
            await anext(changes)
            began.append(number)
            await anext(changes)
            seen.append(number)

    async with following(etcd) as mirror, asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for number in range(64):
            tasks.create_task(follow(mirror, number))
        await until(lambda: len(began) == 64)
        await etcd.txn(compare=[], put=[Put("topics/orders", b"1")])
    assert seen == began
