"""Deliveries of all groups: each is recorded at the offsets replica set that keeps its group."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from batonmq.errors import BatonError, GroupMoved, NotServing
from batonmq_server.runtime.by_set import BySet
from batonmq_server.runtime.places import Places
from batonmq_server.storage.delivery_recorder import (
    DeliveryRecorder,
    PendingDelivery,
    RecordedDelivery,
    unrecorded,
)
from batonmq_server.storage.long_polls import QueueOwner

log = logging.getLogger(__name__)
_ELSEWHERE = (GroupMoved, NotServing)
"""Refusals of a set that does not keep the group, or not yet: nothing is said of the token."""


class DeliveryRouter:
    """A `DeliveryRecorder` for each set, so that the groups of one don't wait for another.

    Args:
        make: Of the set of this name.
    """

    def __init__(self, places: Places, make: Callable[[str], DeliveryRecorder]) -> None:
        self._places, self._sets = places, BySet(make)

    async def run(self) -> None:
        """Send for ever; to be run as one task."""
        await self._sets.run()

    def set_of(self, group: str) -> str:
        """The set that is asked about a group."""
        return self._places.set_of(group)

    async def record(self, delivery: PendingDelivery) -> RecordedDelivery:
        """Record a delivery at the offsets set that keeps its group.

        An epoch that the consumer has seen at another offsets set is ignored.

        Raises:
            DeliveryUnrecorded: also if the group is not at the set that was asked.
        """
        name = self.set_of(delivery.owner.group)
        if delivery.offsets_set not in ("", name):
            delivery = replace(delivery, offsets_epoch=0)
        try:
            return await self._sets[name].record(delivery)
        except _ELSEWHERE as error:
            raise unrecorded(error) from error

    async def touch(self, owners: Sequence[QueueOwner]) -> list[BatonError | None]:
        """See `DeliveryRecorder.touch`; None also for those whose set does not answer."""
        by_set: dict[str, list[QueueOwner]] = defaultdict(list)
        for owner in owners:
            by_set[self.set_of(owner.group)].append(owner)
        verdicts: dict[QueueOwner, BatonError | None] = {}

        async def touch(name: str, some: Sequence[QueueOwner]) -> None:
            try:
                found = await self._sets[name].touch(some)
            except BatonError as error:
                log.info("parked pulls not touched count=%d error=%s", len(some), error)
                return
            verdicts.update(zip(some, found, strict=True))

        async with asyncio.TaskGroup() as tasks:
            for name, some in by_set.items():
                tasks.create_task(touch(name, some))
        found = [verdicts.get(owner) for owner in owners]
        return [None if isinstance(verdict, _ELSEWHERE) else verdict for verdict in found]
