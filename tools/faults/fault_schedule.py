"""Draws faults for a cluster and its consumers; the same seed gives the same faults.

A fault names a part (the leader of `offsets`, some consumer), not a process: the run finds the
process when it injects the fault. The `ha` profile survives each group of faults if it is in sync
before: at most one node of each replica set fails, or several for a few seconds without damage to
their disks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

ETCD, GATEWAY, MEMBER, NETWORK = "etcd", "gateway", "member", "network"
LEASE_S = 30
PAST_LEASE_MS = 35_000
"""An owner that is paused for this long loses its queues."""

PROCESS = ("kill", "pause", "restart")
CUTS = ("isolate", "unplug", "mute", "deaf", "no etcd")
"""Cuts of one process: isolate: from all other services, while clients still reach it; unplug: from
all; mute: everything it sends is lost; deaf: everything sent to it is lost; no etcd: from etcd."""
SPLITS = ("halves", "bridge", "ring")
"""Splits of all services; clients reach all of them."""
DISK = ("slow sync", "failed sync", "full disk")
CLOCK = ("clock jump", "clock strobe")
BYTES = ("torn file", "flipped bit")
RUNNING_FLIP = "flipped bit, running"
"""A bit of a file is flipped while its process runs; then the process is killed and restarted."""
ONE_WAY = "one way"
"""Everything that one process sends to one other process is lost."""
TWO_STEPS = "two steps"
"""A leader is cut off from its replica set, not from etcd, and then dies."""
POWER = "power cut"
"""Processes end, and their disks lose everything that was not synced."""
EVERYTHING = "everything"
"""The part of a power cut that ends all services and etcd."""
OF_MEMBER = ("kill", "pause")
CUTS_OF_MEMBER = ("unplug", "brokers only", "no broker")
"""Cuts of a consumer: from everything; from lockmgr and nameserver; from storage."""
_AWAY_MS = 8_000
"""A node with a damaged disk stays down until its replica set has another leader."""
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one process, or of the network.

    Attributes:
        kind: One of the constants above.
        part: A replica set, `etcd`, `member`, `network` or `everything`; for a one-way cut the
            name of the sender, or `member`.
        rank: Selects the process of the part, modulo its size: 0 is the leader, the others follow
            by name; etcd and members are sorted by name only. For the network: the shuffle seed.
        hold_ms: Duration; ignored by a graceful restart.
        amount: Delay of a sync or error of a clock, in ms; for damaged files, the seed.
        target: For a one-way cut, the name of the receiver, or `member`; for a flipped bit, the
            kind of file (`KINDS` of file_damage.py), drawn if empty.
    """

    kind: str
    part: str
    rank: int
    hold_ms: int
    amount: int = 0
    target: str = ""


@dataclass(frozen=True, slots=True)
class FaultGroup:
    """Faults that are injected at once, and the pause after the cluster has healed."""

    faults: tuple[Fault, ...]
    rest_ms: int


@dataclass(slots=True)
class FaultSchedule:
    """Draws groups of faults.

    Attributes:
        sets: Replica sets with at least two nodes.
        cuts: Whether the network can be cut.
        gateways: Whether there are gateways. Each is killed, paused or restarted by itself.
    """

    random: Random
    sets: Sequence[str]
    cuts: bool
    gateways: bool = False

    def draw(self) -> FaultGroup:
        """Return the next group of faults."""
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
        if self.gateways:
            weights[self._gateway] = 4
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
        """Kill a consumer, pause it for a moment, or pause it until its lease expires."""
        long_pause = Fault("pause", MEMBER, self._any(), PAST_LEASE_MS)
        short_pause = Fault("pause", MEMBER, self._any(), self.random.randrange(500, 8_000))
        death = Fault("kill", MEMBER, self._any(), self.random.randrange(500, 5_000))
        return tuple(self.random.choices((death, short_pause, long_pause), weights=(3, 2, 1)))

    def _gateway(self) -> tuple[Fault, ...]:
        """Kill or restart a gateway, pause it for a moment, or until its lease expires."""
        kind = self.random.choice((*PROCESS, "kill"))
        hold_ms = self._while()
        if kind == "pause" and self.random.random() < 0.3:
            hold_ms = PAST_LEASE_MS
        return (Fault(kind, GATEWAY, self._any(), hold_ms),)

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
    """Return whether the fault needs a network that can be cut."""
    return fault.kind in (*CUTS, *SPLITS, *CUTS_OF_MEMBER, ONE_WAY, TWO_STEPS)
