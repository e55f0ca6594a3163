"""Moves between sets of offsets that leave out a rule (docs/replication.md)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq.errors import NotServing
from batonmq_server.offsets.arriving import Arriving
from batonmq_server.offsets.core.homes import Home, Homes, HomeState
from batonmq_server.offsets.core.resets import Records
from batonmq_server.offsets.core.table import ProgressTable
from batonmq_server.offsets.here import Here
from batonmq_server.offsets.leaving import Leaving
from batonmq_server.offsets.persistence import entries_of_group
from batonmq_server.runtime.group_placements import GroupPlacement


def adopt_without_seal(patch: pytest.MonkeyPatch) -> None:
    """The old set hands over what it has, and goes on."""

    async def hand_over(
        self: Leaving, group: str, move: int, to_set: str, after_key: bytes
    ) -> pb.HandOverResponse:
        del move, to_set, after_key
        await self._commits.settled_all()
        found = await entries_of_group(self._disk, group)
        answer = pb.HandOverResponse(
            last=True, term=self._table.term, topic_ids=self._table.topic_ids
        )
        for key, value in found:
            answer.entries.add(key=key, value=value)
        return answer

    patch.setattr(Leaving, "hand_over", hand_over)
    patch.setattr(Homes, "forget", lambda *_: False)
    _stays_where_it_was(patch)


def serve_after_seal(patch: pytest.MonkeyPatch) -> None:
    """The old set is sealed on its disk, and answers as before."""

    def check(self: Homes, group: str) -> None:
        home = self.get(group)
        if home is not None and home.state is HomeState.ARRIVING:
            raise NotServing("it is on its way", retry_after_ms=100)

    patch.setattr(Homes, "check", check)
    patch.setattr(ProgressTable, "drop", lambda *_: None)
    patch.setattr(Records, "drop", lambda *_: None)


def _stays_where_it_was(patch: pytest.MonkeyPatch) -> None:
    """A set goes on with a group that it has, whatever etcd says."""
    real = Here.check

    def check(self: Here, group: str) -> None:
        if not self._table.has(group):
            real(self, group)

    patch.setattr(Here, "check", check)


def seal_by_a_lower_move(patch: pytest.MonkeyPatch) -> None:
    """A late call of an earlier move seals a group that has come back since."""

    def seal(self: Homes, group: str, move: int, to_set: str, topic_ids: Mapping[str, int]) -> bool:
        self.put(group, Home(move, HomeState.GONE, to_set, dict(topic_ids)))
        return True

    patch.setattr(Homes, "seal", seal)


def adopt_a_lower_move(patch: pytest.MonkeyPatch) -> None:
    """A leader fetches whatever the copy of etcd says that it has, and opens what it has got."""
    real = Arriving._move

    async def move(self: Arriving, group: str, place: GroupPlacement) -> None:
        home = self._table.homes.get(group)
        if home is not None and home.move >= place.move:
            self._table.homes.put(group, Home(place.move, HomeState.ARRIVING))
        await real(self, group, place)

    patch.setattr(Arriving, "_move", move)
