"""One queue for tests of the rules: short calls on a real table, and restarts."""

from __future__ import annotations

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError
from batonmq_server.offsets.codec import (
    decode_progress,
    decode_reset,
    encode_progress,
    encode_reset,
)
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.ranges import EMPTY, RangeSet
from batonmq_server.offsets.core.resets import (
    QueueReset,
    ResetExecutor,
    ResetHistory,
    ResetOrder,
    ResetOutcome,
    ResetStep,
)
from batonmq_server.offsets.core.values import (
    Acks,
    AckState,
    AdvanceSettlement,
    CommitResult,
    DeliveryRange,
    DeliveryResult,
    FenceAttempt,
    FenceCondition,
    FenceGrant,
    Instant,
    ProgressSource,
    QueueLimits,
    Tombstone,
)

KEY = GroupQueue("readers", "news", "broker-a", 3)
A, B, C = (Incarnation(f"client-{name}", number) for number, name in enumerate("abc", 1))
CLOSED_OR_DRAINED, SAME_HOLDER = FenceCondition.CLOSED_OR_DRAINED, FenceCondition.SAME_HOLDER
IDLE, FORCED = FenceCondition.IDLE, FenceCondition.FORCED
UNIX_MS = 1_700_000_000_000


def offsets(*runs: tuple[int, int]) -> RangeSet:
    """Return the set of ascending half-open runs."""
    return RangeSet.merged(runs)


class Scene:
    """A table with term 7 announced, its clock, and the stored state of the queue."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self.limits = limits or QueueLimits()
        self.now_ms = 1_000_000
        self.table = ProgressTable(self.limits, 1, 7, self.now)
        self.stored: bytes | None = None
        self.stored_topic_id = 0
        self.stored_operations: dict[int, bytes] = {}
        self.resets = ResetExecutor(self.table, ResetHistory())
        self._attempts = 0

    @property
    def now(self) -> Instant:
        return Instant(self.now_ms, UNIX_MS + self.now_ms)

    @property
    def state(self) -> Progress | Tombstone:
        state = self.table.state(KEY)
        assert state is not None
        return state

    @property
    def queue(self) -> Progress:
        return self.table.query(KEY)

    def fence(
        self,
        holder: Incarnation | None,
        expected_token: int,
        condition: FenceCondition = CLOSED_OR_DRAINED,
        *,
        attempt: str = "",
        resume: RangeSet = EMPTY,
        reset_epoch: int = 0,
        idle_ms: int = 30_000,
        token_min: int = 0,
        initial_offset: int = 0,
        generation: int = 0,
        term: int = 7,
        observed: tuple[int, int] | None = None,
    ) -> FenceGrant:
        self._attempts += 1
        if observed is None and KEY in self.table:
            progress = self.table.query(KEY)
            observed = progress.delivered_offset, progress.reset_epoch
        observed_offset, observed_reset_epoch = observed or (0, 0)
        fence_attempt = FenceAttempt(
            attempt=attempt or f"attempt-{self._attempts}",
            expected_token=expected_token,
            condition=condition,
            holder=holder,
            resume=resume,
            reset_epoch=reset_epoch,
            idle_ms=idle_ms,
            token_min=token_min,
            initial_offset=initial_offset,
            subscription_generation=generation,
            forced_by="operator" if condition is FORCED else "",
            forced_reason="stuck" if condition is FORCED else "",
            observed_delivered_offset=observed_offset,
            observed_reset_epoch=observed_reset_epoch,
        )
        grant = self.table.fence(KEY, term, fence_attempt, self.now)
        self._store(grant.changed)
        return grant

    def fence_observed(
        self, holder: Incarnation | None, expected_token: int, observed: tuple[int, int]
    ) -> FenceGrant:
        """Fence with CLOSED_OR_DRAINED, as decided at this delivered offset and reset epoch."""
        return self.fence(holder, expected_token, observed=observed)

    def record(
        self,
        token: int,
        first_offset: int,
        next_offset: int,
        generation: int = 0,
        advance: tuple[int, int] = (0, 0),
    ) -> DeliveryResult:
        delivery = DeliveryRange(first_offset, next_offset, generation, *advance)
        delivered = self.table.record_delivered(KEY, token, delivery, self.now)
        self._store(delivered.changed)
        return delivered

    def settle(self, token: int, advance_id: int, sent_offset: int) -> None:
        self.table.settle_advance(KEY, token, AdvanceSettlement(advance_id, sent_offset))

    def touch(self, token: int) -> None:
        self.table.touch(KEY, token, self.now)

    def commit(
        self, token: int, committed: int = 0, acked: RangeSet = EMPTY, reset_epoch: int = 0
    ) -> CommitResult:
        acks = Acks(reset_epoch, committed, acked)
        result = self.table.commit(KEY, token, acks, self.now)
        self._store(result.changed)
        return result

    def commit_unowned(
        self, committed: int = 0, acked: RangeSet = EMPTY, reset_epoch: int = 0
    ) -> CommitResult:
        result = self.table.commit_unowned(KEY, Acks(reset_epoch, committed, acked), self.now)
        self._store(result.changed)
        return result

    def close(
        self,
        token: int,
        committed: int = 0,
        acked: RangeSet = EMPTY,
        unfinished: RangeSet = EMPTY,
        reset_epoch: int = 0,
    ) -> CommitResult:
        acks = Acks(reset_epoch, committed, acked)
        result = self.table.close(KEY, token, acks, unfinished, self.now)
        self._store(result.changed)
        return result

    def delete(self, topic_id: int) -> list[GroupQueue] | None:
        deletion = self.table.delete_topic(KEY.topic, topic_id, self.now)
        self.stored_topic_id = self.table.deleted_topic_id(KEY.topic)
        self._store(bool(deletion))
        return deletion

    def delete_group(self) -> list[GroupQueue]:
        deletion = self.table.delete_group(KEY.group, "", self.now)
        self._store(bool(deletion))
        return deletion

    def reset(self, to: int, op_id: str = "op", *, dry_run: bool = False) -> ResetStep | BatonError:
        order = ResetOrder(op_id, ProgressSource.RESET, "admin", "replay")
        targets = [QueueReset(KEY, AckState(to))]
        outcome = self.resets.reset(KEY.group, order, targets, self.now, dry_run=dry_run)
        (result,) = self.carried_out(outcome)
        return result

    def undo(self, undone: str, op_id: str = "undo") -> list[ResetStep | BatonError]:
        order = ResetOrder(op_id, ProgressSource.RESET, "admin", "a mistake", undone_op_id=undone)
        outcome = self.resets.undo(KEY.group, order, self.now, dry_run=False)
        return self.carried_out(outcome)

    def carried_out(self, outcome: ResetOutcome) -> list[ResetStep | BatonError]:
        """Return the results, after storing what must be durable."""
        if outcome.applied:
            assert outcome.slot is not None
            operation = self.resets.history.at(outcome.slot)
            assert operation is not None
            self.stored_operations[outcome.slot.slot] = encode_reset(operation)
            self._store(True)
        return outcome.results

    def restart(self) -> None:
        """Begin a new epoch from the stored state."""
        self.table = ProgressTable(self.limits, self.table.epoch + 1, self.table.term, self.now)
        if self.stored_topic_id:
            self.table.restore_topic(KEY.topic, self.stored_topic_id)
        if self.stored is not None:
            self.table.restore(KEY, decode_progress(KEY, self.stored))
        records = ResetHistory()
        for stored in self.stored_operations.values():
            records.put(KEY.group, decode_reset(stored))
        self.resets = ResetExecutor(self.table, records)

    def _store(self, changed: bool) -> None:
        if changed:
            self.stored = encode_progress(self.state)
