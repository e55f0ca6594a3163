"""Progress of one queue of one group, and the rules that move it (protocol 3, 4, 6.8, 9, 13).

Words as in the protocol: T token, C committed, A acked above C, D delivered, M maybe-seen,
R reset epoch. Every method either raises and has changed nothing, or has done all of its work.
Whether and when a change becomes durable is not known here, only that it must be (`changed`).
"""

from __future__ import annotations

from dataclasses import dataclass

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
        holder: Whom T was issued to; None after a reset or a fence to nobody.
        closed: The holder has declared T finished, or there is none.
        committed_offset: C; never in `acked`.
        acked: A, all above C.
        delivered_offset: D, not below C.
        delivered_reserved: Durable upper bound of D, not below D.
        delivered_known: What of D is no mere upper bound: below D only after a restart.
        closed_reach: How far was delivered under T when it was closed, which takes D back to C.
        token_change: The record of the change that issued T; None if that was in an earlier life.
        maybe_seen: M; disjoint from what is acked or committed.
        reset_epoch: R.
        first_reset_epoch: R when this progress began; greater than 0 if an earlier one was deleted.
        grant: What the fence that issued T answered; None if no fence did.
        attempt: Id of the last fence.
        forced_by: Who took the queue by force when T was issued; empty if nobody did.
        forced_reason: Why.
        subscription_generation: Deliveries under T have to name it; 0 lets any pass.
        source: What changed the progress last.
        access_monotonic_ms: Time of the last accepted access under T.
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
    access_monotonic_ms: int
    update_unix_ms: int = 0

    # ---- questions

    @property
    def drained(self) -> bool:
        """Nothing is in flight."""
        return self.delivered_offset == self.committed_offset

    def in_flight(self) -> RangeSet:
        """Delivered under T and not acked: [C, D) minus A."""
        return RangeSet.of(self.committed_offset, self.delivered_offset).difference(self.acked)

    def lowest_unacked(self) -> int | None:
        """The lowest offset in flight; C is never acked, so it is that one."""
        return None if self.drained else self.committed_offset

    @property
    def reach(self) -> DeliveryReach:
        """How far was delivered under T, closed or not."""
        if self.closed_reach is not None:
            return self.closed_reach
        known = max(self.delivered_known, self.committed_offset)
        return DeliveryReach(known, self.delivered_offset)

    def idle_ms(self, now: Instant) -> int:
        """Time since the last accepted access under T."""
        return now.monotonic_ms - self.access_monotonic_ms

    def ack_window_full(self, limits: QueueLimits) -> bool:
        """Whether A has reached a cap (protocol 16, bounds)."""
        ranges = len(self.acked.runs)
        if ranges >= limits.ack_ranges_max:
            return True
        if ranges * _RUN_BYTES_MAX < limits.ack_bytes_max - _RUN_BYTES_MAX:
            return False
        return len(self.acked.encoded) >= limits.ack_bytes_max

    # ---- protocol 4

    def fence(self, wish: FenceAttempt, now: Instant) -> FenceGrant:
        """Pass the queue to `wish.holder` if the token is as expected and the condition holds.

        Raises:
            Superseded: the attempt succeeded once, and a reset has raised the token since.
            TokenMismatch: T is not the expected one.
            Unacked, NotHolder, NotIdle: the condition does not hold.
        """
        if wish.attempt == self.attempt:
            return self._replay(wish)
        if wish.expected_token != self.token:
            raise TokenMismatch(
                f"the token is {self.token}, expected was {wish.expected_token}",
                detail=TokenMismatchDetail(
                    expected=wish.expected_token, token=self.token, attempt=self.attempt
                ),
            )
        self._check_condition(wish, now)
        ended = EndedToken(self.token, _ENDS[wish.condition], self.reach)
        live = EMPTY
        if wish.reset_epoch == self.reset_epoch:
            live = wish.resume.at_or_above(self.committed_offset).difference(self.acked)
        same_holder = not self.closed and self.holder == wish.holder
        if not self.closed:
            dropped = self.in_flight()
            if same_holder:
                dropped = dropped.difference(live)
            self.maybe_seen = self.maybe_seen.union(dropped)
        lowest = self.delivered_offset if same_holder else self.committed_offset
        self.delivered_offset = self.delivered_reserved = max(lowest, live.next_offset)
        kept = ended.reach.delivered_offset if same_holder else 0
        self.delivered_known = max(kept, live.next_offset)
        self.holder, self.closed = wish.holder, wish.holder is None
        self.forced_by, self.forced_reason = wish.forced_by, wish.forced_reason
        self.subscription_generation = wish.subscription_generation
        self.token = max(self.token, wish.token_min) + 1
        self.attempt, self.source = wish.attempt, ProgressSource.FENCE
        self.grant = FenceGrant(
            self.token, self.committed_offset, self.acked, self.maybe_seen, self.reset_epoch
        )
        self.access_monotonic_ms, self.update_unix_ms = now
        self._record_token_change(ended, now)
        return self.grant

    def _replay(self, wish: FenceAttempt) -> FenceGrant:
        if self.grant is None:
            raise Superseded(
                f"attempt {wish.attempt} had passed the queue on, a reset has issued token "
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

    def _check_condition(self, wish: FenceAttempt, now: Instant) -> None:
        match wish.condition:
            case FenceCondition.CLOSED_OR_DRAINED if not self.closed and not self.drained:
                open_offsets = self.in_flight()
                raise Unacked(
                    f"{open_offsets.count} delivered messages are not acked",
                    facts={
                        "unacked": open_offsets.count,
                        "lowest_offset": open_offsets.runs[0][0],
                    },
                )
            case FenceCondition.SAME_HOLDER if self.closed or self.holder != wish.holder:
                raise NotHolder(
                    f"token {self.token} is closed"
                    if self.closed
                    else f"token {self.token} was issued to another incarnation"
                )
            case FenceCondition.IDLE if self.idle_ms(now) < wish.idle_ms:
                raise NotIdle(
                    f"the last access was {self.idle_ms(now)} ms ago, asked for {wish.idle_ms}",
                    retry_after_ms=wish.idle_ms - self.idle_ms(now),
                    facts={"idle_ms": self.idle_ms(now)},
                )

    # ---- protocol 3, under the current token

    def record_delivered(
        self, token: int, delivery: DeliveryRange, limits: QueueLimits, now: Instant
    ) -> DeliveryResult:
        """Note that a range is about to leave (protocol 3, 6.3, 6.8).

        At an ack cap only what lies below the end of A may still be delivered: it fills the
        holes that keep A apart, and without it a new holder could never bring A down.

        Raises:
            Fenced: T is another, or closed, or bound to another subscription (protocol 14).
            DeliveryGap: an offset before the range is neither delivered nor acked.
            AckCap: the ack window is full.
        """
        self._check_open(token)
        first_offset, next_offset, generation = delivery
        if self.subscription_generation not in (0, generation):
            raise self._fenced(token, FenceCause.SUBSCRIPTION)
        expected = self.acked.first_missing(self.delivered_offset)
        if first_offset > expected:
            raise DeliveryGap(
                f"offset {expected} was not delivered, the delivery starts at {first_offset}",
                facts={"first_offset": first_offset, "expected": expected},
            )
        changed = False
        if next_offset > self.delivered_offset:
            if next_offset > self.acked.next_offset and self.ack_window_full(limits):
                raise AckCap(
                    f"{len(self.acked.runs)} acked ranges wait for offset {self.committed_offset}",
                    retry_after_ms=1_000,
                    facts={"ranges": len(self.acked.runs), "limit": limits.ack_ranges_max},
                )
            self.delivered_offset = next_offset
            changed = next_offset > self.delivered_reserved
            if changed:
                self.delivered_reserved = next_offset + limits.span_max
                self.update_unix_ms = now.unix_ms
        self.delivered_known = max(self.delivered_known, next_offset)
        self.access_monotonic_ms = now.monotonic_ms
        return DeliveryResult(self.maybe_seen.between(first_offset, next_offset), changed)

    def touch(self, token: int, now: Instant) -> None:
        """Note that a pull of the holder is parked (protocol 6.5).

        Raises:
            Fenced: T is another, or closed.
        """
        self._check_open(token)
        self.access_monotonic_ms = now.monotonic_ms

    def commit(
        self, token: int, acks: Acks, now: Instant, source: ProgressSource = ProgressSource.COMMIT
    ) -> CommitResult:
        """Add `acks` to what is acked: a set union, so order and repetition do not matter.

        Raises:
            Fenced: T or R is another, or T is closed.
            BeyondDelivered: an offset not yet acked was not delivered either.
        """
        self._check_open(token, acks.reset_epoch)
        new = self._new(acks)
        self._check_delivered(new)
        if new:
            self._ack(new, now, source)
        self.access_monotonic_ms = now.monotonic_ms
        return CommitResult(self.committed_offset, bool(new))

    def commit_unowned(self, acks: Acks, now: Instant) -> CommitResult:
        """`commit` where nobody owns the queue: no token and no delivery to compare (protocol 15).

        Raises:
            Fenced: R is another.
        """
        if acks.reset_epoch != self.reset_epoch:
            raise self._fenced(0, FenceCause.RESET)
        new = self._new(acks)
        if new:
            self._ack(new, now, ProgressSource.COMMIT)
        return CommitResult(self.committed_offset, bool(new))

    def close(self, token: int, acks: Acks, unfinished: RangeSet, now: Instant) -> CommitResult:
        """Finish T: acks as in `commit`; what was cut off becomes maybe-seen; D := C (protocol 9).

        In flight, neither acked nor unfinished means never started: it returns unseen.

        Raises:
            Fenced: T or R is another.
            BeyondDelivered: an offset was not delivered.
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
        self.closed = True
        return CommitResult(self.committed_offset, True)

    # ---- protocol 13

    def reset(self, to: AckState, source: ProgressSource, now: Instant) -> ResetEffect:
        """Move to `to`, whoever owns the queue; R and T rise, so nothing older counts any more.

        What was started before, under whatever token and epoch, lies below the greatest of C, D
        and the ends of A and M: all of it that is not handled by `to` becomes maybe-seen.
        """
        before = AckState(self.committed_offset, self.acked)
        ended = EndedToken(self.token, HoldEnd.RESET, self.reach)
        had, has = before.handled(), to.handled()
        started = max(self.delivered_offset, self.acked.next_offset, self.maybe_seen.next_offset)
        self.maybe_seen = RangeSet.of(to.committed_offset, started).difference(to.acked)
        self.committed_offset, self.acked = to
        self.delivered_offset = self.delivered_reserved = to.committed_offset
        self.delivered_known = 0
        self.token += 1
        self.reset_epoch += 1
        self.holder, self.closed, self.grant = None, True, None
        self.forced_by = self.forced_reason = ""
        self.subscription_generation, self.source = 0, source
        self.access_monotonic_ms, self.update_unix_ms = now
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
            f"token {token} is not in force, the current one is {self.token} ({why.value})",
            detail=FencedDetail(
                token=token, current=self.token, reset_epoch=self.reset_epoch, why=why
            ),
        )

    def _new(self, acks: Acks) -> RangeSet:
        """What of `acks` is not acked yet."""
        told = acks.acked
        if acks.committed_offset > self.committed_offset:
            told = told.union(RangeSet.of(self.committed_offset, acks.committed_offset))
        return told.at_or_above(self.committed_offset).difference(self.acked)

    def _check_delivered(self, offsets: RangeSet) -> None:
        if offsets.next_offset > self.delivered_offset:
            offset = offsets.at_or_above(self.delivered_offset).runs[0][0]
            raise BeyondDelivered(
                f"offset {offset} was not delivered, only those below {self.delivered_offset}",
                facts={"offset": offset, "delivered": self.delivered_offset},
            )

    def _ack(self, new: RangeSet, now: Instant, source: ProgressSource) -> None:
        acked = self.acked.union(new)
        self.committed_offset = acked.first_missing(self.committed_offset)
        self.acked = acked.at_or_above(self.committed_offset)
        self.maybe_seen = self.maybe_seen.difference(new)
        self.delivered_offset = max(self.delivered_offset, self.committed_offset)
        self.delivered_reserved = max(self.delivered_reserved, self.delivered_offset)
        self.source, self.update_unix_ms = source, now.unix_ms
