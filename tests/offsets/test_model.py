"""Goal: after any sequence of calls, including late and repeated ones, and of crashes, the table
has the state of a naive model on Python sets; properties V1, V3, V4, V5, V7, V9, V10 hold always.

Method: a Hypothesis state machine on one queue. Every call may crash after it was applied and
before it was durable: then it was never answered, and the model does not have it. The disk has the
stored form of the last change with `changed`, so a missing `changed` is detected. The model counts
a reset and its undo offset by offset.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, UnknownQueue
from batonmq_server.offsets.codec import (
    decode_progress,
    decode_reset,
    encode_progress,
    encode_reset,
)
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
)
from tests.offsets.naive_model import LIMITS, RANGES_MAX, SPAN, Move, Naive, Refused, members
from tests.offsets.rules_scene import KEY, A, B, C

LEASE_MS = 100
Call = tuple[str, Any]


def ranges_of(offsets: frozenset[int] | set[int]) -> RangeSet:
    return RangeSet.merged((offset, offset + 1) for offset in sorted(offsets))


def answer_of(step: ResetStep) -> tuple[int, ...]:
    moved, to = step.effect, step.to_offset
    counts = moved.replayed_count, moved.skipped_count
    return (moved.before.committed_offset, to, *counts, moved.reset_epoch, moved.token)


def granted(grant: FenceGrant) -> tuple[object, bool]:
    acked, maybe_seen = members(grant.acked), members(grant.maybe_seen)
    return (grant.token, grant.committed_offset, acked, maybe_seen), grant.changed


def recorded(delivered: DeliveryResult) -> tuple[object, bool]:
    return (members(delivered.maybe_seen), delivered.advance_to), delivered.changed


def committed(done: CommitResult) -> tuple[object, bool]:
    return tuple(done), done.changed


def ended(keys: list[GroupQueue] | None) -> tuple[object, bool]:
    return (None, False) if keys is None else (len(keys), True)


HOLDERS = st.sampled_from([A, A, B, B, C, None])
GENERATION = st.sampled_from([0, 0, 1, 2])
RUNS = st.frozensets(st.integers(0, 24), max_size=8).map(ranges_of)
RESET_AGE = st.sampled_from([0] * 8 + [1, -1])
"""Difference between the current reset epoch and that of a caller."""
AGE = st.sampled_from([0] * 12 + [1, 2, -1])
"""Difference between the current token and that of a caller."""
PLACES = st.builds(
    lambda committed, acked: AckState(committed, acked.at_or_above(committed + 1)),
    st.integers(0, 14),
    st.one_of(st.just(RangeSet()), RUNS),
)


class Machine(RuleBasedStateMachine):
    """Runs every call on the table and on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000
        self.table = ProgressTable(LIMITS, 1, 1, self.now)
        self.model = Naive(access_ms=self.now_ms)
        self.start_ms = self.now_ms
        self.stored: bytes | None = None
        self.stored_topic_id = 0
        self.stored_floor = (0, 0)
        self.stored_moves: dict[int, bytes] = {}
        self.resets = ResetExecutor(self.table, ResetHistory())
        self.calls: list[Call] = []
        self.attempts = 0
        self.tokens_issued: set[int] = set()
        self.committed_before = 0
        self.sent: dict[int, int] = {}
        """One past the last offset that a node has sent in each advance, by its id."""
        self.settled: set[int] = set()
        self.usable: tuple[int, int, int] | None = None
        """Token, id and end of the advance that a node may use."""
        self.acked_before: set[int] = set()
        self.started: set[int] = set()
        """Offsets that the holder may have started under the current token."""
        self.must_flag: set[int] = set()
        """Offsets that were started under an earlier token, as its owner reported, or acked. And
        offsets that a reset made unacked."""

    @property
    def now(self) -> Instant:
        return Instant(self.now_ms, 5_000_000 + self.now_ms)

    # ---- calls

    @rule(
        holder=HOLDERS,
        condition=st.sampled_from(FenceCondition),
        age=AGE,
        resume=st.one_of(st.just(RangeSet()), RUNS),
        reset_age=RESET_AGE,
        token_min=st.sampled_from([0, 0, 0, 3, 9]),
        initial_offset=st.sampled_from([0, 0, 4]),
        subscription_generation=GENERATION,
        delivered_since=st.sampled_from([0, 0, 0, 1]),
        resets_since=st.sampled_from([0, 0, 0, 1]),
        survives=st.integers(0, 19),
    )
    def fence(
        self,
        age: int,
        reset_age: int,
        delivered_since: int,
        resets_since: int,
        survives: int,
        **fields: Any,
    ) -> None:
        self.attempts += 1
        attempt, expected = f"attempt-{self.attempts}", max(0, self.model.token - age)
        if fields["holder"] is None:
            fields["resume"] = RangeSet()
        call = FenceAttempt(
            attempt=attempt,
            expected_token=expected,
            idle_ms=LEASE_MS,
            reset_epoch=self.model.reset_epoch - reset_age,
            observed_delivered_offset=self.model.delivered - delivered_since,
            observed_reset_epoch=self.model.reset_epoch - resets_since,
            **fields,
        )
        self.call(("fence", call), bool(survives))

    @rule(
        age=AGE,
        back=st.integers(-2, 6),
        size=st.integers(1, 7),
        generation=st.one_of(st.none(), st.none(), GENERATION),
        advance=st.sampled_from(["none", "none", "own", "own", "own", "another"]),
        ahead=st.integers(-1, 9),
        survives=st.integers(0, 19),
    )
    def record(  # noqa: PLR0917
        self,
        age: int,
        back: int,
        size: int,
        generation: int | None,
        advance: str,
        ahead: int,
        survives: int,
    ) -> None:
        first = max(0, min(self.model.delivered, 30) - back)
        filtered_by = self.model.generation if generation is None else generation
        advance_id, advance_to = 0, 0
        if advance != "none":
            advance_id, advance_to = len(self.calls) + 1, first + size + ahead
            if advance == "own" and self.usable is not None:
                advance_id = self.usable[1]
        delivery = DeliveryRange(first, first + size, filtered_by, advance_id, advance_to)
        self.call(("record", (self.model.token - age, delivery)), bool(survives))

    @precondition(lambda self: self.model.closed)
    @rule(holder=st.sampled_from([A, B]))
    def a_member_takes_a_closed_queue(self, holder: Incarnation) -> None:
        self.attempts += 1
        call = FenceAttempt(
            attempt=f"attempt-{self.attempts}",
            expected_token=self.model.token,
            condition=FenceCondition.CLOSED_OR_DRAINED,
            holder=holder,
            resume=RangeSet(),
            reset_epoch=self.model.reset_epoch,
            idle_ms=LEASE_MS,
            token_min=0,
            initial_offset=0,
            subscription_generation=0,
        )
        self.call(("fence", call), True)

    @precondition(lambda self: not self.model.closed)
    @rule(size=st.integers(1, 3), own=st.booleans(), ahead=st.integers(0, 9))
    def the_holder_reads_on(self, size: int, own: bool, ahead: int) -> None:
        first = self.model.known
        advance_id, end = len(self.calls) + 1, first + size + ahead
        if own and self.usable is not None:
            advance_id, first = self.usable[1], self.sent[self.usable[1]]
            end = first + size + ahead
        delivery = DeliveryRange(first, first + size, self.model.generation, advance_id, end)
        self.call(("record", (self.model.token, delivery)), True)

    @precondition(lambda self: self.usable is not None)
    @rule(data=st.data())
    def send_in_the_advance(self, data: st.DataObject) -> None:
        """A node sends without a record; the holder starts it, if its token is current."""
        assert self.usable is not None
        token, advance_id, end = self.usable
        sent = max(self.sent[advance_id], data.draw(st.integers(0, end)))
        if token == self.model.token and not self.model.closed:
            self.started |= set(range(self.sent[advance_id], sent))
        self.sent[advance_id] = sent

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), age=AGE)
    def settle(self, data: st.DataObject, age: int) -> None:
        advance_id = data.draw(st.sampled_from(sorted(self.sent)[-3:]))
        self.settled.add(advance_id)
        if self.usable is not None and self.usable[1] == advance_id:
            self.usable = None
        token, sent = self.model.token - age, self.sent[advance_id]
        self.call(("settle", (token, advance_id, sent)), True)

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
        source = ProgressSource.PULL if survives % 2 else ProgressSource.COMMIT
        self.call(("commit", (self.model.token - age, acks, source)), bool(survives))

    @rule(
        committed=st.integers(0, 12),
        offsets=RUNS,
        reset_age=RESET_AGE,
        survives=st.integers(0, 9),
    )
    def commit_without_a_token(
        self, committed: int, offsets: RangeSet, reset_age: int, survives: int
    ) -> None:
        acks = self.acks(reset_age, committed, offsets, inside=False)
        self.call(("commit_unowned", acks), bool(survives))

    @rule(
        to=PLACES,
        kind=st.sampled_from([ProgressSource.RESET, ProgressSource.CLONE]),
        dry_run=st.booleans(),
        survives=st.integers(0, 9),
    )
    def reset(self, to: AckState, kind: ProgressSource, dry_run: bool, survives: int) -> None:
        to = to if kind is ProgressSource.CLONE else AckState(to.committed_offset)
        move = Move(f"op-{len(self.calls)}", to, kind, dry_run=dry_run)
        self.call(("reset", move), bool(survives))

    @precondition(lambda self: self.model.moves)
    @rule(data=st.data(), survives=st.integers(0, 9))
    def undo(self, data: st.DataObject, survives: int) -> None:
        undone = data.draw(st.sampled_from(sorted(self.model.moves)))
        move = Move(f"op-{len(self.calls)}", AckState(0), undone=undone)
        self.call(("reset", move), bool(survives))

    @precondition(lambda self: self.model.moves)
    @rule(data=st.data(), to=PLACES)
    def an_operation_id_is_used_again(self, data: st.DataObject, to: AckState) -> None:
        op_id = data.draw(st.sampled_from(sorted(self.model.moves)))
        self.call(("reset", Move(op_id, AckState(to.committed_offset))), True)

    @precondition(lambda self: self.model.in_flight and not self.model.closed)
    @rule(data=st.data())
    def commit_in_flight(self, data: st.DataObject) -> None:
        handled = data.draw(st.sets(st.sampled_from(sorted(self.model.in_flight))))
        acks = Acks(self.model.reset_epoch, 0, ranges_of(handled))
        self.call(("commit", (self.model.token, acks, ProgressSource.COMMIT)), True)

    @precondition(lambda self: self.model.in_flight and not self.model.closed)
    @rule(data=st.data())
    def close_in_flight(self, data: st.DataObject) -> None:
        subsets = st.sets(st.sampled_from(sorted(self.model.in_flight)))
        acks = Acks(self.model.reset_epoch, 0, ranges_of(data.draw(subsets)))
        self.call(("close", (self.model.token, acks, ranges_of(data.draw(subsets)))), True)

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
        """Draw acks that are mostly within the delivered range."""
        if inside:
            committed = min(committed, self.model.delivered)
            offsets = offsets.between(0, self.model.delivered)
        return Acks(self.model.reset_epoch - reset_age, committed, offsets)

    @rule(ahead=st.sampled_from([1, 1, 1, 2, 0]), survives=st.integers(0, 4))
    def the_topic_is_created_again(self, ahead: int, survives: int) -> None:
        self.call(("delete", max(1, self.model.topic_id + ahead)), bool(survives))

    @rule(survives=st.integers(0, 4))
    def the_group_is_deleted(self, survives: int) -> None:
        self.call(("delete_group", None), bool(survives))

    @rule(survives=st.integers(0, 4))
    def old_tombstones_are_forgotten(self, survives: int) -> None:
        self.call(("forget", None), bool(survives))

    @rule(
        token=st.integers(0, 12), reset_epoch=st.integers(0, 4), survives=st.sampled_from([0, 1, 1])
    )
    def a_group_brings_the_floor_of_another_set(
        self, token: int, reset_epoch: int, survives: int
    ) -> None:
        self.call(("floor", (token, reset_epoch)), bool(survives))

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
            self.model.delivered = self.model.reserved  # both 0 if the topic was deleted
            self.model.known, self.model.advance = 0, None
            self.model.ever_delivered |= set(range(self.model.delivered))
        self.table.raise_floor(*self.stored_floor)
        records = ResetHistory()
        for stored in self.stored_moves.values():
            records.put(KEY.group, decode_reset(stored))
        self.resets = ResetExecutor(self.table, records)

    # ---- both sides

    def call(self, call: Call, survives: bool) -> None:
        self.calls.append(call)
        model = copy.deepcopy(self.model)
        expected = self.call_model(model, call)
        answer, changed = self.call_table(call)
        assert answer == expected
        if changed and not survives:
            self.crash()  # after the call was applied, before it is durable
            return
        if changed:
            state = self.table.state(KEY)
            self.stored = encode_progress(state) if state is not None else None
            self.stored_floor = self.table.floor
            self.stored_moves = {}
            for operation in self.resets.history.newest_first(KEY.group):
                self.stored_moves[operation.number] = encode_reset(operation)
            self.stored_topic_id = self.table.deleted_topic_id(KEY.topic)
        if KEY in self.table:
            # How far D is reserved ahead is not a rule; that it is durable is one.
            reserved = self.table.query(KEY).delivered_reserved
            assert changed or reserved == self.model.reserved
            model.reserved = reserved
        self.check_acceptance(call, answer, model)
        if not isinstance(answer, str):
            self.note_started(call, model)
            self.note_advance(call, answer)
        self.model = model

    def call_model(self, model: Naive, call: Call) -> object:
        name: str = call[0]
        args: Any = call[1]
        calls: dict[str, Callable[[], object]] = {
            "fence": lambda: model.fence(args, self.now_ms),
            "record": lambda: model.record(args[0], args[1], self.now_ms),
            "settle": lambda: model.settle(*args),
            "commit": lambda: model.commit(args[0], args[1], args[2], self.now_ms),
            "commit_unowned": lambda: model.commit_unowned(args),
            "close": lambda: model.close(*args),
            "touch": lambda: model.touch(args, self.now_ms),
            "delete": lambda: model.delete(args, self.start_ms),
            "delete_group": lambda: model.end(model.topic_id, self.start_ms) or None,
            "forget": model.forget,
            "floor": lambda: model.raise_floor(*args),
            "reset": lambda: (copy.deepcopy(model) if args.dry_run else model).reset(
                args, self.now_ms
            ),
        }
        try:
            return calls[name]()
        except Refused as refusal:
            return refusal.args[0]

    def call_table(self, call: Call) -> tuple[object, bool]:
        name: str = call[0]
        args: Any = call[1]
        before = self.copy()
        calls: dict[str, Callable[[], tuple[object, bool]]] = {
            "fence": lambda: granted(self.table.fence(KEY, 1, args, self.now)),
            "record": lambda: recorded(
                self.table.record_delivered(KEY, args[0], args[1], self.now)
            ),
            "commit": lambda: committed(
                self.table.commit(KEY, args[0], args[1], self.now, args[2])
            ),
            "commit_unowned": lambda: committed(self.table.commit_unowned(KEY, args, self.now)),
            "close": lambda: committed(self.table.close(KEY, args[0], args[1], args[2], self.now)),
            "touch": lambda: self.touch_table(args),
            "settle": lambda: self.settle_table(*args),
            "delete": lambda: ended(self.table.delete_topic(KEY.topic, args, self.now)),
            "delete_group": lambda: ended(self.table.delete_group(KEY.group, "", self.now) or None),
            "forget": self.forget_in_table,
            "floor": lambda: (None, self.table.raise_floor(*args)),
            "reset": lambda: self.move_table(args, before),
        }
        try:
            return calls[name]()
        except BatonError as error:
            assert self.copy() == before, "a rejected call changes nothing"
            return error.reason, False

    def settle_table(self, token: int, advance_id: int, sent: int) -> tuple[object, bool]:
        self.table.settle_advance(KEY, token, AdvanceSettlement(advance_id, sent))
        return None, False

    def forget_in_table(self) -> tuple[object, bool]:
        forgotten = self.table.forget(self.table.tombstones_before(self.now.unix_ms + 1))
        if forgotten and not self.table.knows(KEY.group):
            self.resets.history.drop(KEY.group)
        return len(forgotten), bool(forgotten)

    def touch_table(self, token: int) -> tuple[object, bool]:
        self.table.touch(KEY, token, self.now)
        return None, False

    def move_table(self, move: Move, before: object) -> tuple[object, bool]:
        order = ResetOrder(move.op_id, move.kind, "admin", "", undone_op_id=move.undone)
        outcome: ResetOutcome
        if move.undone:
            outcome = self.resets.undo(KEY.group, order, self.now, dry_run=move.dry_run)
        else:
            target = [QueueReset(KEY, move.to)]
            outcome = self.resets.reset(KEY.group, order, target, self.now, dry_run=move.dry_run)
        (result,) = outcome.results
        if not outcome.applied:
            assert self.copy() == before, "dry runs, repetitions and rejected calls change nothing"
        if isinstance(result, BatonError):
            return result.reason, False
        return answer_of(result), bool(outcome.applied)

    def copy(self) -> object:
        return replace(self.table.query(KEY)) if KEY in self.table else None

    def check_acceptance(self, call: Call, answer: object, after: Naive) -> None:
        before, (name, args) = self.model, call
        if isinstance(answer, str):
            return
        if name in ("forget", "floor"):
            return
        if name == "commit_unowned":
            return  # it issues no token: the first one begins with the closed token of the floor
        if after.token != before.token:
            assert after.token > max(self.tokens_issued, default=0), "V1"
            self.tokens_issued.add(after.token)
        if name in ("reset", "delete", "delete_group", "settle"):
            return
        if name != "fence":
            token = args if name == "touch" else args[0]
            repeated_close = name == "close" and before.closed
            assert token == before.token, "V3"
            assert repeated_close or not before.closed, "V3"
        new = after.acked - before.acked
        skipped = set(range(args.initial_offset)) if name == "fence" else set()
        assert new <= before.ever_delivered | skipped, "V4"

    def note_advance(self, call: Call, answer: Any) -> None:
        """Note what a node may send without a record, unless it has settled the advance."""
        if call[0] != "record":
            return
        token, delivery = call[1]
        if delivery.advance_id and delivery.advance_id not in self.settled:
            sent = max(self.sent.get(delivery.advance_id, 0), delivery.next_offset)
            self.sent[delivery.advance_id] = sent
            if answer[1]:
                self.usable = (token, delivery.advance_id, answer[1])

    def note_started(self, call: Call, after: Naive) -> None:
        before, (name, args) = self.model, call
        if name in ("commit", "close", "commit_unowned"):
            self.must_flag |= after.acked - before.acked
        if name == "record":
            self.started |= set(range(*args[1][:2]))
        elif name == "reset" and after.token != before.token:
            self.must_flag |= self.started
            self.started = set()
            self.committed_before, self.acked_before = 0, set()
        elif name == "close" and not before.closed:
            self.must_flag |= members(args[2])
            self.started = set()
        elif name == "fence" and after.token != before.token:
            current = args.reset_epoch == before.reset_epoch
            live = members(args.resume) if current else frozenset()
            same = not before.closed and before.holder == args.holder
            self.must_flag |= self.started - (live if same else frozenset())
            self.started = set(live)
        elif name in ("delete", "delete_group") and after.reset_epoch != before.reset_epoch:
            self.started, self.must_flag = set(), set()
            self.committed_before, self.acked_before = 0, set()

    # ---- always

    @invariant()
    def table_equals_the_model(self) -> None:
        assert (KEY in self.table) == self.model.has_progress
        if not self.model.has_progress:
            assert self.table.queues_of(KEY.group) == []
            with pytest.raises(UnknownQueue) as raised:
                self.table.query(KEY)
            facts = raised.value.facts
            assert facts["token"] == str(self.model.token)
            assert facts["reset_epoch"] == str(self.model.reset_epoch)
            return
        queue, model = self.table.query(KEY), self.model
        assert (queue.token, queue.reset_epoch) == (model.token, model.reset_epoch)
        assert (queue.holder, queue.closed) == (model.holder, model.closed)
        assert queue.committed_offset == model.committed
        assert members(queue.acked) == model.above
        assert queue.delivered_offset == model.delivered
        assert (
            queue.delivered_offset <= queue.delivered_reserved <= queue.delivered_offset + 2 * SPAN
        )
        assert members(queue.maybe_seen) == model.maybe_seen
        assert self.table.acked.get(KEY, EMPTY) == queue.acked
        assert (KEY in self.table.capped) == (len(queue.acked.runs) >= RANGES_MAX)
        assert (queue.subscription_generation, queue.source) == (model.generation, model.source)
        assert queue.first_reset_epoch == model.first_reset_epoch
        newest_first = self.resets.history.newest_first(KEY.group)
        assert [operation.order.op_id for operation in newest_first] == list(model.moves)[::-1]

    @invariant()
    def properties_hold(self) -> None:
        if not self.model.has_progress:
            return
        queue = self.table.query(KEY)
        assert queue.committed_offset >= self.committed_before, "V5"
        acked = set(range(queue.committed_offset)) | members(queue.acked)
        assert acked >= self.acked_before, "V9"
        assert queue.delivered_offset >= queue.committed_offset, "V10"
        assert not members(queue.maybe_seen) & acked
        assert self.must_flag - acked <= members(queue.maybe_seen), "V7: M lacks a started offset"
        beyond = {offset for offset in self.started - acked if offset >= queue.delivered_offset}
        assert queue.closed or not beyond, "V8: D does not cover a started offset"
        self.committed_before, self.acked_before = queue.committed_offset, acked


TestTableAgainstModel = Machine.TestCase
TestTableAgainstModel.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
