"""Checks offsets when its rules are applied and when it writes to its disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batonmq._core.queues import GroupQueue
from batonmq_server.offsets.codec import META, decode_key, decode_progress, unseal
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.values import (
    Acks,
    AckState,
    AdvanceSettlement,
    DeliveryRange,
    FenceAttempt,
    FenceCondition,
    FenceGrant,
    HolderPosition,
    Instant,
    ProgressSource,
    ResetEffect,
    Tombstone,
)
from tests.simulation.expected_state import ExpectedState, ResetEpoch, copy_of, done, token_of

QUIET_MS = 1_500
"""A drained queue is granted to a new member after three unchanged slots of 500 ms (section 7)."""


class OffsetsChecks:
    """Checks the changes of the table of offsets and the writes to its disk."""

    def __init__(self, expected: ExpectedState) -> None:
        self._expected = expected

    # ---- as its rules are applied

    def watch_table(self, table: ProgressTable, offsets_set: str) -> None:
        """Observe every operation that the table of a new leader accepts."""
        self._begin_epoch(table, offsets_set)
        real = {name: getattr(table, name) for name in _WATCHED}

        def fence(key: GroupQueue, term: int, wish: FenceAttempt, now: Instant) -> FenceGrant:
            before = copy_of(table, key)
            grant: FenceGrant = real["fence"](key, term, wish, now)
            self._fenced(key, before, wish, grant, now)
            return grant

        def record_delivered(key: GroupQueue, token: int, run: DeliveryRange, now: Instant) -> Any:
            before = copy_of(table, key)
            delivered = real["record_delivered"](key, token, run, now)
            self._accepted(key, before, token, f"delivery [{run[0]}, {run[1]})")
            self._moved(key, before, table.query(key))
            self._delivered(key, token, run, table.query(key))
            return delivered

        def touch(key: GroupQueue, token: int, now: Instant, waiting_at: str = "") -> None:
            before = copy_of(table, key)
            real["touch"](key, token, now, waiting_at)
            self._accepted(key, before, token, "touch")

        def commit(
            key: GroupQueue,
            token: int,
            acks: Acks,
            now: Instant,
            source: ProgressSource = ProgressSource.COMMIT,
        ) -> Any:
            before = copy_of(table, key)
            committed = real["commit"](key, token, acks, now, source)
            self._accepted(key, before, token, f"{source.name.lower()} of acks")
            self._acked(key, before, table.query(key))
            self._expected.counts[f"acks by {source.name.lower()}"] += committed.changed
            return committed

        def close(key: GroupQueue, token: int, acks: Acks, left: RangeSet, now: Instant) -> Any:
            before = copy_of(table, key)
            closed = real["close"](key, token, acks, left, now)
            if before is None or before.token != token:
                self._fail("V3", f"{key}: close under {token} accepted; T={token_of(before)}")
            self._acked(key, before, table.query(key))
            if left:
                self._expected.counts["unfinished"] += 1
                self._expected.excuse(key, f"drain timeout under token {token}", offsets=left)
            self._expected.counts["closes"] += closed.changed
            return closed

        def reset(
            key: GroupQueue, to: AckState, source: ProgressSource, now: Instant, *, dry_run: bool
        ) -> ResetEffect:
            before = copy_of(table, key)
            moved: ResetEffect = real["reset"](key, to, source, now, dry_run=dry_run)
            if not dry_run:
                self._reset(key, before, table.query(key))
            return moved

        for wrapped in (fence, record_delivered, touch, commit, close, reset):
            self._watch(table, wrapped)
        self._watch_bounds(table, real)

    def _begin_epoch(self, table: ProgressTable, offsets_set: str) -> None:
        self._expected.tables[offsets_set] = table
        for queue in self._expected.queues.values():
            queue.resets = 0

    def _watch_bounds(self, table: ProgressTable, real: Mapping[str, Callable[..., Any]]) -> None:
        """Observe what lowers an inexact D."""

        def note_received(key: GroupQueue, token: int, position: HolderPosition) -> None:
            before = copy_of(table, key)
            real["note_received"](key, token, position)
            self._bounded(key, before, table, "positions that replaced a bound")

        def note_log_end(key: GroupQueue, token: int, log_end: int) -> None:
            before = copy_of(table, key)
            real["note_log_end"](key, token, log_end)
            self._bounded(key, before, table, "ends of logs that lowered a bound")

        def settle_advance(key: GroupQueue, token: int, settlement: AdvanceSettlement) -> None:
            before = copy_of(table, key)
            real["settle_advance"](key, token, settlement)
            self._bounded(key, before, table, "settled advances")

        for wrapped in (note_received, note_log_end, settle_advance):
            self._watch(table, wrapped)

    def _watch(self, table: ProgressTable, watched: Callable[..., Any]) -> None:
        """Observe a method of the table; changes in memory by a deposed leader are ignored."""
        name = watched.__name__
        real = getattr(table, name)

        def call(*args: Any, **more: Any) -> Any:
            return (watched if self._expected.watches(table) else real)(*args, **more)

        setattr(table, name, call)

    def _accepted(
        self, key: GroupQueue, before: Progress | None, token: int, operation: str
    ) -> None:
        if before is None or before.token != token or before.closed:
            closed = ", which is closed" if before is not None and before.closed else ""
            self._fail(
                "V3", f"{key}: {operation} under {token} accepted; T={token_of(before)}{closed}"
            )

    def _fenced(
        self,
        key: GroupQueue,
        before: Progress | None,
        wish: FenceAttempt,
        grant: FenceGrant,
        now: Instant,
    ) -> None:
        if not grant.changed:
            return
        expected, queue = self._expected, self._expected.queues[key]
        to = wish.holder.client_id if wish.holder else "none"
        text = f"{key}: {wish.condition.value} to {to} token {grant.token}"
        expected.trace.note("offsets", f"fenced {text}")
        expected.counts[f"fence {wish.condition.value}"] += 1
        queue.fenced[grant.token] = wish.holder
        queue.epoch_of[grant.token] = queue.epochs[grant.reset_epoch]
        queue.generation_of[grant.token] = wish.subscription_generation
        if before is None:
            return
        if grant.token <= before.token:
            self._fail("V1", f"{text} after {before.token}")
        if before.holder not in (None, wish.holder):
            expected.counts["hand-overs"] += 1
        match wish.condition:
            case FenceCondition.CLOSED_OR_DRAINED:
                self._fenced_quietly(key, before, wish, text, now)
            case FenceCondition.SAME_HOLDER if before.closed or not _same(before, wish):
                self._fail("section 4", f"{text}, but the holder is {before.holder}")
            case FenceCondition.FORCED:
                queue.revoked[before.token] = "forced"
                expected.excuse(key, f"token {before.token} was ended by force")
            case FenceCondition.IDLE:
                self._fenced_idle(key, before, wish, text, now)

    def _fenced_idle(
        self, key: GroupQueue, before: Progress, wish: FenceAttempt, text: str, now: Instant
    ) -> None:
        if now.monotonic_ms - before.last_call_monotonic_ms < wish.idle_ms:
            self._fail("section 4", f"{text}, but the holder was not idle")
        else:
            self._expected.excuse(key, f"lease of token {before.token} ran out")
        if not before.closed and not before.drained:
            self._expected.counts["steals"] += 1
            self._expected.counts["steals with an advance"] += before.advance is not None

    def _fenced_quietly(
        self, key: GroupQueue, before: Progress, wish: FenceAttempt, text: str, now: Instant
    ) -> None:
        """Check the fence of a queue that its owner has not closed (section 7).

        The owner is owed its quiet time only for the token that it was told of: that of the lock.
        """
        if before.closed:
            return
        if not before.drained:
            self._fail("section 4", f"{text} with {before.in_flight()} in flight")
        queue = self._expected.queues[key]
        told = queue.etcd_token == before.token
        owned = told and queue.owner is not None and queue.owner != wish.holder
        lives = now.monotonic_ms - before.last_call_monotonic_ms < self._expected.lease_ms
        quiet_ms = now.monotonic_ms - queue.moved_ms
        if owned and lives and quiet_ms < QUIET_MS:
            self._fail("section 7", f"{text} after only {quiet_ms} ms without change")
        self._expected.counts["passive"] += 1

    def _reset(self, key: GroupQueue, before: Progress | None, after: Progress) -> None:
        """Start a reset epoch: earlier handler calls do not count any more (section 13)."""
        expected, queue = self._expected, self._expected.queues[key]
        expected.counts["resets"] += 1
        queue.epochs[after.reset_epoch] = ResetEpoch(done(after))
        queue.resets += 1
        queue.moved_ms = queue.committed_ms = expected.now_ms()
        if before is not None:
            expected.counts["back resets"] += after.committed_offset < before.committed_offset
            queue.revoked[before.token] = "reset"
        expected.excuse(key, f"reset to {after.committed_offset}, token {after.token}")

    def _delivered(self, key: GroupQueue, token: int, run: DeliveryRange, now: Progress) -> None:
        """Section 14: two filters are never active at once; acked messages are filtered already."""
        expected, group = self._expected, self._expected.group
        queue, generation = expected.queues[key], run.subscription_generation
        if now.advance is not None and now.advance.id == run.advance_id:
            run = run._replace(next_offset=max(run.next_offset, now.advance.end_offset))
            expected.counts["advances"] += 1
        for first, end in RangeSet.of(run[0], run[1]).difference(done(now)).runs:
            for offset in range(first, end):
                queue.judged[offset].append(generation)
        text = f"{key}: delivery [{run[0]}, {run[1]}) by the filter of generation {generation}"
        bound = queue.generation_of.get(token, 0)
        if group.bound and bound and generation != bound:
            self._fail("section 14", f"{text} under token {token}, which is for {bound}")
        if group.bound and generation < group.served:
            self._fail("section 14", f"{text}, but {group.served} serves already")
        expected.counts["changes of the filter"] += 0 < group.served < generation
        group.served = max(group.served, generation)

    def _bounded(
        self, key: GroupQueue, before: Progress | None, table: ProgressTable, kind: str
    ) -> None:
        """V8: no message that was started under T is beyond an inexact D that was replaced."""
        if before is None or key not in table:
            return
        now = table.query(key)
        if now.delivered_offset == before.delivered_offset:
            return
        self._expected.counts[kind] += 1
        self._moved(key, before, now)
        for offset, starts in self._expected.queues[key].starts.items():
            if any(start.token == now.token for start in starts):
                self._expected.check_covered(key, now, offset)

    def _acked(self, key: GroupQueue, before: Progress | None, after: Progress) -> None:
        """V4: acked messages were handled or filtered. V5: C never goes back."""
        assert before is not None
        if after.committed_offset < before.committed_offset:
            self._fail("V5", f"{key}: C fell from {before.committed_offset} in memory")
        self._moved(key, before, after)
        queue = self._expected.queues[key]
        handled = queue.epochs[after.reset_epoch].handled
        for first, end in done(after).difference(done(before)).runs:
            for offset in range(first, end):
                if offset in handled:
                    continue
                tag = queue.stored.get(offset, ("", None))[1]
                if tag is None or self._expected.wanted(key, offset, tag, after.reset_epoch):
                    self._fail("V4", f"{key}@{offset} is acked, and no member has handled it")

    def _moved(self, key: GroupQueue, before: Progress | None, after: Progress) -> None:
        """Note when the queue moved. The proof of an inexact D lowers it, and is no move (6.8)."""
        queue, now_ms = self._expected.queues[key], self._expected.now_ms()
        if before is None or before.committed_offset != after.committed_offset:
            queue.moved_ms = queue.committed_ms = now_ms
            return
        proved = before.advance is None and after.delivered_offset < before.delivered_offset
        if before.delivered_offset != after.delivered_offset and not proved:
            queue.moved_ms = now_ms

    # ---- what is durable

    def written(self, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Check a durable write of progress."""
        for raw_key, raw in entries:
            if raw_key.startswith(META):
                continue
            if raw is None:
                continue  # moved and removed: the progress is durable in the other set
            key = decode_key(raw_key)
            now = decode_progress(key, unseal(raw_key, raw))
            if isinstance(now, Tombstone):
                self._fail("V9", f"{key}: its progress is gone, though its topic was never deleted")
            else:
                self._durable(key, now)

    def began(self, entries: Mapping[bytes, bytes]) -> None:
        """Check that a new leader starts with all durable progress; it may have more."""
        queues = [(key, raw) for key, raw in entries.items() if not key.startswith(META)]
        for queue in self._expected.queues.values():
            queue.resets = 0
        self.written(queues)
        there = {decode_key(key) for key, _ in queues}
        for key, queue in self._expected.queues.items():
            if queue.durable is not None and key not in there:
                self._fail("V9", f"{key}: a new leader has no progress of it")

    def _durable(self, key: GroupQueue, now: Progress) -> None:
        queue = self._expected.queues[key]
        before, queue.durable = queue.durable, now
        if now.holder is not None and queue.issued.setdefault(now.token, now.holder) != now.holder:
            self._fail("V2", f"{key}: token {now.token} belongs to two incarnations")
        if before is None:
            return
        if now.token < before.token:
            self._fail("V1", f"{key}: token fell from {before.token} to {now.token}")
        if now.reset_epoch < before.reset_epoch:
            self._fail("V5", f"{key}: R fell from {before.reset_epoch} to {now.reset_epoch}")
        lost = done(before).difference(done(now))
        risen = now.reset_epoch - before.reset_epoch
        if lost and not queue.resets and risen <= 0:
            rule = "V5" if now.committed_offset < before.committed_offset else "V9"
            self._fail(rule, f"{key}: {lost} was acked, and is no more; no reset has come")
        queue.resets = max(0, queue.resets - max(risen, int(bool(lost))))

    def _fail(self, rule: str, text: str) -> None:
        self._expected.fail(rule, text)


_BOUNDS = ("note_received", "note_log_end", "settle_advance")
_WATCHED = ("fence", "record_delivered", *_BOUNDS, "touch", "commit", "close", "reset")


def _same(before: Progress, wish: FenceAttempt) -> bool:
    """Return whether the requester is the holder; an owner number of 0 is not known."""
    old, new = before.holder, wish.holder
    if old is None or new is None or old[:2] != new[:2]:
        return False
    return old.owner == new.owner or not (old.owner and new.owner)
