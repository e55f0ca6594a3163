"""Placement of groups: which offsets replica set keeps which group.

    places/<group>      nameserver.v1.StoredPlacement

A new group goes to the set with the highest hash of group and set (rendezvous hashing). The choice
is written to etcd and never computed again, so an added set gets only new groups. An operator moves
the others. A group that does not exist is not placed by a question for its placement.
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
from batonmq_server.runtime.group_record import HEAD, record_key

log = logging.getLogger(__name__)

NOT_PLACED = -1
"""Number of moves of a group that does not exist and has no placement."""


class PlacementCalls:
    """Carries out LocateGroup and MoveGroup, and places new groups.

    Args:
        store: Used to find out whether a group exists.
    """

    def __init__(
        self,
        etcd: EtcdSession,
        swap: CompareAndSwap,
        catalog: Catalog,
        placements: GroupPlacements,
        store: GroupStore,
    ) -> None:
        self._etcd, self._swap, self._catalog = etcd, swap, catalog
        self._placements, self._store = placements, store

    async def locate(self, request: pb.LocateGroupRequest) -> pb.LocateGroupResponse:
        """See the proto."""
        group = check_group(request.group)
        self._catalog.check_ready()
        return pb.LocateGroupResponse(placement=_placement_to_pb(await self._located(group)))

    async def _located(self, group: str) -> GroupPlacement:
        """Return the placement of a group; of one that does not exist, the one that it would get.

        That is not written, because placements outlive their groups. Its move is -1, so any
        placement that is written is newer.

        Raises:
            OffsetsUnreachable, NoQuorum: as `place`.
        """
        known = self._placements.get(group)
        if known is not None:
            return known
        if group not in self._catalog.groups and not await self._is_known(group):
            return GroupPlacement(self._chosen_set(group), NOT_PLACED)
        return await self.place(group)

    async def _is_known(self, group: str) -> bool:
        """Return whether etcd has a record or a placement of the group."""
        for key in (PLACEMENTS_PREFIX + group, record_key(group, HEAD)):
            if await self._etcd.get(key) is not None:
                return True
        return False

    async def place(self, group: str) -> GroupPlacement:
        """Return the placement of a group; a group without placement gets one.

        Raises:
            OffsetsUnreachable: it has none, and no offsets node is registered.
            NoQuorum: etcd does not answer.
        """
        known = self._placements.get(group)
        return known if known is not None else (await self._placed(group))[0]

    async def place_if_possible(self, group: str) -> None:
        """Place a group that is to be created; it stays without placement if there is no set."""
        try:
            await self.place(group)
        except OffsetsUnreachable as error:
            log.info("group not placed yet group=%s error=%s", group, error)

    async def move(self, request: pb.MoveGroupRequest) -> pb.MoveGroupResponse:
        """See the proto."""
        group = check_group(request.group)
        to_set = check_offsets_set(request.to_set) if request.to_set else ""
        self._catalog.check_ready()
        if self._placements.get(group) is None and await self._store.read(group) is None:
            raise group_not_found(group)

        async def attempt() -> tuple[GroupPlacement, GroupPlacement, int] | None:
            before, stored = await self._placed(group)
            after = self._after(group, before, to_set)
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
                "group move written group=%s move=%d from=%s to=%s",
                group,
                after.move,
                after.from_set,
                after.offsets_set,
            )
        return pb.MoveGroupResponse(
            before=_placement_to_pb(before), placement=_placement_to_pb(after)
        )

    def _after(self, group: str, before: GroupPlacement, to_set: str) -> GroupPlacement:
        """Return the placement after a move to `to_set`; if empty, to the set for a new group.

        Raises:
            SetNotFound: no node of the set is registered.
            GroupMoving: the previous move is not finished.
        """
        known = sorted(self._placements.registered())
        if to_set and to_set not in known:
            raise SetNotFound(
                f"no node of the offsets set {to_set} is registered",
                facts={"offsets_set": to_set, "known": ", ".join(known)},
            )
        to_set = to_set or self._chosen_set(group)
        if to_set == before.offsets_set:
            return before
        if before.from_set:
            raise GroupMoving(
                f"group {group} is still moving from {before.from_set} to {before.offsets_set}",
                retry_after_ms=200,
                facts={
                    "group": group,
                    "offsets_set": before.offsets_set,
                    "from_set": before.from_set,
                    "move": before.move,
                },
            )
        return GroupPlacement(to_set, before.move + 1, before.offsets_set)

    async def _placed(self, group: str) -> tuple[GroupPlacement, KeyValue]:
        """Return the present placement in etcd; choose and write one if there is none."""
        key = PLACEMENTS_PREFIX + group
        while True:
            stored = await self._etcd.get(key)
            if stored is not None:
                return decode_placement(stored), stored
            chosen = GroupPlacement(self._chosen_set(group))
            if await self._etcd.txn(
                compare=[unchanged(key, None)], put=[Put(key, chosen.encode())]
            ):
                log.info("group placed group=%s offsets_set=%s", group, chosen.offsets_set)

    def _chosen_set(self, group: str) -> str:
        """Return the set for a new group.

        Raises:
            OffsetsUnreachable: no offsets node is registered.
        """
        known = sorted(self._placements.registered())
        if not known:
            raise OffsetsUnreachable("no offsets node is registered", retry_after_ms=500)
        return known[index_of_highest(group, known)]


def _placement_to_pb(placement: GroupPlacement) -> pb.Placement:
    return pb.Placement(
        offsets_set=placement.offsets_set, move=placement.move, from_set=placement.from_set
    )
