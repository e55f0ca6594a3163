"""Checks a replica set of offsets at every write to a disk or to etcd (section 12).

Each electable node has all confirmed changes; two copies at the same position are equal; no copy
goes back; only the leader answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.common.v1 import replicas_pb2
from batonmq.errors import BatonError, NoQuorum, NotLeader, NotServing
from batonmq_server.offsets.codec import META, unseal
from batonmq_server.offsets.core.change_log import HISTORY, POSITION, Entry
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.runtime.etcd.session import KeyValue
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition
from batonmq_server.testing.memory_disks import MemoryOffsetsDisk
from batonmq_server.testing.memory_network import MemoryCall
from tests.simulation.expected_state import ExpectedState

SET_KEY, LEADER_KEY = "replicas/offsets/offsets", "elections/offsets/offsets"
_SERVICE = "/baton.offsets.v1.OffsetsService/"


@dataclass(frozen=True, slots=True)
class CopyPosition:
    """The position that a copy reports.

    Attributes:
        history: Epoch and first version of every epoch that has written.
    """

    version: int
    history: tuple[tuple[int, int], ...]

    @staticmethod
    def of(entries: Mapping[bytes, bytes]) -> CopyPosition:
        """Read the position from the entries of a disk."""
        if META + POSITION not in entries:
            return CopyPosition(0, ())
        version, history = (
            unseal(META + name, entries[META + name]) for name in (POSITION, HISTORY)
        )
        parts = [part.partition(b":") for part in history.split()]
        return CopyPosition(int(version), tuple((int(part[0]), int(part[2])) for part in parts))

    @property
    def position(self) -> ReplicaPosition:
        """Its last change."""
        return ReplicaPosition(self.history[-1][0], self.version) if self.history else NO_POSITION

    def has(self, change: ReplicaPosition) -> bool:
        """Return whether the copy has that change."""
        if change.version > self.version:
            return False
        wrote = [epoch for epoch, first in self.history if first <= change.version]
        return max(wrote, default=0) == change.epoch


class OffsetsReplicaChecks:
    """Checks the disks of all nodes of the set, its keys in etcd, and its responses.

    Args:
        leader: Reads the leader from etcd; empty without one.

    Attributes:
        min_in_sync: The in-sync set never shrinks below this size.
        deposed: Returns whether the lease of a running leader was ended early: the leader may
            answer until etcd reports that. No confirmed change may be lost.
        drained: Returns whether a node is drained by etcd: then it must not be elected.
    """

    min_in_sync = 1
    deposed: Callable[[str], bool] = staticmethod(lambda _: False)
    drained: Callable[[str], bool] = staticmethod(lambda _: False)

    def __init__(self, expected: ExpectedState, leader: Callable[[], str]) -> None:
        self._expected, self._leader = expected, leader
        self._disks: dict[str, MemoryOffsetsDisk] = {}
        self._stands: dict[str, CopyPosition] = {}
        self._states: dict[ReplicaPosition, int] = {}
        self._standing = replicas_pb2.ReplicaSet()
        self._confirmed = NO_POSITION
        self._epochs: dict[int, int] = {}
        self._servers: dict[int, str] = {}

    # ---- copies

    def watch_disk(self, node: str, disk: MemoryOffsetsDisk) -> None:
        """Observe the writes of a node, starting with an empty disk."""
        self._disks[node], self._stands[node] = disk, CopyPosition(0, ())
        disk.on_write.append(partial(self._written, node, disk))

    def _written(self, node: str, disk: MemoryOffsetsDisk, _: Sequence[Entry]) -> None:
        if self._disks[node] is not disk:
            return  # it is lost
        before, now = self._stands[node], CopyPosition.of(disk.entries)
        self._stands[node] = now
        if now.position < before.position:
            self._fail(f"the copy of {node} goes back from {before.position} to {now.position}")
        state = hash(frozenset(disk.entries.items()))
        if self._states.setdefault(now.position, state) != state:
            self._fail(f"{node} and another copy stand at {now.position}, and are not alike")
        self._check_electable(f"{node} has written")

    def alike(self) -> bool:
        """Return whether every node is in sync and has the same bytes."""
        copies = [disk.entries for disk in self._disks.values()]
        in_sync = {*self._standing.in_sync} == self._disks.keys()
        return not copies or (in_sync and all(copy == copies[0] for copy in copies))

    def check_alike(self) -> None:
        """Check at the end of the run that all copies are equal."""
        if not self.alike():
            stands = {node: stand.position for node, stand in self._stands.items()}
            self._fail(f"copies are not alike in the end: {stands}, set {self._standing}")

    def may_lose(self, node: str) -> bool:
        """Return whether another node could be elected if the disk of `node` were lost."""
        return any(self._electable(other) for other in self._standing.in_sync if other != node)

    def all_electable(self, names: Sequence[str]) -> bool:
        """Return whether each of these nodes can be elected."""
        return set(names) <= {*self._standing.in_sync} and all(map(self._electable, names))

    # ---- leaderships

    @property
    def epoch(self) -> int:
        """Epoch of the set in etcd."""
        return self._standing.epoch

    def served_since(self, epoch: int, former: str) -> bool:
        """Return whether a node other than `former` has served in an epoch after `epoch`."""
        served = self._standing.served_epoch
        return self._servers.get(served, former) != former and served > epoch

    def opened(self, offsets: OffsetsEpoch) -> bool:
        """Check that a new leadership has all confirmed changes.

        Returns:
            Whether it is one.
        """
        node = self._node_of(offsets)
        if not node:
            return False
        self._expected.trace.note(node, f"serves epoch {offsets.table.epoch}")
        self._expected.counts["leaderships"] += 1
        self._confirm(node)
        return True

    def confirmed(self, offsets: OffsetsEpoch) -> None:
        """Check that the in-sync set has a write that has returned at the leader."""
        self._confirm(self._node_of(offsets))

    def _confirm(self, node: str) -> None:
        stand = self._stands[node]
        if stand.position.epoch >= self._confirmed.epoch and not stand.has(self._confirmed):
            self._fail(f"{node} serves from {stand.position}, and {self._confirmed} was confirmed")
        at = stand.position
        if self._epochs.setdefault(at.version, at.epoch) != at.epoch:
            self._fail(f"{node} confirms {at}, and epoch {self._epochs[at.version]} had it before")
        self._confirmed = max(self._confirmed, at)
        self._check_electable(f"{node} confirms {at}")

    def standing_written(self, stored: KeyValue) -> None:
        """Check a change of the in-sync set in etcd."""
        before, now = self._standing, replicas_pb2.ReplicaSet.FromString(stored.value)
        self._standing = now
        names = ",".join(now.in_sync)
        text = f"epoch {now.epoch} of {now.leader}, in sync {names}, served {now.served_epoch}"
        self._expected.trace.note("etcd", text)
        self._expected.counts["shrinks"] += len(now.in_sync) < len(before.in_sync)
        self._expected.counts["elections"] += now.epoch > before.epoch
        if now.epoch < before.epoch or now.served_epoch < before.served_epoch:
            self._fail(f"{text} after epoch {before.epoch}, served {before.served_epoch}")
        if now.epoch > before.epoch and self.drained(now.leader):
            self._expected.fail("drain", f"{text}, which is drained")
        if now.epoch == before.epoch and now.leader != before.leader:
            self._fail(f"{text}, and it was of {before.leader}")
        if len(now.in_sync) < min(self.min_in_sync, len(before.in_sync)):
            self._fail(f"{text}, which are too few: {self.min_in_sync} are required")
        if now.served_epoch > before.served_epoch:
            self._servers[now.served_epoch] = now.leader
        if now.leader not in now.in_sync:
            self._fail(f"{text}, and the leader is not")
        self._check_electable(text)

    def answered(self, call: MemoryCall, answer: Any) -> None:
        """Check that only the leader answers, and only until etcd elects another one."""
        if call.target not in self._disks or not call.path.startswith(_SERVICE):
            return
        if isinstance(answer, BatonError) and says_nothing(answer):
            return
        leader = self._leader()
        if leader != call.target and not self.deposed(call.target):
            text = f"{call.target} answers {call.method}, and the leader is {leader or 'none'}"
            self._expected.fail("section 8", text)

    def fail(self, text: str, rule: str = "section 12") -> None:
        """Report a violation that a fault of the scenario has found."""
        self._expected.fail(rule, text)

    def _check_electable(self, after: str) -> None:
        for node in self._standing.in_sync:
            stand = self._stands[node]
            served = stand.position.epoch >= self._standing.served_epoch
            if served and not stand.has(self._confirmed):
                self._fail(
                    f"{after}: {node} could be elected; it is at {stand.position} and lacks "
                    f"{self._confirmed}, which was confirmed"
                )

    def _electable(self, node: str) -> bool:
        stand = self._stands[node]
        return stand.position.epoch >= self._standing.served_epoch and stand.has(self._confirmed)

    def _node_of(self, offsets: OffsetsEpoch) -> str:
        return next((node for node, disk in self._disks.items() if disk is offsets.disk), "")

    def _fail(self, text: str) -> None:
        self._expected.fail("section 12", text)


def says_nothing(refusal: BatonError) -> bool:
    """Return whether an error reveals nothing of the node's data."""
    return isinstance(refusal, NotLeader | NotServing | NoQuorum) or refusal.kind in (
        "DEADLINE_EXCEEDED",
        "CANCELLED",
        "INVALID_ARGUMENT",
        "UNAVAILABLE",
    )
