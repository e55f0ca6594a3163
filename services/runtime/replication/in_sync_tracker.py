"""Positions of all replicas as the leader knows them: confirmed position, in-sync set, lag.

A position is any number that grows as the leader writes: a version, or bytes of a log. Pure: times
are arguments, decisions are results; a decision takes effect only once etcd has it.

Source: Kafka's in-sync replicas (high watermark, replica.lag.time.max.ms), where the watermark
also waits for followers outside the set that keep up: behind a leader that writes all the time such
a follower would never have everything. Deviation: the leader waits for a follower that joins from
the moment it decides so, before etcd has the change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Follower:
    """One follower, as the leader sees it.

    Attributes:
        position: It has everything up to here, durably.
        level_ms: At this time it had everything that the leader had at that time.
        goal: Position of the leader when the follower last reached its goal.
        goal_ms: Time at which `goal` was set.
        reached_ms: At this time it had received something from the leader, or lacked nothing.
        follows: It has reached a goal since it began or was reset.
    """

    position: int
    level_ms: int
    goal: int
    goal_ms: int
    reached_ms: int
    follows: bool = False


class InSyncTracker:
    """The positions of one leadership.

    Args:
        leader: Node id of the leader.
        in_sync: In-sync set in etcd when the leadership began.
        position: Durable position of the leader at that time.

    Attributes:
        in_sync: In-sync set in etcd.
        awaited: Followers outside the set that keep up; `confirmed` waits for them, so that they
            can join.
        joining: Followers that etcd was asked to add; `confirmed` waits for them until the
            outcome is known.
        position: Durable position of the leader.
        confirmed: Every replica of the in-sync set has everything up to here. Never goes back.
    """

    def __init__(self, leader: str, in_sync: frozenset[str], position: int, now_ms: int) -> None:
        assert leader in in_sync
        self.leader, self.in_sync, self.position = leader, in_sync, position
        self.awaited: frozenset[str] = frozenset()
        self.joining: frozenset[str] = frozenset()
        self.confirmed = position if in_sync == {leader} else 0
        self._first = position
        self._followers = {
            name: _Follower(0, now_ms, position, now_ms, now_ms)
            for name in in_sync
            if name != leader
        }

    def advance_leader(self, position: int) -> None:
        """Record that the leader has everything up to `position`, durably."""
        self.position = max(self.position, position)
        self._confirm()

    def acknowledge(self, name: str, position: int, now_ms: int) -> None:
        """Record that a follower has this leader's history up to `position`, durably."""
        follower = self._followers.get(name)
        if follower is None:
            follower = self._followers[name] = _Follower(0, now_ms, self.position, now_ms, now_ms)
        if position > follower.position or position >= self.position:
            follower.reached_ms = now_ms  # a report alone is not enough: answers may be lost
        follower.position = position
        if position >= self.position:
            follower.level_ms = now_ms
        elif position >= follower.goal:
            follower.level_ms = max(follower.level_ms, follower.goal_ms)
        if position >= follower.goal:
            follower.follows = True
            follower.goal, follower.goal_ms = self.position, now_ms
        self._confirm()

    def reset_follower(self, name: str) -> None:
        """Record that a follower starts anew: its earlier position is void."""
        follower = self._followers.get(name)
        if follower is not None:
            follower.position, follower.follows = 0, False

    def reach(self, name: str, now_ms: int) -> None:
        """Record that a follower receives the leader's answers, though its position is the same."""
        follower = self._followers.get(name)
        if follower is not None:
            follower.reached_ms = max(follower.reached_ms, now_ms)

    def silence_ms(self, name: str, now_ms: int) -> int | None:
        """Return the ms since an answer last reached a follower; None if it is unknown."""
        follower = self._followers.get(name)
        return now_ms - follower.reached_ms if follower is not None else None

    def lag(self, name: str) -> int:
        """Return how far a follower is behind the leader; an unknown follower lacks everything."""
        follower = self._followers.get(name)
        return self.position - (follower.position if follower is not None else 0)

    def lag_ms(self, name: str, now_ms: int) -> int:
        """Return the milliseconds since a follower last had everything; -1 if it is unknown.

        The value also grows while the follower does not report.
        """
        follower = self._followers.get(name)
        return now_ms - follower.level_ms if follower is not None else -1

    def count_with(self, position: int) -> int:
        """Return how many replicas of the in-sync set, leader included, reach `position`."""
        positions = (self._followers[name].position for name in self.in_sync if name != self.leader)
        return sum(at >= position for at in positions) + (self.position >= position)

    @property
    def followers(self) -> tuple[str, ...]:
        """Followers that have reported or are in the set; ascending."""
        return tuple(sorted(self._followers))

    def late(self, now_ms: int, lag_ms_max: int) -> frozenset[str]:
        """Return the followers of the set that have lacked something for over `lag_ms_max`."""
        return frozenset(
            name
            for name in (self.in_sync | self.joining) - {self.leader}
            if now_ms - self._followers[name].level_ms > lag_ms_max
        )

    def await_joiners(self, names: frozenset[str], now_ms: int, lag_ms_max: int) -> None:
        """From now on wait for those of `names` that keep up from outside the set.

        Such a follower has at least what this leader began with. What earlier leaders had
        confirmed is not known, but it is part of that.
        """
        self.awaited = frozenset(
            name
            for name, follower in self._followers.items()
            if name in names - self.in_sync
            and follower.follows
            and follower.position >= max(self._first, 1)
            and now_ms - follower.level_ms <= lag_ms_max
        )
        self._confirm()

    def ready_to_join(self) -> frozenset[str]:
        """Return the awaited followers that have everything confirmed, so that they can join."""
        return frozenset(
            name for name in self.awaited if self._followers[name].position >= self.confirmed
        )

    def start_joining(self, names: frozenset[str]) -> None:
        """Record that etcd is asked to add these; call `set_in_sync` with the outcome."""
        self.joining |= names

    def set_in_sync(self, in_sync: frozenset[str]) -> None:
        """Record the in-sync set that etcd has now."""
        assert self.leader in in_sync
        self.in_sync, self.joining = in_sync, frozenset()
        self.awaited -= in_sync
        self._confirm()

    def _confirm(self) -> None:
        needed = (self.in_sync | self.joining | self.awaited) - {self.leader}
        slowest = min((self._followers[name].position for name in needed), default=self.position)
        self.confirmed = max(self.confirmed, min(slowest, self.position))
