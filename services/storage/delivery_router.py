"""Routes each delivery to the offsets replica set that keeps its group."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from batonmq.errors import BatonError, GroupMoved, NotServing
from batonmq_server.runtime.group_placements import GroupPlacements
from batonmq_server.runtime.per_replica_set import PerReplicaSet
from batonmq_server.storage.delivery_recorder import (
    DeliveryRecorder,
    PendingDelivery,
    RecordedDelivery,
    Settlement,
    unrecorded,
)
from batonmq_server.storage.long_polls import QueueOwner

log = logging.getLogger(__name__)
_NOT_KEPT_HERE = (GroupMoved, NotServing)
"""Errors of a set that does not keep the group, or not yet; they say nothing about the token."""


class DeliveryRouter:
    """One `DeliveryRecorder` per offsets set, so that groups of one set do not wait for another.

    Args:
        make: Makes the recorder of the set with a name.
    """

    def __init__(
        self, placements: GroupPlacements, make: Callable[[str], DeliveryRecorder]
    ) -> None:
        self._placements, self._sets = placements, PerReplicaSet(make)

    async def run(self) -> None:
        """Send calls until cancelled; run it as one task."""
        await self._sets.run()

    def set_of(self, group: str) -> str:
        """Return the name of the offsets set that keeps a group."""
        return self._placements.set_of(group)

    def seen_epoch(self, group: str) -> tuple[str, int]:
        """Return the offsets set that keeps a group, and its highest epoch seen; 0 for none."""
        name = self.set_of(group)
        return name, self._sets[name].epoch

    async def record(self, delivery: PendingDelivery) -> RecordedDelivery:
        """Record a delivery at the offsets set that keeps its group.

        An epoch that the consumer has seen at another offsets set is ignored, and so is the
        position that it states under this epoch.

        Raises:
            DeliveryUnrecorded: as `DeliveryRecorder.record`; also if that set does not keep the
                group.
        """
        name = self.set_of(delivery.owner.group)
        if delivery.offsets_set not in ("", name):
            delivery = replace(delivery, offsets_epoch=0, received_offset=None)
        try:
            return await self._sets[name].record(delivery)
        except _NOT_KEPT_HERE as error:
            raise unrecorded(error) from error

    async def settle(self, settlement: Settlement) -> None:
        """As `DeliveryRecorder.settle`; a set to which the group has moved ignores it."""
        await self._sets[self.set_of(settlement.owner.group)].settle(settlement)

    async def touch(self, owners: Sequence[QueueOwner]) -> list[BatonError | None]:
        """As `DeliveryRecorder.touch`; the result is None also if the set does not answer."""
        by_set: dict[str, list[QueueOwner]] = defaultdict(list)
        for owner in owners:
            by_set[self.set_of(owner.group)].append(owner)
        results: dict[QueueOwner, BatonError | None] = {}

        async def touch(name: str, some: Sequence[QueueOwner]) -> None:
            try:
                outcomes = await self._sets[name].touch(some)
            except BatonError as error:
                log.info("long polls not touched count=%d error=%s", len(some), error)
                return
            results.update(zip(some, outcomes, strict=True))

        async with asyncio.TaskGroup() as tasks:
            for name, some in by_set.items():
                tasks.create_task(touch(name, some))
        outcomes = [results.get(owner) for owner in owners]
        return [None if isinstance(result, _NOT_KEPT_HERE) else result for result in outcomes]
