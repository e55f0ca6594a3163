"""The node entry of a process in etcd.

Goal: the entry exists while the process serves, is written again if it was lost, and is not written
again after it was removed.
Method: the runtime's own loop on a real etcd; leases that the tests end from outside, and an etcd
session that can be set to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._common.clock import Clock
from batonmq._process.config import load
from batonmq.errors import NoQuorum
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Lease
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.runtime.settings import ServiceSettings
from tests.support.conditions import until

KEY = "nodes/offsets/offsets-0"


def runtime_of(etcd: EtcdSession, lease_ms: int = 10_000) -> Runtime:
    env = {"BATON_OFFSETS_NODE_ID": "offsets-0", "BATON_OFFSETS_NODE_LEASE_MS": str(lease_ms)}
    settings = load(ServiceSettings, "BATON_OFFSETS", env)
    runtime = Runtime("offsets", settings, etcd)
    runtime.node_entry.set_addresses("127.0.0.1:4000", "127.0.0.1:4001")
    return runtime


@asynccontextmanager
async def kept(runtime: Runtime) -> AsyncIterator[asyncio.Task[None]]:
    """Run the loop that keeps the entry, and the mirror of all entries, as a process does."""
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(runtime.nodes.run())
        await runtime.nodes.ready()
        loop = tasks.create_task(runtime.node_entry.keep())
        yield loop
        loop.cancel()
        following.cancel()


async def stored(etcd: EtcdSession) -> KeyValue:
    entry = await etcd.get(KEY)
    assert entry is not None
    return entry


async def node(etcd: EtcdSession) -> StoredNode:
    return StoredNode.FromString((await stored(etcd)).value)


async def test_entry_has_address_and_kind_of_the_process(etcd: EtcdSession) -> None:
    await runtime_of(etcd).node_entry.write(epoch=3)
    entry = await node(etcd)
    assert (entry.service, entry.node_id) == (pb.SERVICE_KIND_OFFSETS, "offsets-0")
    assert (entry.address, entry.metrics_address) == ("127.0.0.1:4000", "127.0.0.1:4001")
    assert (entry.epoch, entry.leader) == (3, True)
    assert entry.start_unix_ms > 0
    assert (await stored(etcd)).lease_id


async def test_second_write_changes_the_entry_under_the_same_lease(etcd: EtcdSession) -> None:
    runtime = runtime_of(etcd)
    await runtime.node_entry.write()
    lease_id = (await stored(etcd)).lease_id
    await runtime.node_entry.write(epoch=9, leader=False)
    entry = await node(etcd)
    assert (entry.epoch, entry.leader) == (9, False)
    assert (await stored(etcd)).lease_id == lease_id


@pytest.mark.long
async def test_entry_outlives_its_lease_time_while_it_is_refreshed(etcd: EtcdSession) -> None:
    runtime = runtime_of(etcd, lease_ms=4_000)
    await runtime.node_entry.write()
    refreshed: list[bool] = []
    first = await stored(etcd)

    class Noting(Lease):
        async def refresh(self) -> bool:
            refreshed.append(await super().refresh())
            return refreshed[-1]

    runtime.node_entry._lease = Noting(etcd, first.lease_id)
    async with kept(runtime):
        await until(lambda: len(refreshed) >= 5)  # refreshed every second; the lease has 4 s
    assert all(refreshed)
    assert await stored(etcd) == first


async def test_entry_comes_back_after_its_lease_was_lost(etcd: EtcdSession) -> None:
    runtime = runtime_of(etcd)
    await runtime.node_entry.write(epoch=3)
    lost = await stored(etcd)
    await etcd.attach(lost.lease_id).revoke()
    assert await etcd.get(KEY) is None

    async def back() -> bool:
        return await etcd.get(KEY) is not None

    async with kept(runtime):
        await until(back)
    entry = await stored(etcd)
    assert entry.lease_id != lost.lease_id
    assert entry.value == lost.value


async def test_entry_is_written_again_after_an_earlier_write_lands_late(
    etcd: EtcdSession,
) -> None:
    runtime = runtime_of(etcd)
    await runtime.node_entry.write(epoch=2, leader=False)
    early = await stored(etcd)
    await runtime.node_entry.write(epoch=3)
    newer = await stored(etcd)
    await etcd.put(KEY, early.value, await etcd.lease(60_000))

    async def as_wanted() -> bool:
        entry = await stored(etcd)
        return (entry.value, entry.lease_id) == (newer.value, newer.lease_id)

    async with kept(runtime):
        await until(as_wanted)


class Failing(EtcdSession):
    """A session whose next writes fail, while reads and leases work."""

    failures = 0

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        if self.failures:
            self.failures -= 1
            raise NoQuorum("on purpose")
        return await super().put(key, value, lease)


async def test_failed_change_is_written_later(etcd_endpoint: str, cluster: str) -> None:
    async with Failing(etcd_endpoint, cluster, Clock()) as etcd:
        runtime = runtime_of(etcd)
        await runtime.node_entry.write(leader=False)
        etcd.failures = 1
        with pytest.raises(NoQuorum):
            await runtime.node_entry.write(epoch=4, leader=True)
        assert not (await node(etcd)).leader

        async def leads() -> bool:
            return (await node(etcd)).leader

        async with kept(runtime):
            await until(leads)


async def test_removed_entry_is_not_written_again(
    etcd: EtcdSession,
) -> None:
    runtime = runtime_of(etcd)
    await runtime.node_entry.write()
    async with kept(runtime) as loop:
        await runtime.node_entry.remove()
        assert await etcd.get(KEY) is None
        await until(loop.done)  # else it would write the entry again
    await runtime.node_entry.write(epoch=5)
    assert await etcd.get(KEY) is None
