"""Maintenance of groups: removes dead members, ends finished drains, assigns queues anew.

Every replica does it; the first one writes, the others find nothing left to do. The catalog only
tells where to look: `GroupStore.maintain` decides by etcd's own state.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random

from batonmq._common.backoff import Backoff
from batonmq.errors import BatonError, NoQuorum, Overloaded
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.assignment import AssignmentStrategy
from batonmq_server.nameserver.core.groups import is_fully_assigned
from batonmq_server.nameserver.group_store import GroupStore

log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_ms=100, delay_ms_max=2_000)
AT_ONCE_MAX = 8
"""Groups that are maintained at once: one may wait for seconds until it may be written again."""


class GroupMaintainer:
    """Watches live keys that vanish, queues that lose their owner, and topics that change.

    Args:
        check_interval_ms: All groups are checked at the start and at this interval, for changes
            that this replica has missed.
    """

    def __init__(
        self, catalog: Catalog, store: GroupStore, random: Random, *, check_interval_ms: int
    ) -> None:
        self._catalog, self._store = catalog, store
        self._random, self._check_interval_ms = random, check_interval_ms
        self._pending: dict[str, None] = {}  # first in, first out
        self._has_pending = asyncio.Event()
        self._maintaining: set[str] = set()
        catalog.live.on_change.append(self._live_changed)
        catalog.locks.on_change.append(self._check_groups_of_keys)
        catalog.group_records.on_change.append(self._check)
        catalog.topic_mirror.on_change.append(self._topics_changed)

    async def run(self) -> None:
        """Maintain groups until cancelled; to be run as one task."""
        await self._catalog.ready()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_all())
            for _ in range(AT_ONCE_MAX):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._maintain_pending()
            self._has_pending.clear()
            await self._has_pending.wait()

    async def _check_all(self) -> None:
        while True:
            self._add_pending(
                {name for name in self._catalog.groups if self._needs_maintenance(name)}
            )
            self._add_pending(
                {name for name in self._catalog.groups if self._has_dead_member(name)}
            )
            await asyncio.sleep(self._check_interval_ms / 1000)

    def _live_changed(self, keys: frozenset[str]) -> None:
        gone = frozenset(key for key in keys if key not in self._catalog.live.values)
        self._check_groups_of_keys(gone)

    def _check_groups_of_keys(self, keys: frozenset[str]) -> None:
        self._check(frozenset(key.partition("/")[0] for key in keys))

    def _topics_changed(self, topics: frozenset[str]) -> None:
        touched = {
            name
            for name, group in self._catalog.groups.items()
            if any(s.topic in topics for s in group.terms.subscriptions)
        }
        by_room = {
            name
            for name in touched
            if self._catalog.groups[name].strategy is AssignmentStrategy.MACHINE_ROOM
            and self._catalog.groups[name].members
        }
        self._add_pending(by_room)
        self._check(frozenset(touched))

    def _check(self, names: frozenset[str]) -> None:
        # A record may arrive before its live keys: look for dead members only once the live keys
        # are as new as the record.
        records, seen = self._catalog.group_records, self._catalog.live.revision
        known_names = names & self._catalog.groups.keys()
        self._add_pending({name for name in known_names if self._needs_maintenance(name)})
        self._add_pending(
            {
                name
                for name in known_names
                if records.revision(name) <= seen and self._has_dead_member(name)
            }
        )

    def _add_pending(self, names: set[str]) -> None:
        if names:
            self._pending.update(dict.fromkeys(sorted(names)))
            self._has_pending.set()

    def _needs_maintenance(self, name: str) -> bool:
        group = self._catalog.groups[name]
        drained = group.draining and name not in self._catalog.owned
        return drained or not is_fully_assigned(group, self._catalog.topics)

    def _has_dead_member(self, name: str) -> bool:
        live, members = self._catalog.live.values, self._catalog.groups[name].members
        return any(f"{name}/{member.client_id}" not in live for member in members)

    async def _maintain_pending(self) -> None:
        """Maintain groups until no pending one is left to this task."""
        failures = 0
        while (group := self._next_pending()) is not None:
            self._maintaining.add(group)
            try:
                await self._store.maintain(group)
                failures = 0
            except (NoQuorum, Overloaded) as error:
                log.warning("group maintenance is retried group=%s error=%s", group, error)
                self._pending[group] = None
                await asyncio.sleep(_BACKOFF.delay_ms(failures, self._random) / 1000)
                failures += 1
            except BatonError as error:
                log.error("group maintenance failed group=%s error=%s", group, error)
            finally:
                self._maintaining.discard(group)

    def _next_pending(self) -> str | None:
        """Remove and return the first pending group that no task maintains."""
        group = next((name for name in self._pending if name not in self._maintaining), None)
        if group is not None:
            del self._pending[group]
        return group
