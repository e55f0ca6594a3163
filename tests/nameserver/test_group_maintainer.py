"""Goal: other groups are maintained while the maintenance of one group fails, or takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from batonmq._common.clock import Clock
from batonmq.errors import Overloaded
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.group_maintainer import GroupMaintainer
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.testing import run_virtual

GROUPS = ("a", "b", "c")
FAILURES = 4


class FailingStore(GroupStore):
    """Fails to maintain the first group for some time."""

    def __init__(self) -> None:
        self.maintained: list[str] = []

    async def maintain(self, group: str) -> Any:
        """Override."""
        if group == GROUPS[0] and self.maintained.count(group) < FAILURES:
            self.maintained.append(group)
            raise Overloaded("the group changes too often")
        self.maintained.append(group)


def test_failing_group_is_repeated_behind_the_others() -> None:
    async def main() -> list[str]:
        etcd = EtcdSession("127.0.0.1:1", "unused", Clock())
        catalog = Catalog(etcd, EtcdMirror(etcd, "nodes/"), watchers_max=1)
        store = FailingStore()
        maintainer = GroupMaintainer(catalog, store, Random(1), check_interval_ms=1_000)
        maintainer._add_pending(set(GROUPS))
        await maintainer._maintain_pending()
        return store.maintained

    first, *others = GROUPS
    assert run_virtual(main()) == [first, *others, *[first] * FAILURES]


class SlowStore(GroupStore):
    """Maintains the first group slowly; groups are pending again when their maintenance begins."""

    def __init__(self, maintained: dict[str, list[float]]) -> None:
        self.maintained = maintained
        self.again: Callable[[set[str]], None] = lambda _: None

    async def maintain(self, group: str) -> Any:
        """Override."""
        loop = asyncio.get_running_loop()
        self.maintained.setdefault(group, []).append(loop.time())
        if group == GROUPS[0]:
            self.again({group})
            await asyncio.sleep(5)


def test_group_that_waits_for_its_write_delays_no_other_group() -> None:
    async def main() -> dict[str, list[float]]:
        etcd = EtcdSession("127.0.0.1:1", "unused", Clock())
        catalog = Catalog(etcd, EtcdMirror(etcd, "nodes/"), watchers_max=1)
        store = SlowStore({})
        maintainer = GroupMaintainer(catalog, store, Random(1), check_interval_ms=1_000)
        store.again = maintainer._add_pending
        for mirror in (*catalog.mirrors, catalog._nodes):
            mirror._ready.set()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(maintainer.run())
            for group in GROUPS * 3:
                maintainer._add_pending({group})
                await asyncio.sleep(1)
            running.cancel()
        return store.maintained

    first, *others = GROUPS
    maintained = run_virtual(main())
    assert maintained[first] == [0, 5], "never by two tasks at once"
    for nth, group in enumerate(others, start=1):
        assert maintained[group] == [nth, nth + 3, nth + 6]
