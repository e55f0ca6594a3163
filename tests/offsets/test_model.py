"""Goal: no run of calls, late and repeated ones included, and of crashes leads anywhere but where
a naive model on Python sets leads; the properties V1, V3, V4, V5, V9, V10 hold on the way.

Method: a Hypothesis state machine on one queue. Every call may meet a crash after it was applied
and before it was durable: then it was never answered, and the model has not seen it. The disk is
the stored form of the last change that was told to be durable, so a forgotten `changed` shows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonmq.common.errors import BatonError, UnknownQueue
from services.offsets.codec import decode_progress, encode_progress
from services.offsets.core.calls import (
    Acks,
    Committed,
    Condition,
    Delivered,
    Fence,
    Grant,
    Holder,
    Instant,
    Limits,
)
from services.offsets.core.ranges import RangeSet
from services.offsets.core.table import ProgressTable
from tests.offsets.scene import KEY, A, B, C

SPAN = 5
RANGES_MAX = 2
LIMITS = Limits(span_max=SPAN, ack_ranges_max=RANGES_MAX)
LEASE_MS = 100
Call = tuple[str, Any]


def members(ranges: RangeSet) -> frozenset[int]:
    return frozenset(o for first, next_ in ranges.runs for o in range(first, next_))


def ranges_of(offsets: frozenset[int] | set[int]) -> RangeSet:
    return RangeSet.merged((offset, offset + 1) for offset in sorted(offsets))


class Refused(Exception):
    """The model refuses; the argument is the reason."""


@dataclass
class Naive:
    """The protocol's tables, on sets. `acked` has everything below C too."""

    known: bool = False
    token: int = 0
    holder: Holder | None = None
    closed: bool = True
    acked: set[int] = field(default_factory=set)
    delivered: int = 0
    reserved: int = 0
    maybe_seen: set[int] = field(default_factory=set)
    reset_epoch: int = 0
    topic_id: int = 0
    attempt: str = ""
    answer: tuple[Any, ...] = ()
    access_ms: int = 0
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
        if not self.known and not self.token:
            raise Refused("UNKNOWN_QUEUE")
        other_epoch = reset_epoch is not None and reset_epoch != self.reset_epoch
        if not self.known or token != self.token or self.closed or other_epoch:
            raise Refused("FENCED")

    def delete(self, topic_id: int, life_start_ms: int) -> int | None:
        """All is gone but what keeps tokens apart."""
        if topic_id <= self.topic_id:
            return None
        ended = int(self.known)
        anew = Naive(
            token=self.token + ended,
            reset_epoch=self.reset_epoch + ended,
            topic_id=topic_id,
            access_ms=life_start_ms,
        )
        vars(self).update(vars(anew))
        return ended

    def fence(self, wish: Fence, now_ms: int) -> tuple[Any, ...]:
        if self.attempt == wish.attempt:
            return self.answer
        if wish.expected_token != self.token:
            raise Refused("TOKEN_MISMATCH")
        same = not self.closed and self.holder == wish.holder
        if wish.condition is Condition.CLOSED_OR_DRAINED and self.in_flight and not self.closed:
            raise Refused("UNACKED")
        if wish.condition is Condition.SAME_HOLDER and not same:
            raise Refused("NOT_HOLDER")
        if wish.condition is Condition.IDLE and now_ms - self.access_ms < wish.idle_ms:
            raise Refused("NOT_IDLE")
        if not self.known:
            self.known = True
            self.acked = set(range(wish.initial_offset))
            self.delivered = wish.initial_offset
        current = wish.reset_epoch == self.reset_epoch
        live = members(wish.resume) - self.acked if current else frozenset()
        if not self.closed:
            self.maybe_seen |= self.in_flight - (live if same else frozenset())
        end = max(live, default=-1) + 1
        self.delivered = max(self.delivered if same else self.committed, end)
        self.ever_delivered |= set(range(self.delivered))
        self.reserved = self.delivered
        self.holder, self.closed = wish.holder, False
        self.token = max(self.token, wish.token_min) + 1
        self.attempt, self.access_ms = wish.attempt, now_ms
        self.answer = (
            self.token,
            self.committed,
            frozenset(self.above),
            frozenset(self.maybe_seen),
        )
        return self.answer

    def record(self, token: int, first: int, next_: int, now_ms: int) -> frozenset[int]:
        self.check(token)
        if any(o not in self.acked for o in range(self.delivered, first)):
            raise Refused("DELIVERY_GAP")
        above = self.above
        runs = sum(o + 1 not in above for o in above)
        beyond = next_ > max(self.delivered, max(above, default=-1) + 1)
        if runs >= RANGES_MAX and beyond:
            raise Refused("ACK_CAP")
        self.delivered = max(self.delivered, next_)
        self.ever_delivered |= set(range(first, next_))
        if self.delivered > self.reserved:
            self.reserved = self.delivered + SPAN
        self.access_ms = now_ms
        return frozenset(self.maybe_seen & set(range(first, next_)))

    def acknowledge(self, acks: Acks) -> set[int]:
        new = (set(range(acks.committed_offset)) | members(acks.acked)) - self.acked
        if any(o >= self.delivered for o in new):
            raise Refused("BEYOND_DELIVERED")
        return new

    def commit(self, token: int, acks: Acks, now_ms: int) -> tuple[int, bool]:
        self.check(token, acks.reset_epoch)
        new = self.acknowledge(acks)
        self.add(new)
        self.access_ms = now_ms
        return self.committed, bool(new)

    def close(self, token: int, acks: Acks, unfinished: RangeSet) -> tuple[int, bool]:
        if self.known and token == self.token and self.closed:
            return self.committed, False
        self.check(token, acks.reset_epoch)
        new = self.acknowledge(acks)
        left = members(unfinished) - self.acked - new
        if any(o >= self.delivered for o in left):
            raise Refused("BEYOND_DELIVERED")
        self.add(new)
        self.maybe_seen |= left
        self.delivered = self.reserved = self.committed
        self.closed = True
        return self.committed, True

    def add(self, new: set[int]) -> None:
        self.acked |= new
        self.maybe_seen -= self.acked
        self.delivered = max(self.delivered, self.committed)
        self.reserved = max(self.reserved, self.delivered)


HOLDERS = st.sampled_from([A, B, C])
RUNS = st.frozensets(st.integers(0, 24), max_size=8).map(ranges_of)
RESET_AGE = st.sampled_from([0] * 8 + [1, -1])
"""How far a caller's reset epoch is behind the current one."""
AGE = st.sampled_from([0] * 12 + [1, 2, -1])
"""How far a caller's token is behind the current one."""


class Machine(RuleBasedStateMachine):
    """Table and model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000
        self.table = ProgressTable(LIMITS, 1, 1, self.now)
        self.model = Naive(access_ms=self.now_ms)
        self.start_ms = self.now_ms
        self.stored: bytes | None = None
        self.stored_topic_id = 0
        self.calls: list[Call] = []
        self.attempts = 0
        self.tokens_issued: set[int] = set()
        self.committed_before = 0
        self.acked_before: set[int] = set()
        self.in_hand: set[int] = set()
        """What the client that holds the token may have started under it."""
        self.must_flag: set[int] = set()
        """What was started under a token that is over, by the owner's word where there is one."""

    @property
    def now(self) -> Instant:
        return Instant(self.now_ms, 5_000_000 + self.now_ms)

    # ---- calls

    @rule(
        holder=HOLDERS,
        condition=st.sampled_from(Condition),
        age=AGE,
        resume=st.one_of(st.just(RangeSet()), RUNS),
        reset_age=RESET_AGE,
        token_min=st.sampled_from([0, 0, 0, 3, 9]),
        initial_offset=st.sampled_from([0, 0, 4]),
        survives=st.integers(0, 19),
    )
    def fence(self, age: int, reset_age: int, survives: int, **wish: Any) -> None:
        self.attempts += 1
        attempt, expected = f"attempt-{self.attempts}", max(0, self.model.token - age)
        call = Fence(
            attempt=attempt,
            expected_token=expected,
            idle_ms=LEASE_MS,
            reset_epoch=self.model.reset_epoch - reset_age,
            **wish,
        )
        self.call(("fence", call), bool(survives))

    @rule(age=AGE, back=st.integers(-2, 6), size=st.integers(1, 7), survives=st.integers(0, 19))
    def record(self, age: int, back: int, size: int, survives: int) -> None:
        first = max(0, min(self.model.delivered, 30) - back)
        self.call(("record", (self.model.token - age, first, first + size)), bool(survives))

    @rule(age=AGE)
    def touch(self, age: int) -> None:
        self.call(("touch", self.model.token - age), True)

    @rule(
        age=AGE,
        committed=st.integers(0, 12),
        offsets=RUNS,
        reset_age=RESET_AGE,
        inside=st.booleans(),
        survives=st.integers(0, 19),
    )
    def commit(
        self,
        age: int,
        committed: int,
        offsets: RangeSet,
        reset_age: int,
        inside: bool,
        survives: int,
    ) -> None:
        acks = self.acks(reset_age, committed, offsets, inside)
        self.call(("commit", (self.model.token - age, acks)), bool(survives))

    @precondition(lambda self: self.model.in_flight and not self.model.closed)
    @rule(data=st.data())
    def commit_in_flight(self, data: st.DataObject) -> None:
        done = data.draw(st.sets(st.sampled_from(sorted(self.model.in_flight))))
        acks = Acks(self.model.reset_epoch, 0, ranges_of(done))
        self.call(("commit", (self.model.token, acks)), True)

    @precondition(lambda self: self.model.in_flight and not self.model.closed)
    @rule(data=st.data())
    def close_in_flight(self, data: st.DataObject) -> None:
        some = st.sets(st.sampled_from(sorted(self.model.in_flight)))
        acks = Acks(self.model.reset_epoch, 0, ranges_of(data.draw(some)))
        self.call(("close", (self.model.token, acks, ranges_of(data.draw(some)))), True)

    @rule(
        age=AGE,
        committed=st.integers(0, 12),
        offsets=RUNS,
        unfinished=RUNS,
        inside=st.booleans(),
        survives=st.integers(0, 19),
    )
    def close(
        self,
        age: int,
        committed: int,
        offsets: RangeSet,
        unfinished: RangeSet,
        inside: bool,
        survives: int,
    ) -> None:
        acks = self.acks(0, committed, offsets, inside)
        if inside:
            unfinished = unfinished.between(0, self.model.delivered)
        self.call(("close", (self.model.token - age, acks, unfinished)), bool(survives))

    def acks(self, reset_age: int, committed: int, offsets: RangeSet, inside: bool) -> Acks:
        """Acks that are mostly in bounds."""
        if inside:
            committed = min(committed, self.model.delivered)
            offsets = offsets.between(0, self.model.delivered)
        return Acks(self.model.reset_epoch - reset_age, committed, offsets)

    @rule(ahead=st.sampled_from([1, 1, 1, 2, 0]), survives=st.integers(0, 4))
    def the_topic_is_created_again(self, ahead: int, survives: int) -> None:
        self.call(("delete", max(1, self.model.topic_id + ahead)), bool(survives))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def an_earlier_call_arrives_again(self, data: st.DataObject) -> None:
        self.call(data.draw(st.sampled_from(self.calls)), True)

    @rule(ms=st.sampled_from([1, LEASE_MS - 1, LEASE_MS]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def crash(self) -> None:
        self.table = ProgressTable(LIMITS, self.table.epoch + 1, self.table.term, self.now)
        self.model.access_ms = self.start_ms = self.now_ms
        if self.stored_topic_id:
            self.table.restore_topic(KEY.topic, self.stored_topic_id)
        if self.stored is not None:
            self.table.restore(KEY, decode_progress(KEY, self.stored))
            self.model.delivered = self.model.reserved  # both 0 where the topic was deleted
            self.model.ever_delivered |= set(range(self.model.delivered))

    # ---- both sides

    def call(self, call: Call, survives: bool) -> None:
        self.calls.append(call)
        model = copy.deepcopy(self.model)
        expected = self.ask_model(model, call)
        answer, changed = self.ask_table(call)
        assert answer == expected
        if changed and not survives:
            self.crash()  # after it was applied, before it was durable or answered
            return
        if changed:
            self.stored = encode_progress(self.table.state(KEY)) if model.token else None
            self.stored_topic_id = self.table.deleted_for(KEY.topic)
        self.check_acceptance(call, answer, model)
        if not isinstance(answer, str):
            self.note_started(call, model)
        self.model = model

    def ask_model(self, model: Naive, call: Call) -> object:
        name: str = call[0]
        args: Any = call[1]
        try:
            match name:
                case "fence":
                    return model.fence(args, self.now_ms)
                case "record" | "commit":
                    return getattr(model, name)(*args, self.now_ms)
                case "touch":
                    model.check(args)
                    model.access_ms = self.now_ms
                    return None
                case "delete":
                    return model.delete(args, self.start_ms)
            return model.close(*args)
        except Refused as refusal:
            return refusal.args[0]

    def ask_table(self, call: Call) -> tuple[object, bool]:
        name: str = call[0]
        args: Any = call[1]
        before = self.copy()
        try:
            match name:
                case "fence":
                    grant: Grant = self.table.fence(KEY, 1, args, self.now)
                    acked, maybe_seen = members(grant.acked), members(grant.maybe_seen)
                    answer = (grant.token, grant.committed_offset, acked, maybe_seen)
                    return answer, grant.changed
                case "record":
                    token, first, next_ = args
                    run = (first, next_)
                    found: Delivered = self.table.record_delivered(KEY, token, run, self.now)
                    return members(found.maybe_seen), found.changed
                case "touch":
                    self.table.touch(KEY, args, self.now)
                    return None, False
                case "delete":
                    ended = self.table.delete_topic(KEY.topic, args, self.now)
                    return (None, False) if ended is None else (len(ended), True)
            apply: Any = self.table.commit if name == "commit" else self.table.close
            done: Committed = apply(KEY, *args, self.now)
            return tuple(done), done.changed
        except BatonError as error:
            assert self.copy() == before, "refused means: nothing changed"
            return error.reason, False

    def copy(self) -> object:
        return replace(self.table.query(KEY)) if KEY in self.table else None

    def check_acceptance(self, call: Call, answer: object, after: Naive) -> None:
        before, (name, args) = self.model, call
        if isinstance(answer, str):
            return
        if name == "fence" and after.token != before.token:
            assert after.token > max(self.tokens_issued, default=0), "V1"
            self.tokens_issued.add(after.token)
        elif name not in ("fence", "delete"):
            token = args if name == "touch" else args[0]
            repeated_close = name == "close" and before.closed
            assert token == before.token, "V3"
            assert repeated_close or not before.closed, "V3"
        new = after.acked - before.acked
        skipped = set(range(args.initial_offset)) if name == "fence" else set()
        assert new <= before.ever_delivered | skipped, "V4"

    def note_started(self, call: Call, after: Naive) -> None:
        before, (name, args) = self.model, call
        if name == "record":
            self.in_hand |= set(range(args[1], args[2]))
        elif name == "close" and not before.closed:
            self.must_flag |= members(args[2])
            self.in_hand = set()
        elif name == "fence" and after.token != before.token:
            current = args.reset_epoch == before.reset_epoch
            live = members(args.resume) if current else frozenset()
            same = not before.closed and before.holder == args.holder
            self.must_flag |= self.in_hand - (live if same else frozenset())
            self.in_hand = set(live)
        elif name == "delete" and after.topic_id != before.topic_id:
            self.in_hand, self.must_flag = set(), set()
            self.committed_before, self.acked_before = 0, set()

    # ---- always

    @invariant()
    def table_is_where_the_model_is(self) -> None:
        assert (KEY in self.table) == self.model.known
        if not self.model.known:
            assert self.table.group(KEY.group) == []
            with pytest.raises(UnknownQueue) as raised:
                self.table.query(KEY)
            assert raised.value.facts["token"] == str(self.model.token)
            return
        queue, model = self.table.query(KEY), self.model
        assert (queue.token, queue.reset_epoch) == (model.token, model.reset_epoch)
        assert (queue.holder, queue.closed) == (model.holder, model.closed)
        assert queue.committed_offset == model.committed
        assert members(queue.acked) == model.above
        assert (queue.delivered_offset, queue.delivered_reserved) == (
            model.delivered,
            model.reserved,
        )
        assert members(queue.maybe_seen) == model.maybe_seen
        assert self.table.ack_ranges.get(KEY, 0) == len(queue.acked.runs)

    @invariant()
    def properties_hold(self) -> None:
        if not self.model.known:
            return
        queue = self.table.query(KEY)
        assert queue.committed_offset >= self.committed_before, "V5"
        acked = set(range(queue.committed_offset)) | members(queue.acked)
        assert acked >= self.acked_before, "V9"
        assert queue.delivered_offset >= queue.committed_offset, "V10"
        assert queue.delivered_reserved >= queue.delivered_offset
        assert not members(queue.maybe_seen) & acked
        assert self.must_flag - acked <= members(queue.maybe_seen), "V7: M lacks a started offset"
        self.committed_before, self.acked_before = queue.committed_offset, acked


TestTableAgainstModel = Machine.TestCase
TestTableAgainstModel.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
