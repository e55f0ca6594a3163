"""Which offsets replica set keeps which group: a live copy of the places in etcd.

A place says where a group is to be. Whether a set has it, and so may answer, only the set itself
knows (`batonmq_server.offsets.core.local_placements`): so a place that is out of date does no harm.
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
    """Where a group is kept.

    Attributes:
        move: Rises by one with every move; 0 for a group that is where it began.
        from_set: The set it comes from, until the move is finished; else empty.
        revision: In etcd.
    """

    offsets_set: str
    move: int = 0
    from_set: str = ""
    revision: int = 0

    def encode(self) -> bytes:
        """As it stands in etcd."""
        return StoredPlacement(
            offsets_set=self.offsets_set, move=self.move, from_set=self.from_set
        ).SerializeToString()


def decode_placement(stored: KeyValue) -> GroupPlacement:
    """Inverse of `GroupPlacement.encode`."""
    read = StoredPlacement.FromString(stored.value)
    return GroupPlacement(read.offsets_set, read.move, read.from_set, stored.mod_revision)


class GroupPlacements:
    """The places by group.

    Args:
        mirror: Of `PLACEMENTS_PREFIX`, run by somebody else.
        nodes: Mirror of the nodes, likewise.
    """

    def __init__(self, mirror: EtcdMirror, nodes: EtcdMirror) -> None:
        self._mirror, self._nodes = mirror, nodes
        self._known: dict[str, GroupPlacement] = {}
        self._registered: tuple[int, frozenset[str]] = (-1, frozenset())

    async def ready(self) -> None:
        """Until everything that is in etcd is here."""
        await self._mirror.ready()

    def get(self, group: str) -> GroupPlacement | None:
        """The place as it is here; None if the group has none that is known."""
        stored = self._mirror.values.get(group)
        if stored is None:
            return None
        known = self._known.get(group)
        if known is None or known.revision != stored.mod_revision:
            known = self._known[group] = decode_placement(stored)
        return known

    def set_of(self, group: str) -> str:
        """The set to be asked about a group; empty for any.

        A group without a place belongs to the set that is asked first. If it is the wrong one after
        all, it says so.
        """
        place = self.get(group)
        if place is not None:
            return place.offsets_set
        registered = self.registered()
        return next(iter(registered)) if len(registered) == 1 else ""

    def registered(self) -> frozenset[str]:
        """The sets of which a node is up."""
        revision, found = self._registered
        if revision != self._nodes.revision:
            nodes = (
                StoredNode.FromString(stored.value)
                for key, stored in self._nodes.values.items()
                if key.startswith(f"{OFFSETS_SERVICE}/")
            )
            found = frozenset(node.replica_set or node.node_id for node in nodes)
            self._registered = self._nodes.revision, found
        return found

    def sets(self) -> frozenset[str]:
        """Every set that keeps a group, or is up."""
        found = set(self.registered())
        for group in self._mirror.values:
            place = self.get(group)
            if place is not None:
                found |= {place.offsets_set, place.from_set}
        return frozenset(found - {""})
