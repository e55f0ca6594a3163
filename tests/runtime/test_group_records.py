"""Goal: the copy of a record changes by whole writes, and an unreadable record is refused.

Method: a real etcd; each write is one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from batonmq.errors import Internal
from batonmq_server.runtime.etcd.session import EtcdSession, Put
from batonmq_server.runtime.group_record import HEAD, changed_parts, record_key, split_record
from batonmq_server.runtime.group_records import GroupRecords
from tests.support.conditions import until
from tests.support.stored_groups import MINE, Stored, group, member


@asynccontextmanager
async def followed(etcd: EtcdSession) -> AsyncIterator[GroupRecords]:
    records = GroupRecords(etcd)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(records.mirror.run())
        await records.mirror.ready()
        yield records
        running.cancel()


async def write(etcd: EtcdSession, parts: dict[str, bytes], delete: list[str]) -> int:
    revision = await etcd.txn(
        compare=(),
        put=[Put(record_key("g", part), value) for part, value in parts.items()],
        delete=[record_key("g", part) for part in delete],
    )
    assert revision is not None
    return revision


def members(records: GroupRecords) -> list[str]:
    record = records.get("g")
    return [one.incarnation.client_id for one in record.group.members] if record else []


async def test_every_change_shows_a_whole_record(etcd: EtcdSession) -> None:
    async with followed(etcd) as records:
        seen: list[list[str]] = []
        records.on_change.append(lambda names: seen.append([*sorted(names), *members(records)]))
        stored = Stored()
        for names in ("a", "abc", "bc", "bcde", "d"):
            before = dict(stored.parts)
            stored.write(group(map(member, names), [len(names)] * 300, len(seen) + 1))
            revision = await write(etcd, *changed_parts(before, stored.parts))
            async with asyncio.timeout(20):
                await records.mirror.reached(revision)
            assert records.revision("g") == revision
        assert seen == [["g", *names] for names in ("a", "abc", "bc", "bcde", "d")]
        keys = [one.key for one in await etcd.get_tree("groups/g")]
        await etcd.txn(compare=(), delete=keys)
        await until(lambda: records.get("g") is None)
        assert records.revision("g") == 0


async def test_names_of_changed_groups_are_yielded(etcd: EtcdSession) -> None:
    await write(etcd, split_record(group([member("a")]), MINE, {}), [])
    async with followed(etcd) as records:
        changes = records.watch()
        assert await anext(changes) == {"g"}
        await etcd.put("groups/other", b"")
        assert await anext(changes) == {"other"}


async def test_unreadable_record_is_refused_until_it_is_whole_again(etcd: EtcdSession) -> None:
    parts = split_record(group([member("a"), member("b")]), MINE, {})
    await write(etcd, parts, [])
    async with followed(etcd) as records:
        for delete in ("members/2", "settings", HEAD):
            await write(etcd, {}, [delete])
            await until(lambda: refused(records))
            await write(etcd, {delete: parts[delete]}, [])
            await until(lambda: not refused(records))
            assert members(records) == ["a", "b"]


def refused(records: GroupRecords) -> bool:
    try:
        records.get("g")
    except Internal:
        return True
    return False


async def test_key_of_a_member_without_a_head_is_refused(etcd: EtcdSession) -> None:
    await etcd.put("groups/g/members/1", member("a").SerializeToString())
    async with followed(etcd) as records:
        with pytest.raises(Internal, match="groups/g does not exist, and members/1 below it does"):
            records.get("g")
