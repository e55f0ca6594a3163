"""The role of a node towards its clients: accepted writes, durability, reads."""

from __future__ import annotations

from typing import Protocol

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq.errors import BatonError, DataLoss, NotLeader
from batonmq_server.storage.core.store import MessageStore


class NodeRole(Protocol):
    """The role of a node: standalone, leader or follower of its replica set.

    Attributes:
        replicated: Whether a receipt waits for the other members of a replica set.
    """

    replicated: bool

    @property
    def is_follower(self) -> bool:
        """Whether this node is not the serving leader."""
        ...

    def next_read_node(self, behind_bytes: int) -> str:
        """Return the node id that a consumer with this lag should pull from; empty: the leader.

        A node names itself only while it is a current member of its set: see `outdated`.
        """
        ...

    def outdated(self) -> NotLeader | None:
        """Return why this node may lack messages that the set has, without a bound in time.

        Such a node is a follower that can't prove that it is a current member of its set. It
        serves the messages that it has. To a reader that has read all of them it returns this
        error, so that the reader looks the leader up. None if this node is current.
        """
        ...

    @property
    def has_confirmed(self) -> bool:
        """Whether this copy has all that the in-sync set has, by a recent answer of the leader."""
        ...

    def leader_age_ms(self) -> int:
        """Return how long ago etcd confirmed that this node leads, at most; 0 without replicas.

        Raises:
            NotLeader: this node is not the leader.
        """
        ...

    def rejection(self, members_min: int = 1) -> BatonError | None:
        """Return why new messages are rejected now; None if they are accepted.

        Args:
            members_min: Minimum size of the in-sync set for these messages.

        Raises:
            NotLeader: this node is not the leader.
            NotServing: this node has just been elected and does not serve yet.
        """
        ...

    def durability_of(self, next_position: int) -> pb.Durability.ValueType:
        """Return the durability that everything below `next_position` has now."""
        ...

    def leaves_to_others(self, lost: DataLoss) -> bool:
        """Return whether another replica has a batch that this leader can't read.

        If so, this node resigns and repairs its copy, and the next leader has the batch. So the
        caller must not give it up.

        Raises:
            NotLeader, NoQuorum: this node is not the leader.
        """
        ...


class StandaloneRole(NodeRole):
    """The role of a node without replicas."""

    replicated, is_follower, has_confirmed = False, False, True

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def next_read_node(self, behind_bytes: int) -> str:
        """See NodeRole."""
        return ""

    def outdated(self) -> NotLeader | None:
        """See NodeRole."""
        return None

    def leader_age_ms(self) -> int:
        """See NodeRole."""
        return 0

    def rejection(self, members_min: int = 1) -> BatonError | None:
        """See NodeRole."""
        return None

    def durability_of(self, next_position: int) -> pb.Durability.ValueType:
        """See NodeRole."""
        synced = next_position <= self._store.log.synced_position
        return pb.DURABILITY_FSYNCED if synced else pb.DURABILITY_MEMORY

    def leaves_to_others(self, lost: DataLoss) -> bool:
        """See NodeRole."""
        return False
