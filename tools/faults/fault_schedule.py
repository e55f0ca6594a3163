"""Draws what is done to a cluster and its consumers: the same from the same seed.

Victims are drawn as parts (the leader of `offsets`, some consumer); who plays a part at that moment
only the run knows. Each fault is one that the `ha` profile survives when it is whole: at most one
node of each replica set, or anything at all for a few seconds that leaves disks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

ETCD, MEMBER, NETWORK = "etcd", "member", "network"
LEASE_S = 30
PAST_LEASE_MS = 35_000
"""An owner that stands still for so long loses its queues."""

PROCESS = ("kill", "pause", "restart")
CUTS = ("isolate", "unplug", "mute", "deaf", "no etcd")
"""Of one process. From all other processes, while consumers and producers reach it; from all and
everybody; what it sends is lost; what is sent to it is lost; from etcd."""
SPLITS = ("halves", "bridge", "ring")
"""Of all processes; consumers and producers reach them all."""
DISK = ("slow sync", "failed sync", "full disk")
CLOCK = ("clock jump", "clock strobe")
BYTES = ("torn file", "flipped bit")
OF_MEMBER = ("kill", "pause")
CUTS_OF_MEMBER = ("unplug", "brokers only", "no broker")
"""From everything; from lockmgr and nameserver; from storage."""
_AWAY_MS = 8_000
"""Who comes back with a damaged disk stays away until it can't be elected with what it has."""
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to one process, or to the network.

    Attributes:
        kind: One of those above.
        part: A replica set, `etcd`, `member` or `network`.
        rank: Which process of the part: 0 the leader, then the others by name, and so on around;
            of etcd and of members, just by name. Of the network, how it is shuffled.
        hold_ms: It lasts so long; a restart in good order not longer than that takes.
        amount: Milliseconds by which a sync is slow or a clock is wrong; of damaged files, what is
            drawn.
    """

    kind: str
    part: str
    rank: int
    hold_ms: int
    amount: int = 0


@dataclass(frozen=True, slots=True)
class FaultGroup:
    """Strikes that are made at once, and the rest after the cluster has healed."""

    faults: tuple[Fault, ...]
    rest_ms: int


@dataclass(slots=True)
class FaultSchedule:
    """Draws faults.

    Attributes:
        sets: Replica sets that have somebody to take over.
        cuts: Whether the network can be cut.
    """

    random: Random
    sets: Sequence[str]
    cuts: bool

    def draw(self) -> FaultGroup:
        """The next fault."""
        weights = {
            self._one: 6,
            self._several: 4,
            self._etcd: 2,
            self._quorum: 2,
            self._member: 4,
            self._disk: 5,
            self._clock: 2,
            self._bytes: 3,
        }
        if self.cuts:
            weights |= {self._cut: 6, self._split: 3, self._cut_member: 2}
        pick = self.random.choices(list(weights), weights=list(weights.values()))[0]
        return FaultGroup(pick(), self.random.randrange(500, 3_000))

    def _one(self) -> tuple[Fault, ...]:
        return (self._process_fault(self.random.choice(self.sets)),)

    def _several(self) -> tuple[Fault, ...]:
        parts = self.random.sample([*self.sets, ETCD], self.random.randint(2, 3))
        return tuple(map(self._process_fault, parts))

    def _etcd(self) -> tuple[Fault, ...]:
        return (self._process_fault(ETCD),)

    def _quorum(self) -> tuple[Fault, ...]:
        hold_ms = self.random.randrange(3_000, 9_000)
        return tuple(
            Fault("pause", ETCD, rank, hold_ms) for rank in self.random.sample(range(3), 2)
        )

    def _member(self) -> tuple[Fault, ...]:
        """A consumer is killed, stumbles, or stands still until its queues are others'."""
        long_pause = Fault("pause", MEMBER, self._any(), PAST_LEASE_MS)
        stumble = Fault("pause", MEMBER, self._any(), self.random.randrange(500, 8_000))
        death = Fault("kill", MEMBER, self._any(), self.random.randrange(500, 5_000))
        return tuple(self.random.choices((death, stumble, long_pause), weights=(3, 2, 1)))

    def _cut(self) -> tuple[Fault, ...]:
        part = self.random.choice([*self.sets, ETCD])
        kinds = CUTS[:-1] if part == ETCD else CUTS
        return (Fault(self.random.choice(kinds), part, self._rank(), self._while()),)

    def _split(self) -> tuple[Fault, ...]:
        return (Fault(self.random.choice(SPLITS), NETWORK, self._any(), self._while()),)

    def _cut_member(self) -> tuple[Fault, ...]:
        hold_ms = self.random.choice((self._while(), PAST_LEASE_MS))
        return (Fault(self.random.choice(CUTS_OF_MEMBER), MEMBER, self._any(), hold_ms),)

    def _disk(self) -> tuple[Fault, ...]:
        slow_ms = self.random.choice((100, 500, 2_000, 5_000))
        part = self.random.choice(self._with_disk())
        kind = self.random.choices(DISK, weights=(3, 2, 2))[0]
        return (Fault(kind, part, self._rank(), self._while(), slow_ms),)

    def _clock(self) -> tuple[Fault, ...]:
        kind = self.random.choice(CLOCK)
        amounts = {"clock jump": (-_HOUR_MS, _HOUR_MS), "clock strobe": (100,)}
        part = self.random.choice(self.sets)
        return (Fault(kind, part, self._rank(), self._while(), self.random.choice(amounts[kind])),)

    def _bytes(self) -> tuple[Fault, ...]:
        part = self.random.choice(self._with_disk())
        hold_ms = self.random.randrange(_AWAY_MS, 12_000)
        draw = self.random.randrange(1 << 30)
        return (Fault(self.random.choice(BYTES), part, self._rank(), hold_ms, draw),)

    def _process_fault(self, part: str) -> Fault:
        return Fault(self.random.choice(PROCESS), part, self._rank(), self._while())

    def _with_disk(self) -> list[str]:
        return [part for part in self.sets if part.split()[0] in ("storage", "offsets")]

    def _rank(self) -> int:
        return self.random.choice((0, 0, 0, 1, 2))

    def _any(self) -> int:
        return self.random.randrange(12)

    def _while(self) -> int:
        return self.random.randrange(500, 12_000)


def is_cut(fault: Fault) -> bool:
    """Whether it is done to the network."""
    return fault.kind in (*CUTS, *SPLITS, *CUTS_OF_MEMBER)
