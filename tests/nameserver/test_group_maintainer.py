"""Goal: other groups are maintained while the maintenance of one group fails."""

from __future__ import annotations

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
