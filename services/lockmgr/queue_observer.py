"""Observes queues at offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from batonmq._common.clock import Clock
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, OffsetsUnreachable
from batonmq_server.lockmgr.core.lock_entry import Observation
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.offsets_client import OffsetsClient


class QueueObserver:
    """Queries offsets about queues and stores the answers in the table."""

    def __init__(self, table: LockTable, offsets: OffsetsClient, clock: Clock) -> None:
        self._table, self._offsets, self._clock = table, offsets, clock

    async def observe(self, key: GroupQueue) -> Observation:
        """Return the queue as offsets shows it now.

        Raises:
            OffsetsUnreachable: offsets did not answer.
        """
        version = self._table.begin_observation(key)
        try:
            observation = await self._offsets.observe(key)
        except OffsetsUnreachable:
            self._table.observation_failed(key, self._clock.monotonic_ms())
            raise
        self._table.end_observation(key, observation, version, self._clock.monotonic_ms())
        return observation

    async def observe_all(self, keys: Sequence[GroupQueue]) -> list[Observation | BatonError]:
        """Return the observation of each queue, or the error if offsets did not answer."""

        async def observe(key: GroupQueue) -> Observation | BatonError:
            try:
                return await self.observe(key)
            except BatonError as error:
                return error

        async with asyncio.TaskGroup() as tasks:
            observing = [tasks.create_task(observe(key)) for key in keys]
        return [task.result() for task in observing]
