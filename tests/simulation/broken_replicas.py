"""Replica sets of offsets that leave out a rule of protocol section 12."""

from __future__ import annotations

import pytest

from batonmq.errors import BatonError
from batonmq_server.offsets.core.change_log import ChangeLog, StoreChange
from batonmq_server.offsets.follower import Follower
from batonmq_server.offsets.persistence import change_log_of
from batonmq_server.offsets.role import Role
from batonmq_server.runtime.election import Candidacy
from batonmq_server.runtime.etcd import Compare, Put
from batonmq_server.runtime.insync import InSync
from batonmq_server.runtime.keeper import Keeper
from batonmq_server.runtime.member import Member
from batonmq_server.runtime.position import Position
from batonmq_server.runtime.replicas import ReplicaSet, Standing


def ack_before_replicate(patch: pytest.MonkeyPatch) -> None:
    """A leader answers once it has written a change itself."""

    async def confirmed(*_: object) -> None:
        return

    patch.setattr(Keeper, "confirmed", confirmed)


def elect_out_of_sync(patch: pytest.MonkeyPatch) -> None:
    """Whoever is up may be elected, in sync or not."""

    async def stand(self: ReplicaSet) -> Candidacy | None:
        before = await self.read()
        return _candidacy(self, before, before.in_sync | {self._node_id})

    patch.setattr(ReplicaSet, "stand", stand)
    patch.setattr(Member, "lacks", lambda *_: False)


def elect_a_lost_disk(patch: pytest.MonkeyPatch) -> None:
    """A member of the in-sync set may be elected, whatever has become of its disk."""
    real = ReplicaSet.stand

    async def stand(self: ReplicaSet) -> Candidacy | None:
        before = await self.read()
        if self._node_id not in before.in_sync:
            return await real(self)
        return _candidacy(self, before, before.in_sync)

    patch.setattr(ReplicaSet, "stand", stand)
    patch.setattr(Member, "lacks", lambda *_: False)


def _candidacy(replicas: ReplicaSet, before: Standing, in_sync: frozenset[str]) -> Candidacy:
    epoch = max(before.epoch, replicas._position().epoch) + 1
    name = replicas._node_id
    replicas._candidate = Standing(epoch, name, in_sync, before.served_epoch)
    return Candidacy(
        compare=(Compare(replicas.key, mod_revision=before.mod_revision),),
        put=(Put(replicas.key, replicas._candidate.encode()),),
    )


def answer_without_lease(patch: pytest.MonkeyPatch) -> None:
    """Who was elected answers until it hears that it is over."""
    patch.setattr(Role, "check", lambda _: None)
    patch.setattr(Role, "check_still", lambda *_: None)


def histories_without_epochs(patch: pytest.MonkeyPatch) -> None:
    """Versions are compared, and not the epochs that wrote them."""

    def contains(self: ChangeLog, position: Position) -> bool:
        return position.version <= self._version

    patch.setattr(ChangeLog, "contains", contains)


def adopt_a_lower_version(patch: pytest.MonkeyPatch) -> None:
    """A follower that loses its leader gives its last changes up: they may not be confirmed.

    Source: Kafka before KIP-101, whose followers truncated to what they knew to be confirmed.
    """
    write, step = Follower._write, Follower._step
    befores: dict[Follower, list[tuple[bytes, bytes]]] = {}

    async def keep_before(self: Follower, found: list[StoreChange]) -> None:
        if found:
            befores[self] = list(self.disk.read())
        await write(self, found)

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
    """Who falls out is not waited for any more, though it could still be elected."""
    real = Keeper._change

    async def change(self: Keeper, in_sync: frozenset[str]) -> None:
        self.books.settled(in_sync)
        self.looked_at()
        await real(self, in_sync)

    patch.setattr(Keeper, "_change", change)


def let_in_too_early(patch: pytest.MonkeyPatch) -> None:
    """A new leader takes nothing for confirmed, so whoever asks it has enough to come in."""

    def wait_for(self: InSync, names: frozenset[str], *_: int) -> None:
        self.awaited = frozenset(
            name for name in names - self.in_sync if self.position > self.lag(name)
        )
        self._confirm()

    patch.setattr(InSync, "wait_for", wait_for)
