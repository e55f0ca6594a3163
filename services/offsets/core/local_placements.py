"""The groups that have moved to this replica set, or away from it.

A group that began in this set and never moved has no entry. A group that has left is sealed: the
set answers no call about it, whatever its placement in etcd says (see
docs/explanation/replication.md). Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from batonmq.errors import GroupMoved, GroupMovedDetail, InvalidArgument, NotServing, OldMove

ARRIVING_RETRY_MS = 100


class PlacementState(IntEnum):
    """The state of a moved group in this replica set; numbers as in the proto."""

    ARRIVING = 1
    KEPT = 2
    GONE = 3
    FORGOTTEN = 4


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """The entry of a group that has moved to this replica set, or away from it.

    Attributes:
        move: Number of the move.
        gone_to: The set that the group has left for; empty while it is kept here.
        topic_ids: See `StoredLocalPlacement`.
    """

    move: int
    state: PlacementState
    gone_to: str = ""
    topic_ids: Mapping[str, int] = field(default_factory=dict)


_KEPT = (PlacementState.ARRIVING, PlacementState.KEPT)


class LocalPlacements:
    """The entries of the moved groups."""

    def __init__(self) -> None:
        self._placements: dict[str, LocalPlacement] = {}

    def get(self, group: str) -> LocalPlacement | None:
        """Return the entry of a group; None if it has not moved."""
        return self._placements.get(group)

    def put(self, group: str, placement: LocalPlacement) -> None:
        """Set the entry of a group; the caller makes it durable before it answers a call."""
        self._placements[group] = placement

    def keeps(self, group: str) -> bool:
        """Return whether this set keeps the group: it is neither arriving nor gone."""
        placement = self._placements.get(group)
        return placement is None or placement.state is PlacementState.KEPT

    def topic_id(self, group: str, topic: str) -> int:
        """Return the id for which the old set last deleted the progress on a topic; else 0."""
        placement = self._placements.get(group)
        return placement.topic_ids.get(topic, 0) if placement is not None else 0

    def counts(self) -> tuple[int, int]:
        """Return the number of groups that are arriving, and of those that are gone."""
        # Scraped in another thread: list() copies the values in one step of the interpreter.
        states = [placement.state for placement in list(self._placements.values())]
        gone = states.count(PlacementState.GONE) + states.count(PlacementState.FORGOTTEN)
        return states.count(PlacementState.ARRIVING), gone

    def check(self, group: str) -> None:
        """Return if the group has no entry, or is kept here.

        Raises:
            GroupMoved: the group has left.
            NotServing: the group is arriving.
        """
        placement = self._placements.get(group)
        if placement is None or placement.state is PlacementState.KEPT:
            return
        if placement.state is PlacementState.ARRIVING:
            raise arriving(group)
        raise moved(group, placement.gone_to, placement.move)

    def seal(self, group: str, move: int, to_set: str, topic_ids: Mapping[str, int]) -> bool:
        """Seal a group for a move; False if this move has sealed it before.

        Args:
            topic_ids: By topic, the id for which this set has last deleted its progress.

        Raises:
            OldMove: a later move has brought the group, or taken it, or the group is forgotten.
            NotServing: the group has not arrived yet.
        """
        placement = self._placements.get(group)
        if placement is not None and placement.move >= move:
            if (placement.move, placement.state, placement.gone_to) == (
                move,
                PlacementState.GONE,
                to_set,
            ):
                return False
            raise old_move(group, move, placement.move)
        if placement is not None and placement.state is not PlacementState.KEPT:
            raise arriving(group)
        ahead = placement.topic_ids if placement is not None else {}
        joined = {topic: max(ahead.get(topic, 0), one) for topic, one in topic_ids.items()}
        self._placements[group] = LocalPlacement(
            move, PlacementState.GONE, to_set, {**ahead, **joined}
        )
        return True

    def forget(self, group: str, move: int) -> bool:
        """Mark a sealed group as forgotten; return whether its entries must be removed, if any.

        Raises:
            InvalidArgument: the group was not handed over by this move.
        """
        placement = self._placements.get(group)
        if (
            placement is None
            or placement.move < move
            or (placement.move == move and placement.state in _KEPT)
        ):
            raise InvalidArgument(
                f"group {group} was not handed over by move {move}", facts={"field": "move"}
            )
        if placement.move > move:
            return False
        self._placements[group] = LocalPlacement(move, PlacementState.FORGOTTEN, placement.gone_to)
        return True


def arriving(group: str) -> NotServing:
    """Return the error for a call about a group that is being imported."""
    return NotServing(
        f"group {group} is being moved to this replica set", retry_after_ms=ARRIVING_RETRY_MS
    )


def moved(group: str, offsets_set: str, move: int) -> GroupMoved:
    """Return the error for a call about a group that another set keeps."""
    return GroupMoved(
        f"group {group} is kept by {offsets_set}",
        retry_after_ms=ARRIVING_RETRY_MS // 2,
        detail=GroupMovedDetail(group=group, offsets_set=offsets_set, move=move),
    )


def old_move(group: str, move: int, current: int) -> OldMove:
    """Return the error for a move that is older than the group's newest one."""
    return OldMove(
        f"move {move} of group {group} is old; the group's newest move is {current}",
        facts={"group": group, "move": move, "current": current},
    )
