"""The record of a replica set in etcd, `replicas/<service>/<set>`, and how a node changes it.

The record lists the nodes that may be elected. A candidate takes the election key and raises the
epoch in one transaction, which succeeds only if the record is unchanged since it was read. A
leader changes the record only while it holds the election key. So at any time at most one node can
do either (protocol section 12).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.common.v1 import replicas_pb2
from batonmq._process.config import ConfigError, ConfigProblem
from batonmq.errors import NoQuorum, NotLeader
from batonmq_server.runtime.election import Candidacy, Election
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue, Put
from batonmq_server.runtime.replication.position import ReplicaPosition

log = logging.getLogger(__name__)

ACCEPTED_LOSSES_MAX = 16
"""Accepted losses that the record keeps; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class ReplicaSetRecord:
    """A replica set as etcd has it (see the proto); `mod_revision` is 0 if etcd has none."""

    epoch: int
    leader: str
    in_sync: frozenset[str]
    served_epoch: int = 0
    accepted: tuple[replicas_pb2.AcceptedLoss, ...] = ()
    mod_revision: int = 0
    min_in_sync: int = 0

    def encode(self) -> bytes:
        """Return the value that etcd keeps."""
        return replicas_pb2.ReplicaSet(
            epoch=self.epoch,
            leader=self.leader,
            in_sync=sorted(self.in_sync),
            served_epoch=self.served_epoch,
            accepted_losses=self.accepted,
            min_in_sync=self.min_in_sync,
        ).SerializeToString()

    def with_accepted_loss(self, loss: replicas_pb2.AcceptedLoss) -> ReplicaSetRecord:
        """Return the record after an operator accepted `loss`: only its node may be elected.

        `served_epoch` becomes 0, because the node may lack any epoch.
        """
        accepted = (*self.accepted, loss)[-ACCEPTED_LOSSES_MAX:]
        in_sync = frozenset({loss.node_id})
        return replace(self, in_sync=in_sync, served_epoch=0, accepted=accepted)


_NONE = ReplicaSetRecord(0, "", frozenset())


def decode_record(stored: KeyValue | None) -> ReplicaSetRecord:
    """Return the record in a key of etcd; the inverse of `ReplicaSetRecord.encode`."""
    if stored is None:
        return _NONE
    record = replicas_pb2.ReplicaSet.FromString(stored.value)
    return ReplicaSetRecord(
        record.epoch,
        record.leader,
        frozenset(record.in_sync),
        record.served_epoch,
        tuple(record.accepted_losses),
        stored.mod_revision,
        record.min_in_sync,
    )


async def check_single_node(session: EtcdSession, service: str, name: str, node_id: str) -> None:
    """Return if a node may run without replicas: no other node of the set may be elected.

    Otherwise what it wrote would be dropped once it joins the others again, or what they wrote.
    Waits for etcd without a bound.

    Raises:
        ConfigError: another node may be elected.
    """
    logged = False
    while True:
        try:
            record = decode_record(await session.get(session.key("replicas", service, name)))
            break
        except NoQuorum as error:
            if not logged:
                log.warning("not known yet whether this node may run alone error=%s", error)
            logged = True
            await asyncio.sleep(0.5)
    others = sorted(record.in_sync - {node_id})
    if others:
        setting = f"BATON_{service.upper()}_REPLICAS"
        raise ConfigError(
            ConfigProblem(
                setting,
                f"{node_id} belongs to the replica set {name}, in which {', '.join(others)} may "
                f"be elected, so it must not run without {setting}; name the set there, or, if "
                f"the others are lost for good: baton cluster elect --service {service} --set "
                f"{name} {node_id} --accept-loss",
            )
        )


class ReplicaSetStore:
    """Reads and changes the record of one replica set, for one of its nodes.

    Args:
        election: Election of the set's leader, with this node as candidate.
        key: Key of the record.
        node_ids: Node ids of the set, by configuration.
        position: Returns the position of this node's copy.
        positions: Returns the positions of the nodes that are up and may found a set, by node id.
    """

    def __init__(
        self,
        election: Election,
        key: str,
        node_ids: frozenset[str],
        position: Callable[[], ReplicaPosition],
        positions: Callable[[], dict[str, ReplicaPosition]],
    ) -> None:
        self._election, self._session = election, election.session
        self.key, self._node_id, self.node_ids = key, election.node_id, node_ids
        self._position, self._positions = position, positions
        self._candidate: ReplicaSetRecord | None = None

    async def read(self) -> ReplicaSetRecord:
        """Return the record as etcd has it now.

        Raises:
            NoQuorum: etcd does not answer.
        """
        return decode_record(await self._session.get(self.key))

    async def candidacy(self) -> Candidacy | None:
        """Return what this node's election compares and writes; None if it may not be elected.

        If etcd has no record, the node with the greatest position founds the set, once all nodes
        are up and none of them runs without replicas: only then is it known which node has
        everything.

        Raises:
            NoQuorum: etcd does not answer.
        """
        before, own = await self.read(), self._position()
        in_sync = before.in_sync
        if not before.mod_revision:
            known = {**self._positions(), self._node_id: own}
            if known.keys() < self.node_ids or self._greatest(known) != self._node_id:
                return None
            in_sync = frozenset({self._node_id})
        if self._node_id not in in_sync or own.epoch < before.served_epoch:
            return None
        epoch = max(before.epoch, own.epoch) + 1
        self._candidate = replace(before, epoch=epoch, leader=self._node_id, in_sync=in_sync)
        return Candidacy(
            compare=(Compare(self.key, mod_revision=before.mod_revision),),
            put=(Put(self.key, self._candidate.encode()),),
        )

    def elected_record(self, revision: int) -> ReplicaSetRecord:
        """Return the record that the election has written.

        Args:
            revision: Revision of the election's transaction.
        """
        assert self._candidate is not None
        return replace(self._candidate, mod_revision=revision)

    async def change(self, before: ReplicaSetRecord, wanted: ReplicaSetRecord) -> ReplicaSetRecord:
        """Replace `before` by `wanted`, as the leader.

        Returns:
            The record in etcd now: `wanted`, or what an earlier call with unknown outcome wrote.

        Raises:
            NotLeader: this node no longer holds the election key.
            NoQuorum: not known whether the record was changed; call again.
        """
        revision = await self._session.txn(
            compare=[self._election.compare(), Compare(self.key, mod_revision=before.mod_revision)],
            put=[Put(self.key, wanted.encode())],
        )
        if revision is not None:
            return replace(wanted, mod_revision=revision)
        now = await self.read()
        if now.epoch != before.epoch or now.leader != self._node_id or not self._election.valid():
            raise NotLeader(f"{self._node_id} is no longer the leader")
        return now

    @staticmethod
    def _greatest(known: dict[str, ReplicaPosition]) -> str:
        return max(known, key=lambda name: (known[name], name))
