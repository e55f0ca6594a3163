"""Replica sets of storage that leave out a rule of protocol section 12."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.storage.v1 import replication_service_pb2 as replication_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._core import reader_choice
from batonmq_server.storage import node
from batonmq_server.storage.components import StorageComponents, build_components
from batonmq_server.storage.core.epochs import EpochHistory, common_point
from batonmq_server.storage.core.producers import ProducerTable
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.leadership import StorageLeadership
from batonmq_server.storage.log_follower import LogFollower
from batonmq_server.storage.replica import StorageReplica


def ack_before_replicate(patch: pytest.MonkeyPatch) -> None:
    """A leader sends a receipt as soon as the message is on its own disk."""

    async def reached(self: Flusher, position: int) -> None:
        self.check()
        if self._store.log.synced_position < position:
            await self.sync()

    patch.setattr(Flusher, "wait_until_safe", reached)


def compare_positions_only(patch: pytest.MonkeyPatch) -> None:
    """Two logs are regarded as equal up to the shorter end, whatever epochs wrote them."""

    def shorter(_: EpochHistory, one_end: int, __: EpochHistory, other_end: int) -> int:
        return min(one_end, other_end)

    patch.setattr("batonmq_server.storage.leadership.common_point", shorter)


def keep_the_longer_log(patch: pytest.MonkeyPatch) -> None:
    """A follower whose log is longer than that of the leader keeps its log."""

    def longer(one: EpochHistory, one_end: int, other: EpochHistory, other_end: int) -> int:
        return other_end if other_end > one_end else common_point(one, one_end, other, other_end)

    patch.setattr("batonmq_server.storage.leadership.common_point", longer)


def show_what_is_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    """A follower shows its whole log to readers, not only the confirmed part."""
    real = LogFollower._clear_damage

    async def clear_damage(
        self: LogFollower, components: StorageComponents, answer: replication_pb.FetchResponse
    ) -> None:
        components.flusher.confirmed(components.node.store.log.synced_position)
        await real(self, components, answer)

    patch.setattr(LogFollower, "_clear_damage", clear_damage)


def replicated_alone(patch: pytest.MonkeyPatch) -> None:
    """A receipt says REPLICATED even if the leader is the only member of the in-sync set."""
    real = StorageReplica.durability_of

    def reached(self: StorageReplica, next_position: int) -> pb.Durability.ValueType:
        durability = real(self, next_position)
        safe = durability == pb.DURABILITY_FSYNCED
        return pb.DURABILITY_REPLICATED if safe else durability

    patch.setattr(StorageReplica, "durability_of", reached)


def deliver_everywhere(patch: pytest.MonkeyPatch) -> None:
    """[two_delayers] Every node delivers due delayed messages, not only the leader."""

    def served(*args: Any) -> StorageComponents:
        components = build_components(*args)
        return replace(components, loops=(*components.loops, components.due.run))

    patch.setattr("batonmq_server.storage.app.build_components", served)
    patch.setattr(StorageReplica, "rejection", lambda *_: None)


def take_an_empty_copy_for_whole(patch: pytest.MonkeyPatch) -> None:
    """A node that has lost its disk is in sync again as soon as it has reached the last epoch."""
    real = node._recover_replica

    def recover_replica(attempt: node._Attempt, *, accept_loss: bool) -> EpochHistory:
        history = real(attempt, accept_loss=accept_loss)
        return history if history.starts else EpochHistory()

    patch.setattr(node, "_recover_replica", recover_replica)


def forget_the_producers(patch: pytest.MonkeyPatch) -> None:
    """A new leader starts without the producer sequences of the previous leader."""
    real = StorageLeadership.begin

    async def begin(self: StorageLeadership) -> None:
        self.components.node.store.producers = ProducerTable()
        await real(self)

    patch.setattr(StorageLeadership, "begin", begin)


def wait_at_a_cut_off_node(patch: pytest.MonkeyPatch) -> None:
    """A follower without a leader lets consumers wait, and consumers do not look up the leader."""

    def next_read_node(self: StorageReplica, behind_bytes: int) -> str:
        follower = self._follower
        connected = follower is not None and follower.is_connected()
        return "" if not self.is_follower or connected else self._settings.node_id

    patch.setattr(StorageReplica, "outdated", lambda _: None)
    patch.setattr(StorageReplica, "next_read_node", next_read_node)
    patch.setattr(reader_choice, "CHECK_MS", 10**9)


def answer_without_lease(patch: pytest.MonkeyPatch) -> None:
    """A leader answers after its lease has expired, until etcd reports the expiry."""
    patch.setattr(StorageReplica, "check", lambda _: None)
