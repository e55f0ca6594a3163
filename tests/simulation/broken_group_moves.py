"""Moves between sets of offsets that leave out a rule (docs/explanation/replication.md)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq.errors import NotServing
from batonmq_server.offsets.core.local_placements import (
    LocalPlacement,
    LocalPlacements,
    PlacementState,
)
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetHistory
from batonmq_server.offsets.group_exporter import GroupExporter
from batonmq_server.offsets.group_importer import GroupImporter
from batonmq_server.offsets.persistence import entries_of_group
from batonmq_server.offsets.placement_resolver import PlacementResolver
from batonmq_server.runtime.group_placements import GroupPlacement


def adopt_without_seal(patch: pytest.MonkeyPatch) -> None:
    """The old set exports the group and continues to serve it."""

    async def export(
        self: GroupExporter, group: str, move: int, to_set: str, after_key: bytes
    ) -> pb.ExportGroupResponse:
        del move, to_set, after_key
        await self._commits.wait_all_durable()
        entries = await entries_of_group(self._disk, group)
        answer = pb.ExportGroupResponse(
            last=True, term=self._table.term, topic_ids=self._table.topic_ids
        )
        for key, value in entries:
            answer.entries.add(key=key, value=value)
        return answer

    patch.setattr(GroupExporter, "export", export)
    patch.setattr(LocalPlacements, "forget", lambda *_: False)
    _stays_where_it_was(patch)


def serve_after_seal(patch: pytest.MonkeyPatch) -> None:
    """The old set is sealed on its disk, but still serves the group."""

    def check(self: LocalPlacements, group: str) -> None:
        home = self.get(group)
        if home is not None and home.state is PlacementState.ARRIVING:
            raise NotServing("it is on its way", retry_after_ms=100)

    patch.setattr(LocalPlacements, "check", check)
    patch.setattr(ProgressTable, "drop", lambda *_: None)
    patch.setattr(ResetHistory, "drop", lambda *_: None)


def _stays_where_it_was(patch: pytest.MonkeyPatch) -> None:
    """A set serves every group that it has, whatever the placement in etcd."""
    real = PlacementResolver.check

    def check(self: PlacementResolver, group: str, *, placed: bool = True) -> None:
        if not self._table.has(group):
            real(self, group, placed=placed)

    patch.setattr(PlacementResolver, "check", check)


def seal_by_a_lower_move(patch: pytest.MonkeyPatch) -> None:
    """A late call of an earlier move seals a group that has returned since."""

    def seal(
        self: LocalPlacements, group: str, move: int, to_set: str, topic_ids: Mapping[str, int]
    ) -> bool:
        self.put(group, LocalPlacement(move, PlacementState.GONE, to_set, dict(topic_ids)))
        return True

    patch.setattr(LocalPlacements, "seal", seal)


def adopt_a_lower_move(patch: pytest.MonkeyPatch) -> None:
    """A leader imports every group that its mirror of etcd assigns to it, also by an old move."""
    real = GroupImporter._move

    async def move(self: GroupImporter, group: str, place: GroupPlacement) -> None:
        home = self._table.placements.get(group)
        if home is not None and home.move >= place.move:
            self._table.placements.put(group, LocalPlacement(place.move, PlacementState.ARRIVING))
        await real(self, group, place)

    patch.setattr(GroupImporter, "_move", move)
