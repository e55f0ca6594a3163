"""Tells everybody whether this node leads, as soon as etcd takes it."""

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
    """This node's entry among the nodes; the newest wish is the one that is written.

    Args:
        position: Of a replica's copy, at the moment of writing.
        room: Machine room; empty for none.
        replica_set: That the node belongs to; empty for none.
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
        self._wanted = asyncio.Event()
        self._wanted.set()

    def set_epoch(self, epoch: int) -> None:
        """This node leads, in an epoch or term of its own; 0: it does not."""
        self._epoch = epoch
        self._wanted.set()

    async def run(self) -> None:
        """Write for ever; to be run as one task."""
        tries = 0
        while True:
            await self._wanted.wait()
            self._wanted.clear()
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
                self._wanted.set()
                await asyncio.sleep(_BACKOFF.delay_ms(tries, self._runtime.random) / 1000)
                tries += 1
