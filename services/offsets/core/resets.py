"""Resets, undos and clones of a group's progress, and their history (protocol 13).

An operation moves queues of one group: in one call, or in several calls with one operation id if it
has many queues. A queue that an operation has moved is not moved by it again: a repeated call is
answered from the history.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
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
"""Operations kept per group; a new one replaces the oldest."""


class ResetOrder(NamedTuple):
    """The identity of an operation: two calls belong to one operation if their orders are equal.

    Attributes:
        kind: RESET or CLONE.
        undone_op_id: The operation that this one undoes; empty for none.
        from_group: The source group of a clone; empty for a reset.
    """

    op_id: str
    kind: ProgressSource
    by: str
    reason: str
    undone_op_id: str = ""
    from_group: str = ""


class ResetStep(NamedTuple):
    """One queue that an operation moved, or would move."""

    key: GroupQueue
    to_offset: int
    effect: ResetEffect


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReset:
    """An operation with the queues it moved; `number` counts the operations of a group from 1."""

    number: int
    order: ResetOrder
    unix_ms: int
    steps: tuple[ResetStep, ...]


class ResetSlot(NamedTuple):
    """Where an operation is kept: the slots of a group form a ring."""

    group: str
    slot: int


class ResetHistory:
    """The recorded operations of all groups."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[int, RecordedReset]] = {}
        self._by_id: dict[tuple[str, str], RecordedReset] = {}

    def find(self, group: str, op_id: str) -> RecordedReset | None:
        """Return the operation with this id, if it is recorded."""
        return self._by_id.get((group, op_id))

    def at(self, slot: ResetSlot) -> RecordedReset | None:
        """Return the operation in a slot; None if it is empty."""
        return self._slots.get(slot.group, {}).get(slot.slot)

    def slots(self, group: str) -> list[ResetSlot]:
        """Return the slots of a group that have an operation."""
        return [ResetSlot(group, slot) for slot in self._slots.get(group, ())]

    def newest_first(self, group: str) -> list[RecordedReset]:
        """Return the operations of a group, newest first."""
        slots = self._slots.get(group, {})
        return sorted(slots.values(), key=lambda each: each.number, reverse=True)

    def put(self, group: str, operation: RecordedReset) -> ResetSlot:
        """Keep an operation, in place of its earlier version or of the oldest operation."""
        slots, slot = self._slots.setdefault(group, {}), operation.number % RECORDS_MAX
        if slot in slots:
            del self._by_id[group, slots[slot].order.op_id]
        slots[slot] = self._by_id[group, operation.order.op_id] = operation
        return ResetSlot(group, slot)

    def drop(self, group: str) -> None:
        """Forget the operations of a group that was deleted, or has left this replica set."""
        for operation in self._slots.pop(group, {}).values():
            del self._by_id[group, operation.order.op_id]

    def next_number(self, group: str) -> int:
        """Return the number of the next new operation."""
        slots = self._slots.get(group, {})
        return max((each.number for each in slots.values()), default=0) + 1


class ResetOutcome(NamedTuple):
    """The result of one call.

    Attributes:
        results: One per requested queue.
        applied: The steps that this call made; empty for a dry run or a repeated call.
        slot: The changed slot of the history, to be made durable together with the queues of
            `applied`; None if nothing was applied.
    """

    results: list[ResetStep | BatonError]
    applied: list[ResetStep]
    slot: ResetSlot | None


class QueueReset(NamedTuple):
    """The new state of one queue; `undone` is the step that an undo reverts."""

    key: GroupQueue
    to: AckState
    undone: ResetStep | None = None


class ResetExecutor:
    """Applies operations to a table and records them."""

    def __init__(self, table: ProgressTable, history: ResetHistory) -> None:
        self._table, self.history = table, history

    def reset(
        self,
        group: str,
        order: ResetOrder,
        targets: Sequence[QueueReset],
        now: Instant,
        *,
        dry_run: bool,
        missing: Mapping[GroupQueue, BatonError] = MappingProxyType({}),
    ) -> ResetOutcome:
        """Move queues of `group`; if the result is an error, the queue is unchanged.

        Args:
            missing: Queues that must not get their first progress, with the error.
        """
        known = None if dry_run else self.history.find(group, order.op_id)
        if known is not None and known.order != order:
            return ResetOutcome([_exists(order.op_id) for _ in targets], [], None)
        done = {step.key: step for step in known.steps} if known else {}
        results: list[ResetStep | BatonError] = []
        applied = []
        for target in targets:
            step = done.get(target.key)
            if step is None:
                result = missing.get(target.key) or self._move(
                    target, order.kind, now, dry_run=dry_run
                )
                results.append(result)
                if isinstance(result, ResetStep) and not dry_run:
                    applied.append(result)
            elif step.to_offset == target.to.committed_offset:
                results.append(step)
            else:
                results.append(_exists(order.op_id))
        return ResetOutcome(results, applied, self._record(group, order, known, applied, now))

    def undo(self, group: str, order: ResetOrder, now: Instant, *, dry_run: bool) -> ResetOutcome:
        """Move every queue of operation `order.undone_op_id` back to its earlier state.

        Raises:
            OperationNotFound: the operation to undo is not recorded.
        """
        known = None if dry_run else self.history.find(group, order.op_id)
        undone = self.history.find(group, order.undone_op_id)
        if undone is None and known is not None and known.order == order:
            return ResetOutcome(list(known.steps), [], None)
        if undone is None:
            raise OperationNotFound(
                f"no operation {order.undone_op_id} of group {group} is recorded",
                facts={"op_id": order.undone_op_id},
            )
        targets = [QueueReset(step.key, step.effect.before, step) for step in undone.steps]
        return self.reset(group, order, targets, now, dry_run=dry_run)

    def clone_targets(self, to_group: str, order: ResetOrder, topic: str) -> list[QueueReset]:
        """Return what a clone gives to `to_group`: the progress of `order.from_group`.

        Args:
            topic: Only this topic; empty for all but the retry topic of `from_group`, which no
                other group reads.
        """
        targets, own = [], retry_topic(order.from_group)
        for key in self._table.queues_of(order.from_group):
            if key.topic == topic or (not topic and key.topic != own):
                source = self._table.query(key)
                state = AckState(source.committed_offset, source.acked)
                targets.append(QueueReset(key._replace(group=to_group), state))
        return targets

    def clone(
        self,
        to_group: str,
        order: ResetOrder,
        topic: str,
        now: Instant,
        *,
        dry_run: bool,
        missing: Container[GroupQueue] = (),
    ) -> ResetOutcome:
        """Give `to_group` the progress of `order.from_group`, as `clone_targets` returns it.

        Args:
            missing: Queues that are left out, because they do not exist.

        Raises:
            OperationExists: the id was used for another operation.
        """
        known = None if dry_run else self.history.find(to_group, order.op_id)
        if known is not None and known.order != order:
            raise _exists(order.op_id)
        if known is not None:
            return ResetOutcome(list(known.steps), [], None)
        targets = [
            target
            for target in self.clone_targets(to_group, order, topic)
            if target.key not in missing
        ]
        return self.reset(to_group, order, targets, now, dry_run=dry_run)

    def _move(
        self, target: QueueReset, kind: ProgressSource, now: Instant, *, dry_run: bool
    ) -> ResetStep | BatonError:
        if target.undone is not None:
            try:
                progress = self._table.query(target.key)
            except UnknownQueue as error:
                return error
            if target.undone.effect.reset_epoch <= progress.first_reset_epoch:
                return UnknownQueue(
                    f"the progress that the operation moved on queue {target.key} was deleted",
                    facts={"queue": str(target.key)},
                    detail=UnknownQueueDetail(token=progress.token),
                )
        effect = self._table.reset(target.key, target.to, kind, now, dry_run=dry_run)
        return ResetStep(target.key, target.to.committed_offset, effect)

    def _record(
        self,
        group: str,
        order: ResetOrder,
        known: RecordedReset | None,
        applied: Iterable[ResetStep],
        now: Instant,
    ) -> ResetSlot | None:
        steps = tuple(applied)
        if not steps:
            return None
        operation = RecordedReset(
            number=known.number if known else self.history.next_number(group),
            order=order,
            unix_ms=known.unix_ms if known else now.unix_ms,
            steps=tuple(sorted((known.steps if known else ()) + steps)),
        )
        return self.history.put(group, operation)


def _exists(op_id: str) -> OperationExists:
    return OperationExists(
        f"operation id {op_id} was used for another operation", facts={"op_id": op_id}
    )
