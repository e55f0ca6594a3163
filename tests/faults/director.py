"""Draws what is done to a cluster and its consumers: the same from the same seed.

Victims are drawn as parts (the leader of `offsets`, some consumer); who plays a part at that moment
only the run knows. Each fault is one that the `ha` profile survives when it is whole: at most one
node of each replica set, or a majority of etcd for a few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

ETCD = "etcd"
MEMBER = "member"
Kind = Literal["kill", "pause", "restart"]
_KINDS: tuple[Kind, ...] = ("kill", "pause", "restart")
_PAST_LEASE_MS = 35_000
"""An owner that stands still for so long loses its queues: its lease is 30 s."""


@dataclass(frozen=True, slots=True)
class Strike:
    """What is done to one process.

    Attributes:
        part: A replica set, `etcd` or `member`.
        rank: Which process of the part: 0 the leader, then the others by name, and so on around;
            of etcd and of members, just by name.
        hold_ms: It stays away so long; after a restart in good order not longer than that takes.
    """

    kind: Kind
    part: str
    rank: int
    hold_ms: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes that are made at once, and the rest after the cluster has healed."""

    strikes: tuple[Strike, ...]
    rest_ms: int


@dataclass(slots=True)
class Director:
    """Draws faults.

    Attributes:
        sets: Replica sets that have somebody to take over.
    """

    random: Random
    sets: Sequence[str]

    def draw(self) -> Fault:
        """The next fault."""
        pick = self.random.choices(
            (self._one, self._several, self._etcd, self._quorum, self._member),
            weights=(10, 4, 2, 2, 4),
        )[0]
        return Fault(pick(), self.random.randrange(500, 3_000))

    def _one(self) -> tuple[Strike, ...]:
        return (self._strike(self.random.choice(self.sets)),)

    def _several(self) -> tuple[Strike, ...]:
        parts = self.random.sample([*self.sets, ETCD], self.random.randint(2, 3))
        return tuple(map(self._strike, parts))

    def _etcd(self) -> tuple[Strike, ...]:
        return (self._strike(ETCD),)

    def _quorum(self) -> tuple[Strike, ...]:
        hold_ms = self.random.randrange(3_000, 9_000)
        return tuple(
            Strike("pause", ETCD, rank, hold_ms) for rank in self.random.sample(range(3), 2)
        )

    def _member(self) -> tuple[Strike, ...]:
        """A consumer is killed, stumbles, or stands still until its queues are others'."""
        long_pause = Strike("pause", MEMBER, self._rank(), _PAST_LEASE_MS)
        stumble = Strike("pause", MEMBER, self._rank(), self.random.randrange(500, 8_000))
        death = Strike("kill", MEMBER, self._rank(), self.random.randrange(500, 5_000))
        return tuple(self.random.choices((death, stumble, long_pause), weights=(3, 2, 1)))

    def _rank(self) -> int:
        return self.random.randrange(12)

    def _strike(self, part: str) -> Strike:
        return Strike(
            self.random.choice(_KINDS),
            part,
            self.random.choice((0, 0, 0, 1, 2)),
            self.random.randrange(500, 12_000),
        )
