"""Resets, undos and clones: what an operator asks for, and the record of it (protocol 13).

An operation moves queues of one group in one step or, if it has many, in several under one id. A
queue that it has moved is not moved by it again: the record answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batonmq._core.queues import GroupQueue
from batonmq._core.retries import retry_topic
from batonmq.errors import (
    BatonError,
    OperationExists,
    OperationNotFound,
    UnknownQueue,
    UnknownQueueDetail,
)
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.values import AckState, Instant, ProgressSource, ResetEffect

RECORDS_MAX = 1_000
"""Operations kept per group; the oldest is forgotten for a newer one."""


class ResetOrder(NamedTuple):
    """What makes two calls the same operation: all of it is equal.

    Attributes:
        kind: RESET or CLONE.
        undone_op_id: The operation that this one undoes; empty for none.
        from_group: Whose progress a clone takes; empty for a reset.
    """

    op_id: str
    kind: ProgressSource
    by: str
    reason: str
    undone_op_id: str = ""
    from_group: str = ""


class ResetStep(NamedTuple):
    """One queue that was moved, or would be."""

    key: GroupQueue
    to_offset: int
    moved: ResetEffect


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReset:
    """What was carried out. `number` counts the operations of a group, from 1 and for ever."""

    number: int
    order: ResetOrder
    unix_ms: int
    steps: tuple[ResetStep, ...]


class ResetSlot(NamedTuple):
    """Where an operation is kept: the slots of a group are a ring."""

    group: str
    slot: int


class ResetHistory:
    """The recorded operations of all groups."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[int, RecordedReset]] = {}
        self._by_id: dict[tuple[str, str], RecordedReset] = {}

    def find(self, group: str, op_id: str) -> RecordedReset | None:
        """The operation of this id."""
        return self._by_id.get((group, op_id))

    def at(self, key: ResetSlot) -> RecordedReset:
        """What is kept there."""
        return self._slots[key.group][key.slot]

    def newest_first(self, group: str) -> list[RecordedReset]:
        """The operations of a group."""
        slots = self._slots.get(group, {})
        return sorted(slots.values(), key=lambda each: each.number, reverse=True)

    def put(self, group: str, operation: RecordedReset) -> ResetSlot:
        """Keep an operation, in place of its former self or of the oldest."""
        slots, slot = self._slots.setdefault(group, {}), operation.number % RECORDS_MAX
        if slot in slots:
            del self._by_id[group, slots[slot].order.op_id]
        slots[slot] = self._by_id[group, operation.order.op_id] = operation
        return ResetSlot(group, slot)

    def drop(self, group: str) -> None:
        """Forget those of a group that is kept elsewhere."""
        for operation in self._slots.pop(group, {}).values():
            del self._by_id[group, operation.order.op_id]

    def next_number(self, group: str) -> int:
        """For an operation that is new."""
        slots = self._slots.get(group, {})
        return max((each.number for each in slots.values()), default=0) + 1


class ResetOutcome(NamedTuple):
    """What came of a call.

    Attributes:
        results: One per queue asked for.
        fresh: The steps that this call has taken; empty for a dry run or a repetition.
        record: What has to become durable together with the queues of `fresh`.
    """

    results: list[ResetStep | BatonError]
    fresh: list[ResetStep]
    record: ResetSlot | None


class ResetTarget(NamedTuple):
    """Where a queue has to go. `undone` is the step to be undone, if it is one."""

    key: GroupQueue
    to: AckState
    undone: ResetStep | None = None


class ResetExecutor:
    """Carries out operations on a table."""

    def __init__(self, table: ProgressTable, records: ResetHistory) -> None:
        self._table, self.records = table, records

    def reset(
        self,
        group: str,
        order: ResetOrder,
        targets: Sequence[ResetTarget],
        now: Instant,
        *,
        dry_run: bool,
    ) -> ResetOutcome:
        """Move queues of `group`. A result that is an error has changed nothing."""
        known = None if dry_run else self.records.find(group, order.op_id)
        if known is not None and known.order != order:
            return ResetOutcome([_exists(order.op_id) for _ in targets], [], None)
        taken = {step.key: step for step in known.steps} if known else {}
        results: list[ResetStep | BatonError] = []
        fresh = []
        for target in targets:
            step = taken.get(target.key)
            if step is None:
                moved = self._move(target, order.kind, now, dry_run=dry_run)
                results.append(moved)
                if isinstance(moved, ResetStep) and not dry_run:
                    fresh.append(moved)
            elif step.to_offset == target.to.committed_offset:
                results.append(step)
            else:
                results.append(_exists(order.op_id))
        return ResetOutcome(results, fresh, self._recorded(group, order, known, fresh, now))

    def undo(self, group: str, order: ResetOrder, now: Instant, *, dry_run: bool) -> ResetOutcome:
        """Bring every queue that `order.undone_op_id` has moved back to where it was.

        Raises:
            OperationNotFound: no such operation is recorded.
        """
        known = None if dry_run else self.records.find(group, order.op_id)
        undone = self.records.find(group, order.undone_op_id)
        if undone is None and known is not None and known.order == order:
            return ResetOutcome(list(known.steps), [], None)
        if undone is None:
            raise OperationNotFound(
                f"no operation {order.undone_op_id} of group {group} is recorded",
                facts={"op_id": order.undone_op_id},
            )
        targets = [ResetTarget(step.key, step.moved.before, step) for step in undone.steps]
        return self.reset(group, order, targets, now, dry_run=dry_run)

    def clone(
        self, to_group: str, order: ResetOrder, topic: str, now: Instant, *, dry_run: bool
    ) -> ResetOutcome:
        """Give `to_group` the progress of `order.from_group`, on one topic or, if empty, all.

        All but its retry topic, which only `from_group` reads.

        Raises:
            OperationExists: the id was used for something else.
        """
        known = None if dry_run else self.records.find(to_group, order.op_id)
        if known is not None and known.order != order:
            raise _exists(order.op_id)
        if known is not None:
            return ResetOutcome(list(known.steps), [], None)
        targets, own = [], retry_topic(order.from_group)
        for key in self._table.group(order.from_group):
            if key.topic == topic or (not topic and key.topic != own):
                source = self._table.query(key)
                place = AckState(source.committed_offset, source.acked)
                targets.append(ResetTarget(key._replace(group=to_group), place))
        return self.reset(to_group, order, targets, now, dry_run=dry_run)

    def _move(
        self, target: ResetTarget, kind: ProgressSource, now: Instant, *, dry_run: bool
    ) -> ResetStep | BatonError:
        if target.undone is not None:
            try:
                progress = self._table.query(target.key)
            except UnknownQueue as error:
                return error
            if target.undone.moved.reset_epoch <= progress.first_reset_epoch:
                return UnknownQueue(
                    f"what the operation moved on queue {target.key} was deleted since",
                    facts={"queue": str(target.key)},
                    detail=UnknownQueueDetail(token=progress.token),
                )
        moved = self._table.reset(target.key, target.to, kind, now, dry_run=dry_run)
        return ResetStep(target.key, target.to.committed_offset, moved)

    def _recorded(
        self,
        group: str,
        order: ResetOrder,
        known: RecordedReset | None,
        fresh: Iterable[ResetStep],
        now: Instant,
    ) -> ResetSlot | None:
        steps = tuple(fresh)
        if not steps:
            return None
        operation = RecordedReset(
            number=known.number if known else self.records.next_number(group),
            order=order,
            unix_ms=known.unix_ms if known else now.unix_ms,
            steps=tuple(sorted((known.steps if known else ()) + steps)),
        )
        return self.records.put(group, operation)


def _exists(op_id: str) -> OperationExists:
    return OperationExists(
        f"operation id {op_id} was used for something else", facts={"op_id": op_id}
    )
