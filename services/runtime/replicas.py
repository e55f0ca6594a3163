"""A node's part in a replica set: it stands for election when it may, and keeps the in-sync set.

`replicas/<service>/<set>` says who may be elected. A candidate takes the election key and raises
the epoch in one transaction that holds only if nobody has changed the set since it was read; a
leader changes the set only while the election key is its own. So at any time at most one node can
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
from batonmq_server.runtime.etcd import Compare, EtcdSession, Put, Stored
from batonmq_server.runtime.position import Position

log = logging.getLogger(__name__)

ACCEPTED_MAX = 16
"""Losses that are remembered."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A replica set as it stands in etcd: see the proto; `mod_revision` 0 if it does not."""

    epoch: int
    leader: str
    in_sync: frozenset[str]
    served_epoch: int = 0
    accepted: tuple[replicas_pb2.AcceptedLoss, ...] = ()
    mod_revision: int = 0

    def encode(self) -> bytes:
        """As etcd keeps it."""
        return replicas_pb2.ReplicaSet(
            epoch=self.epoch,
            leader=self.leader,
            in_sync=sorted(self.in_sync),
            served_epoch=self.served_epoch,
            accepted_losses=self.accepted,
        ).SerializeToString()

    def elected(self, loss: replicas_pb2.AcceptedLoss) -> Standing:
        """The set once an operator has accepted `loss`: its node alone may be elected.

        Nothing is known any more of what has to be there, so it need not have been served by.
        """
        accepted = (*self.accepted, loss)[-ACCEPTED_MAX:]
        in_sync = frozenset({loss.node_id})
        return replace(self, in_sync=in_sync, served_epoch=0, accepted=accepted)


_NONE = Standing(0, "", frozenset())


def decode(stored: Stored | None) -> Standing:
    """Inverse of `Standing.encode`."""
    if stored is None:
        return _NONE
    found = replicas_pb2.ReplicaSet.FromString(stored.value)
    return Standing(
        found.epoch,
        found.leader,
        frozenset(found.in_sync),
        found.served_epoch,
        tuple(found.accepted_losses),
        stored.mod_revision,
    )


async def check_alone(session: EtcdSession, service: str, name: str, node_id: str) -> None:
    """Let a node run without others only if no other one of the set could be elected.

    What it wrote would be given up once it joins them again, or the other way round. Waits for
    etcd as long as it takes.

    Raises:
        ConfigError: others could be.
    """
    told = False
    while True:
        try:
            standing = decode(await session.get(session.key("replicas", service, name)))
            break
        except NoQuorum as error:
            if not told:
                log.warning("whether this node may run alone is not known yet error=%s", error)
            told = True
            await asyncio.sleep(0.5)
    others = sorted(standing.in_sync - {node_id})
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


class ReplicaSet:
    """One replica set, seen by one of its nodes.

    Args:
        key: Of the set in etcd.
        members: Node ids that belong to it, by configuration.
        position: Of this node's own copy, at any moment.
        positions: Of the members that are up and may begin a set: node id to position.
    """

    def __init__(
        self,
        session: EtcdSession,
        key: str,
        node_id: str,
        members: frozenset[str],
        position: Callable[[], Position],
        positions: Callable[[], dict[str, Position]],
    ) -> None:
        self._session, self.key, self._node_id = session, key, node_id
        self.members = members
        self._position, self._positions = position, positions
        self._candidate: Standing | None = None

    async def read(self) -> Standing:
        """As it stands now.

        Raises:
            NoQuorum: etcd does not answer.
        """
        return decode(await self._session.get(self.key))

    async def stand(self) -> Candidacy | None:
        """How this node may be elected; None if it may not be at the moment.

        A set that does not stand in etcd, or no longer, is begun by the member with the greatest
        position, once all members are up, and none runs alone any more: nobody could say otherwise
        who has everything.

        Raises:
            NoQuorum: etcd does not answer.
        """
        before, own = await self.read(), self._position()
        in_sync = before.in_sync
        if not before.mod_revision:
            known = {**self._positions(), self._node_id: own}
            if known.keys() < self.members or self._greatest(known) != self._node_id:
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

    def won(self, revision: int) -> Standing:
        """The set as the election has made it.

        Args:
            revision: Of the transaction.
        """
        assert self._candidate is not None
        return replace(self._candidate, mod_revision=revision)

    async def change(self, election: Election, before: Standing, wanted: Standing) -> Standing:
        """Make the set `wanted`, as the leader.

        Returns:
            What it is now: perhaps what an earlier try, whose outcome was not known, has made it.

        Raises:
            NotLeader: the election key is no longer ours.
            NoQuorum: not known whether it is changed: call again.
        """
        revision = await self._session.txn(
            compare=[election.compare(), Compare(self.key, mod_revision=before.mod_revision)],
            put=[Put(self.key, wanted.encode())],
        )
        if revision is not None:
            return replace(wanted, mod_revision=revision)
        now = await self.read()
        if now.epoch != before.epoch or now.leader != self._node_id or not election.valid():
            raise NotLeader(f"{self._node_id} is not the leader any more")
        return now

    @staticmethod
    def _greatest(known: dict[str, Position]) -> str:
        return max(known, key=lambda name: (known[name], name))
