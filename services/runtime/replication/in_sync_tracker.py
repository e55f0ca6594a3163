"""Which replicas have what: how far is confirmed, who falls out of the in-sync set, who comes in.

A position is any number that only grows as the leader writes: a version, or bytes of a log. Pure:
times come in as arguments, decisions go out; only etcd makes a decision true.

Source: Kafka's in-sync replicas (high watermark, replica.lag.time.max.ms), and that the watermark
waits for who keeps up from outside: with a leader that is busy all the time it would never have
everything. Deviation: one who comes in is waited for from the moment the leader wants it in, before
etcd says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Follower:
    """One follower, as the leader sees it.

    Attributes:
        position: Up to here it has everything, durably.
        level_ms: At this time it had all that the leader had at that time.
        goal: What the leader had when it was last heard of,
        goal_ms: and when that was.
        follows: It has reached a goal since it began.
    """

    position: int
    level_ms: int
    goal: int
    goal_ms: int
    follows: bool = False


class InSyncTracker:
    """The books of one leadership.

    Args:
        me: Node id of the leader.
        in_sync: By etcd, when the leadership began.
        position: Of the leader then: what it has durably.

    Attributes:
        in_sync: By etcd.
        awaited: Those that keep up from outside: waited for, so that they can come in.
        joining: Those that the leader has asked etcd to let in: waited for until it is settled.
        position: Of the leader.
        confirmed: Every member of the in-sync set has everything up to here. Never falls.
    """

    def __init__(self, me: str, in_sync: frozenset[str], position: int, now_ms: int) -> None:
        assert me in in_sync
        self.me, self.in_sync, self.position = me, in_sync, position
        self.awaited: frozenset[str] = frozenset()
        self.joining: frozenset[str] = frozenset()
        self.confirmed = position if in_sync == {me} else 0
        self._first = position
        self._followers = {
            name: _Follower(0, now_ms, position, now_ms) for name in in_sync if name != me
        }

    def wrote(self, position: int) -> None:
        """The leader has everything up to here, durably."""
        self.position = max(self.position, position)
        self._confirm()

    def heard(self, name: str, position: int, now_ms: int) -> None:
        """A follower says how far it has everything, durably, in this leader's history."""
        follower = self._followers.get(name)
        if follower is None:
            follower = self._followers[name] = _Follower(0, now_ms, self.position, now_ms)
        follower.position = position
        if position >= self.position:
            follower.level_ms = now_ms
        elif position >= follower.goal:
            follower.level_ms = max(follower.level_ms, follower.goal_ms)
        if position >= follower.goal:
            follower.follows = True
            follower.goal, follower.goal_ms = self.position, now_ms
        self._confirm()

    def forget(self, name: str) -> None:
        """A follower begins anew: what it had counts no more."""
        follower = self._followers.get(name)
        if follower is not None:
            follower.position, follower.follows = 0, False

    def lag(self, name: str) -> int:
        """How far a follower is behind the leader; all of it, if it was never heard of."""
        follower = self._followers.get(name)
        return self.position - (follower.position if follower is not None else 0)

    def lag_ms(self, name: str, now_ms: int) -> int:
        """For how long a follower has not had everything; a while after it was last heard of."""
        follower = self._followers.get(name)
        return now_ms - follower.level_ms if follower is not None else -1

    def holders(self, position: int) -> int:
        """How many members of the in-sync set, the leader included, have all up to `position`."""
        have = (self._followers[name].position for name in self.in_sync if name != self.me)
        return sum(at >= position for at in have) + (self.position >= position)

    @property
    def followers(self) -> tuple[str, ...]:
        """All followers that were heard of, or are in the set; ascending."""
        return tuple(sorted(self._followers))

    def late(self, now_ms: int, lag_ms_max: int) -> frozenset[str]:
        """Members that have not had everything for longer than that, or were not heard of."""
        return frozenset(
            name
            for name in (self.in_sync | self.joining) - {self.me}
            if now_ms - self._followers[name].level_ms > lag_ms_max
        )

    def wait_for(self, names: frozenset[str], now_ms: int, lag_ms_max: int) -> None:
        """Wait from now on for those of `names` that keep up from outside, and for no others.

        They have what this leader began with: what earlier ones had confirmed is not known, but
        that it is among it.
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

    def level(self) -> frozenset[str]:
        """Those waited for that could come in: they have all that is confirmed."""
        return frozenset(
            name for name in self.awaited if self._followers[name].position >= self.confirmed
        )

    def join(self, names: frozenset[str]) -> None:
        """Etcd is asked to let these in; tell `settled` what came of it."""
        self.joining |= names

    def settled(self, in_sync: frozenset[str]) -> None:
        """The set is this now, by etcd."""
        assert self.me in in_sync
        self.in_sync, self.joining = in_sync, frozenset()
        self.awaited -= in_sync
        self._confirm()

    def _confirm(self) -> None:
        needed = (self.in_sync | self.joining | self.awaited) - {self.me}
        slowest = min((self._followers[name].position for name in needed), default=self.position)
        self.confirmed = max(self.confirmed, min(slowest, self.position))
