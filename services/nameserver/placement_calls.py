"""Which offsets replica set keeps which group: chosen once, written to etcd, moved by an operator.

    places/<group>      nameserver.v1.StoredPlacement

A new group goes to the set with the highest score of a hash of both (rendezvous hashing). What
was chosen stands in etcd, so nobody computes it again: a set that is added gets new groups, and old
ones only by a move.
"""

from __future__ import annotations

import logging

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.keyed_queues import index_of_highest
from batonmq._core.names import check_group, check_offsets_set
from batonmq.errors import GroupMoving, OffsetsUnreachable, SetNotFound
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap, unchanged
from batonmq_server.nameserver.group_store import GroupStore, group_not_found
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Put
from batonmq_server.runtime.group_placements import (
    PLACEMENTS_PREFIX,
    GroupPlacement,
    GroupPlacements,
    decode_placement,
)

log = logging.getLogger(__name__)


class PlacementCalls:
    """Gives groups a place, and moves them.

    Args:
        store: Of the groups, to see whether there is one.
    """

    def __init__(
        self,
        etcd: EtcdSession,
        swap: CompareAndSwap,
        catalog: Catalog,
        places: GroupPlacements,
        store: GroupStore,
    ) -> None:
        self._etcd, self._swap, self._catalog = etcd, swap, catalog
        self._places, self._store = places, store

    async def locate(self, request: pb.LocateGroupRequest) -> pb.LocateGroupResponse:
        """See the proto."""
        group = check_group(request.group)
        self._catalog.check_ready()
        return pb.LocateGroupResponse(placement=_place_pb(await self.place(group)))

    async def place(self, group: str) -> GroupPlacement:
        """The place of a group; one that has none gets it.

        Raises:
            OffsetsUnreachable: it has none, and there is no set.
            NoQuorum: not known.
        """
        known = self._places.get(group)
        return known if known is not None else (await self._given(group))[0]

    async def place_if_possible(self, group: str) -> None:
        """As `place`, of a group that is about to be created; without a set it waits."""
        try:
            await self.place(group)
        except OffsetsUnreachable as error:
            log.info("group has no place yet group=%s why=%s", group, error)

    async def move(self, request: pb.MoveGroupRequest) -> pb.MoveGroupResponse:
        """See the proto."""
        group = check_group(request.group)
        wanted = check_offsets_set(request.to_set) if request.to_set else ""
        self._catalog.check_ready()
        if self._places.get(group) is None and await self._store.read(group) is None:
            raise group_not_found(group)

        async def attempt() -> tuple[GroupPlacement, GroupPlacement, int] | None:
            before, stored = await self._given(group)
            after = self._after(group, before, wanted)
            if after == before or request.dry_run:
                return before, after, 0
            key = PLACEMENTS_PREFIX + group
            revision = await self._etcd.txn(
                compare=[unchanged(key, stored)], put=[Put(key, after.encode())]
            )
            return (before, after, revision) if revision is not None else None

        before, after, revision = await self._swap.run(PLACEMENTS_PREFIX + group, attempt)
        if revision:
            await self._catalog.caught_up(places=revision)
            log.info(
                "group moves group=%s move=%d from=%s to=%s",
                group,
                after.move,
                after.from_set,
                after.offsets_set,
            )
        return pb.MoveGroupResponse(before=_place_pb(before), placement=_place_pb(after))

    def _after(self, group: str, before: GroupPlacement, wanted: str) -> GroupPlacement:
        """Where a group is after a move to `wanted`, or to where a new one would be.

        Raises:
            SetNotFound: there is no such set.
            GroupMoving: the last move is not finished.
        """
        known = sorted(self._places.registered())
        if wanted and wanted not in known:
            raise SetNotFound(
                f"no node of the offsets set {wanted} is registered",
                facts={"offsets_set": wanted, "known": ", ".join(known)},
            )
        to_set = wanted or self._chosen(group)
        if to_set == before.offsets_set:
            return before
        if before.from_set:
            raise GroupMoving(
                f"group {group} is on its way from {before.from_set} to {before.offsets_set}",
                retry_after_ms=200,
                facts={
                    "group": group,
                    "offsets_set": before.offsets_set,
                    "from_set": before.from_set,
                    "move": before.move,
                },
            )
        return GroupPlacement(to_set, before.move + 1, before.offsets_set)

    async def _given(self, group: str) -> tuple[GroupPlacement, KeyValue]:
        """The place as etcd has it now; one is chosen if there is none."""
        key = PLACEMENTS_PREFIX + group
        while True:
            stored = await self._etcd.get(key)
            if stored is not None:
                return decode_placement(stored), stored
            chosen = GroupPlacement(self._chosen(group))
            if await self._etcd.txn(
                compare=[unchanged(key, None)], put=[Put(key, chosen.encode())]
            ):
                log.info("group placed group=%s offsets_set=%s", group, chosen.offsets_set)

    def _chosen(self, group: str) -> str:
        """The set that a new group is given.

        Raises:
            OffsetsUnreachable: there is none.
        """
        known = sorted(self._places.registered())
        if not known:
            raise OffsetsUnreachable("no node of offsets is registered", retry_after_ms=500)
        return known[index_of_highest(group, known)]


def _place_pb(place: GroupPlacement) -> pb.Placement:
    return pb.Placement(offsets_set=place.offsets_set, move=place.move, from_set=place.from_set)
