"""What a node can promise for what it writes, and who should read where: alone, or in a set."""

from __future__ import annotations

from typing import Protocol

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq.errors import BatonError
from batonmq_server.storage.core.store import Store


class NodeRole(Protocol):
    """See the module.

    Attributes:
        replicated: Whether others have to have what is written before anybody is told so.
    """

    replicated: bool

    @property
    def is_follower(self) -> bool:
        """Whether another node writes, or nobody."""
        ...

    def next_read_node(self, behind_bytes: int) -> str:
        """Node id from which somebody should pull next who is so far behind; empty: the leader."""
        ...

    def refusal(self, members_min: int = 1) -> BatonError | None:
        """Why nothing new may be written now that at least so many members are to have.

        Raises:
            NotLeader, NotServing: nothing at all may be said, as this node may not be the leader,
                or is about to be.
        """
        ...

    def durability_of(self, next_position: int) -> pb.Durability.ValueType:
        """How safe everything below `next_position` is now."""
        ...


class StandaloneRole(NodeRole):
    """A node without replicas."""

    replicated, is_follower = False, False

    def __init__(self, store: Store) -> None:
        self._store = store

    def next_read_node(self, behind_bytes: int) -> str:
        """See NodeRole."""
        return ""

    def refusal(self, members_min: int = 1) -> BatonError | None:
        """See NodeRole."""
        return None

    def durability_of(self, next_position: int) -> pb.Durability.ValueType:
        """See NodeRole."""
        synced = next_position <= self._store.log.synced_position
        return pb.DURABILITY_FSYNCED if synced else pb.DURABILITY_MEMORY
