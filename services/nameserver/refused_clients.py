"""Clients with refused heartbeats: `refused/<group>/<client_id>` in etcd, with a lease."""

from __future__ import annotations

import logging

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_refused_client_pb2 import StoredRefusedClient
from batonmq.errors import BatonError, NoQuorum
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.change_budget import WritePace
from batonmq_server.nameserver.core.groups import Heartbeat
from batonmq_server.nameserver.group_proto import refused_to_pb, refused_to_stored
from batonmq_server.nameserver.group_store import WRITE_BYTES_PER_S
from batonmq_server.runtime.etcd.session import EtcdSession

log = logging.getLogger(__name__)

REFUSED_MAX = 100
"""Refused clients that are recorded per group."""


class RefusedClients:
    """Records refused clients; a record expires if the refusal is not repeated.

    Args:
        lease_ms: Lifetime of a record.
        write_bytes_per_s: Limit of the bytes that the refusals of one group write per second.
    """

    def __init__(
        self,
        etcd: EtcdSession,
        catalog: Catalog,
        *,
        lease_ms: int,
        write_bytes_per_s: int = WRITE_BYTES_PER_S,
    ) -> None:
        self._etcd, self._mirror, self._lease_ms = etcd, catalog.refused, lease_ms
        self._pace = WritePace(write_bytes_per_s)

    def of_group(self, group: str) -> list[pb.RefusedClient]:
        """Return the refused clients of the group, by client id."""
        values, prefix = self._mirror.values, f"{group}/"
        return [
            refused_to_pb(StoredRefusedClient.FromString(values[key].value))
            for key in sorted(values)
            if key.startswith(prefix)
        ]

    async def record(self, heartbeat: Heartbeat, error: BatonError) -> None:
        """Record a refusal; a repeated one only renews the lease.

        Without etcd it is only logged. One above the group's rate of writes is left out: the
        client's next heartbeat is refused as well.
        """
        try:
            await self._record(heartbeat, error)
        except NoQuorum as failure:
            log.warning("refusal not recorded group=%s error=%s", heartbeat.group, failure)

    async def _record(self, heartbeat: Heartbeat, error: BatonError) -> None:
        known = self._mirror.values.get(f"{heartbeat.group}/{heartbeat.client_id}")
        since, lease = self._etcd.clock.unix_ms(), None
        if known is not None:
            before = StoredRefusedClient.FromString(known.value)
            lease = self._etcd.attach(known.lease_id)
            if not await lease.refresh():
                lease = None
            elif before.incarnation.incarnation_id == heartbeat.incarnation_id:
                since = before.since_unix_ms
                if before == refused_to_stored(heartbeat, error, since):
                    return
        elif len(self.of_group(heartbeat.group)) >= REFUSED_MAX:
            return
        now_ms = self._etcd.clock.monotonic_ms()
        if self._pace.wait_ms(heartbeat.group, now_ms):
            return
        value = refused_to_stored(heartbeat, error, since).SerializeToString()
        self._pace.written(heartbeat.group, len(value), now_ms)
        await self._etcd.put(
            self._etcd.key("refused", heartbeat.group, heartbeat.client_id),
            value,
            lease or await self._etcd.lease(self._lease_ms),
        )
