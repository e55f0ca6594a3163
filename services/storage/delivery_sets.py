"""Deliveries of all groups: each is recorded at the offsets replica set that keeps its group."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from batonmq.errors import BatonError, GroupMoved, NotServing
from batonmq_server.runtime.group_placements import GroupPlacements
from batonmq_server.runtime.per_replica_set import PerReplicaSet
from batonmq_server.storage.deliveries import Deliveries, Delivery, Verdict, unrecorded
from batonmq_server.storage.pulls import Holder

log = logging.getLogger(__name__)
_ELSEWHERE = (GroupMoved, NotServing)
"""Refusals of a set that does not keep the group, or not yet: nothing is said of the token."""


class DeliverySets:
    """A `Deliveries` for each set, so that the groups of one don't wait for another.

    Args:
        make: Of the set of this name.
    """

    def __init__(self, places: GroupPlacements, make: Callable[[str], Deliveries]) -> None:
        self._places, self._sets = places, PerReplicaSet(make)

    async def run(self) -> None:
        """Send for ever; to be run as one task."""
        await self._sets.run()

    def set_of(self, group: str) -> str:
        """The set that is asked about a group."""
        return self._places.set_of(group)

    async def record(self, delivery: Delivery) -> Verdict:
        """See `Deliveries.record`. An epoch that the puller has seen at another set says nothing.

        Raises:
            DeliveryUnrecorded: also if the group is not at the set that was asked.
        """
        name = self.set_of(delivery.holder.group)
        if delivery.offsets_set not in ("", name):
            delivery = replace(delivery, offsets_epoch=0)
        try:
            return await self._sets[name].record(delivery)
        except _ELSEWHERE as error:
            raise unrecorded(error) from error

    async def touch(self, holders: Sequence[Holder]) -> list[BatonError | None]:
        """See `Deliveries.touch`; None also for those whose set does not answer."""
        by_set: dict[str, list[Holder]] = defaultdict(list)
        for holder in holders:
            by_set[self.set_of(holder.group)].append(holder)
        verdicts: dict[Holder, BatonError | None] = {}

        async def touch(name: str, some: Sequence[Holder]) -> None:
            try:
                found = await self._sets[name].touch(some)
            except BatonError as error:
                log.info("parked pulls not touched count=%d error=%s", len(some), error)
                return
            verdicts.update(zip(some, found, strict=True))

        async with asyncio.TaskGroup() as tasks:
            for name, some in by_set.items():
                tasks.create_task(touch(name, some))
        found = [verdicts.get(holder) for holder in holders]
        return [None if isinstance(verdict, _ELSEWHERE) else verdict for verdict in found]
