"""What a run of backups knows outside the clusters, and its comparison with a restored cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._core.retries import ATTEMPTS, retry_topic
from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq.admin.backup_manifest import BackupManifest, QueueBackup, QueueProgressBackup
from tests.simulation.run_record import RunRecord

Place = tuple[QueueRef, int]
Progress = Mapping[str, Mapping[QueueRef, frozenset[int]]]
"""Offsets that count as handled, by group and queue."""
Extents = Mapping[QueueRef, tuple[int, int]]
Settings = Mapping[str, tuple[object, ...]]


@dataclass(slots=True)
class Sending:
    """One message that a producer has sent, or tried to send.

    Attributes:
        scheduled_unix_ms: Time at which it was scheduled for certain; 0 if it was not.
        deliver_unix_ms: Delivery time of a scheduled message; else 0.
        queue: Queue of its receipt; of a scheduled message the one to which it was to be delivered.
        offset: Offset of its receipt; -1 if it has none.
        confirmed: Whether it was stored, scheduled or committed for certain.
        unwanted: Whether its transaction is rolled back, or it was cancelled before its time.
        doubtful: Whether its producer has tried to cancel it.
    """

    topic: str
    message: Message
    scheduled_unix_ms: int = 0
    deliver_unix_ms: int = 0
    queue: QueueRef | None = None
    offset: int = -1
    confirmed: bool = False
    unwanted: bool = False
    doubtful: bool = False

    def stored(self, queue: QueueRef, offset: int) -> None:
        """Note a receipt."""
        self.queue, self.offset, self.confirmed = queue, offset, True

    def removed(self, one: SnapshotRecord) -> bool:
        """Return whether it may have been removed before the snapshot had it."""
        if self.deliver_unix_ms > one.after.unix_ms:
            return False
        assert self.queue is not None, "only what was confirmed is looked for"
        if self.queue not in one.before.extents or self.queue not in one.after.extents:
            return True  # all groups have read the messages of a removed queue
        first = one.after.extents[self.queue][0]
        return max(self.offset, 0) < first


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What an operator reads of a cluster at one moment.

    Attributes:
        unix_ms: Time at which the reading began.
        confirmed: Numbers of the messages that were stored or scheduled for certain.
        unwanted: Numbers of the messages that must not appear any more.
        doubtful: Numbers of the messages that may be missing.
        handled: Numbers that handlers of each group have handled.
        changes_before: How often a topic was changed, when the view began.
        changes_after: How often it was changed when the view was complete.
    """

    unix_ms: int
    confirmed: frozenset[int]
    unwanted: frozenset[int]
    doubtful: frozenset[int]
    handled: Mapping[str, frozenset[int]]
    topics: Settings
    groups: Settings
    extents: Extents
    progress: Progress
    changes_before: Mapping[str, int]
    changes_after: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A complete snapshot, with what was known before it began and after it was complete."""

    manifest: BackupManifest
    before: ClusterView
    after: ClusterView

    @property
    def stable(self) -> set[str]:
        """Topics that existed before the snapshot and were not changed meanwhile."""
        before, after = self.before.changes_before, self.after.changes_after
        return {
            name
            for name in self.before.topics.keys() & self.after.topics.keys()
            if before.get(name, 0) == after.get(name, 0)
        }


@dataclass(slots=True)
class BackupRun(RunRecord):
    """A run, as its checks see it.

    Attributes:
        sent: What was sent, by number; the body of a message is its number.
        to_commit: Numbers whose transactions a check commits.
        handled: Numbers that were handled at the first cluster, by group.
        again: Places at the second cluster whose messages were delivered, by group.
        handled_again: Numbers that were handled there, by group.
        source: Messages of the first cluster by place, at its end.
        topic_changes: How often each topic was deleted, or its queues were changed.
        deletions: Times at which deletions of the temporary topic began.
        trimmed: Topics whose own retention removes messages, at both clusters.
        retention: Whether the first cluster removes old messages of all topics.
    """

    sent: dict[int, Sending] = field(default_factory=dict)
    to_commit: set[int] = field(default_factory=set)
    handled: dict[str, set[int]] = field(default_factory=dict)
    again: dict[str, Counter[Place]] = field(default_factory=dict)
    handled_again: dict[str, set[int]] = field(default_factory=dict)
    source: dict[Place, ReceivedMessage] = field(default_factory=dict)
    snapshots: list[SnapshotRecord] = field(default_factory=list)
    topic_changes: Counter[str] = field(default_factory=Counter)
    deletions: list[int] = field(default_factory=list)
    trimmed: frozenset[str] = frozenset()
    retention: bool = False

    def state_of(self, pending: PendingTransaction) -> TransactionState:
        """Answer a check of a transaction."""
        commits = int(pending.message.body) in self.to_commit
        return TransactionState.COMMIT if commits else TransactionState.ROLLBACK

    # ---- a snapshot, compared with the cluster

    def judge_snapshot(self, one: SnapshotRecord) -> None:
        """Compare a manifest with the cluster before and after the snapshot."""
        self._judge_extents(one)
        self._judge_settings(one)
        self._judge_progress(one)
        for note in one.manifest.notes:
            if "copied anew" in note and not self._changed(one, note.split()[1].split("/")[0]):
                self.fail("incremental", f"snapshot {one.manifest.number}: {note}")

    def _changed(self, one: SnapshotRecord, topic: str) -> bool:
        """Return whether a topic was changed since the snapshot before."""
        earlier = [each for each in self.snapshots if each is not one]
        then = earlier[-1].before.changes_before if earlier else {}
        return one.after.changes_after.get(topic, 0) != then.get(topic, 0)

    def _judge_extents(self, one: SnapshotRecord) -> None:
        number, stable = one.manifest.number, one.stable
        backups = {each.queue: each for each in one.manifest.queues}
        for queue, (_, end) in one.before.extents.items():
            if queue.topic not in stable or queue not in one.after.extents:
                continue
            first = one.after.extents[queue][0]
            have = {
                offset
                for chunk in (backups[queue].chunks if queue in backups else ())
                for offset in range(chunk.first_offset, chunk.next_offset)
            }
            if missing := set(range(first, end)) - have:
                text = f"snapshot {number} lacks {sorted(missing)[:5]} of {queue}, end {end}"
                self.fail("complete", text)
            self.counts["removed by retention"] += bool(first)

    def _judge_settings(self, one: SnapshotRecord) -> None:
        have = {each.name: each for each in one.manifest.topics}
        for name in sorted(one.stable - have.keys()):
            self.fail("settings", f"snapshot {one.manifest.number} lacks topic {name}")
        groups = {each.name for each in one.manifest.groups}
        for name in sorted(one.before.groups.keys() - groups):
            self.fail("settings", f"snapshot {one.manifest.number} lacks group {name}")

    def _judge_progress(self, one: SnapshotRecord) -> None:
        """Progress is that of a moment of the snapshot, and is never beyond its messages."""
        ends = {each.queue: each.next_offset for each in one.manifest.queues}
        stable = one.stable
        for group in one.manifest.groups:
            before = one.before.progress.get(group.name, {})
            after = one.after.progress.get(group.name, {})
            known = {each.queue: acked_offsets(each) for each in group.progress}
            for queue in sorted(before.keys() | known.keys()):
                if queue.topic not in stable or queue not in ends:
                    continue
                acked = known.get(queue, frozenset())
                if lost := before.get(queue, frozenset()) - acked:
                    self.fail("progress", f"{group.name} had {sorted(lost)[:5]} of {queue}")
                if more := acked - after.get(queue, frozenset()):
                    self.fail("progress", f"{group.name} has not {sorted(more)[:5]} of {queue}")
                if max(acked, default=-1) >= ends[queue]:
                    self.fail("beyond", f"{group.name} is beyond {ends[queue]} of {queue}")

    # ---- the restored cluster, compared with the snapshot

    def judge_restored(
        self,
        one: SnapshotRecord,
        mapping: Mapping[QueueRef, QueueRef],
        restored: Mapping[QueueRef, Sequence[ReceivedMessage]],
        waiting: Sequence[tuple[str, bytes]],
    ) -> None:
        """Compare the messages of the second cluster with the first one.

        Args:
            waiting: Topic and body of each message that the snapshot has as scheduled.
        """
        late: Counter[tuple[str, bytes]] = Counter()
        for backup in one.manifest.queues:
            found = restored.get(mapping[backup.queue], ())
            offsets = [
                offset
                for chunk in backup.chunks
                for offset in range(chunk.first_offset, chunk.next_offset)
            ]
            by_offset = {each.offset: each for each in found}
            for index, offset in enumerate(offsets):
                if index in by_offset:
                    self._judge_same((backup.queue, offset), by_offset[index])
                elif backup.queue.topic not in self.trimmed:
                    self.fail("restored", f"{offset} of {backup.queue} is not at {index}")
            behind = [each for each in found if each.offset >= len(offsets)]
            late.update((each.queue.topic, each.body) for each in behind)
            self.counts["restored"] += len(offsets)
        # A topic that is deleted during a snapshot may have no queues in it.
        topics = {each.queue.topic for each in one.manifest.queues}
        expected = Counter(each for each in waiting if each[0] in topics)
        for topic, body in sorted((late - expected).elements()):
            self.fail("scheduled", f"{body!r} is more often in {topic} than it was scheduled")
        for topic, body in sorted((expected - late).elements()):
            if topic not in self.trimmed:
                self.fail("scheduled", f"{body!r} of {topic} was scheduled, and does not come")
        self.counts["restored as scheduled"] += len(waiting)
        self._judge_numbers(one, restored)

    def _judge_same(self, place: Place, message: ReceivedMessage) -> None:
        queue, offset = place
        source = self.source.get(place)
        if source is None:
            return
        if self.topic_changes[queue.topic] and queue.topic == TEMPORARY:
            return
        if content(source) != content(message):
            text = f"{content(message)} is restored for {content(source)} at {queue}/{offset}"
            self.fail("same", text)
        self.counts["compared"] += 1

    def _judge_numbers(
        self, one: SnapshotRecord, restored: Mapping[QueueRef, Sequence[ReceivedMessage]]
    ) -> None:
        """Each confirmed message is in its topic once, and no other one is."""
        stable = one.stable - self.trimmed
        found: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for queue, messages in restored.items():
            found[queue.topic].update(int(each.body) for each in messages)
            for each in messages:
                self._judge_sending(queue, each)
        for number, sending in self.sent.items():
            count = found[sending.topic][number]
            if count > 1:
                self.fail("once", f"{number} is {count} times in {sending.topic}")
            if count and number in one.before.unwanted:
                self.fail("unwanted", f"{number} was rolled back or cancelled, and is restored")
            if sending.topic not in stable:
                continue
            if sending.topic == TEMPORARY:
                if count and self._deleted(sending, one):
                    self.fail("deleted", f"{number} of a deleted topic is restored")
                continue  # a broker may store messages in a deleted topic until it hears of that
            wanted = number in one.before.confirmed - one.after.doubtful
            if wanted and not count and not sending.removed(one):
                kind = "scheduled " if sending.deliver_unix_ms else ""
                self.fail("lost", f"{kind}message {number} of {sending.topic} is not restored")

    def _deleted(self, sending: Sending, one: SnapshotRecord) -> bool:
        """Return whether the topic was deleted between the last call of a sending and a snapshot.

        A call that the network delays may store the message in the topic that is made afterwards.
        """
        last_call_unix_ms = sending.scheduled_unix_ms + LATE_MS
        return bool(sending.scheduled_unix_ms) and any(
            last_call_unix_ms < deletion < one.before.unix_ms for deletion in self.deletions
        )

    def _judge_sending(self, queue: QueueRef, message: ReceivedMessage) -> None:
        sending = self.sent.get(int(message.body))
        if sending is None:
            self.fail("same", f"{message.body!r} of {queue} was not sent")
        elif sending.topic == queue.topic:
            if (message.tag, message.keys) != (sending.message.tag, sending.message.keys):
                self.fail("same", f"{message.body!r} of {queue} has other tags or keys")
            if sending.deliver_unix_ms > message.store_unix_ms:
                self.fail("early", f"{message.body!r} of {queue} came too early")
            if sending.message.properties.items() - message.properties.items():
                self.fail("same", f"{message.body!r} of {queue} has other properties")

    def judge_handled(
        self,
        one: SnapshotRecord,
        mapping: Mapping[QueueRef, QueueRef],
        restored: Mapping[QueueRef, Sequence[ReceivedMessage]],
        dead: Mapping[str, set[int]],
    ) -> None:
        """What was handled in the snapshot is not delivered again, and all the rest is.

        Args:
            dead: Numbers among the dead letters of each group, in the end.
        """
        for backup in one.manifest.groups:
            group = backup.name
            if group not in self.again:
                continue
            known = {each.queue: acked_offsets(each) for each in backup.progress}
            for queue in one.manifest.queues:
                if queue.queue.topic in (ORDERS, retry_topic(group)):
                    target, acked = mapping[queue.queue], known.get(queue.queue, frozenset())
                    count = len(restored.get(target, ()))
                    self._judge_queue(group, queue, acked, (target, count))
            done = one.after.handled.get(group, frozenset()) | self.handled_again[group]
            done |= dead.get(group, set())
            self.counts["dead letters"] += len(dead.get(group, ()))
            for number in sorted(one.before.confirmed - one.after.doubtful - done):
                sending = self.sent[number]
                if sending.topic == ORDERS and not (self.retention and sending.removed(one)):
                    self.fail("handled", f"{group} has never handled {number}")

    def _judge_queue(
        self, group: str, backup: QueueBackup, acked: frozenset[int], to: tuple[QueueRef, int]
    ) -> None:
        target, count = to
        offsets = [
            offset
            for chunk in backup.chunks
            for offset in range(chunk.first_offset, chunk.next_offset)
        ]
        for index, offset in enumerate(offsets):
            times = self.again[group][target, index]
            if offset in acked and times:
                self.fail("repeated", f"{group} has handled {offset} of {backup.queue} before")
            if offset not in acked and not times:
                self.fail("delivered", f"{group} did not get {offset} of {backup.queue}")
        self.counts["handled before"] += len(acked.intersection(offsets))
        self.counts["left to handle"] += len(set(offsets) - acked)
        if left := set(offsets) - acked:
            self.counts["acknowledged above"] += sum(offset > min(left) for offset in acked)
        for index in range(len(offsets), count):
            if not self.again[group][target, index]:
                self.fail("delivered", f"{group} did not get the scheduled one at {index}")


ORDERS, LOGS, TEMPORARY = "orders", "logs", "temporary"
LATE_MS = 7_000
"""No call of a producer arrives so late."""


def acked_offsets(progress: QueueProgressBackup) -> frozenset[int]:
    """Return the offsets that count as handled."""
    ranges = ((0, progress.committed_offset), *progress.acked)
    return frozenset(offset for first, end in ranges for offset in range(first, end))


def content(message: ReceivedMessage) -> tuple[object, ...]:
    """Return what a restore must not change."""
    properties = tuple(sorted(message.properties.items()))
    return message.body, message.tag, message.keys, properties, message.born_unix_ms


def attempts(message: ReceivedMessage) -> int:
    """Return how often a message was handled before it was sent back."""
    return int(message.properties.get(ATTEMPTS, 0))
