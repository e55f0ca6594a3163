"""Progress of one queue of one group, and its rules (protocol 3, 4, 6.8, 9, 13).

Letters as in the protocol: T token, C committed, A acked above C, D delivered, M maybe-seen,
R reset epoch. Every method either raises and changes nothing, or completes. The caller makes the
changes durable; a result says by `changed` that there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batonmq._core.queues import Incarnation
from batonmq.errors import (
    AckCap,
    BeyondDelivered,
    DeliveryGap,
    FenceCause,
    Fenced,
    FencedDetail,
    NotHolder,
    NotIdle,
    Superseded,
    TokenMismatch,
    TokenMismatchDetail,
    Unacked,
)
from batonmq_server.offsets.core.delivery_reserve import DeliveryReserve
from batonmq_server.offsets.core.holds import (
    ACKED_RANGES_MAX,
    DeliveryReach,
    EndedToken,
    HoldEnd,
    TokenChange,
)
from batonmq_server.offsets.core.ranges import EMPTY, RangeSet
from batonmq_server.offsets.core.values import (
    Acks,
    AckState,
    Advance,
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
    ResetEffect,
)

_RUN_BYTES_MAX = 16
_ENDS = {
    FenceCondition.CLOSED_OR_DRAINED: HoldEnd.PASSED,
    FenceCondition.SAME_HOLDER: HoldEnd.RENEWED,
    FenceCondition.IDLE: HoldEnd.TIMED_OUT,
    FenceCondition.FORCED: HoldEnd.FORCED,
}


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of one queue.

    Attributes:
        token: T; 0 for a queue that was never fenced.
        holder: Incarnation to which T was issued; None after a reset or a fence without a holder.
        closed: The holder has closed T, or there is no holder.
        committed_offset: C; never in `acked`.
        acked: A, all above C.
        delivered_offset: D, not below C.
        delivered_reserved: Durable upper bound of D, not below D.
        delivered_known: Known lower bound of the true D; below D only after a restart or with an
            advance: end of what was recorded under T in this epoch, received by the holder, or
            acked under T.
        advance: Offsets that storage may deliver without another record; D includes them. In memory
            only.
        provable: Whether an inexact D may be replaced; not if deliveries may still arrive that
            another replica set recorded.
        reserve: Step by which `delivered_reserved` is ahead of an exact D; in memory only.
        closed_reach: End of the deliveries under T when T was closed, which sets D to C.
        token_change: Record of the change that issued T; None if T was issued before the restart.
        maybe_seen: M; disjoint from the acked and committed offsets.
        reset_epoch: R.
        first_reset_epoch: R when this progress began; greater than 0 if an earlier one was deleted.
        grant: Answer to the fence that issued T; None if a reset issued it.
        attempt: Id of the last fence.
        forced_by: Operator of the forced fence that issued T; empty if it was not forced.
        forced_reason: Reason of that operator.
        subscription_generation: Deliveries under T must name it; 0 accepts any.
        source: Last kind of change of the progress.
        last_call_monotonic_ms: Time of the last accepted call under T.
        waiting_at: Storage node at which the holder's long poll waits; in memory only.
        update_unix_ms: Wall clock of the last change that must be durable.
    """

    token: int = 0
    holder: Incarnation | None = None
    closed: bool = True
    committed_offset: int = 0
    acked: RangeSet = EMPTY
    delivered_offset: int = 0
    delivered_reserved: int = 0
    delivered_known: int = 0
    advance: Advance | None = None
    provable: bool = field(default=True, compare=False)
    reserve: DeliveryReserve = field(default=DeliveryReserve(), compare=False)
    closed_reach: DeliveryReach | None = None
    token_change: TokenChange | None = None
    maybe_seen: RangeSet = EMPTY
    reset_epoch: int = 0
    first_reset_epoch: int = 0
    grant: FenceGrant | None = None
    attempt: str = ""
    forced_by: str = ""
    forced_reason: str = ""
    subscription_generation: int = 0
    source: ProgressSource = ProgressSource.NOTHING
    last_call_monotonic_ms: int
    waiting_at: str = field(default="", compare=False)
    update_unix_ms: int = 0

    # ---- state

    @property
    def drained(self) -> bool:
        """Whether no message is in flight, and no advance is open."""
        return self.delivered_offset == self.committed_offset

    @property
    def exact(self) -> bool:
        """Whether D is the true end of the deliveries under T, not an upper bound of it."""
        return max(self.delivered_known, self.committed_offset) >= self.delivered_offset

    @property
    def delivered_without_advance(self) -> int:
        """D without the offsets of an advance that are not known to be delivered, for people."""
        if self.advance is None:
            return self.delivered_offset
        return max(self.delivered_known, self.committed_offset)

    def in_flight(self) -> RangeSet:
        """Return the offsets in flight: delivered under T and not acked, [C, D) minus A."""
        return RangeSet.of(self.committed_offset, self.delivered_offset).difference(self.acked)

    def in_flight_without_advance(self) -> RangeSet:
        """Return the offsets in flight, without those of an advance, for people."""
        delivered = RangeSet.of(self.committed_offset, self.delivered_without_advance)
        return delivered.difference(self.acked)

    def known_in_flight(self) -> RangeSet:
        """Return the offsets that are in flight even if no more than the known ones are."""
        known = min(self.delivered_offset, max(self.delivered_known, self.committed_offset))
        return RangeSet.of(self.committed_offset, known).difference(self.acked)

    def lowest_unacked(self) -> int | None:
        """Return the lowest offset in flight: C, as C is never acked; None if there is none."""
        in_flight = self.delivered_without_advance > self.committed_offset
        return self.committed_offset if in_flight else None

    @property
    def reach(self) -> DeliveryReach:
        """End of the deliveries under T, closed or not."""
        if self.closed_reach is not None:
            return self.closed_reach
        known = max(self.delivered_known, self.committed_offset)
        return DeliveryReach(known, self.delivered_offset)

    def idle_ms(self, now: Instant) -> int:
        """Return the time since the last accepted call under T, in milliseconds."""
        return now.monotonic_ms - self.last_call_monotonic_ms

    def ack_window_full(self, limits: QueueLimits) -> bool:
        """Return whether A has reached one of its limits (protocol 16, bounds)."""
        ranges = len(self.acked.runs)
        if ranges >= limits.ack_ranges_max:
            return True
        if ranges * _RUN_BYTES_MAX < limits.ack_bytes_max - _RUN_BYTES_MAX:
            return False
        return len(self.acked.encoded) >= limits.ack_bytes_max

    # ---- protocol 4

    def fence(self, attempt: FenceAttempt, now: Instant) -> FenceGrant:
        """Give the queue to `attempt.holder` if the token is as expected and the condition holds.

        Raises:
            Superseded: the attempt succeeded before, and a reset has raised the token since.
            TokenMismatch: T is not the expected one.
            Unacked, NotHolder, NotIdle: the condition does not hold.
        """
        if attempt.attempt == self.attempt:
            return self._repeated(attempt)
        if attempt.expected_token != self.token:
            raise TokenMismatch(
                f"the token is {self.token}, expected {attempt.expected_token}",
                detail=TokenMismatchDetail(
                    expected=attempt.expected_token, token=self.token, attempt=self.attempt
                ),
            )
        self._check_condition(attempt, now)
        ended = EndedToken(self.token, _ENDS[attempt.condition], self.reach)
        resumed = EMPTY
        if attempt.reset_epoch == self.reset_epoch:
            resumed = attempt.resume.at_or_above(self.committed_offset).difference(self.acked)
        same_holder = not self.closed and self._held_by(attempt.holder)
        if not self.closed:
            dropped = self.in_flight()
            if same_holder:
                dropped = dropped.difference(resumed)
            self.maybe_seen = self.maybe_seen.union(dropped)
        lowest = self.delivered_offset if same_holder else self.committed_offset
        self.delivered_offset = self.delivered_reserved = max(lowest, resumed.next_offset)
        kept = ended.reach.delivered_offset if same_holder else 0
        self.delivered_known, self.advance = max(kept, resumed.next_offset), None
        holder = attempt.holder
        self.holder = holder.known_as(self.holder) if holder is not None else None
        self.closed = holder is None
        self.forced_by, self.forced_reason = attempt.forced_by, attempt.forced_reason
        self.subscription_generation = attempt.subscription_generation
        self.token = max(self.token, attempt.token_min) + 1
        self.attempt, self.source = attempt.attempt, ProgressSource.FENCE
        self.grant = FenceGrant(
            self.token, self.committed_offset, self.acked, self.maybe_seen, self.reset_epoch
        )
        self.last_call_monotonic_ms, self.update_unix_ms = now
        self.waiting_at = ""
        self._record_token_change(ended, now)
        return self.grant

    def _repeated(self, attempt: FenceAttempt) -> FenceGrant:
        if self.grant is None:
            raise Superseded(
                f"attempt {attempt.attempt} succeeded before, but a reset has issued token "
                f"{self.token} since",
                facts={"token": self.token},
            )
        return self.grant._replace(changed=False)

    def _record_token_change(self, ended: EndedToken, now: Instant) -> None:
        self.closed_reach = None
        acked = RangeSet(self.acked.runs[:ACKED_RANGES_MAX])
        self.token_change = TokenChange(
            self.token, self.holder, now.unix_ms, self.committed_offset, acked, ended
        )

    def _held_by(self, incarnation: Incarnation | None) -> bool:
        return self.holder is not None and self.holder.matches(incarnation)

    def _check_condition(self, attempt: FenceAttempt, now: Instant) -> None:
        match attempt.condition:
            case FenceCondition.CLOSED_OR_DRAINED if not self.closed and not self.drained:
                unacked = self.in_flight_without_advance().count
                raise Unacked(
                    f"{unacked} delivered messages are not acked"
                    if unacked
                    else f"messages below offset {self.delivered_offset} may be on their way",
                    facts={"unacked": unacked, "lowest_offset": self.committed_offset},
                )
            case FenceCondition.CLOSED_OR_DRAINED if not self.closed and (
                (attempt.observed_delivered_offset, attempt.observed_reset_epoch)
                != (self.delivered_offset, self.reset_epoch)
            ):
                raise NotIdle(
                    f"the fence was decided at delivered offset "
                    f"{attempt.observed_delivered_offset} of reset epoch "
                    f"{attempt.observed_reset_epoch}; the queue is at {self.delivered_offset} of "
                    f"{self.reset_epoch}",
                    remedy="Query the queue and decide again.",
                    facts={
                        "observed": attempt.observed_delivered_offset,
                        "delivered": self.delivered_offset,
                    },
                )
            case FenceCondition.SAME_HOLDER if self.closed or not self._held_by(attempt.holder):
                raise NotHolder(
                    f"token {self.token} is closed"
                    if self.closed
                    else f"token {self.token} was issued to another incarnation"
                )
            case FenceCondition.IDLE if self.idle_ms(now) < attempt.idle_ms:
                raise NotIdle(
                    f"the last call of the holder was {self.idle_ms(now)} ms ago, "
                    f"the fence requires {attempt.idle_ms} ms",
                    retry_after_ms=attempt.idle_ms - self.idle_ms(now),
                    facts={"idle_ms": self.idle_ms(now)},
                )

    # ---- protocol 3, under the current token

    def check_caller(self, token: int, caller: int) -> None:
        """Return unless T was issued to an incarnation of another identity (protocol 3).

        A token from before access control has no identity and may be used by every caller.

        Args:
            caller: Owner number of the caller's identity; not 0.

        Raises:
            NotHolder: the caller has another identity than the holder.
        """
        if token != self.token or self.holder is None or self.holder.owner in (0, caller):
            return
        raise NotHolder(
            f"token {token} was issued to another identity",
            remedy="Acquire the queue: a token is valid only for the identity that acquired it.",
        )

    def record_delivered(
        self, token: int, delivery: DeliveryRange, limits: QueueLimits, now: Instant
    ) -> DeliveryResult:
        """Record a range that is about to be delivered (protocol 3, 6.3, 6.8).

        While the ack window is full, only offsets below the end of A may be delivered. They fill
        the gaps between the ranges of A; without them a new holder could never shrink A.

        Raises:
            Fenced: `token` is not T, or T is closed or of another subscription (protocol 14).
            DeliveryGap: an offset before the range is neither delivered nor acked.
            AckCap: the ack window is full.
        """
        self._check_open(token)
        first_offset, next_offset, generation, advance_id, advance_to = delivery
        if self.subscription_generation not in (0, generation):
            raise self._fenced(token, FenceCause.SUBSCRIPTION)
        expected = self.acked.first_missing(self.delivered_offset)
        if first_offset > expected:
            raise DeliveryGap(
                f"the delivery starts at {first_offset}, but offset {expected} is not delivered",
                facts={"first_offset": first_offset, "expected": expected},
            )
        changed = False
        if next_offset > self.delivered_offset:
            if next_offset > self.acked.next_offset and self.ack_window_full(limits):
                raise AckCap(
                    f"{len(self.acked.runs)} ranges are acked above offset "
                    f"{self.committed_offset}, which is not",
                    retry_after_ms=1_000,
                    facts={"ranges": len(self.acked.runs), "limit": limits.ack_ranges_max},
                )
            self.delivered_offset = next_offset
            changed = next_offset > self.delivered_reserved
            if changed:
                self.reserve = self.reserve.used_up(next_offset, now.monotonic_ms, limits.span_max)
                self.delivered_reserved = next_offset + self.reserve.step
                self.update_unix_ms = now.unix_ms
        self.delivered_known = max(self.delivered_known, next_offset)
        permitted = self._advance(advance_id, advance_to, limits)
        if self.delivered_offset > self.delivered_reserved:
            self.delivered_reserved, changed = self.delivered_offset, True
            self.update_unix_ms = now.unix_ms
        self.last_call_monotonic_ms, self.waiting_at = now.monotonic_ms, ""
        maybe_seen = self.maybe_seen.between(first_offset, max(next_offset, permitted))
        return DeliveryResult(maybe_seen, changed, permitted)

    def _advance(self, advance_id: int, end_offset: int, limits: QueueLimits) -> int:
        """Begin or extend an advance (protocol 6.8); return its end, 0 if there is none.

        A queue has one advance at a time. While D is inexact for another reason, none begins.
        """
        if self.advance is not None and self.advance.end_offset <= self.delivered_known:
            self.advance = None
        if self.advance is not None and self.advance.id != advance_id:
            return 0
        end_offset = min(end_offset, self.committed_offset + limits.span_max)
        if end_offset > self.delivered_known and not self.ack_window_full(limits):
            if self.advance is not None:
                end_offset = max(end_offset, self.advance.end_offset)
            elif not advance_id or not self.exact:
                return 0
            self.advance = Advance(advance_id, end_offset)
            self.delivered_offset = max(self.delivered_offset, end_offset)
        return self.advance.end_offset if self.advance is not None else 0

    def settle_advance(self, token: int, settlement: AdvanceSettlement) -> None:
        """Replace an advance by what was delivered in it (protocol 6.8).

        Another token or another advance: no effect. Storage delivers nothing in the advance after
        it has sent the settlement.
        """
        advance = self.advance
        if token != self.token or advance is None or advance.id != settlement.advance_id:
            return
        known = max(self.delivered_known, self.committed_offset, settlement.sent_offset)
        self.delivered_offset = self.delivered_known = known
        self.advance = None

    def note_received(self, token: int, received_offset: int) -> None:
        """Replace an inexact D by what the holder of T has received (protocol 6.8).

        What this epoch has recorded may be on its way to the holder, and counts as delivered.
        A statement under another token has no effect.

        Args:
            received_offset: As in `HolderPosition`, of this epoch.
        """
        if self._may_bound(token):
            self.delivered_offset = self.delivered_known = self._bounded(received_offset)

    def note_log_end(self, token: int, log_end: int) -> None:
        """Lower an inexact D to the end of the log (protocol 6.8); no effect for another token.

        Args:
            log_end: End of the log, read after the last delivery that an older epoch recorded.
        """
        if self._may_bound(token):
            self.delivered_offset = self._bounded(log_end)

    def _may_bound(self, token: int) -> bool:
        if token != self.token or self.closed or self.advance is not None:
            return False
        return self.provable and not self.exact

    def _bounded(self, end: int) -> int:
        return min(self.delivered_offset, max(end, self.delivered_known, self.committed_offset))

    def touch(self, token: int, now: Instant, waiting_at: str = "") -> None:
        """Record that a long poll of the holder is waiting (protocol 6.5).

        Raises:
            Fenced: `token` is not T, or T is closed.
        """
        self._check_open(token)
        self.last_call_monotonic_ms, self.waiting_at = now.monotonic_ms, waiting_at

    def commit(
        self, token: int, acks: Acks, now: Instant, source: ProgressSource = ProgressSource.COMMIT
    ) -> CommitResult:
        """Add `acks` to the acked offsets: a set union, so order and repetition do not matter.

        Raises:
            Fenced: token or reset epoch are not T and R, or T is closed.
            BeyondDelivered: a newly acked offset is not delivered.
        """
        self._check_open(token, acks.reset_epoch)
        new = self._new(acks)
        self._check_delivered(new)
        if new:
            self.delivered_known = max(self.delivered_known, new.next_offset)
            self._ack(new, now, source)
        self.last_call_monotonic_ms = now.monotonic_ms
        return CommitResult(self.committed_offset, bool(new))

    def commit_unowned(self, acks: Acks, now: Instant) -> CommitResult:
        """Add `acks` of a group without ownership: without token and deliveries (protocol 15).

        Raises:
            Fenced: the reset epoch is not R.
        """
        if acks.reset_epoch != self.reset_epoch:
            raise self._fenced(0, FenceCause.RESET)
        new = self._new(acks)
        if new:
            self._ack(new, now, ProgressSource.COMMIT)
        return CommitResult(self.committed_offset, bool(new))

    def close(self, token: int, acks: Acks, unfinished: RangeSet, now: Instant) -> CommitResult:
        """Close T: add `acks` as `commit` does, add `unfinished` to M, set D to C (protocol 9).

        Offsets in flight that are neither acked nor unfinished were never started: they are
        delivered again without the maybe-seen flag.

        Raises:
            Fenced: token or reset epoch are not T and R.
            BeyondDelivered: an offset is not delivered.
        """
        if token == self.token and self.closed:
            return CommitResult(self.committed_offset, False)
        self._check_open(token, acks.reset_epoch)
        new = self._new(acks)
        cut_off = unfinished.at_or_above(self.committed_offset)
        cut_off = cut_off.difference(self.acked).difference(new)
        self._check_delivered(new)
        self._check_delivered(cut_off)
        self._ack(new, now, ProgressSource.COMMIT)
        self.maybe_seen = self.maybe_seen.union(cut_off.at_or_above(self.committed_offset))
        self.closed_reach = self.reach
        self.delivered_offset = self.delivered_reserved = self.committed_offset
        self.closed, self.advance = True, None
        return CommitResult(self.committed_offset, True)

    # ---- protocol 13

    def reset(self, to: AckState, source: ProgressSource, now: Instant) -> ResetEffect:
        """Set the acked offsets to `to`, also while the queue has an owner; raise T and R.

        Calls under the old token or reset epoch are fenced. Every offset that was started under any
        earlier token lies below the greatest of C, D and the ends of A and M: those that `to` does
        not acknowledge become maybe-seen.
        """
        before = AckState(self.committed_offset, self.acked)
        ended = EndedToken(self.token, HoldEnd.RESET, self.reach)
        had, has = before.all_acked(), to.all_acked()
        started = max(self.delivered_offset, self.acked.next_offset, self.maybe_seen.next_offset)
        self.maybe_seen = RangeSet.of(to.committed_offset, started).difference(to.acked)
        self.committed_offset, self.acked = to
        self.delivered_offset = self.delivered_reserved = to.committed_offset
        self.delivered_known, self.advance = 0, None
        self.token += 1
        self.reset_epoch += 1
        self.holder, self.closed, self.grant = None, True, None
        self.forced_by = self.forced_reason = ""
        self.subscription_generation, self.source = 0, source
        self.last_call_monotonic_ms, self.update_unix_ms = now
        self._record_token_change(ended, now)
        replayed, skipped = had.difference(has).count, has.difference(had).count
        return ResetEffect(before, replayed, skipped, self.reset_epoch, self.token)

    def _check_open(self, token: int, reset_epoch: int | None = None) -> None:
        other_epoch = reset_epoch is not None and reset_epoch != self.reset_epoch
        if token == self.token and not self.closed and not other_epoch:
            return
        if other_epoch or self.grant is None:
            raise self._fenced(token, FenceCause.RESET)
        if token == self.token:
            raise self._fenced(token, FenceCause.CLOSED)
        raise self._fenced(token, FenceCause.FORCED if self.forced_by else FenceCause.TAKEN)

    def _fenced(self, token: int, why: FenceCause) -> Fenced:
        return Fenced(
            f"token {token} is fenced, the current one is {self.token} ({why.value})",
            detail=FencedDetail(
                token=token, current=self.token, reset_epoch=self.reset_epoch, why=why
            ),
        )

    def _new(self, acks: Acks) -> RangeSet:
        """Return the offsets of `acks` that are not acked yet."""
        acked = acks.acked
        if acks.committed_offset > self.committed_offset:
            acked = acked.union(RangeSet.of(self.committed_offset, acks.committed_offset))
        return acked.at_or_above(self.committed_offset).difference(self.acked)

    def _check_delivered(self, offsets: RangeSet) -> None:
        if offsets.next_offset > self.delivered_offset:
            offset = offsets.at_or_above(self.delivered_offset).runs[0][0]
            raise BeyondDelivered(
                f"offset {offset} is not delivered, only offsets below {self.delivered_offset} are",
                facts={"offset": offset, "delivered": self.delivered_offset},
            )

    def _ack(self, new: RangeSet, now: Instant, source: ProgressSource) -> None:
        acked = self.acked.union(new)
        self.committed_offset = acked.first_missing(self.committed_offset)
        self.acked = acked.at_or_above(self.committed_offset)
        self.maybe_seen = self.maybe_seen.difference(new)
        self.delivered_offset = max(self.delivered_offset, self.committed_offset)
        self.delivered_reserved = max(self.delivered_reserved, self.delivered_offset)
        if self.exact and self.reserve.step and not self.closed:
            # The write of the acks also brings the bound close to D again.
            self.reserve = self.reserve.shrunk(
                self.delivered_offset, now.monotonic_ms, self.reserve.step
            )
            self.delivered_reserved = self.delivered_offset + self.reserve.step
        self.source, self.update_unix_ms = source, now.unix_ms
