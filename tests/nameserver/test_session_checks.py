"""Goal: the checks of broken sessions do not wait for each other.

Method: many members die at once, in a group whose record may be written seldom, and one in another
group. The store is a twin that carries out waiting requests of one group by one write, as the real
one does.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any, cast

from batonmq._common.clock import Clock
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.group_events import GroupEvents
from batonmq_server.nameserver.group_requests import GroupOutcome
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.nameserver.member_sessions import MemberSessions, SessionKey
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.testing import run_virtual

GRACE_MS, LEASE_S, WRITE_S = 4_000, 30, 2.0
MEMBERS = 100


class Etcd(EtcdSession):
    """Knows leases of members that were renewed three seconds before their session broke."""

    async def time_to_live(self, lease_id: int) -> tuple[int, int]:
        """Override."""
        now_s = asyncio.get_running_loop().time()
        return int(LEASE_S - 3 - now_s), LEASE_S


class SlowStore(GroupStore):
    """Writes the record of a group every two seconds."""

    def __init__(self) -> None:
        self.left_s: dict[tuple[str, str], float] = {}

    async def leave(
        self, group: str, client_id: str, incarnation_id: int, owner: int = 0
    ) -> GroupOutcome:
        """Override."""
        loop = asyncio.get_running_loop()
        if group == "large":
            await asyncio.sleep(WRITE_S - loop.time() % WRITE_S)
        self.left_s[group, client_id] = loop.time()
        return GroupOutcome(group=None, group_revision=0, left=True)


class Events:
    """Takes the events."""

    def session_broken(self, *_: Any) -> None:
        """Override."""


def test_members_of_a_slow_group_are_removed_together_and_delay_no_other_group() -> None:
    async def main() -> dict[tuple[str, str], float]:
        etcd = Etcd("127.0.0.1:1", "unused", Clock())
        catalog = Catalog(etcd, EtcdMirror(etcd, "nodes/"), watchers_max=1)
        store, events = SlowStore(), cast(GroupEvents, Events())
        sessions = MemberSessions(etcd, catalog, store, events, grace_ms=GRACE_MS)
        keys = [SessionKey("large", f"c{number}", 1) for number in range(MEMBERS)]
        keys.append(SessionKey("small", "c", 1))
        with ExitStack() as stack:
            for key in keys:
                name = f"{key.group}/{key.client_id}"
                catalog.live.values[name] = KeyValue(name, b"1", 1, 1, lease_id=1)
                stack.enter_context(sessions.open(key))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(sessions.run())
            await asyncio.sleep(LEASE_S - 4)
            running.cancel()
        return store.left_s

    left_s = run_virtual(main())
    assert len(left_s) == MEMBERS + 1
    assert left_s["small", "c"] < GRACE_MS / 1_000 + 1
    assert max(left_s.values()) < GRACE_MS / 1_000 + 2 * WRITE_S
