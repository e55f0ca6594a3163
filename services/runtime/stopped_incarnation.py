"""The mark of a process that stopped gracefully, in etcd: `stopped/<service>/<node id>`.

A process writes it as its last act, once all its events are published or kept. The next incarnation
takes it before it publishes anything. So an incarnation that finds a mark knows that no other one
ran since: one that was killed had taken the mark, and left none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from batonmq.errors import NoQuorum
from batonmq_server.runtime.etcd.session import Compare, EtcdSession

log = logging.getLogger(__name__)

MARK_MS = 7 * 24 * 3_600_000
"""Lease of a mark: names of nodes that never come back, as those of pods, do not pile up."""
RETRY_S = 1.0


class StoppedIncarnation:
    """The mark of one node.

    Args:
        service: Name of the service.
        node_id: Node id of the process.
    """

    def __init__(self, etcd: EtcdSession, service: str, node_id: str) -> None:
        self._etcd = etcd
        self._key = etcd.key("stopped", service, node_id)

    async def take(self) -> int:
        """Remove the mark and return its incarnation id; 0 if there is none. Wait for etcd."""
        while True:
            try:
                return await self._take()
            except NoQuorum as error:
                log.debug("mark of the incarnation before is not read yet error=%s", error)
                await asyncio.sleep(RETRY_S)

    async def leave(self, incarnation_id: int) -> None:
        """Write the mark; without etcd there is none, and readers of the stream see a gap."""
        try:
            lease = await self._etcd.lease(MARK_MS)
            await self._etcd.put(self._key, str(incarnation_id).encode(), lease)
        except NoQuorum as error:
            log.warning("graceful stop is not marked in etcd error=%s", error)

    async def _take(self) -> int:
        mark = await self._etcd.get(self._key)
        if mark is None:
            return 0
        unchanged = Compare(self._key, mod_revision=mark.mod_revision)
        if await self._etcd.txn(compare=[unchanged], delete=[self._key]) is None:
            return 0  # another process of this node has taken it
        with contextlib.suppress(NoQuorum):
            await self._etcd.attach(mark.lease_id).revoke()
        return int(mark.value)
