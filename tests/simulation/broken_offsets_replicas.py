"""Replica sets of offsets that leave out a rule of protocol section 12."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batonmq.errors import BatonError
from batonmq_server.offsets.core.change_log import ChangeLog, StoreChange
from batonmq_server.offsets.follower import Follower
from batonmq_server.offsets.persistence import change_log_of
from batonmq_server.offsets.replica import OffsetsReplica
from batonmq_server.runtime.election import Candidacy, Election
from batonmq_server.runtime.etcd.session import Compare, Lease, Put
from batonmq_server.runtime.replication.in_sync_set import InSyncSet
from batonmq_server.runtime.replication.in_sync_tracker import InSyncTracker
from batonmq_server.runtime.replication.position import ReplicaPosition
from batonmq_server.runtime.replication.replica_node import ReplicaNode
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, ReplicaSetStore


def ack_before_replicate(patch: pytest.MonkeyPatch) -> None:
    """A leader answers as soon as it has written a change to its own disk."""

    async def confirmed(*_: object) -> None:
        return

    patch.setattr(InSyncSet, "confirmed", confirmed)


def elect_out_of_sync(patch: pytest.MonkeyPatch) -> None:
    """Every running node may be elected, in sync or not."""

    async def candidacy(self: ReplicaSetStore) -> Candidacy | None:
        before = await self.read()
        return _candidacy(self, before, before.in_sync | {self._node_id})

    patch.setattr(ReplicaSetStore, "candidacy", candidacy)
    patch.setattr(ReplicaNode, "_lost_data", lambda *_: False)


def elect_a_lost_disk(patch: pytest.MonkeyPatch) -> None:
    """A member of the in-sync set may be elected even if it has lost its disk."""
    real = ReplicaSetStore.candidacy

    async def candidacy(self: ReplicaSetStore) -> Candidacy | None:
        before = await self.read()
        if self._node_id not in before.in_sync:
            return await real(self)
        return _candidacy(self, before, before.in_sync)

    patch.setattr(ReplicaSetStore, "candidacy", candidacy)
    patch.setattr(ReplicaNode, "_lost_data", lambda *_: False)


def _candidacy(
    replicas: ReplicaSetStore, before: ReplicaSetRecord, in_sync: frozenset[str]
) -> Candidacy:
    epoch = max(before.epoch, replicas._position().epoch) + 1
    name = replicas._node_id
    replicas._candidate = ReplicaSetRecord(epoch, name, in_sync, before.served_epoch)
    return Candidacy(
        compare=(Compare(replicas.key, mod_revision=before.mod_revision),),
        put=(Put(replicas.key, replicas._candidate.encode()),),
    )


def answer_without_lease(patch: pytest.MonkeyPatch) -> None:
    """A leader answers after its lease has expired, until etcd reports the expiry."""
    patch.setattr(OffsetsReplica, "check", lambda _: None)
    patch.setattr(OffsetsReplica, "check_still", lambda *_: None)


def histories_without_epochs(patch: pytest.MonkeyPatch) -> None:
    """Histories are compared by version only, not by epoch."""

    def contains(self: ChangeLog, position: ReplicaPosition) -> bool:
        return position.version <= self._version

    patch.setattr(ChangeLog, "contains", contains)


def adopt_a_lower_version(patch: pytest.MonkeyPatch) -> None:
    """A follower that loses its leader truncates its unconfirmed changes.

    Source: Kafka before KIP-101, whose followers truncated to the last position that was confirmed
    to them.
    """
    write, step = Follower._write, Follower._step
    befores: dict[Follower, list[tuple[bytes, bytes]]] = {}

    async def keep_before(self: Follower, changes: list[StoreChange]) -> None:
        if changes:
            befores[self] = list(self.disk.read())
        await write(self, changes)

    async def go_back(self: Follower) -> None:
        try:
            await step(self)
        except BatonError:
            async with self.writing:
                if self in befores:
                    before = befores.pop(self)
                    await self.disk.replace(before)
                    self.changes.replace_with(change_log_of(dict(before), kept_bytes_max=0))
            raise

    patch.setattr(Follower, "_write", keep_before)
    patch.setattr(Follower, "_step", go_back)


def shrink_before_etcd_knows(patch: pytest.MonkeyPatch) -> None:
    """A leader stops waiting for a removed follower before etcd has the smaller in-sync set."""
    real = InSyncSet._change

    async def change(self: InSyncSet, in_sync: frozenset[str]) -> None:
        self.tracker.set_in_sync(in_sync)
        self.tracker_changed()
        await real(self, in_sync)

    patch.setattr(InSyncSet, "_change", change)


def shrink_below_the_minimum(patch: pytest.MonkeyPatch) -> None:
    """Every late follower leaves the in-sync set, however few members remain."""
    patch.setattr(InSyncSet, "_leaving", lambda _, late, __: late)


def shrink_while_cut_off(patch: pytest.MonkeyPatch) -> None:
    """A leader that a majority can't reach removes these nodes, which alone could succeed it."""

    def leaving(self: InSyncSet, late: frozenset[str], members: frozenset[str]) -> frozenset[str]:
        return late if len(members - late) >= self.policy.min_in_sync else frozenset()

    patch.setattr(InSyncSet, "_leaving", leaving)


def stay_although_cut_off(patch: pytest.MonkeyPatch) -> None:
    """A leader that a majority can't reach leads on as long as it reaches etcd."""

    async def is_cut_off(*_: object) -> bool:
        return False

    patch.setattr(ReplicaNode, "_is_cut_off", is_cut_off)


def elect_a_drained_node(patch: pytest.MonkeyPatch) -> None:
    """A drained node may be elected again."""

    async def attempt(self: Election, lease: Lease, candidacy: Candidacy) -> int | None:
        vacant = Compare(self.key, create_revision=0)
        put = Put(self.key, self.node_id.encode(), lease)
        return await self.session.txn(
            compare=[vacant, *candidacy.compare], put=[put, *candidacy.put]
        )

    patch.setattr(Election, "_try", attempt)


def hand_over_to_no_node(patch: pytest.MonkeyPatch) -> None:
    """A drained leader resigns before a follower is in the in-sync set, and up."""

    def hands_over(self: ReplicaNode[Any], _: InSyncSet) -> bool:
        drained = self._node_id in self.election.drained
        if drained:
            self.election.resign()
        return drained

    patch.setattr(ReplicaNode, "_hands_over", hands_over)


def miss_a_drain(patch: pytest.MonkeyPatch) -> None:
    """A leader reads the marks when it is elected, and misses those that are written later."""
    patch.setattr(Election, "_note_drained", lambda *_: None)


def ignore_an_ended_lease(patch: pytest.MonkeyPatch) -> None:
    """A leader whose lease another node has ended continues to lead, as if etcd had renewed it."""
    real = Lease.refresh

    async def refresh(self: Lease) -> bool:
        await real(self)
        return True

    async def watch_own_key(_: Election) -> None:
        await asyncio.Event().wait()

    patch.setattr(Lease, "refresh", refresh)
    patch.setattr(Election, "_watch_own_key", watch_own_key)


def let_in_too_early(patch: pytest.MonkeyPatch) -> None:
    """A new leader regards nothing as confirmed, so every follower may join the in-sync set."""

    def await_joiners(self: InSyncTracker, names: frozenset[str], *_: int) -> None:
        self.awaited = frozenset(
            name for name in names - self.in_sync if self.position > self.lag(name)
        )
        self._confirm()

    patch.setattr(InSyncTracker, "await_joiners", await_joiners)
