"""Progress of all queues, the term of the lock manager and the epoch of this replica set.

Pure: the time is an argument, and a result says by `changed` that the state must become durable.
A caller may answer from a state only when the state is durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from batonmq._core.queues import GroupQueue
from batonmq.errors import (
    FenceCause,
    Fenced,
    FencedDetail,
    OldEpoch,
    OldEpochDetail,
    OldTopic,
    UnknownQueue,
    UnknownQueueDetail,
)
from batonmq_server.offsets.core.local_placements import LocalPlacements
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.values import (
    Acks,
    AckState,
    AdvanceSettlement,
    CommitResult,
    DeliveryRange,
    DeliveryResult,
    FenceAttempt,
    FenceGrant,
    HolderPosition,
    Instant,
    ProgressSource,
    QueueLimits,
    ResetEffect,
    TokenFloor,
    Tombstone,
)


class ProgressTable:
    """Keeps a `Progress` per queue, and a `Tombstone` per queue of a deleted topic or group.

    Args:
        epoch: Epoch of this replica set; greater than every earlier one.
        term: Highest announced term.
        now: Start of the epoch; counts as a call under every token (protocol 12).

    Attributes:
        placements: The groups that have moved to this replica set, or away from it.
        floor: Tokens and reset epochs of forgotten queues; the floor of another set is added by
            `raise_floor`.
    """

    def __init__(self, limits: QueueLimits, epoch: int, term: int, now: Instant) -> None:
        self.limits, self.epoch, self.term, self._start = limits, epoch, term, now
        self.placements = LocalPlacements()
        self.floor = TokenFloor()
        self._queues: dict[GroupQueue, Progress] = {}
        self._groups: dict[str, dict[GroupQueue, Progress]] = {}
        self._tombstones: dict[str, dict[GroupQueue, Tombstone]] = {}  # by group
        self._topic_ids: dict[str, int] = {}
        self.acked: dict[GroupQueue, RangeSet] = {}
        """Acked ranges, of the queues that have any."""
        self.capped: set[GroupQueue] = set()
        """Queues with a full ack window."""

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, key: object) -> bool:
        return key in self._queues

    def restore(
        self, key: GroupQueue, stored: Progress | Tombstone, now: Instant | None = None
    ) -> None:
        """Add a stored queue, at the start of the epoch, or at `now` from another replica set.

        The delivered offset becomes its reserved bound; the idle time starts at 0. For progress
        from another replica set the bound stays: what that set recorded may still be on its way.
        """
        if isinstance(stored, Tombstone):
            self._tombstones.setdefault(key.group, {})[key] = stored
            return
        stored.delivered_offset = stored.delivered_reserved
        stored.delivered_known, stored.token_change = 0, None
        stored.provable = now is None
        stored.last_call_monotonic_ms = (now or self._start).monotonic_ms
        self._put(key, stored)

    def restore_topic(self, topic: str, topic_id: int) -> None:
        """Set the id for which the progress on a topic was last deleted."""
        self._topic_ids[topic] = topic_id

    def raise_floor(self, token: int, reset_epoch: int) -> bool:
        """Raise the floor to these values; return whether it has changed."""
        before, self.floor = self.floor, self.floor.raised((token, reset_epoch))
        return self.floor != before

    @property
    def topic_ids(self) -> dict[str, int]:
        """By topic, the greatest id for which its progress was deleted."""
        return dict(self._topic_ids)

    def has(self, group: str) -> bool:
        """Return whether a group has progress."""
        return group in self._groups

    def knows(self, group: str) -> bool:
        """Return whether a group has progress, or had some that is not forgotten."""
        return group in self._groups or group in self._tombstones

    def drop(self, group: str) -> None:
        """Forget a group that has left this replica set, with its tombstones."""
        for key in self._groups.pop(group, {}):
            del self._queues[key]
            self.acked.pop(key, None)
            self.capped.discard(key)
        self._tombstones.pop(group, None)

    def check_epoch(self, seen_epoch: int) -> None:
        """Return if the caller has not seen a newer epoch of this replica set.

        Raises:
            OldEpoch: the caller has seen a newer epoch.
        """
        if seen_epoch > self.epoch:
            raise OldEpoch(
                f"this replica has epoch {self.epoch}, the caller has seen {seen_epoch}",
                detail=OldEpochDetail(epoch=self.epoch, current=seen_epoch),
            )

    def announce(self, term: int) -> bool:
        """Accept a term of the lock manager; return whether it is new and must become durable.

        Raises:
            OldEpoch: a newer term was announced before.
        """
        if term < self.term:
            raise OldEpoch(
                f"term {term} is over, the announced term is {self.term}",
                detail=OldEpochDetail(epoch=term, current=self.term),
            )
        changed = term > self.term
        self.term = term
        return changed

    def fence(self, key: GroupQueue, term: int, attempt: FenceAttempt, now: Instant) -> FenceGrant:
        """Fence a queue; a successful fence creates missing progress.

        Raises:
            OldEpoch: `term` is not the announced one.
            UnknownQueue: the queue has no progress, and the attempt has no holder.
            OldTopic: the start offset was read in an earlier topic of this name.
            Superseded, TokenMismatch, Unacked, NotHolder, NotIdle: see `Progress.fence`.
        """
        if term != self.term:
            raise OldEpoch(
                f"term {term} is not the announced term, {self.term}",
                detail=OldEpochDetail(epoch=term, current=self.term),
            )
        progress = self._queues.get(key)
        if progress is None:
            if attempt.holder is None:
                raise self._unknown(key)
            self._check_topic_id(key, attempt.topic_id)
            progress = self._first(key, attempt.initial_offset)
            if self._tombstone(key) is None and not attempt.expected_token:
                attempt = replace(attempt, expected_token=progress.token)
        grant = progress.fence(attempt, now)
        self._put(key, progress)
        return grant

    def reset(
        self, key: GroupQueue, to: AckState, source: ProgressSource, now: Instant, *, dry_run: bool
    ) -> ResetEffect:
        """Reset a queue as `Progress.reset` does; missing progress is created at `to`.

        A dry run returns the effect and changes nothing.
        """
        progress = self._queues.get(key) or self._first(key, to.committed_offset)
        if dry_run:
            return replace(progress).reset(to, source, now)
        moved = progress.reset(to, source, now)
        self._put(key, progress)
        return moved

    def delete_topic(self, topic: str, topic_id: int, now: Instant) -> list[GroupQueue] | None:
        """Delete the progress of all groups on the topics of a name with ids below `topic_id`.

        Returns:
            The queues that had progress; None, with nothing deleted, if it was called for this id
            or a greater one before: the progress may belong to that topic.
        """
        if topic_id <= self.deleted_topic_id(topic):
            return None
        self._topic_ids[topic] = topic_id
        keys = (
            key
            for key in self._queues
            if key.topic == topic and self.placements.topic_id(key.group, topic) < topic_id
        )
        return self._delete(keys, now)

    def delete_group(self, group: str, topic: str, now: Instant) -> list[GroupQueue]:
        """Delete the progress of `group` on `topic`, or on all if empty; return the queues."""
        return self._delete((key for key in self.queues_of(group) if topic in ("", key.topic)), now)

    def tombstones_before(self, unix_ms: int) -> list[GroupQueue]:
        """Return the queues whose progress was deleted before a time, by the wall clock."""
        return [
            key
            for tombstones in self._tombstones.values()
            for key, one in tombstones.items()
            if one.update_unix_ms < unix_ms
        ]

    def forget(self, keys: Iterable[GroupQueue]) -> list[GroupQueue]:
        """Remove tombstones and raise the floor to them; return the queues that had one."""
        forgotten = []
        for key in keys:
            tombstone = self._tombstone(key)
            if tombstone is not None:
                self._drop_tombstone(key)
                self.raise_floor(tombstone.token, tombstone.reset_epoch)
                forgotten.append(key)
        return forgotten

    def deleted_topic_id(self, topic: str) -> int:
        """Return the greatest id that `delete_topic` was called with for this topic; 0 for none."""
        return self._topic_ids.get(topic, 0)

    def check_caller(self, key: GroupQueue, token: int, caller: int) -> None:
        """Check the caller of an operation under a token as `Progress.check_caller` does.

        Raises:
            UnknownQueue: the queue never had progress.
            Fenced: the topic or group was deleted.
            NotHolder: see there.
        """
        if caller:
            self._progress_of(key, token).check_caller(token, caller)

    def record_delivered(
        self, key: GroupQueue, token: int, delivery: DeliveryRange, now: Instant
    ) -> DeliveryResult:
        """Record a delivery as `Progress.record_delivered` does.

        Raises:
            UnknownQueue: the queue never had progress.
            Fenced: see there, or the topic or group was deleted.
        """
        return self._progress_of(key, token).record_delivered(token, delivery, self.limits, now)

    def settle_advance(self, key: GroupQueue, token: int, settlement: AdvanceSettlement) -> None:
        """Settle an advance as `Progress.settle_advance` does; no effect without progress."""
        if (progress := self._queues.get(key)) is not None:
            progress.settle_advance(token, settlement)

    def note_received(self, key: GroupQueue, token: int, position: HolderPosition) -> None:
        """Note the position of a holder that names this epoch, as `Progress.note_received` does."""
        if position.offsets_epoch == self.epoch and (progress := self._queues.get(key)) is not None:
            progress.note_received(token, position.received_offset)

    def inexact(self) -> dict[GroupQueue, int]:
        """Return the token of each queue with a delivered offset that the log's end may lower."""
        return {
            key: progress.token
            for key, progress in self._queues.items()
            if not progress.exact and progress.provable
        }

    def note_log_end(self, key: GroupQueue, token: int, log_end: int) -> None:
        """Lower an inexact delivered offset as `Progress.note_log_end` does."""
        if (progress := self._queues.get(key)) is not None:
            progress.note_log_end(token, log_end)

    def touch(self, key: GroupQueue, token: int, now: Instant, waiting_at: str = "") -> None:
        """Record a waiting long poll as `Progress.touch` does.

        Raises:
            UnknownQueue: the queue never had progress.
            Fenced: see there, or the topic or group was deleted.
        """
        self._progress_of(key, token).touch(token, now, waiting_at)

    def commit(
        self,
        key: GroupQueue,
        token: int,
        acks: Acks,
        now: Instant,
        source: ProgressSource = ProgressSource.COMMIT,
    ) -> CommitResult:
        """Commit acks as `Progress.commit` does.

        Raises:
            UnknownQueue: the queue never had progress.
            Fenced: see there, or the topic or group was deleted.
        """
        progress = self._progress_of(key, token)
        committed = progress.commit(token, acks, now, source)
        self._note_acked(key, progress)
        return committed

    def commit_unowned(self, key: GroupQueue, acks: Acks, now: Instant) -> CommitResult:
        """Commit as `Progress.commit_unowned` does; creates missing progress, also without acks."""
        progress = self._queues.get(key) or self._first(key, 0)
        committed = progress.commit_unowned(acks, now)
        if key not in self._queues:
            progress.source, progress.update_unix_ms = ProgressSource.COMMIT, now.unix_ms
            committed = committed._replace(changed=True)
        self._put(key, progress)
        return committed

    def close(
        self, key: GroupQueue, token: int, acks: Acks, unfinished: RangeSet, now: Instant
    ) -> CommitResult:
        """Close a token as `Progress.close` does.

        Raises:
            UnknownQueue: the queue never had progress.
            Fenced: see there, or the topic or group was deleted.
        """
        progress = self._progress_of(key, token)
        committed = progress.close(token, acks, unfinished, now)
        self._note_acked(key, progress)
        return committed

    def query(self, key: GroupQueue) -> Progress:
        """Return the progress of a queue, to be read before the caller's next await.

        Raises:
            UnknownQueue: it has none; the fact `token` is the one that a fence has to expect, and
                `reset_epoch` the one that a commit without token has to name.
        """
        progress = self._queues.get(key)
        if progress is None:
            raise self._unknown(key)
        return progress

    def state(self, key: GroupQueue) -> Progress | Tombstone | None:
        """Return the state to be stored of a queue; None if nothing is to be stored."""
        return self._queues.get(key) or self._tombstone(key)

    def queues_of(self, group: str) -> list[GroupQueue]:
        """Return the queues of a group that have progress, ascending."""
        return sorted(self._groups.get(group, ()))

    def fingerprint(self, group: str) -> dict[GroupQueue, tuple[int, int, RangeSet]]:
        """Return token, C and A of the queues of a group; any use of the group changes them."""
        queues = self._groups.get(group, {})
        return {key: (p.token, p.committed_offset, p.acked) for key, p in queues.items()}

    def items(self) -> Iterator[tuple[GroupQueue, Progress | Tombstone]]:
        """Yield all queues, including those of deleted topics and groups."""
        yield from self._queues.items()
        for tombstones in self._tombstones.values():
            yield from tombstones.items()

    def groups_after(
        self, group: str, count: int
    ) -> tuple[list[tuple[GroupQueue, Progress | Tombstone]], bool]:
        """Return about `count` queues of the groups with names after `group`; no group is split.

        Returns:
            The queues by group, including those of deleted topics and groups, and whether there are
            more.
        """
        known = self._groups.keys() | self._tombstones.keys()
        names = sorted(name for name in known if name > group)
        entries: list[tuple[GroupQueue, Progress | Tombstone]] = []
        for name in names:
            if len(entries) >= count:
                return entries, True
            entries.extend(self._groups.get(name, {}).items())
            entries.extend(self._tombstones.get(name, {}).items())
        return entries, False

    def _check_topic_id(self, key: GroupQueue, topic_id: int) -> None:
        """Return if a start offset was not read in an earlier topic of this name.

        Raises:
            OldTopic: the start offset belongs to an earlier topic.
        """
        current = max(
            self.deleted_topic_id(key.topic), self.placements.topic_id(key.group, key.topic)
        )
        if 0 < topic_id < current:
            raise OldTopic(
                f"the start offset is of topic {key.topic} with id {topic_id}; "
                f"the id is {current} now",
                facts={"topic_id": topic_id, "current": current},
            )

    def _first(self, key: GroupQueue, initial_offset: int) -> Progress:
        """Return the first progress of a queue; it continues the token of a tombstone."""
        before = self._tombstone(key) or self.floor
        return Progress(
            token=before.token,
            reset_epoch=before.reset_epoch,
            first_reset_epoch=before.reset_epoch,
            committed_offset=initial_offset,
            delivered_offset=initial_offset,
            delivered_reserved=initial_offset,
            last_call_monotonic_ms=self._start.monotonic_ms,
        )

    def _progress_of(self, key: GroupQueue, token: int) -> Progress:
        """Return the progress of a queue for a call under a token.

        Raises:
            UnknownQueue: the queue never had progress.
            Fenced: the topic or group was deleted.
        """
        tombstone = self._tombstone(key)
        if tombstone is None:
            return self.query(key)
        raise Fenced(
            f"token {token} is fenced, the progress of queue {key} was deleted",
            detail=FencedDetail(
                token=token,
                current=tombstone.token,
                reset_epoch=tombstone.reset_epoch,
                why=FenceCause.RESET,
            ),
        )

    def _unknown(self, key: GroupQueue) -> UnknownQueue:
        tombstone = self._tombstone(key)
        token = tombstone.token if tombstone else 0
        floor_token, reset_epoch = (tombstone or self.floor)[:2]
        return UnknownQueue(
            f"queue {key} has no progress",
            facts={"queue": str(key)},
            detail=UnknownQueueDetail(
                token=token, reset_epoch=reset_epoch, floor_token=floor_token
            ),
        )

    def _delete(self, keys: Iterable[GroupQueue], now: Instant) -> list[GroupQueue]:
        deleted = list(keys)
        for key in deleted:
            progress = self._queues.pop(key)
            self._tombstones.setdefault(key.group, {})[key] = Tombstone(
                progress.token + 1, progress.reset_epoch + 1, now.unix_ms
            )
            self.acked.pop(key, None)
            self.capped.discard(key)
            del self._groups[key.group][key]
            if not self._groups[key.group]:
                del self._groups[key.group]
        return deleted

    def _tombstone(self, key: GroupQueue) -> Tombstone | None:
        return self._tombstones.get(key.group, {}).get(key)

    def _drop_tombstone(self, key: GroupQueue) -> None:
        tombstones = self._tombstones.get(key.group)
        if tombstones is not None and tombstones.pop(key, None) is not None and not tombstones:
            del self._tombstones[key.group]

    def _put(self, key: GroupQueue, progress: Progress) -> None:
        self._drop_tombstone(key)
        self._queues[key] = progress
        self._groups.setdefault(key.group, {})[key] = progress
        self._note_acked(key, progress)

    def _note_acked(self, key: GroupQueue, progress: Progress) -> None:
        if progress.acked:
            self.acked[key] = progress.acked
        else:
            self.acked.pop(key, None)
        if progress.ack_window_full(self.limits):
            self.capped.add(key)
        else:
            self.capped.discard(key)
