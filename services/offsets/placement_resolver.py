"""Decides whether this replica set keeps a group, and so may answer calls about it.

If the set has stored a local placement or progress of the group, that decides. For all other groups
the placement in etcd decides. Its first value never becomes wrong: the set in which a group began
keeps the group until another set calls ExportGroup. A group without a placement gets one in this
set, unless the call only reads, and the group does not exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from batonmq._common import timeouts
from batonmq.errors import NoQuorum, NotServing
from batonmq_server.offsets.core.local_placements import arriving, moved
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Put
from batonmq_server.runtime.group_placements import (
    PLACEMENTS_PREFIX,
    GroupPlacement,
    decode_placement,
)

log = logging.getLogger(__name__)

RESOLVE_TIMEOUT_S = 0.5
LOOKUPS_AT_ONCE_MAX = 64


class PlacementResolver:
    """Checks and looks up the placements of groups for one epoch.

    Args:
        table: The progress of the epoch.
        offsets_set: Name of this replica set.
        placements: Mirror of the placements in etcd; its owner runs it.
    """

    def __init__(
        self, table: ProgressTable, offsets_set: str, etcd: EtcdSession, placements: EtcdMirror
    ) -> None:
        self._table, self._set, self._etcd, self._mirror = table, offsets_set, etcd, placements
        self._found: dict[str, GroupPlacement] = {}

    def check(self, group: str, *, placed: bool = True) -> None:
        """Return if this set keeps the group.

        The caller must apply its change before the next await: the group may be sealed then.

        Args:
            placed: False if `resolve` has left the group without a placement.

        Raises:
            GroupMoved: another set keeps it.
            NotServing: the group is being imported, or its placement is not known.
        """
        self._table.placements.check(group)
        if self._has_stored(group) or not placed:
            return
        placement = self._known_placement(group)
        if placement is None:
            raise NotServing(f"the placement of group {group} is not known", retry_after_ms=100)
        began_here = placement.offsets_set == self._set and not placement.move
        if began_here or (placement.from_set == self._set and placement.move == 1):
            return
        if placement.offsets_set == self._set:
            raise arriving(group)
        raise moved(group, placement.offsets_set, placement.move)

    async def resolve(
        self, groups: Iterable[str], places: Callable[[str], bool] = lambda _: True
    ) -> frozenset[str]:
        """Read the placements of unknown groups from etcd, for `check`.

        Waits no longer than `RESOLVE_TIMEOUT_S` for all of them together.

        Args:
            places: Whether a group without a placement is placed in this set. Placements outlive
                their groups, so a read does not place a group that does not exist.

        Returns:
            The groups that are left without a placement: no set has progress of them.
        """
        unknown = {
            group
            for group in groups
            if not self._has_stored(group) and self._known_placement(group) is None
        }
        unplaced: set[str] = set()
        if not unknown:
            return frozenset()
        slots = asyncio.Semaphore(LOOKUPS_AT_ONCE_MAX)

        async def look_up(group: str) -> None:
            async with slots:
                if not await self._resolve(group, places=places(group)):
                    unplaced.add(group)

        try:
            async with timeouts.timeout(RESOLVE_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                for group in sorted(unknown):
                    tasks.create_task(look_up(group))
        except TimeoutError:
            missing = len(unknown - self._found.keys() - unplaced)
            log.info("placements not read in time, etcd is slow groups=%d", missing)
        return frozenset(unplaced)

    async def _resolve(self, group: str, *, places: bool) -> bool:
        """Find the placement of a group; return False if it has none and stays without one."""
        try:
            found = await self._read_or_create(group, places=places)
        except NoQuorum as error:
            log.info("placement not read group=%s error=%s", group, error)
            return True  # not known
        if found is not None:
            self._found[group] = found
        return found is not None

    def _has_stored(self, group: str) -> bool:
        return self._table.placements.get(group) is not None or self._table.has(group)

    def _known_placement(self, group: str) -> GroupPlacement | None:
        stored = self._mirror.values.get(group)
        if stored is None:
            return self._found.get(group)
        self._found.pop(group, None)
        return decode_placement(stored)

    async def _read_or_create(self, group: str, *, places: bool) -> GroupPlacement | None:
        """Return the placement of a group from etcd; if it has none, see `places`."""
        while True:
            stored = await self._mirror.read(group)
            if stored is not None:
                return decode_placement(stored)
            if not places:
                return None
            key, placement = PLACEMENTS_PREFIX + group, GroupPlacement(self._set)
            await self._etcd.txn(
                compare=[Compare(key, create_revision=0)], put=[Put(key, placement.encode())]
            )
