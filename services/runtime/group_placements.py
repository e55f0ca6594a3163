"""Group placements: which offsets replica set keeps which group, followed in etcd.

A placement says where a group belongs. Only the set itself knows whether it has the group and so
may answer (`batonmq_server.offsets.core.local_placements`): an outdated placement does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.nameserver.v1.stored_placement_pb2 import StoredPlacement
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import KeyValue

PLACEMENTS_PREFIX = "places/"
OFFSETS_SERVICE = "offsets"


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """The placement of one group.

    Attributes:
        offsets_set: The replica set that keeps the group.
        move: Number of moves of the group so far.
        from_set: The set that it moves from, until the move is finished; else empty.
        revision: Revision in etcd.
    """

    offsets_set: str
    move: int = 0
    from_set: str = ""
    revision: int = 0

    def encode(self) -> bytes:
        """Return the value that etcd stores."""
        return StoredPlacement(
            offsets_set=self.offsets_set, move=self.move, from_set=self.from_set
        ).SerializeToString()


def decode_placement(stored: KeyValue) -> GroupPlacement:
    """Return the placement in a key of etcd; the inverse of `GroupPlacement.encode`."""
    read = StoredPlacement.FromString(stored.value)
    return GroupPlacement(read.offsets_set, read.move, read.from_set, stored.mod_revision)


class GroupPlacements:
    """The placements by group.

    Args:
        mirror: Mirror of `PLACEMENTS_PREFIX`, which is run elsewhere.
        nodes: Mirror of the nodes, which is run elsewhere.
    """

    def __init__(self, mirror: EtcdMirror, nodes: EtcdMirror) -> None:
        self._mirror, self._nodes = mirror, nodes
        self._known: dict[str, GroupPlacement] = {}
        self._registered: tuple[int, frozenset[str]] = (-1, frozenset())

    async def ready(self) -> None:
        """Wait until the placements are read from etcd."""
        await self._mirror.ready()

    def get(self, group: str) -> GroupPlacement | None:
        """Return the last known placement of a group; None if it has none."""
        stored = self._mirror.values.get(group)
        if stored is None:
            return None
        known = self._known.get(group)
        if known is None or known.revision != stored.mod_revision:
            known = self._known[group] = decode_placement(stored)
        return known

    def set_of(self, group: str) -> str:
        """Return the set to call for a group; empty for any set.

        A group without a placement belongs to the set that is called first. A set that does not
        keep the group says so.
        """
        placement = self.get(group)
        if placement is not None:
            return placement.offsets_set
        registered = self.registered()
        return next(iter(registered)) if len(registered) == 1 else ""

    def registered(self) -> frozenset[str]:
        """Return the sets with a registered node."""
        revision, names = self._registered
        if revision != self._nodes.revision:
            nodes = (
                StoredNode.FromString(stored.value)
                for key, stored in self._nodes.values.items()
                if key.startswith(f"{OFFSETS_SERVICE}/")
            )
            names = frozenset(node.replica_set or node.node_id for node in nodes)
            self._registered = self._nodes.revision, names
        return names

    def sets(self) -> frozenset[str]:
        """Return every set that keeps a group or has a registered node."""
        names = set(self.registered())
        for group in self._mirror.values:
            placement = self.get(group)
            if placement is not None:
                names |= {placement.offsets_set, placement.from_set}
        return frozenset(names - {""})
