"""Decides whether this replica set keeps a group, and so may answer calls about it.

If the set has stored a local placement or progress of the group, that decides. For all other groups
the placement in etcd decides. Its first value never becomes wrong: the set in which a group began
keeps the group until another set calls ExportGroup. A group without a placement gets one in this
set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

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

    def check(self, group: str) -> None:
        """Return if this set keeps the group.

        The caller must apply its change before the next await: the group may be sealed then.

        Raises:
            GroupMoved: another set keeps it.
            NotServing: the group is being imported, or its placement is not known.
        """
        self._table.placements.check(group)
        if self._has_stored(group):
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

    async def resolve(self, groups: Iterable[str]) -> None:
        """Read the placements of unknown groups from etcd, for `check`.

        Waits no longer than `RESOLVE_TIMEOUT_S` for all of them together.
        """
        unknown = {
            group
            for group in groups
            if not self._has_stored(group) and self._known_placement(group) is None
        }
        if not unknown:
            return
        slots = asyncio.Semaphore(LOOKUPS_AT_ONCE_MAX)
        try:
            async with timeouts.timeout(RESOLVE_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                for group in sorted(unknown):
                    tasks.create_task(self._resolve(group, slots))
        except TimeoutError:
            missing = len(unknown - self._found.keys())
            log.info("placements not read in time, etcd is slow groups=%d", missing)

    async def _resolve(self, group: str, slots: asyncio.Semaphore) -> None:
        try:
            async with slots:
                self._found[group] = await self._read_or_create(group)
        except NoQuorum as error:
            log.info("placement not read group=%s error=%s", group, error)

    def _has_stored(self, group: str) -> bool:
        return self._table.placements.get(group) is not None or self._table.has(group)

    def _known_placement(self, group: str) -> GroupPlacement | None:
        stored = self._mirror.values.get(group)
        if stored is None:
            return self._found.get(group)
        self._found.pop(group, None)
        return decode_placement(stored)

    async def _read_or_create(self, group: str) -> GroupPlacement:
        """Return the placement of a group from etcd; place it in this set if it has none."""
        while True:
            stored = await self._mirror.read(group)
            if stored is not None:
                return decode_placement(stored)
            key, placement = PLACEMENTS_PREFIX + group, GroupPlacement(self._set)
            await self._etcd.txn(
                compare=[Compare(key, create_revision=0)], put=[Put(key, placement.encode())]
            )
