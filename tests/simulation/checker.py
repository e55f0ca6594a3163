"""Checks the properties of protocol section 16, which hold in every run.

The checker observes the table of offsets as it changes, the disk of offsets and etcd as they are
written, what storage appends, what handlers start and finish, and every response when it is sent
and when a client receives it. It keeps its own expected state and uses no state of an observed
process. A broken property raises `Violation` at the end of the run, with the events before the
first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._core.ordering_key import ORDERING_KEY
from batonmq._core.queues import GroupQueue
from batonmq._core.records import Record, decode_records, read_header
from batonmq._core.retries import ATTEMPTS
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.runtime.group_placements import OFFSETS_SERVICE
from batonmq_server.storage.core import schedule
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.node import StorageNode
from tests.simulation.answer_checks import AnswerChecks
from tests.simulation.client_checks import ClientChecks
from tests.simulation.etcd_checks import EtcdChecks
from tests.simulation.expected_state import ExpectedQueue, ExpectedState, OffsetsCopy, key_of
from tests.simulation.offsets_checks import OffsetsChecks
from tests.simulation.offsets_replica_checks import LEADER_KEY, OffsetsReplicaChecks
from tests.simulation.storage_replica_checks import LEADER_KEY as STORE_LEADER_KEY
from tests.simulation.storage_replica_checks import StorageReplicaChecks, WrittenBatch
from tests.simulation.trace import Trace

STILL_MS = 70_000
"""A queue that has not moved for this long must not be reported as moving; within one minute of the
last progress a nameserver may report it."""
BROKER = "broker-a"
SYNC_MS = 2_000
"""A message that was stored this long ago is on disk and visible."""


class Checker:
    """All checks of one run, with one expected state.

    Args:
        group: The consumer group.
        topic: The only topic of the group.
        lease_ms: Length of a lock's lease.
        now_ms: Reads the time of the simulation.
        leader: Reads the holder of an election key from etcd.
    """

    def __init__(
        self,
        group: str,
        topic: str,
        lease_ms: int,
        trace: Trace,
        now_ms: Callable[[], int],
        leader: Callable[[str], str],
    ) -> None:
        self.expected = ExpectedState(group, lease_ms, trace, now_ms)
        self.offsets = OffsetsChecks(self.expected)
        self.replicas = OffsetsReplicaChecks(self.expected, partial(leader, LEADER_KEY))
        self.stores = StorageReplicaChecks(
            self.expected, partial(leader, STORE_LEADER_KEY), self._kept
        )
        self.etcd = EtcdChecks(self.expected, topic)
        self.clients = ClientChecks(self.expected)
        self.answers = AnswerChecks(self.expected)

    # ---- offsets

    def watch_leadership(self, offsets: OffsetsEpoch) -> None:
        """Observe a leader of offsets; its writes count once the in-sync set has them."""
        table = self.expected.tables.get(OFFSETS_SERVICE)
        if table is None or offsets.table.epoch > table.epoch:
            self.offsets.began(dict(offsets.disk.read()))
            self.offsets.watch_table(offsets.table, OFFSETS_SERVICE)
        write = offsets.commits._write

        async def watched(entries: Sequence[Entry]) -> None:
            await write(entries)
            self.replicas.confirmed(offsets)
            if self.expected.watches(offsets.table):
                self.offsets.written(entries)

        offsets.commits._write = watched

    # ---- storage

    def watch_store(self, store: MessageStore, broker: str) -> None:
        """Observe what a restarted storage node has kept and appends. There is one topic."""
        self.forget_pause()
        for key, queue in self.expected.queues.items():
            if key.broker == broker and key.topic in self.expected.topic_ids:
                end = store.offsets((self.expected.topic_ids[key.topic], key.queue_id)).next_offset
                for offset in [offset for offset in queue.stored if offset >= end]:
                    del queue.stored[offset]
                    queue.keys.pop(offset, None)
                    self.expected.counts["torn"] += 1
        for once, copy in list(self.expected.copies.items()):
            topic_id, queue_id, offset = copy.place
            if offset >= store.offsets((topic_id, queue_id)).next_offset:
                del self.expected.copies[once]
        append = store.append

        def watched(
            batches: Sequence[CheckedBatch], topics: Mapping[str, LocalTopic], *more: Any
        ) -> Any:
            outcomes = append(batches, topics, *more)
            for checked, outcome in zip(batches, outcomes, strict=True):
                if isinstance(outcome, StoreReceipt) and not outcome.duplicate:
                    self._took(broker, checked, outcome, topics[checked.header.topic].topic_id)
            return outcomes

        setattr(store, "append", watched)  # noqa: B010  it stands before the class's own

    def watch_copy(self, node_id: str, node: StorageNode) -> None:
        """Observe the copy of a replica."""
        self.forget_pause()
        self.stores.copy_opened(node_id, node)

    def forget_pause(self) -> None:
        """Allow storage to lose the pause of the group, or to act on an older state."""
        self.expected.group.pause_known_ms.clear()

    def _kept(self, one: WrittenBatch) -> None:
        """Check a batch of a replica set: at its offset, once, in the order of its producer."""
        header = one.checked.header
        if header.topic != schedule.TOPIC:
            key = GroupQueue(self.expected.name, header.topic, BROKER, header.queue_id)
            end = len(self.expected.queues[key].stored)
            if one.receipt.first_offset != end:
                self.expected.fail(
                    "P2", f"{key} goes on at {one.receipt.first_offset}, not at {end}"
                )
        self._took(BROKER, one.checked, one.receipt, one.topic_id)

    def _took(
        self, broker: str, checked: CheckedBatch, receipt: StoreReceipt, topic_id: int
    ) -> None:
        self.expected.topic_ids[checked.header.topic] = topic_id
        if checked.header.topic == schedule.TOPIC:
            self._scheduled(checked, receipt)
        else:
            self._stored(broker, checked, receipt)

    def _stored(self, broker: str, checked: CheckedBatch, receipt: StoreReceipt) -> None:
        header = checked.header
        queue = self.expected.queues[
            GroupQueue(self.expected.name, header.topic, broker, header.queue_id)
        ]
        records = decode_records(checked.batch, header, range(header.count))
        for index, record in enumerate(records):
            offset = receipt.first_offset + index
            queue.stored[offset] = (_name(record), record.tag)
            queue.keys.pop(offset, None)  # of a message that was torn
            if (ordering_key := record.properties.get(ORDERING_KEY)) is not None:
                queue.keys[offset] = ordering_key
            queue.stored_ms[offset] = self.expected.now_ms()

    def _scheduled(self, checked: CheckedBatch, receipt: StoreReceipt) -> None:
        """Check that a message that was sent back is stored once, whichever node stores it (T5)."""
        header, expected = checked.header, self.expected
        if header.queue_id != schedule.SCHEDULED:
            return
        scheduled = schedule.decode_scheduled(header, checked.batch)
        if scheduled.schedule_id != schedule.FIRST:
            return
        inner = read_header(scheduled.batch)
        (record,) = decode_records(scheduled.batch, inner, range(inner.count))
        name, place = _name(record), (schedule.TOPIC_ID, header.queue_id, receipt.first_offset)
        expected.trace.note("storage", f"{name} waits for its time")
        expected.counts["sent back"] += 1
        if inner.producer_id in expected.copies:
            expected.fail("T5", f"{name} is sent back twice")
        expected.copies[inner.producer_id] = OffsetsCopy(name, place)

    # ---- why a queue does not move

    def backlogs(self) -> dict[GroupQueue, int]:
        """Return the lowest waiting offset of each queue with a backlog."""
        return {
            key: queue.committed_offset
            for key, queue in sorted(self.expected.queues.items())
            if queue.committed_offset in queue.stored
        }

    def explained(
        self,
        before: Mapping[GroupQueue, int],
        asked_ms: int,
        queues: Sequence[Any],
        *,
        clocks_agree: bool,
    ) -> None:
        """L3: a queue that does not move has a reason, and a queue with a backlog is not idle.

        Args:
            before: `backlogs` at the time of the call, `asked_ms`.
            queues: The `Diagnosis` messages of a nameserver.
            clocks_agree: Whether a nameserver can compute the age of a message.
        """
        for diagnosis in queues:
            key = key_of(diagnosis.queue)
            queue = self.expected.queues[key]
            offset = before.get(key)
            reason = nameserver_pb.StuckReason.Name(diagnosis.reason).removeprefix("STUCK_REASON_")
            self.expected.counts[f"because {reason}"] += 1
            if offset is None or queue.committed_offset != offset or offset not in queue.stored:
                continue
            since_ms = max(queue.stored_ms[offset], queue.committed_ms)
            text = f"{key}@{offset} waits for {asked_ms - since_ms} ms, and is said to be {reason}"
            if reason == "IDLE" and asked_ms - since_ms > SYNC_MS:
                self.expected.fail("L3", text)
            if reason == "MOVING" and clocks_agree and asked_ms - since_ms > STILL_MS:
                self.expected.fail("L3", text)

    # ---- at the end

    def check_complete(self, acked: Mapping[str, object]) -> None:
        """Check that each appended message is handled and committed once (L2)."""
        expected = self.expected
        ids, again = self._names(retries=False), self._names(retries=True)
        copies = Counter(copy.name for copy in expected.copies.values())
        for body, count in ids.items():
            if count > 1:
                expected.fail("T5", f"message {body} is stored {count} times")
        if again != copies:
            expected.fail("T5", f"sent back were {copies - again}, and came were {again - copies}")
        if not expected.counts["resets"] and (twice := [n for n, c in copies.items() if c > 1]):
            expected.fail("T5", f"sent back more than once: {twice}")
        if missing := sorted(acked.keys() - ids.keys()):
            expected.fail("P1", f"acknowledged messages are lost: {missing}")
        for key, queue in sorted(expected.queues.items()):
            if key.topic != expected.retries:
                self._check_order(key, [name for _, (name, _) in sorted(queue.stored.items())])
            if queue.committed_offset != len(queue.stored):
                expected.fail("L2", f"{key}: C is {queue.committed_offset} of {len(queue.stored)}")
            if unhandled := self._unhandled(key, queue):
                expected.fail("L2", f"{key}: never handled: {unhandled[:10]}")

    def _check_order(self, key: GroupQueue, names: Sequence[str]) -> None:
        """Check that the messages of one burst are stored in the order of their sends."""
        last: dict[str, int] = {}
        for burst, _, number in (name.partition(".") for name in names):
            if int(number) < last.get(burst, 0):
                self.expected.fail("order", f"{key}: {burst}.{number} is behind {last[burst]}")
            last[burst] = int(number)

    def complete(self) -> bool:
        """Return whether all messages are handled and committed."""
        return self._names(retries=True).total() == len(self.expected.copies) and all(
            queue.committed_offset == len(queue.stored) for queue in self.expected.queues.values()
        )

    def _names(self, *, retries: bool) -> Counter[str]:
        """Count the stored messages by name: those of the retry topic, or of all other topics."""
        return Counter(
            name
            for key, queue in self.expected.queues.items()
            if (key.topic == self.expected.retries) == retries
            for name, _ in queue.stored.values()
        )

    def _unhandled(self, key: GroupQueue, queue: ExpectedQueue) -> list[int]:
        """Return the offsets that must be handled since the last reset and are not."""
        epoch, reset_epoch = queue.epoch(), queue.durable.reset_epoch if queue.durable else 0
        return [
            offset
            for offset, (_, tag) in sorted(queue.stored.items())
            if offset not in epoch.handled
            and not epoch.given.between(offset, offset + 1)
            and self.expected.wanted(key, offset, tag, reset_epoch)
        ]


def _name(record: Record) -> str:
    """Return the name of a message in the expected state; a retry copy has a name of its own."""
    attempts = record.properties.get(ATTEMPTS)
    return record.body.decode() + (f" after {attempts} attempts" if attempts else "")
