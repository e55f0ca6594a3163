"""The registration of this node as leader or follower."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from batonmq._common.backoff import Backoff
from batonmq.errors import NoQuorum
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition
from batonmq_server.runtime.service_runtime import Runtime

log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_ms=50, delay_ms_max=2_000)


class LeaderRegistration:
    """Writes to this node's entry whether it leads; only the newest epoch is written.

    Args:
        position: Returns the position of a replica's copy; called at each write.
        room: Machine room; empty for none.
        replica_set: Replica set of the node; empty for none.
    """

    def __init__(
        self,
        runtime: Runtime,
        position: Callable[[], ReplicaPosition] = lambda: NO_POSITION,
        *,
        room: str = "",
        replica_set: str = "",
    ) -> None:
        self._runtime, self._position = runtime, position
        self._room, self._replica_set = room, replica_set
        self._epoch = 0
        self._changed = asyncio.Event()
        self._changed.set()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch or term in which this node leads; 0 if it does not lead."""
        self._epoch = epoch
        self._changed.set()

    async def run(self) -> None:
        """Write each change to etcd until cancelled; run as one task."""
        tries = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            epoch = self._epoch
            try:
                await self._runtime.node_entry.write(
                    epoch=epoch,
                    leader=epoch > 0,
                    room=self._room,
                    replica_set=self._replica_set,
                    position=self._position,
                )
                tries = 0
            except NoQuorum as error:
                log.warning("not registered epoch=%d error=%s", epoch, error)
                self._changed.set()
                await asyncio.sleep(_BACKOFF.delay_ms(tries, self._runtime.random) / 1000)
                tries += 1
