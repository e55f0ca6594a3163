"""The entry of this node in etcd, `nodes/<service>/<node id>`, kept under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._common.contract import CONTRACT, CONTRACT_MIN
from batonmq.errors import NoQuorum
from batonmq_server.runtime.app import FurtherPorts
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, Lease
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition
from batonmq_server.runtime.settings import ServiceSettings

log = logging.getLogger(__name__)


class NodeEntry:
    """Registers the node: writes its entry, refreshes the lease, and removes the entry at the end.

    Args:
        nodes: Mirror of `nodes/`, which is run elsewhere.
    """

    def __init__(
        self, service: str, settings: ServiceSettings, etcd: EtcdSession, nodes: EtcdMirror
    ) -> None:
        self._service, self._settings, self._etcd, self._nodes = service, settings, etcd, nodes
        self._node: StoredNode | None = None
        self._position: Callable[[], ReplicaPosition] = lambda: NO_POSITION
        self._lease: Lease | None = None
        self._writing = asyncio.Lock()
        self._removed = self._listed = False
        self._start_unix_ms = etcd.clock.unix_ms()
        self._address = self._metrics_address = ""
        self._further = FurtherPorts()

    def set_addresses(
        self, address: str, metrics_address: str, further: FurtherPorts | None = None
    ) -> None:
        """Set the host:port at which other processes reach this one."""
        self._address, self._metrics_address = address, metrics_address
        self._further = further or FurtherPorts()

    async def write(
        self,
        *,
        epoch: int = 0,
        leader: bool = True,
        room: str = "",
        replica_set: str = "",
        position: Callable[[], ReplicaPosition] = lambda: NO_POSITION,
    ) -> None:
        """Write the entry with these values under the lease of the process.

        Args:
            position: Returns the position of the node's copy; called at this and each later write.

        Raises:
            NoQuorum: not known whether the entry was written; `keep` tries again.
        """
        self._position = position
        self._node = StoredNode(
            service=nameserver_pb.ServiceKind.Value(f"SERVICE_KIND_{self._service.upper()}"),
            node_id=self._settings.node_id,
            address=self._address,
            outside_address=self._settings.outside_address,
            metrics_address=self._metrics_address,
            start_unix_ms=self._start_unix_ms,
            epoch=epoch,
            leader=leader,
            room=room,
            replica_set=replica_set,
            tls_address=self._further.tls_address,
            plain_address=self._further.plain_address,
            contract=CONTRACT,
            contract_min=CONTRACT_MIN,
        )
        await self._write_node()

    @property
    def defined(self) -> bool:
        """Whether `write` was called: the values of the entry are known."""
        return self._node is not None

    @property
    def listed(self) -> bool:
        """Whether the entry is in etcd, as far as this process knows."""
        return self._listed

    async def keep(self) -> None:
        """Refresh the lease until `remove`; if it expired, write the entry under a new lease.

        An entry that differs from the last one written is written again although the lease is
        alive: a write that was given up may land late and replace the entry, under a lease that
        is not refreshed.
        """
        while not self._removed:
            await asyncio.sleep(self._settings.node_lease_ms / 4000)
            try:
                if self._lease is None or not await self._lease.refresh():
                    log.warning("node entry lost, registering again")
                    self._lease, self._listed = None, False
                    await self._write_node()
                elif self._overwritten():
                    log.warning("node entry was overwritten, writing it again")
                    await self._write_node()
            except NoQuorum as error:
                log.warning("node lease not refreshed error=%s", error)

    async def remove(self) -> None:
        """Revoke the lease, which deletes the entry; later writes have no effect."""
        self._removed = True
        async with self._writing:
            if self._lease is not None:
                with contextlib.suppress(NoQuorum):
                    await self._lease.revoke()
                self._lease = None

    def _overwritten(self) -> bool:
        """Whether etcd has no entry, or an older one of this process."""
        if self._node is None or self._lease is None:
            return False  # about to be written
        stored = self._nodes.values.get(f"{self._service}/{self._settings.node_id}")
        if stored is None:
            return True
        node = StoredNode.FromString(stored.value)
        own = node.start_unix_ms == self._start_unix_ms and node.address == self._address
        return own and (stored.lease_id != self._lease.lease_id or node != self._node)

    async def _write_node(self) -> None:
        async with self._writing:  # else each of two writers could take a lease, and one is lost
            if self._node is None or self._removed:
                return
            # No lease is kept until the write is known to have succeeded: so `keep` tries again.
            lease, self._lease = self._lease, None
            lease = lease or await self._etcd.lease(self._settings.node_lease_ms)
            position = self._position()
            self._node.replica_epoch = position.epoch
            self._node.replica_version = position.version
            key = self._etcd.key("nodes", self._service, self._settings.node_id)
            await self._etcd.put(key, self._node.SerializeToString(), lease)
            self._lease, self._listed = lease, True
