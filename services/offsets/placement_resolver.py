"""Whether a group is kept by this replica set.

That is decided by what the set itself has: a group that came here says so, one that left is
sealed. Where nothing is stored of a group its place in etcd counts, of which the beginning never
changes: the set at which it began keeps it until it is asked for it. A group that has no place gets
one here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from batonmq.errors import NoQuorum, NotServing
from batonmq_server.offsets.core.local_placements import arriving, moved
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.runtime.etcd import Compare, EtcdSession, Put
from batonmq_server.runtime.mirror import Mirror
from batonmq_server.runtime.places import PREFIX, Place, place_of

log = logging.getLogger(__name__)

FIND_S = 0.5
AT_ONCE_MAX = 64


class PlacementResolver:
    """See the module.

    Args:
        table: Of one epoch.
        offsets_set: Name of this replica set.
        places: Mirror of the places, run by somebody else.
    """

    def __init__(
        self, table: ProgressTable, offsets_set: str, etcd: EtcdSession, places: Mirror
    ) -> None:
        self._table, self._set, self._etcd, self._places = table, offsets_set, etcd, places
        self._found: dict[str, Place] = {}

    def check(self, group: str) -> None:
        """Refuse a call about a group that this set does not keep; what it changes follows at once.

        Raises:
            GroupMoved: another one does.
            NotServing: it is on its way here, or etcd has not told where it is.
        """
        self._table.placements.check(group)
        if self._is_ours(group):
            return
        place = self._place(group)
        if place is None:
            raise NotServing(f"it is not known where group {group} is kept", retry_after_ms=100)
        begins_here = place.offsets_set == self._set and not place.move
        if begins_here or (place.from_set == self._set and place.move == 1):
            return
        if place.offsets_set == self._set:
            raise arriving(group)
        raise moved(group, place.offsets_set, place.move)

    async def find(self, groups: Iterable[str]) -> None:
        """Ask etcd about groups of which nothing is known here; `check` says what came of it.

        For all of them together it is waited no longer than `FIND_S`.
        """
        unknown = {
            group for group in groups if not self._is_ours(group) and self._place(group) is None
        }
        if not unknown:
            return
        turns = asyncio.Semaphore(AT_ONCE_MAX)
        try:
            async with asyncio.timeout(FIND_S), asyncio.TaskGroup() as tasks:
                for group in sorted(unknown):
                    tasks.create_task(self._find(group, turns))
        except TimeoutError:
            log.info("places not found, etcd is slow groups=%d", len(unknown - self._found.keys()))

    async def _find(self, group: str, turns: asyncio.Semaphore) -> None:
        try:
            async with turns:
                self._found[group] = await self._claimed(group)
        except NoQuorum as error:
            log.info("place not found group=%s error=%s", group, error)

    def _is_ours(self, group: str) -> bool:
        return self._table.placements.get(group) is not None or self._table.has(group)

    def _place(self, group: str) -> Place | None:
        stored = self._places.values.get(group)
        if stored is None:
            return self._found.get(group)
        self._found.pop(group, None)
        return place_of(stored)

    async def _claimed(self, group: str) -> Place:
        """The place of a group, which is this set if it has had none."""
        while True:
            stored = await self._places.now(group)
            if stored is not None:
                return place_of(stored)
            key, place = PREFIX + group, Place(self._set)
            await self._etcd.txn(
                compare=[Compare(key, create_revision=0)], put=[Put(key, place.encode())]
            )
