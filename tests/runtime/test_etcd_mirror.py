"""The mirror of a prefix of etcd.

Goal: the mirror follows, through restarts of etcd and compactions, and never has a revision without
its changes.
Method: a real etcd, and one of its own where the test stops it. A session that runs code just
before each watch starts makes the gap between the read and the watch visible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batonmq._common.clock import Clock
from batonmq_server.local.etcd import EtcdProcess
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
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
                await other.put("topics/a", b"2")
                await other.delete("topics/b")
                revision = await other.put("topics/c", b"3")
            await reached(mirror, revision)
            assert shown(mirror) == {"a": b"2", "c": b"3"}
            assert frozenset[str]().union(*changes) == {"a", "b", "c"}
