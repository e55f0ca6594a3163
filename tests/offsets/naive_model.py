"""A second implementation of the protocol's tables for one queue: on Python sets, short, slow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batonmq._core.queues import Incarnation
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.values import (
    Acks,
    AckState,
    DeliveryRange,
    FenceAttempt,
    FenceCondition,
    ProgressSource,
    QueueLimits,
)

SPAN = 12
RANGES_MAX = 2
LIMITS = QueueLimits(span_max=SPAN, ack_ranges_max=RANGES_MAX)


def members(ranges: RangeSet) -> frozenset[int]:
    return frozenset(o for first, next_ in ranges.runs for o in range(first, next_))


class Refused(Exception):
    """The model rejects a call; the argument is the reason."""


@dataclass(frozen=True)
class Move:
    """A reset or clone to `to`, or the undo of `undone`."""

    op_id: str
    to: AckState
    kind: ProgressSource = ProgressSource.RESET
    undone: str = ""
    dry_run: bool = False


@dataclass(frozen=True)
class Done:
    """The record of a move: the answer, and the offsets before."""

    move: Move
    answer: tuple[int, ...]
    before: frozenset[int]


@dataclass
class Naive:
    """The protocol's tables on sets; `acked` includes every offset below C."""

    has_progress: bool = False
    token: int = 0
    holder: Incarnation | None = None
    closed: bool = True
    acked: set[int] = field(default_factory=set)
    delivered: int = 0
    reserved: int = 0
    known: int = 0
    advance: tuple[int, int] | None = None
    maybe_seen: set[int] = field(default_factory=set)
    reset_epoch: int = 0
    first_reset_epoch: int = 0
    generation: int = 0
    source: ProgressSource = ProgressSource.NOTHING
    moves: dict[str, Done] = field(default_factory=dict)
    topic_id: int = 0
    attempt: str = ""
    answer: tuple[Any, ...] | None = None
    access_ms: int = 0
    floor: tuple[int, int] = (0, 0)
    ever_delivered: set[int] = field(default_factory=set)

    @property
    def committed(self) -> int:
        offset = 0
        while offset in self.acked:
            offset += 1
        return offset

    @property
    def in_flight(self) -> set[int]:
        return set(range(self.committed, self.delivered)) - self.acked

    @property
    def above(self) -> set[int]:
        committed = self.committed
        return {o for o in self.acked if o > committed}

    def check(self, token: int, reset_epoch: int | None = None) -> None:
        if not self.has_progress and not self.token:
            raise Refused("UNKNOWN_QUEUE")
        other_epoch = reset_epoch is not None and reset_epoch != self.reset_epoch
        if not self.has_progress or token != self.token or self.closed or other_epoch:
            raise Refused("FENCED")

    def delete(self, topic_id: int, life_start_ms: int) -> int | None:
        """Delete the progress; token and reset epoch continue."""
        if topic_id <= self.topic_id:
            return None
        return self.end(topic_id, life_start_ms)

    def touch(self, token: int, now_ms: int) -> None:
        self.check(token)
        self.access_ms = now_ms

    def end(self, topic_id: int, life_start_ms: int) -> int:
        queue_count = int(self.has_progress)
        empty = Naive(
            token=self.token + queue_count,
            reset_epoch=self.reset_epoch + queue_count,
            topic_id=topic_id,
            moves=self.moves,
            access_ms=life_start_ms,
            floor=self.floor,
        )
        vars(self).update(vars(empty))
        return queue_count

    @property
    def forgotten(self) -> bool:
        return not self.has_progress and not self.token

    def forget(self) -> int:
        """Forget a deleted queue; the floor rises to it."""
        if self.has_progress or self.forgotten:
            return 0
        self.token, deleted = 0, (self.token, self.reset_epoch)
        self.attempt, self.answer, self.moves = "", None, {}
        self.raise_floor(*deleted)
        return 1

    def raise_floor(self, token: int, reset_epoch: int) -> None:
        self.floor = max(self.floor[0], token), max(self.floor[1], reset_epoch)
        if self.forgotten:
            self.reset_epoch = self.floor[1]

    def fence(self, attempt: FenceAttempt, now_ms: int) -> tuple[Any, ...]:
        if not self.has_progress and attempt.holder is None:
            raise Refused("UNKNOWN_QUEUE")
        if self.attempt == attempt.attempt:
            if self.answer is None:
                raise Refused("SUPERSEDED")
            return self.answer
        if attempt.expected_token != self.token:
            raise Refused("TOKEN_MISMATCH")
        same = not self.closed and self.holder == attempt.holder
        if attempt.condition is FenceCondition.CLOSED_OR_DRAINED and not self.closed:
            if self.in_flight:
                raise Refused("UNACKED")
            observed = attempt.observed_delivered_offset, attempt.observed_reset_epoch
            if observed != (self.delivered, self.reset_epoch):
                raise Refused("NOT_IDLE")
        if attempt.condition is FenceCondition.SAME_HOLDER and not same:
            raise Refused("NOT_HOLDER")
        if attempt.condition is FenceCondition.IDLE and now_ms - self.access_ms < attempt.idle_ms:
            raise Refused("NOT_IDLE")
        if not self.has_progress:
            self.begin(attempt.initial_offset)
        current = attempt.reset_epoch == self.reset_epoch
        live = members(attempt.resume) - self.acked if current else frozenset()
        if not self.closed:
            self.maybe_seen |= self.in_flight - (live if same else frozenset())
        end = max(live, default=-1) + 1
        self.delivered = max(self.delivered if same else self.committed, end)
        self.known = max(self.known if same else 0, self.committed if same else 0, end)
        self.advance = None
        self.ever_delivered |= set(range(self.delivered))
        self.reserved = self.delivered
        self.holder, self.closed = attempt.holder, attempt.holder is None
        self.generation, self.source = attempt.subscription_generation, ProgressSource.FENCE
        self.token = max(self.token, attempt.token_min) + 1
        self.attempt, self.access_ms = attempt.attempt, now_ms
        self.answer = (
            self.token,
            self.committed,
            frozenset(self.above),
            frozenset(self.maybe_seen),
        )
        return self.answer

    def begin(self, offset: int) -> None:
        if self.forgotten:
            self.token = self.floor[0]
        self.has_progress, self.first_reset_epoch = True, self.reset_epoch
        self.acked = set(range(offset))
        self.delivered = self.reserved = offset

    def reset(self, move: Move, now_ms: int) -> tuple[int, ...]:
        """Count offset by offset; started offsets lie below the greatest known offset."""
        previous = self.moves.get(move.op_id)
        if previous is not None and not move.dry_run:
            if previous.move != move:
                raise Refused("OPERATION_EXISTS")
            return previous.answer
        after = set(range(move.to.committed_offset)) | members(move.to.acked)
        if move.undone:
            if move.undone not in self.moves:
                raise Refused("OPERATION_NOT_FOUND")
            undone = self.moves[move.undone]
            if not self.has_progress or undone.answer[-2] <= self.first_reset_epoch:
                raise Refused("UNKNOWN_QUEUE")
            after = set(undone.before)
        if not self.has_progress:
            self.begin(move.to.committed_offset)
        before, committed = self.acked, self.committed
        started = max([committed, self.delivered, *(o + 1 for o in before | self.maybe_seen)])
        self.acked, self.maybe_seen = after, set(range(started)) - after
        self.known, self.advance = 0, None
        self.delivered = self.reserved = self.committed
        self.token, self.reset_epoch = self.token + 1, self.reset_epoch + 1
        self.holder, self.closed, self.answer = None, True, None
        self.generation, self.source, self.access_ms = 0, move.kind, now_ms
        counts = len(before - after), len(after - before)
        answer = (committed, self.committed, *counts, self.reset_epoch, self.token)
        self.moves[move.op_id] = Done(move, answer, frozenset(before))
        return answer

    def commit_unowned(self, acks: Acks) -> tuple[int, bool]:
        if acks.reset_epoch != self.reset_epoch:
            raise Refused("FENCED")
        new = (set(range(acks.committed_offset)) | members(acks.acked)) - self.acked
        is_change = bool(new) or not self.has_progress
        if not self.has_progress:
            self.begin(0)
        if is_change:
            self.add(new, ProgressSource.COMMIT)
        return self.committed, is_change

    def record(
        self, token: int, delivery: DeliveryRange, now_ms: int
    ) -> tuple[frozenset[int], int]:
        self.check(token)
        first, next_, generation, advance_id, advance_to = delivery
        if self.generation and generation != self.generation:
            raise Refused("FENCED")
        if any(o not in self.acked for o in range(self.delivered, first)):
            raise Refused("DELIVERY_GAP")
        above = self.above
        runs = sum(o + 1 not in above for o in above)
        is_beyond = next_ > max(self.delivered, max(above, default=-1) + 1)
        if runs >= RANGES_MAX and is_beyond:
            raise Refused("ACK_CAP")
        self.delivered = max(self.delivered, next_)
        self.known = max(self.known, next_)
        permitted = 0 if runs >= RANGES_MAX else self.permit(advance_id, advance_to)
        if self.advance is not None:
            if self.advance[1] <= self.known:
                self.advance = None
            elif self.advance[0] == advance_id:
                permitted = self.advance[1]
        self.ever_delivered |= set(range(first, max(next_, permitted)))
        self.access_ms = now_ms
        return frozenset(self.maybe_seen & set(range(first, max(next_, permitted)))), permitted

    def permit(self, advance_id: int, end: int) -> int:
        """Begin or extend an advance; return its end if it is the one with this id."""
        end = min(end, self.committed + SPAN)
        is_open = self.advance is not None and self.advance[1] > self.known
        if is_open and self.advance is not None and self.advance[0] != advance_id:
            return 0
        if end <= self.known or (not is_open and (not advance_id or self.inexact)):
            return 0
        if is_open and self.advance is not None:
            end = max(end, self.advance[1])
        self.advance, self.delivered = (advance_id, end), max(self.delivered, end)
        return end

    @property
    def inexact(self) -> bool:
        return max(self.known, self.committed) < self.delivered

    def settle(self, token: int, advance_id: int, sent: int) -> None:
        if token == self.token and self.advance is not None and self.advance[0] == advance_id:
            self.known = self.delivered = max(self.known, self.committed, sent)
            self.advance = None

    def acknowledge(self, acks: Acks) -> set[int]:
        new = (set(range(acks.committed_offset)) | members(acks.acked)) - self.acked
        if any(o >= self.delivered for o in new):
            raise Refused("BEYOND_DELIVERED")
        return new

    def commit(
        self, token: int, acks: Acks, source: ProgressSource, now_ms: int
    ) -> tuple[int, bool]:
        self.check(token, acks.reset_epoch)
        new = self.acknowledge(acks)
        if new:
            self.known = max(self.known, *(offset + 1 for offset in new))
            self.add(new, source)
        self.access_ms = now_ms
        return self.committed, bool(new)

    def close(self, token: int, acks: Acks, unfinished: RangeSet) -> tuple[int, bool]:
        if self.has_progress and token == self.token and self.closed:
            return self.committed, False
        self.check(token, acks.reset_epoch)
        new = self.acknowledge(acks)
        remaining = members(unfinished) - self.acked - new
        if any(o >= self.delivered for o in remaining):
            raise Refused("BEYOND_DELIVERED")
        self.add(new, ProgressSource.COMMIT)
        self.maybe_seen |= remaining
        self.delivered = self.reserved = self.committed
        self.closed, self.advance = True, None
        return self.committed, True

    def add(self, new: set[int], source: ProgressSource) -> None:
        self.acked, self.source = self.acked | new, source
        self.maybe_seen -= self.acked
        self.delivered = max(self.delivered, self.committed)
        self.reserved = max(self.reserved, self.delivered)
