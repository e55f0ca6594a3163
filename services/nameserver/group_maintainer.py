"""Does for each group what is due: takes out the dead, ends drains, deals out queues anew.

Every replica does it; the first wins, the others find nothing left to do. What this replica sees
only tells it where to look: `GroupStore.tend` decides by what etcd has.
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


class GroupMaintainer:
    """Watches live keys vanish, queues lose their owner, and topics change.

    Args:
        check_interval_ms: All groups are looked at at the start and so often, for what happened
            while this replica was away.
    """

    def __init__(
        self, catalog: Catalog, store: GroupStore, random: Random, *, check_interval_ms: int
    ) -> None:
        self._catalog, self._store = catalog, store
        self._random, self._check_interval_ms = random, check_interval_ms
        self._suspects: set[str] = set()
        self._noticed = asyncio.Event()
        catalog.live.on_change.append(self._live_changed)
        catalog.locks.on_change.append(self._look_at_groups_of_keys)
        catalog.group_mirror.on_change.append(self._look_at)
        catalog.topic_mirror.on_change.append(self._topics_changed)

    async def run(self) -> None:
        """Tend for ever; to be run as one task."""
        await self._catalog.ready()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep())
            while True:
                await self._noticed.wait()
                self._noticed.clear()
                await self._tend_suspects()

    async def _sweep(self) -> None:
        while True:
            self._suspect({name for name in self._catalog.groups if self._is_due(name)})
            self._suspect({name for name in self._catalog.groups if self._has_dead(name)})
            await asyncio.sleep(self._check_interval_ms / 1000)

    def _live_changed(self, keys: frozenset[str]) -> None:
        gone = frozenset(key for key in keys if key not in self._catalog.live.values)
        self._look_at_groups_of_keys(gone)

    def _look_at_groups_of_keys(self, keys: frozenset[str]) -> None:
        self._look_at(frozenset(key.partition("/")[0] for key in keys))

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
        self._suspect(by_room)
        self._look_at(frozenset(touched))

    def _look_at(self, names: frozenset[str]) -> None:
        # The live keys of a record that has just come may still be on their way.
        known, seen = self._catalog.group_mirror.values, self._catalog.live.revision
        here = names & self._catalog.groups.keys()
        self._suspect({name for name in here if self._is_due(name)})
        self._suspect(
            {name for name in here if known[name].mod_revision <= seen and self._has_dead(name)}
        )

    def _suspect(self, names: set[str]) -> None:
        if names:
            self._suspects |= names
            self._noticed.set()

    def _is_due(self, name: str) -> bool:
        group = self._catalog.groups[name]
        drained = group.draining and name not in self._catalog.owned
        return drained or not is_fully_assigned(group, self._catalog.topics)

    def _has_dead(self, name: str) -> bool:
        live, members = self._catalog.live.values, self._catalog.groups[name].members
        return any(f"{name}/{member.client_id}" not in live for member in members)

    async def _tend_suspects(self) -> None:
        failures = 0
        while self._suspects:
            group = self._suspects.pop()
            try:
                await self._store.maintain(group)
                failures = 0
            except (NoQuorum, Overloaded) as error:
                log.warning("group not tended yet group=%s error=%s", group, error)
                self._suspects.add(group)
                await asyncio.sleep(_BACKOFF.delay_ms(failures, self._random) / 1000)
                failures += 1
            except BatonError as error:
                log.error("group can not be changed group=%s error=%s", group, error)
