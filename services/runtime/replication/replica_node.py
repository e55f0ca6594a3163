"""A node of a replica set: registers, stands for election, and leads when it is elected.

Services derive from `ReplicaNode` and say what their leader does. See
docs/explanation/replica-control.md for the life of a node.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq.errors import NoQuorum, NotLeader
from batonmq_server.runtime.election import Candidacy, Election
from batonmq_server.runtime.leader_registration import LeaderRegistration
from batonmq_server.runtime.replication.in_sync_set import InSyncSet, ReplicaPolicy
from batonmq_server.runtime.replication.leadership import Leadership
from batonmq_server.runtime.replication.position import ReplicaPosition
from batonmq_server.runtime.replication.replica_set import ReplicaSetStore
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.runtime.sibling_watch import SiblingWatch

log = logging.getLogger(__name__)

REACH_INTERVAL_S = 0.5
"""Interval of the checks whether the leader is drained or cut off; it resigns after three that say
that it is cut off."""
RESIGN_INTERVAL_MS = 60_000
"""A node resigns at most this often because it is cut off or its disk is full: if no node reaches
another, one of them has to stay the leader, and nodes whose disks are nearly full do not take turns
all the time."""

L = TypeVar("L", bound=Leadership)


class ReplicaNode(ABC, Generic[L]):
    """This node's part in its replica set, whatever the service.

    Args:
        name: Name of the replica set.
        node_ids: Node ids of the set, by configuration.
        lease_ms: Length of the leader's lease.
        position: Returns the position of this node's copy.
        room: Machine room to be registered; empty for none.

    Attributes:
        registration: Tells other processes whether this node leads.
        election: This node's candidacy and lease.
        siblings: Watch over the processes of the other nodes.
        replica_set: The record of the set in etcd.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str,
        node_ids: frozenset[str],
        lease_ms: int,
        position: Callable[[], ReplicaPosition],
        room: str = "",
    ) -> None:
        self._runtime, self._node_id, self._node_ids = runtime, runtime.settings.node_id, node_ids
        self.name, self._position = name, position
        self._lease_ms, self._abstains_until_ms = lease_ms, 0
        self._resigned_epoch, self._resigns_from_ms = 0, 0
        self._stopping = False
        self._leadership: L | None = None
        self.registration = LeaderRegistration(runtime, position, room=room, replica_set=name)
        self.election = Election(
            runtime.etcd,
            f"{runtime.service}/{name}",
            self._node_id,
            ttl_ms=lease_ms,
            stand=self._stand,
        )
        self.siblings = SiblingWatch(runtime, self.election.key, replica_set=name)
        self.replica_set = ReplicaSetStore(
            self.election,
            runtime.etcd.key("replicas", runtime.service, name),
            node_ids,
            position,
            self._founders,
        )

    @abstractmethod
    async def _lead(self, term: int) -> None:
        """Lead until cancelled: begin an epoch, serve it inside `_leading`.

        Args:
            term: Revision of the election's transaction.
        """

    @abstractmethod
    def _can_lead(self) -> bool:
        """Return whether this node's disk lets it lead; asked before each candidacy."""

    async def run(self) -> None:
        """Stand for election, and lead while elected; run as one task."""
        await self.election.run(self._lead)

    def check(self) -> None:
        """Return if this node may answer as the leader.

        Raises:
            NoQuorum: etcd does not answer, so the lease may have expired.
            NotLeader: another node is the leader, or the lease may have expired.
        """
        if self.election.valid():
            return
        if not self.election.reachable:
            raise NoQuorum("etcd does not answer, so there may be another leader")
        raise self._not_leader()

    @property
    def leadership(self) -> L:
        """The current leadership, for calls of followers.

        Raises:
            NoQuorum, NotLeader: see `check`.
        """
        self.check()
        if self._leadership is None:
            raise self._not_leader()
        return self._leadership

    def check_still(self, leadership: L) -> None:
        """Return if `leadership` is the current one.

        Raises:
            NoQuorum, NotLeader: it has ended, or see `check`.
        """
        if self.leadership is not leadership:
            raise self._not_leader()

    def resign(self) -> None:
        """Give up the leadership for good, because the process stops.

        A leader that went on after its server stopped would remove its silent followers from the
        in-sync set, and then be gone as the only node that may be elected.
        """
        self._stopping = True
        self.election.resign()

    def step_back(self, reason: str) -> None:
        """Give up the leadership, and stand for election again only after three lease times.

        Until then each other replica that has everything may be elected.
        """
        if self.election.term:
            log.error("resigns: %s", reason)
        self._abstain(0, 3 * self._lease_ms)
        self.election.resign()

    def _give_way(self, in_sync_set: InSyncSet, reason: str) -> None:
        """Give up the leadership, and abstain until another node has led or for three leases."""
        self.step_back(reason)
        self._resigned_epoch = in_sync_set.epoch
        self._resigns_from_ms = self._runtime.clock.monotonic_ms() + RESIGN_INTERVAL_MS

    def _may_give_way(self) -> bool:
        """Return whether the last time at which this node gave way is long ago."""
        return self._runtime.clock.monotonic_ms() >= self._resigns_from_ms

    def _abstain(self, epoch: int, duration_ms: int) -> None:
        """Don't stand for election for a while, or until a later epoch than `epoch` if not 0."""
        self._resigned_epoch = epoch
        self._abstains_until_ms = self._runtime.clock.monotonic_ms() + duration_ms

    def _is_abstaining(self) -> bool:
        return self._runtime.clock.monotonic_ms() < self._abstains_until_ms

    async def is_in_sync(self) -> bool:
        """Return whether etcd lists this node in the in-sync set.

        Raises:
            NoQuorum: etcd does not answer.
        """
        return self._node_id in (await self.replica_set.read()).in_sync

    def _in_sync_set(self, term: int, position: int, policy: ReplicaPolicy) -> InSyncSet:
        """Return the in-sync set of the leadership that the election of `term` has begun."""
        store, clock = self.replica_set, self._runtime.clock
        in_sync_set = InSyncSet(
            store, store.elected_record(term), position, policy, clock, self._registered_ids
        )
        in_sync_set.resigns_from_ms = self._resigns_from_ms
        return in_sync_set

    def _lost_data(self, in_sync_set: InSyncSet) -> bool:
        """Return whether this node's copy lost the epoch with which it stood for election.

        If so it resigns, and must not begin an epoch.
        """
        if self._position().epoch >= in_sync_set.served_epoch:
            return False
        log.error("resigns: its copy was damaged during the election epoch=%d", in_sync_set.epoch)
        self.election.resign()
        return True

    @asynccontextmanager
    async def _leading(self, leadership: L) -> AsyncIterator[asyncio.TaskGroup]:
        """Make `leadership` the current one inside, register it, and keep its in-sync set."""
        in_sync_set = leadership.in_sync_set
        self._leadership = leadership
        self.registration.set_epoch(leadership.epoch)
        in_sync = sorted(in_sync_set.tracker.in_sync)
        log.info("leader epoch=%d in_sync=%s", leadership.epoch, in_sync)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(in_sync_set.run())
                tasks.create_task(self._watch_reach(in_sync_set))
                yield tasks
        finally:
            self._leadership = None
            self.registration.set_epoch(0)
            if not self._is_abstaining() and in_sync_set.cut_off():
                # It lost its lease, and could win again before those that can't reach it.
                self._abstain(in_sync_set.epoch, self._lease_ms)

    async def _watch_reach(self, in_sync_set: InSyncSet) -> None:
        """Resign once another node had better lead.

        This node is drained, or a majority of the set can't reach it, and is known to reach etcd.
        """
        checks = 0
        while True:
            await asyncio.sleep(REACH_INTERVAL_S)
            if self._hands_over(in_sync_set):
                return
            checks = checks + 1 if await self._is_cut_off(in_sync_set) else 0
            if checks == 3:  # a node that was paused has renewed its entry, and reports soon
                names = ", ".join(sorted(in_sync_set.cut_off()))
                self._give_way(in_sync_set, f"{names} reach etcd, and can't reach this node")
                return

    def _hands_over(self, in_sync_set: InSyncSet) -> bool:
        """Resign if this node is drained and another node that is not drained could lead.

        Until then it continues to lead: a set without a leader is worse than a drain that
        takes longer.
        """
        drained = self.election.drained
        if self._node_id not in drained:
            return False
        others = in_sync_set.successors() - drained
        if others:
            log.info("hands over: it is drained successors=%s", ",".join(sorted(others)))
            self.election.resign()
        return bool(others)

    async def _is_cut_off(self, in_sync_set: InSyncSet) -> bool:
        """Return whether the nodes that are cut off have renewed their entries in etcd since then.

        Otherwise they may be paused, or etcd has not yet noticed that they are dead.
        """
        cut_off = in_sync_set.cut_off()
        # A node that is alive renews its entry after its last report, too.
        slack_ms = in_sync_set.policy.lag_ms_max // 2
        try:
            for name, silence_ms in cut_off.items():
                stored = self._runtime.nodes.values.get(f"{self._runtime.service}/{name}")
                if stored is None:
                    return False
                left_s, granted_s = await self._runtime.etcd.time_to_live(stored.lease_id)
                if left_s < 0 or (granted_s - left_s) * 1000 > silence_ms - slack_ms:
                    return False
        except NoQuorum:
            return False
        return bool(cut_off)

    def _not_leader(self) -> NotLeader:
        return NotLeader(f"{self._node_id} is not the leader", retry_after_ms=200)

    async def _stand(self) -> Candidacy | None:
        if self._stopping or not self._can_lead() or await self._abstains():
            return None
        return await self.replica_set.candidacy()

    async def _abstains(self) -> bool:
        if not self._is_abstaining():
            return False
        if not self._resigned_epoch:
            return True
        return (await self.replica_set.read()).epoch <= self._resigned_epoch

    def _registered_ids(self) -> frozenset[str]:
        if not self._runtime.nodes.revision:
            return self._node_ids  # not known yet
        return frozenset(self._registered())

    def _founders(self) -> dict[str, ReplicaPosition]:
        """Return the positions of the registered nodes that do not lead, by node id.

        While etcd has no record of the set, a registered leader runs without replicas: it has
        messages, and no position.
        """
        return {
            name: ReplicaPosition(node.replica_epoch, node.replica_version)
            for name, node in self._registered().items()
            if not node.leader
        }

    def _registered_leaders(self) -> list[str]:
        """Return the other nodes of the set that etcd lists as leader; the newest epoch first."""
        leaders = [
            (node.epoch, name)
            for name, node in self._registered().items()
            if node.leader and name != self._node_id
        ]
        return [name for _, name in sorted(leaders, reverse=True)]

    def _registered(self) -> dict[str, StoredNode]:
        """Return the registered nodes of the set by node id."""
        nodes = {}
        for key, stored in self._runtime.nodes.values.items():
            service, _, name = key.partition("/")
            if service == self._runtime.service and name in self._node_ids:
                nodes[name] = StoredNode.FromString(stored.value)
        return nodes
