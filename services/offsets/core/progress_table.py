"""Progress of all queues, the term of the lock manager and the epoch of this replica set.

Pure: time comes in, and what must become durable before an answer leaves goes out as
`changed`. A caller may answer from a state only when that state is durable.
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
    CommitResult,
    DeliveryRange,
    DeliveryResult,
    FenceAttempt,
    FenceGrant,
    Instant,
    ProgressSource,
    QueueLimits,
    ResetEffect,
    Tombstone,
)

_NOTHING = Tombstone(token=0, reset_epoch=0, update_unix_ms=0)


class ProgressTable:
    """Keeps a `Progress` per queue, and a `Tombstone` per queue whose topic or group was deleted.

    Args:
        epoch: Epoch of this replica set; one greater than in the life before.
        term: Highest announced term.
        now: Start of this life; counts as an access to every queue (protocol 12).

    Attributes:
        placements: Which groups have come here, or left.
    """

    def __init__(self, limits: QueueLimits, epoch: int, term: int, now: Instant) -> None:
        self.limits, self.epoch, self.term, self._start = limits, epoch, term, now
        self.placements = LocalPlacements()
        self._queues: dict[GroupQueue, Progress] = {}
        self._groups: dict[str, dict[GroupQueue, Progress]] = {}
        self._tombstones: dict[GroupQueue, Tombstone] = {}
        self._topic_ids: dict[str, int] = {}
        self.ack_ranges: dict[GroupQueue, int] = {}
        """Number of acked ranges, of the queues that have any."""
        self.capped: set[GroupQueue] = set()
        """Queues whose deliveries wait for the lowest offset."""

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, key: object) -> bool:
        return key in self._queues

    def restore(
        self, key: GroupQueue, stored: Progress | Tombstone, now: Instant | None = None
    ) -> None:
        """Take a queue over, from the life before or as of `now` from another replica set.

        D is what was reserved, ages begin anew.
        """
        if isinstance(stored, Tombstone):
            self._tombstones[key] = stored
            return
        stored.delivered_offset = stored.delivered_reserved
        stored.delivered_known, stored.token_change = 0, None
        stored.access_monotonic_ms = (now or self._start).monotonic_ms
        self._put(key, stored)

    def restore_topic(self, topic: str, topic_id: int) -> None:
        """Take over for which id the progress of a topic's name was last deleted."""
        self._topic_ids[topic] = topic_id

    @property
    def topic_ids(self) -> dict[str, int]:
        """By name the greatest id for which the progress on a topic was deleted."""
        return dict(self._topic_ids)

    def has(self, group: str) -> bool:
        """Whether a group has progress."""
        return group in self._groups

    def drop(self, group: str) -> None:
        """Forget a group that is kept elsewhere, tombstones too."""
        for key in self._groups.pop(group, {}):
            del self._queues[key]
            self.ack_ranges.pop(key, None)
            self.capped.discard(key)
        for key in [key for key in self._tombstones if key.group == group]:
            del self._tombstones[key]

    def check_epoch(self, seen_epoch: int) -> None:
        """Refuse a caller that has seen a newer life of this replica set.

        Raises:
            OldEpoch: it has.
        """
        if seen_epoch > self.epoch:
            raise OldEpoch(
                f"this replica has epoch {self.epoch}, the caller has seen {seen_epoch}",
                detail=OldEpochDetail(epoch=self.epoch, current=seen_epoch),
            )

    def announce(self, term: int) -> bool:
        """Accept a leader; whether the term is new and must become durable.

        Raises:
            OldEpoch: a newer term has announced itself.
        """
        if term < self.term:
            raise OldEpoch(
                f"term {term} is over, the announced one is {self.term}",
                detail=OldEpochDetail(epoch=term, current=self.term),
            )
        changed = term > self.term
        self.term = term
        return changed

    def fence(self, key: GroupQueue, term: int, wish: FenceAttempt, now: Instant) -> FenceGrant:
        """Pass a queue on; a queue without progress gets some if it may be.

        Raises:
            OldEpoch: `term` is not the announced one.
            UnknownQueue: a queue without progress can't be passed to nobody.
            OldTopic: a queue without progress would start where an earlier topic was.
            Superseded, TokenMismatch, Unacked, NotHolder, NotIdle: see `Progress.fence`.
        """
        if term != self.term:
            raise OldEpoch(
                f"term {term} is not the announced one, {self.term}",
                detail=OldEpochDetail(epoch=term, current=self.term),
            )
        progress = self._queues.get(key)
        if progress is None:
            if wish.holder is None:
                raise self._unknown(key)
            self._check_topic_id(key, wish.topic_id)
            progress = self._first(key, wish.initial_offset)
        grant = progress.fence(wish, now)
        self._put(key, progress)
        return grant

    def reset(
        self, key: GroupQueue, to: AckState, source: ProgressSource, now: Instant, *, dry_run: bool
    ) -> ResetEffect:
        """See `Progress.reset`; a queue without progress gets some, from `to` on.

        A dry run tells what would happen and changes nothing.
        """
        progress = self._queues.get(key) or self._first(key, to.committed_offset)
        if dry_run:
            return replace(progress).reset(to, source, now)
        moved = progress.reset(to, source, now)
        self._put(key, progress)
        return moved

    def delete_topic(self, topic: str, topic_id: int, now: Instant) -> list[GroupQueue] | None:
        """End the progress of all groups on `topic`, before it is created as `topic_id`.

        Returns:
            The queues that had progress; None, with nothing done, if it was called for this id
            or a greater one before: what there is may belong to that topic.
        """
        if topic_id <= self.deleted_topic_id(topic):
            return None
        self._topic_ids[topic] = topic_id
        ended = (
            key
            for key in self._queues
            if key.topic == topic and self.placements.topic_id(key.group, topic) < topic_id
        )
        return self._end(ended, now)

    def delete_group(self, group: str, topic: str, now: Instant) -> list[GroupQueue]:
        """End the progress of `group` on `topic` or, if empty, on all; which queues had some."""
        return self._end((key for key in self.group(group) if topic in ("", key.topic)), now)

    def deleted_topic_id(self, topic: str) -> int:
        """The greatest id that `delete_topic` was called with for this name; 0 for none."""
        return self._topic_ids.get(topic, 0)

    def record_delivered(
        self, key: GroupQueue, token: int, delivery: DeliveryRange, now: Instant
    ) -> DeliveryResult:
        """See `Progress.record_delivered`; UnknownQueue without progress."""
        return self._held(key, token).record_delivered(token, delivery, self.limits, now)

    def touch(self, key: GroupQueue, token: int, now: Instant) -> None:
        """See `Progress.touch`; UnknownQueue without progress."""
        self._held(key, token).touch(token, now)

    def commit(
        self,
        key: GroupQueue,
        token: int,
        acks: Acks,
        now: Instant,
        source: ProgressSource = ProgressSource.COMMIT,
    ) -> CommitResult:
        """See `Progress.commit`; UnknownQueue without progress."""
        progress = self._held(key, token)
        committed = progress.commit(token, acks, now, source)
        self._count_ranges(key, progress)
        return committed

    def commit_unowned(self, key: GroupQueue, acks: Acks, now: Instant) -> CommitResult:
        """See `Progress.commit_unowned`; a queue without progress gets some, whatever is acked."""
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
        """See `Progress.close`; UnknownQueue without progress."""
        progress = self._held(key, token)
        committed = progress.close(token, acks, unfinished, now)
        self._count_ranges(key, progress)
        return committed

    def query(self, key: GroupQueue) -> Progress:
        """The live progress of a queue, to be read before the caller next waits.

        Raises:
            UnknownQueue: it has none; the fact `token` is the one that a fence has to expect, and
                `reset_epoch` the one that a commit without token has to name.
        """
        progress = self._queues.get(key)
        if progress is None:
            raise self._unknown(key)
        return progress

    def state(self, key: GroupQueue) -> Progress | Tombstone:
        """What has to be durable of a queue that has, or had, progress."""
        return self._queues.get(key) or self._tombstones[key]

    def group(self, group: str) -> list[GroupQueue]:
        """Queues of a group, ascending."""
        return sorted(self._groups.get(group, ()))

    def fingerprint(self, group: str) -> dict[GroupQueue, tuple[int, int, RangeSet]]:
        """Token, C and A of the queues of a group: what changes if anybody uses it."""
        queues = self._groups.get(group, {})
        return {key: (p.token, p.committed_offset, p.acked) for key, p in queues.items()}

    def items(self) -> Iterator[tuple[GroupQueue, Progress | Tombstone]]:
        """All queues, those of deleted topics and groups too."""
        yield from self._queues.items()
        yield from self._tombstones.items()

    def groups_after(
        self, group: str, count: int
    ) -> tuple[list[tuple[GroupQueue, Progress | Tombstone]], bool]:
        """About `count` queues of the groups with greater names, by group, each group whole.

        Returns:
            The queues, those of deleted topics and groups too; and whether there are more.
        """
        ended: dict[str, list[GroupQueue]] = {}
        for key in self._tombstones:
            if key.group > group:
                ended.setdefault(key.group, []).append(key)
        names = sorted({name for name in self._groups if name > group} | ended.keys())
        found: list[tuple[GroupQueue, Progress | Tombstone]] = []
        for name in names:
            if len(found) >= count:
                return found, True
            found.extend(self._groups.get(name, {}).items())
            found.extend((key, self._tombstones[key]) for key in ended.get(name, ()))
        return found, False

    def _check_topic_id(self, key: GroupQueue, topic_id: int) -> None:
        """Refuse a start offset that was found before the topic was created anew.

        Raises:
            OldTopic: it was.
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
        """What a queue without progress begins with."""
        before = self._tombstones.get(key, _NOTHING)
        return Progress(
            token=before.token,
            reset_epoch=before.reset_epoch,
            first_reset_epoch=before.reset_epoch,
            committed_offset=initial_offset,
            delivered_offset=initial_offset,
            delivered_reserved=initial_offset,
            access_monotonic_ms=self._start.monotonic_ms,
        )

    def _held(self, key: GroupQueue, token: int) -> Progress:
        """The progress of a queue under whose token somebody calls.

        Raises:
            UnknownQueue: it never had any.
            Fenced: its topic or group was deleted.
        """
        tombstone = self._tombstones.get(key)
        if tombstone is None:
            return self.query(key)
        raise Fenced(
            f"the progress of queue {key} was deleted, token {token} is not in force",
            detail=FencedDetail(
                token=token,
                current=tombstone.token,
                reset_epoch=tombstone.reset_epoch,
                why=FenceCause.RESET,
            ),
        )

    def _unknown(self, key: GroupQueue) -> UnknownQueue:
        token, reset_epoch, _ = self._tombstones.get(key, _NOTHING)
        return UnknownQueue(
            f"queue {key} has no progress",
            facts={"queue": str(key)},
            detail=UnknownQueueDetail(token=token, reset_epoch=reset_epoch),
        )

    def _end(self, keys: Iterable[GroupQueue], now: Instant) -> list[GroupQueue]:
        ended = list(keys)
        for key in ended:
            progress = self._queues.pop(key)
            self._tombstones[key] = Tombstone(
                progress.token + 1, progress.reset_epoch + 1, now.unix_ms
            )
            self.ack_ranges.pop(key, None)
            self.capped.discard(key)
            del self._groups[key.group][key]
            if not self._groups[key.group]:
                del self._groups[key.group]
        return ended

    def _put(self, key: GroupQueue, progress: Progress) -> None:
        self._tombstones.pop(key, None)
        self._queues[key] = progress
        self._groups.setdefault(key.group, {})[key] = progress
        self._count_ranges(key, progress)

    def _count_ranges(self, key: GroupQueue, progress: Progress) -> None:
        if progress.acked:
            self.ack_ranges[key] = len(progress.acked.runs)
        else:
            self.ack_ranges.pop(key, None)
        if progress.ack_window_full(self.limits):
            self.capped.add(key)
        else:
            self.capped.discard(key)
