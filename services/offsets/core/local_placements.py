"""Which groups this replica set keeps: those that came here, and those that left.

A group that began here and never moved has no entry. One that has left is sealed: nothing about it
is answered any more, whatever anybody believes of where it is (see docs/replication.md). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from batonmq.errors import GroupMoved, GroupMovedDetail, InvalidArgument, NotServing, OldMove

ARRIVING_RETRY_MS = 100


class PlacementState(IntEnum):
    """What became of a group here; numbers as in the contract."""

    ARRIVING = 1
    HERE = 2
    GONE = 3
    FORGOTTEN = 4


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """A group that has come here, or left.

    Attributes:
        move: By which it came, or left.
        topic_ids: See `StoredHome`.
    """

    move: int
    state: PlacementState
    gone_to: str = ""
    topic_ids: Mapping[str, int] = field(default_factory=dict)


_KEPT = (PlacementState.ARRIVING, PlacementState.HERE)


class LocalPlacements:
    """The groups that have an entry."""

    def __init__(self) -> None:
        self._placements: dict[str, LocalPlacement] = {}

    def get(self, group: str) -> LocalPlacement | None:
        """The entry of a group."""
        return self._placements.get(group)

    def put(self, group: str, placement: LocalPlacement) -> None:
        """Note what has become of a group; it is durable, or about to be before anybody is told."""
        self._placements[group] = placement

    def keeps(self, group: str) -> bool:
        """Whether what is stored of a group counts here: it is neither on its way nor gone."""
        placement = self._placements.get(group)
        return placement is None or placement.state is PlacementState.HERE

    def topic_id(self, group: str, topic: str) -> int:
        """For which id the progress on a topic was last deleted where the group came from."""
        placement = self._placements.get(group)
        return placement.topic_ids.get(topic, 0) if placement is not None else 0

    def counts(self) -> tuple[int, int]:
        """How many groups are on their way here, and how many have gone."""
        # Scraped from another thread: list() of a dict's values is one step of the interpreter.
        states = [placement.state for placement in list(self._placements.values())]
        gone = states.count(PlacementState.GONE) + states.count(PlacementState.FORGOTTEN)
        return states.count(PlacementState.ARRIVING), gone

    def check(self, group: str) -> None:
        """Refuse a call about a group that is not here.

        Raises:
            GroupMoved: it has left.
            NotServing: it is on its way.
        """
        placement = self._placements.get(group)
        if placement is None or placement.state is PlacementState.HERE:
            return
        if placement.state is PlacementState.ARRIVING:
            raise arriving(group)
        raise moved(group, placement.gone_to, placement.move)

    def seal(self, group: str, move: int, to_set: str, topic_ids: Mapping[str, int]) -> bool:
        """Give a group up; False if this move has sealed it before.

        Args:
            topic_ids: As of now, of this set.

        Raises:
            OldMove: it came here, or left, by a later move, or there is nothing left of it.
            NotServing: it has not arrived yet.
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
        if placement is not None and placement.state is not PlacementState.HERE:
            raise arriving(group)
        ahead = placement.topic_ids if placement is not None else {}
        joined = {topic: max(ahead.get(topic, 0), one) for topic, one in topic_ids.items()}
        self._placements[group] = LocalPlacement(
            move, PlacementState.GONE, to_set, {**ahead, **joined}
        )
        return True

    def forget(self, group: str, move: int) -> bool:
        """Whether what was handed over by this move is to be removed; the seal stays.

        Raises:
            InvalidArgument: it was not handed over.
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
        if placement.move > move or placement.state is not PlacementState.GONE:
            return False
        self._placements[group] = LocalPlacement(move, PlacementState.FORGOTTEN, placement.gone_to)
        return True


def arriving(group: str) -> NotServing:
    """The refusal while a group is on its way here."""
    return NotServing(f"group {group} is on its way here", retry_after_ms=ARRIVING_RETRY_MS)


def moved(group: str, offsets_set: str, move: int) -> GroupMoved:
    """The refusal of a set that does not keep a group."""
    return GroupMoved(
        f"group {group} is kept by {offsets_set}",
        retry_after_ms=ARRIVING_RETRY_MS // 2,
        detail=GroupMovedDetail(group=group, offsets_set=offsets_set, move=move),
    )


def old_move(group: str, move: int, current: int) -> OldMove:
    """The refusal of a move that a later one has overtaken."""
    return OldMove(
        f"group {group} is moved by move {current}, not {move}",
        facts={"group": group, "move": move, "current": current},
    )
