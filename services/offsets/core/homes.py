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


class HomeState(IntEnum):
    """What became of a group here; numbers as in the contract."""

    ARRIVING = 1
    HERE = 2
    GONE = 3
    FORGOTTEN = 4


@dataclass(frozen=True, slots=True)
class Home:
    """A group that has come here, or left.

    Attributes:
        move: By which it came, or left.
        topic_ids: See `StoredHome`.
    """

    move: int
    state: HomeState
    gone_to: str = ""
    topic_ids: Mapping[str, int] = field(default_factory=dict)


_KEPT = (HomeState.ARRIVING, HomeState.HERE)


class Homes:
    """The groups that have an entry."""

    def __init__(self) -> None:
        self._homes: dict[str, Home] = {}

    def get(self, group: str) -> Home | None:
        """The entry of a group."""
        return self._homes.get(group)

    def put(self, group: str, home: Home) -> None:
        """Note what has become of a group; it is durable, or about to be before anybody is told."""
        self._homes[group] = home

    def keeps(self, group: str) -> bool:
        """Whether what is stored of a group counts here: it is neither on its way nor gone."""
        home = self._homes.get(group)
        return home is None or home.state is HomeState.HERE

    def topic_id(self, group: str, topic: str) -> int:
        """For which id the progress on a topic was last deleted where the group came from."""
        home = self._homes.get(group)
        return home.topic_ids.get(topic, 0) if home is not None else 0

    def counts(self) -> tuple[int, int]:
        """How many groups are on their way here, and how many have gone."""
        # Scraped from another thread: list() of a dict's values is one step of the interpreter.
        states = [home.state for home in list(self._homes.values())]
        gone = states.count(HomeState.GONE) + states.count(HomeState.FORGOTTEN)
        return states.count(HomeState.ARRIVING), gone

    def check(self, group: str) -> None:
        """Refuse a call about a group that is not here.

        Raises:
            GroupMoved: it has left.
            NotServing: it is on its way.
        """
        home = self._homes.get(group)
        if home is None or home.state is HomeState.HERE:
            return
        if home.state is HomeState.ARRIVING:
            raise arriving(group)
        raise moved(group, home.gone_to, home.move)

    def seal(self, group: str, move: int, to_set: str, topic_ids: Mapping[str, int]) -> bool:
        """Give a group up; False if this move has sealed it before.

        Args:
            topic_ids: As of now, of this set.

        Raises:
            OldMove: it came here, or left, by a later move, or there is nothing left of it.
            NotServing: it has not arrived yet.
        """
        home = self._homes.get(group)
        if home is not None and home.move >= move:
            if (home.move, home.state, home.gone_to) == (move, HomeState.GONE, to_set):
                return False
            raise old_move(group, move, home.move)
        if home is not None and home.state is not HomeState.HERE:
            raise arriving(group)
        ahead = home.topic_ids if home is not None else {}
        joined = {topic: max(ahead.get(topic, 0), one) for topic, one in topic_ids.items()}
        self._homes[group] = Home(move, HomeState.GONE, to_set, {**ahead, **joined})
        return True

    def forget(self, group: str, move: int) -> bool:
        """Whether what was handed over by this move is to be removed; the seal stays.

        Raises:
            InvalidArgument: it was not handed over.
        """
        home = self._homes.get(group)
        if home is None or home.move < move or (home.move == move and home.state in _KEPT):
            raise InvalidArgument(
                f"group {group} was not handed over by move {move}", facts={"field": "move"}
            )
        if home.move > move or home.state is not HomeState.GONE:
            return False
        self._homes[group] = Home(move, HomeState.FORGOTTEN, home.gone_to)
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
