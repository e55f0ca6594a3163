"""What every node of a replica set does, whatever the service: stand, register, know who is up."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq.errors import NoQuorum, NotLeader
from batonmq_server.runtime.election import Candidacy, Election
from batonmq_server.runtime.leader_registration import LeaderRegistration
from batonmq_server.runtime.replication.in_sync_set import InSyncSet, ReplicaPolicy, Won
from batonmq_server.runtime.replication.position import ReplicaPosition
from batonmq_server.runtime.replication.replica_set import ReplicaSetStore
from batonmq_server.runtime.service_runtime import Runtime

log = logging.getLogger(__name__)

Stand = Callable[[], Awaitable[Candidacy | None]]


class ReplicaNode:
    """See the module.

    Args:
        name: Of the replica set.
        members: Node ids that belong to it, by configuration.
        lease_ms: Of the leader.
        position: Of this node's copy, at any moment.
        room: Machine room, to be registered; empty for none.

    Attributes:
        standing_back: Asked before every try to be elected; whether to leave it to others.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str,
        members: frozenset[str],
        lease_ms: int,
        position: Callable[[], ReplicaPosition],
        room: str = "",
    ) -> None:
        self._runtime, self._node_id, self._members = runtime, runtime.settings.node_id, members
        self.name, self._position = name, position
        self.standing_back: Callable[[], bool] = lambda: False
        self._lease_ms, self._back_to_ms = lease_ms, 0
        self._left = False
        self.registration = LeaderRegistration(runtime, position, room=room, replica_set=name)
        self.set = ReplicaSetStore(
            runtime.etcd,
            runtime.etcd.key("replicas", runtime.service, name),
            self._node_id,
            members,
            position,
            self._beginners,
        )
        self.election = Election(
            runtime.etcd,
            f"{runtime.service}/{name}",
            self._node_id,
            ttl_ms=lease_ms,
            stand=self._stand,
        )

    def check(self) -> None:
        """Refuse to answer once the lease may be over.

        Raises:
            NoQuorum: it may be, because etcd does not answer.
            NotLeader: it may be; or another node is the leader.
        """
        if self.election.valid():
            return
        if not self.election.reachable:
            raise NoQuorum("etcd does not answer, so there may be another leader")
        raise self.not_leader()

    def not_leader(self) -> NotLeader:
        """Why this node does not answer."""
        return NotLeader(f"{self._node_id} is not the leader", retry_after_ms=200)

    def keeper(self, revision: int, position: int, policy: ReplicaPolicy) -> InSyncSet:
        """Of the leadership that the election at `revision` has begun."""
        won = Won(self.election, self.set, self.set.won(revision))
        return InSyncSet(won, position, policy, self._runtime.clock, self._up)

    def resign(self) -> None:
        """The process ends: be leader no more.

        One that went on while it takes no more calls of its followers would let them out of the
        set, and be gone as the only one who can be elected.
        """
        self._left = True
        self.election.resign()

    def step_back(self, why: str) -> None:
        """Be leader no more, and not at once again: whoever else has everything goes first."""
        if self.election.term:
            log.error("resigns: %s", why)
        self._back_to_ms = self._runtime.clock.monotonic_ms() + 3 * self._lease_ms
        self.election.resign()

    def lacks(self, keeper: InSyncSet) -> bool:
        """Whether this node has lost, since it stood for election, what it stood with.

        Then it resigns, and must not begin.
        """
        at = self._position()
        if at.epoch >= keeper.served_epoch:
            return False
        log.error("resigns, as its copy was damaged meanwhile epoch=%d", keeper.epoch)
        self.election.resign()
        return True

    async def in_sync(self) -> bool:
        """Whether etcd lists this node among those that may be elected.

        Raises:
            NoQuorum: etcd does not answer.
        """
        return self._node_id in (await self.set.read()).in_sync

    async def _stand(self) -> Candidacy | None:
        back = self._runtime.clock.monotonic_ms() < self._back_to_ms
        return None if self._left or back or self.standing_back() else await self.set.stand()

    def _up(self) -> frozenset[str]:
        if not self._runtime.nodes.revision:
            return self._members  # not known yet
        return frozenset(self._registered())

    def _beginners(self) -> dict[str, ReplicaPosition]:
        """The members that are up, and how far they were when they registered; without leaders.

        Where no set stands in etcd, who leads still runs alone: with messages, and no position.
        """
        return {
            name: ReplicaPosition(node.replica_epoch, node.replica_version)
            for name, node in self._registered().items()
            if not node.leader
        }

    def _registered(self) -> dict[str, nameserver_pb.Node]:
        """The members that are up."""
        found = {}
        for key, stored in self._runtime.nodes.values.items():
            service, _, name = key.partition("/")
            if service == self._runtime.service and name in self._members:
                found[name] = nameserver_pb.Node.FromString(stored.value)
        return found
