"""Nodes of offsets that leave out a rule; names in brackets are those of protocol section 17."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.queue_acquirer import AcquiredQueue
from batonmq._core.queues import GroupQueue
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.ranges import EMPTY
from batonmq_server.offsets.core.values import Acks as TableAcks
from batonmq_server.offsets.core.values import (
    AckState,
    AdvanceSettlement,
    CommitResult,
    DeliveryResult,
    FenceAttempt,
    HolderPosition,
    Instant,
    ProgressSource,
    QueueLimits,
    ResetEffect,
)
from batonmq_server.offsets.core.values import DeliveryRange as TableDelivery
from batonmq_server.offsets.core.values import FenceGrant as TableGrant
from batonmq_server.offsets.group_commit import GroupCommit


def unconditional_fence(patch: pytest.MonkeyPatch) -> None:
    """[fence_uncond] Only lockmgr checks that the queue is drained; the fence does not."""
    patch.setattr(Progress, "_check_condition", lambda *_: None)


def fence_without_its_offset(patch: pytest.MonkeyPatch) -> None:
    """A fence of a drained queue passes though its owner has worked meanwhile (story 32)."""
    real = Progress._check_condition

    def check(self: Progress, wish: FenceAttempt, now: Instant) -> None:
        observed = replace(
            wish,
            observed_delivered_offset=self.delivered_offset,
            observed_reset_epoch=self.reset_epoch,
        )
        real(self, observed, now)

    patch.setattr(Progress, "_check_condition", check)


def answer_before_durable(patch: pytest.MonkeyPatch) -> None:
    """Fences, commits and closes are answered before they are durable."""

    async def settled(*_: object) -> None:
        return

    patch.setattr(GroupCommit, "wait_durable", settled)
    patch.setattr(GroupCommit, "wait_all_durable", settled)


def commit_without_token(patch: pytest.MonkeyPatch) -> None:
    """[commit_no_token] A commit counts with any token."""
    real = Progress.commit

    def commit(
        self: Progress, _: int, acks: TableAcks, now: Instant, source: ProgressSource
    ) -> CommitResult:
        return real(self, self.token, acks, now, source)

    patch.setattr(Progress, "commit", commit)


def pull_without_token(patch: pytest.MonkeyPatch) -> None:
    """[pull_no_token] A delivery counts with any token, also that of a long poll."""
    record, touch = Progress.record_delivered, Progress.touch

    def recorded(
        self: Progress, _: int, delivery: TableDelivery, limits: QueueLimits, now: Instant
    ) -> DeliveryResult:
        return record(self, self.token, delivery, limits, now)

    patch.setattr(Progress, "record_delivered", recorded)
    patch.setattr(
        Progress, "touch", lambda self, _, now, *more: touch(self, self.token, now, *more)
    )


def record_in_memory(patch: pytest.MonkeyPatch) -> None:
    """[record_not_durable] The delivered offset is not stored."""
    real = Progress.record_delivered

    def record(
        self: Progress, token: int, delivery: TableDelivery, limits: QueueLimits, now: Instant
    ) -> DeliveryResult:
        reserved = self.delivered_reserved
        delivered = real(self, token, delivery, limits, now)
        self.delivered_reserved = reserved
        return delivered._replace(changed=False)

    patch.setattr(Progress, "record_delivered", record)


def idle_untested(patch: pytest.MonkeyPatch) -> None:
    """An expired lease at the lock manager is enough: offsets does not check that calls ceased."""
    real = Progress._check_condition

    def check(self: Progress, wish: FenceAttempt, now: Instant) -> None:
        if wish.condition.value != "IDLE":
            real(self, wish, now)

    patch.setattr(Progress, "_check_condition", check)


def maybe_seen_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A fence does not record the messages in flight at the previous owner."""
    real = Progress.fence

    def fence(self: Progress, wish: FenceAttempt, now: Instant) -> TableGrant:
        before = self.maybe_seen
        grant = real(self, wish, now)
        if grant.changed:
            self.maybe_seen = before
            self.grant = grant = grant._replace(maybe_seen=before)
        return grant

    patch.setattr(Progress, "fence", fence)


def same_holder_without_flags(patch: pytest.MonkeyPatch) -> None:
    """A fence for the same holder does not record what the holder dropped (story 9)."""
    real = Progress.fence

    def fence(self: Progress, wish: FenceAttempt, now: Instant) -> TableGrant:
        before = self.maybe_seen
        same_holder = not self.closed and self.holder == wish.holder
        grant = real(self, wish, now)
        if grant.changed and same_holder:
            self.maybe_seen = before
            self.grant = grant = grant._replace(maybe_seen=before)
        return grant

    patch.setattr(Progress, "fence", fence)


def acked_ranges_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A new owner starts at the committed offset and repeats what is acked above it."""
    real = Progress.fence

    def fence(self: Progress, wish: FenceAttempt, now: Instant) -> TableGrant:
        self.acked = EMPTY
        return real(self, wish, now)

    patch.setattr(Progress, "fence", fence)


def reset_no_epoch(patch: pytest.MonkeyPatch) -> None:
    """[reset_no_epoch] A reset sets the offset, but does not fence the owner."""
    real = Progress.reset

    def reset(self: Progress, to: AckState, source: ProgressSource, now: Instant) -> ResetEffect:
        names = ("token", "reset_epoch", "holder", "closed", "grant", "delivered_offset")
        before = {name: getattr(self, name) for name in (*names, "delivered_reserved")}
        moved = real(self, to, source, now)
        for name, value in before.items():
            setattr(self, name, value)
        self.delivered_offset = max(self.delivered_offset, self.committed_offset)
        self.delivered_reserved = max(self.delivered_reserved, self.delivered_offset)
        return moved._replace(token=self.token, reset_epoch=self.reset_epoch)

    patch.setattr(Progress, "reset", reset)


def reset_no_resume_check(patch: pytest.MonkeyPatch) -> None:
    """[reset_no_resume_check] A reset fences, but acks from before the reset count after it.

    The epoch is not raised, and a client keeps its progress when it gets the error of the reset.
    """
    real_reset = Progress.reset

    def reset(self: Progress, to: AckState, source: ProgressSource, now: Instant) -> ResetEffect:
        reset_epoch = self.reset_epoch
        moved = real_reset(self, to, source, now)
        self.reset_epoch = reset_epoch
        return moved._replace(reset_epoch=reset_epoch)

    patch.setattr(Progress, "reset", reset)
    patch.setattr(AssignedQueue, "reset", AssignedQueue.fence)


def force_without_flags(patch: pytest.MonkeyPatch) -> None:
    """A forced release does not record the messages in flight at the owner."""
    real = Progress.fence

    def fence(self: Progress, wish: FenceAttempt, now: Instant) -> TableGrant:
        before = self.maybe_seen
        grant = real(self, wish, now)
        if grant.changed and wish.forced_by:
            self.maybe_seen = before
            self.grant = grant = grant._replace(maybe_seen=before)
        return grant

    patch.setattr(Progress, "fence", fence)


def riding_acks_without_token(patch: pytest.MonkeyPatch) -> None:
    """Acks within a pull count with any token."""
    real = Progress.commit

    def commit(
        self: Progress, token: int, acks: TableAcks, now: Instant, source: ProgressSource
    ) -> Any:
        return real(self, self.token if source is ProgressSource.PULL else token, acks, now, source)

    patch.setattr(Progress, "commit", commit)


def delivery_of_any_generation(patch: pytest.MonkeyPatch) -> None:
    """A delivery counts with any generation of the subscription.

    A client that waits for the subscription of its grant would hide this.
    """
    record, begin = Progress.record_delivered, AssignedQueue.begin

    def recorded(
        self: Progress, token: int, delivery: TableDelivery, limits: QueueLimits, now: Instant
    ) -> DeliveryResult:
        named = delivery._replace(subscription_generation=self.subscription_generation)
        return record(self, token, named, limits, now)

    def unbound(self: AssignedQueue, acquired: AcquiredQueue) -> None:
        assert acquired.lease is not None
        lease = replace(acquired.lease, bound_generation=0)
        begin(self, replace(acquired, lease=lease))

    patch.setattr(Progress, "record_delivered", recorded)
    patch.setattr(AssignedQueue, "begin", unbound)


def position_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    """[position_without_epoch] The position of a holder counts, whatever epoch it names."""

    def noted(self: ProgressTable, key: GroupQueue, token: int, position: HolderPosition) -> None:
        if key in self:
            self.query(key).note_received(token, position.received_offset)

    patch.setattr(ProgressTable, "note_received", noted)


def position_below_recorded(patch: pytest.MonkeyPatch) -> None:
    """A position counts although this epoch has recorded deliveries beyond it."""

    def noted(self: Progress, token: int, received_offset: int) -> None:
        if token == self.token and not self.closed and not self.drained:
            self.delivered_offset = max(self.committed_offset, received_offset)
            self.delivered_known = self.delivered_offset

    patch.setattr(Progress, "note_received", noted)


def advance_not_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Offsets permits an advance and does not count it as delivered."""
    real = Progress._advance

    def advance(self: Progress, advance_id: int, end_offset: int, limits: QueueLimits) -> int:
        delivered_offset = self.delivered_offset
        permitted = real(self, advance_id, end_offset, limits)
        self.delivered_offset = delivered_offset
        return permitted

    patch.setattr(Progress, "_advance", advance)


def settle_any_advance(patch: pytest.MonkeyPatch) -> None:
    """A settlement is accepted for whatever advance the queue has."""
    real = Progress.settle_advance

    def settle_advance(self: Progress, token: int, settlement: AdvanceSettlement) -> None:
        if self.advance is not None:
            settlement = settlement._replace(advance_id=self.advance.id)
        real(self, token, settlement)

    patch.setattr(Progress, "settle_advance", settle_advance)


def position_below_an_advance(patch: pytest.MonkeyPatch) -> None:
    """A position of the holder lowers D below an advance."""

    def may_bound(self: Progress, token: int) -> bool:
        return token == self.token and not self.closed and self.provable and not self.exact

    patch.setattr(Progress, "_may_bound", may_bound)
