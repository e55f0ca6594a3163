"""What must hold in every run, whatever happens: the properties of protocol section 16.

The checker sees the table of offsets as it changes, the disk of offsets and etcd as they are
written, what storage takes in, what handlers start and finish, and every answer as it leaves a
server and as a client learns it. It keeps its own books and trusts none of those it watches. A
broken property raises `Violation` at the end of the run, with the events around the first one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.lockmgr.v1 import stored_lock_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb

from batonmq.common.errors import BatonError, Internal
from batonmq.consuming.message import ReceivedMessage
from batonmq.core.records import decode_records
from batonmq.core.route import QueueId
from services.offsets.codec import META, decode_key, decode_progress
from services.offsets.core.calls import (
    Acks,
    Condition,
    Fence,
    Grant,
    Holder,
    Instant,
    QueueKey,
    Tombstone,
)
from services.offsets.core.progress import Progress
from services.offsets.core.ranges import RangeSet
from services.offsets.core.table import ProgressTable
from services.runtime.etcd import Stored
from services.storage.core.producers import Receipt
from services.storage.core.store import Checked, Store
from tests.simulation.books import Queue, Start, copy_of, done, holder_of, key_of, token_of
from tests.simulation.trace import Trace

TOPIC_ID = 1
"""Of the first topic in a cluster."""
QUIET_MS = 1_500
"""A drained queue goes to a newcomer after three slots of 500 ms without change (section 7)."""


class Violation(AssertionError):
    """A property does not hold; the text has the events before it."""


class Checker:
    """Keeps the books of one run.

    Args:
        group: The consumer group.
        wanted: Whether the group subscribes to a tag.
        lease_ms: Length of a lock's lease.
        now_ms: Reads the time of the simulation.
    """

    def __init__(
        self,
        group: str,
        wanted: Callable[[str], bool],
        lease_ms: int,
        trace: Trace,
        now_ms: Callable[[], int],
    ) -> None:
        self._group, self._wanted, self._lease_ms = group, wanted, lease_ms
        self._trace, self._now_ms = trace, now_ms
        self.counts: Counter[str] = Counter()
        self.queues: dict[QueueKey, Queue] = defaultdict(Queue)
        self.watching = True
        self.violation: Violation | None = None
        self.broken = asyncio.Event()
        self._table: ProgressTable | None = None

    def fail(self, rule: str, text: str) -> None:
        """Note that a property does not hold; the first one counts."""
        if not self.watching or self.violation is not None:
            return
        self._trace.note("checker", f"VIOLATION {rule}: {text}")
        self.violation = Violation(f"{rule}: {text}\n{self._trace.tail()}")
        self.broken.set()

    # ---- offsets, as its rules are applied

    def watch_table(self, table: ProgressTable) -> None:
        """See every operation that the table of a new life of offsets accepts."""
        self._table = table
        real = {name: getattr(table, name) for name in _WATCHED}

        def fence(key: QueueKey, term: int, wish: Fence, now: Instant) -> Grant:
            before = copy_of(table, key)
            grant: Grant = real["fence"](key, term, wish, now)
            self._fenced(key, before, wish, grant, now)
            return grant

        def record_delivered(key: QueueKey, token: int, run: tuple[int, int], now: Instant) -> Any:
            before = copy_of(table, key)
            delivered = real["record_delivered"](key, token, run, now)
            self._accepted(key, before, token, f"delivery [{run[0]}, {run[1]})")
            self._moved(key, before, table.query(key))
            return delivered

        def touch(key: QueueKey, token: int, now: Instant) -> None:
            before = copy_of(table, key)
            real["touch"](key, token, now)
            self._accepted(key, before, token, "touch")

        def commit(key: QueueKey, token: int, acks: Acks, now: Instant) -> Any:
            before = copy_of(table, key)
            committed = real["commit"](key, token, acks, now)
            self._accepted(key, before, token, "commit")
            self._acked(key, before, table.query(key))
            return committed

        def close(key: QueueKey, token: int, acks: Acks, left: RangeSet, now: Instant) -> Any:
            before = copy_of(table, key)
            closed = real["close"](key, token, acks, left, now)
            if before is None or before.token != token:
                self.fail("V3", f"{key}: close under token {token} of {token_of(before)} accepted")
            self._acked(key, before, table.query(key))
            if left:
                self.counts["unfinished"] += 1
                self._excuse(key, f"drain timeout under token {token}", offsets=left)
            self.counts["closes"] += closed.changed
            return closed

        for wrapped in (fence, record_delivered, touch, commit, close):
            setattr(table, wrapped.__name__, wrapped)

    def _accepted(self, key: QueueKey, before: Progress | None, token: int, what: str) -> None:
        if before is None or before.token != token or before.closed:
            closed = ", which is closed" if before is not None and before.closed else ""
            self.fail("V3", f"{key}: {what} under {token} accepted; T={token_of(before)}{closed}")

    def _fenced(
        self, key: QueueKey, before: Progress | None, wish: Fence, grant: Grant, now: Instant
    ) -> None:
        if not grant.changed:
            return
        text = f"{key}: {wish.condition.value} to {wish.holder.client_id} token {grant.token}"
        self._trace.note("offsets", f"fenced {text}")
        self.counts[f"fence {wish.condition.value}"] += 1
        if before is None:
            return
        if grant.token <= before.token:
            self.fail("V1", f"{text} after {before.token}")
        if before.holder not in (None, wish.holder):
            self.counts["hand-overs"] += 1
        if wish.condition is Condition.CLOSED_OR_DRAINED:
            self._fenced_quietly(key, before, wish, text, now)
        elif wish.condition is Condition.SAME_HOLDER:
            if before.closed or before.holder != wish.holder:
                self.fail("section 4", f"{text}, but the holder is {before.holder}")
        elif now.monotonic_ms - before.access_monotonic_ms < wish.idle_ms:
            self.fail("section 4", f"{text}, but the holder was not idle")
        else:
            self._excuse(key, f"lease of token {before.token} ran out")
        if wish.condition is Condition.IDLE and not before.closed and not before.drained:
            self.counts["steals"] += 1

    def _fenced_quietly(
        self, key: QueueKey, before: Progress, wish: Fence, text: str, now: Instant
    ) -> None:
        """A queue whose owner has neither closed it nor fallen silent (section 7)."""
        if before.closed:
            return
        if not before.drained:
            self.fail("section 4", f"{text} with {before.in_flight()} in flight")
        queue = self.queues[key]
        owned = queue.owner is not None and queue.owner not in (wish.holder,)
        lives = now.monotonic_ms - before.access_monotonic_ms < self._lease_ms
        quiet_ms = now.monotonic_ms - queue.moved_ms
        if owned and lives and quiet_ms < QUIET_MS:
            self.fail("section 7", f"{text} after only {quiet_ms} ms without change")
        self.counts["passive"] += 1

    def _acked(self, key: QueueKey, before: Progress | None, after: Progress) -> None:
        """V4: what is acked was handled, or nobody wanted it. V5: C never falls."""
        assert before is not None
        if after.committed_offset < before.committed_offset:
            self.fail("V5", f"{key}: C fell from {before.committed_offset} in memory")
        self._moved(key, before, after)
        queue = self.queues[key]
        for first, end in done(after).difference(done(before)).runs:
            for offset in range(first, end):
                if offset in queue.handled:
                    continue
                tag = queue.stored.get(offset, ("", None))[1]
                if tag is None or self._wanted(tag):
                    self.fail("V4", f"{key}@{offset} is acked, and nobody has handled it")

    def _moved(self, key: QueueKey, before: Progress | None, after: Progress) -> None:
        if before is None or (before.committed_offset, before.delivered_offset) != (
            after.committed_offset,
            after.delivered_offset,
        ):
            self.queues[key].moved_ms = self._now_ms()

    # ---- what is durable

    def offsets_written(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Offsets has made progress durable."""
        for raw_key, raw in entries:
            if raw_key.startswith(META):
                continue
            key = decode_key(raw_key)
            queue, now = self.queues[key], decode_progress(decode_key(raw_key), raw)
            if isinstance(now, Tombstone):
                self.fail("V9", f"{key}: its progress is gone, though its topic was never deleted")
                continue
            before, queue.durable = queue.durable, now
            if now.holder is not None and queue.issued.setdefault(now.token, now.holder) != (
                now.holder
            ):
                self.fail("V2", f"{key}: token {now.token} belongs to two incarnations")
            if before is None:
                continue
            if now.token < before.token:
                self.fail("V1", f"{key}: token fell from {before.token} to {now.token}")
            if now.committed_offset < before.committed_offset:
                self.fail("V5", f"{key}: C fell from {before.committed_offset}")
            if lost := done(before).difference(done(now)):
                self.fail("V9", f"{key}: {lost} was acked, and is no more")

    def etcd_written(self, stored: Stored) -> None:
        """A key of etcd has a new value."""
        if not stored.key.startswith("locks/"):
            return
        lock = stored_lock_pb2.StoredLock.FromString(stored.value)
        key = key_of(lock.queue)
        queue = self.queues[key]
        owner = holder_of(lock.owner) if lock.HasField("owner") else None
        self._trace.note("etcd", f"{key} is {owner.client_id if owner else 'free'} {lock.token}")
        if lock.token < queue.etcd_token:
            self.fail("V1", f"{key}: token in etcd fell from {queue.etcd_token} to {lock.token}")
        if owner is not None and owner == queue.owner and lock.acquire_seq < queue.acquire_seq:
            self.fail("story 8", f"{key}: request {lock.acquire_seq} after {queue.acquire_seq}")
        queue.etcd_token, queue.owner, queue.acquire_seq = lock.token, owner, lock.acquire_seq
        issued = queue.issued.get(lock.token)
        if owner is None:
            if issued is None:
                self.fail("V1", f"{key}: etcd has token {lock.token}, never issued")
            return
        if issued != owner:
            self.fail("V1", f"{key}: etcd gives token {lock.token} to {owner}, issued to {issued}")
        queue.persisted[lock.token] = owner

    def watch_store(self, store: Store, broker: str) -> None:
        """See what a new life of storage has kept, and takes in. There is one topic."""
        for key, queue in self.queues.items():
            if key.broker == broker:
                end = store.offsets((TOPIC_ID, key.queue_id)).next_offset
                for offset in [offset for offset in queue.stored if offset >= end]:
                    del queue.stored[offset]
                    self.counts["torn"] += 1
        append = store.append

        def watched(batches: Sequence[Checked], *more: Any) -> Any:
            outcomes = append(batches, *more)
            for checked, outcome in zip(batches, outcomes, strict=True):
                if isinstance(outcome, Receipt) and not outcome.duplicate:
                    self._stored(broker, checked, outcome)
            return outcomes

        setattr(store, "append", watched)  # noqa: B010  it stands before the class's own

    def _stored(self, broker: str, checked: Checked, receipt: Receipt) -> None:
        header = checked.header
        key = QueueKey(self._group, header.topic, broker, header.queue_id)
        records = decode_records(checked.batch, header, range(header.count))
        for index, record in enumerate(records):
            offset = receipt.first_offset + index
            self.queues[key].stored[offset] = (record.body.decode(), record.tag)

    # ---- what clients do

    def granted(self, client: str, incarnation_id: int, queue: QueueId, token: int) -> None:
        """A client believes from now on that it owns a queue (V11)."""
        key = self._queue_key(queue)
        holder = Holder(client, incarnation_id)
        self._trace.note(client, f"owns {key} token {token}")
        self.counts["grants"] += 1
        persisted = self.queues[key].persisted.get(token)
        if persisted != holder:
            self.fail("V11", f"{key}: {client} uses token {token}; etcd gave it to {persisted}")

    def started(self, client: str, message: ReceivedMessage) -> None:
        """A handler begins (V7, V8, V9, and V6 by its excuses)."""
        key, offset = self._queue_key(message.queue), message.offset
        queue, durable = self.queues[key], self.queues[key].durable
        flag = " redelivered" if message.redelivered else ""
        self._trace.note(client, f"starts {key}@{offset} token {message.token}{flag}")
        self.counts["starts"] += 1
        text = f"{key}@{offset}: {client} starts it under token {message.token}"
        before = queue.starts[offset]
        if before:
            self.counts["repeated"] += 1
            if not message.redelivered:
                self.fail("V7", f"{text}, unflagged, after {before}")
            if unexcused := [start for start in before if not start.excused]:
                self.fail("V6", f"{text} after {unexcused}, and nothing has happened to that")
        before.append(Start(client, self._now_ms()))
        if durable is None or durable.token < message.token:
            self.fail("V8", f"{text}; no such token is durable")
            return
        in_force = self._in_force(key, durable)
        if in_force != message.token:
            self.fail("V3", f"{text}; the token in force is {in_force}")
        if durable.token == message.token and durable.delivered_reserved <= offset:
            self.fail("V8", f"{text}; durable is only D={durable.delivered_reserved}")
        if done(durable).between(offset, offset + 1):
            self.fail("V9", f"{text}; it is acked already")

    def finished(self, client: str, message: ReceivedMessage) -> None:
        """A handler has ended well."""
        key = self._queue_key(message.queue)
        self._trace.note(client, f"handled {key}@{message.offset}")
        self.queues[key].handled.add(message.offset)

    def deadline_passed(self, client: str, queue: QueueId) -> None:
        """A client has stopped by itself: its lease ran out."""
        self.counts["own deadline"] += 1
        self._excuse(self._queue_key(queue), f"own deadline of {client}", client)

    def crashed(self, client: str) -> None:
        """A client is gone."""
        for key in self.queues:
            self._excuse(key, "", client)

    def _excuse(
        self, key: QueueKey, why: str, client: str = "", offsets: RangeSet | None = None
    ) -> None:
        """What was started until now, by `client` or anybody, may be started again (V6)."""
        if why:
            self._trace.note("checker", f"{key}: {why}")
        for offset, starts in self.queues[key].starts.items():
            if offsets is not None and not offsets.between(offset, offset + 1):
                continue
            for start in starts:
                start.excused |= client in ("", start.client)

    def _in_force(self, key: QueueKey, durable: Progress) -> int:
        if self._table is not None and key in self._table:
            return self._table.query(key).token
        return durable.token

    # ---- answers

    def answered(self, node: str, request: Any, answer: Any) -> None:
        """A server sends an answer: what it says must be durable by now."""
        if isinstance(answer, BatonError):
            if isinstance(answer, Internal):
                self.fail("unexpected", f"{node} failed with {answer.message}: {request}")
            return
        if isinstance(answer, lockmgr_pb.AcquireResponse | lockmgr_pb.KeepAliveResponse):
            self._lock_answered(node, request, answer)
        if isinstance(answer, offsets_pb.FenceResponse):
            for item, fence in zip(request.items, answer.outcomes, strict=True):
                if fence.HasField("fenced"):
                    self._fence_answered(item, fence.fenced)
        if isinstance(answer, offsets_pb.CommitResponse | offsets_pb.CloseResponse):
            for item, outcome in zip(request.items, answer.outcomes, strict=True):
                if not outcome.HasField("error"):
                    self._acks_answered(item)

    def _lock_answered(
        self,
        node: str,
        request: Any,
        answer: lockmgr_pb.AcquireResponse | lockmgr_pb.KeepAliveResponse,
    ) -> None:
        if isinstance(answer, lockmgr_pb.AcquireResponse):
            if not answer.HasField("grant"):
                return
            key, owner = key_of(answer.queue), holder_of(request.incarnation)
            if self.queues[key].persisted.get(answer.grant.token) != owner:
                self.fail("V11", f"{key}: {node} grants token {answer.grant.token}, not persisted")

            return
        for hold, report in zip(request.holds, answer.reports, strict=False):
            if report.state == lockmgr_pb.HOLD_STATE_NOT_OWNER:
                self._disowned(node, holder_of(request.incarnation), hold)
            elif report.state in (lockmgr_pb.HOLD_STATE_OK, lockmgr_pb.HOLD_STATE_WANTED):
                self._renewed(node, hold)

    def _renewed(self, node: str, hold: lockmgr_pb.Hold) -> None:
        """Nobody is renewed whose token is dead, or is being taken (stories 6, 7 and 12)."""
        key = key_of(hold.queue)
        durable = self.queues[key].durable
        in_force = self._in_force(key, durable) if durable is not None else 0
        if in_force != hold.token:
            self.fail("section 5", f"{key}: {node} renews {hold.token}; in force is {in_force}")

    def _disowned(self, node: str, owner: Holder, hold: lockmgr_pb.Hold) -> None:
        """Nothing is forgotten by a lock manager, whoever leads (section 12)."""
        key = key_of(hold.queue)
        queue = self.queues[key]
        if queue.durable is None or queue.owner != owner or queue.etcd_token != hold.token:
            return
        if self._in_force(key, queue.durable) == hold.token:
            self.fail(
                "section 12", f"{key}: {node} tells {owner} that it does not own {hold.token}"
            )

    def _fence_answered(self, item: offsets_pb.FenceItem, fenced: offsets_pb.Fenced) -> None:
        key = key_of(item.queue)
        durable = self.queues[key].durable
        if durable is None or durable.token < fenced.token:
            self.fail("V8", f"{key}: token {fenced.token} is answered and not durable")

    def _acks_answered(self, item: offsets_pb.CommitItem | offsets_pb.CloseItem) -> None:
        key = key_of(item.queue)
        durable = self.queues[key].durable
        told = RangeSet.merged((r.first_offset, r.next_offset) for r in item.acked)
        if item.committed_offset:
            told = told.union(RangeSet.of(0, item.committed_offset))
        if durable is None or told.difference(done(durable)):
            self.fail("V9", f"{key}: acks {told} are answered and not durable")

    # ---- at the end

    def check_complete(self, acked: Mapping[str, object]) -> None:
        """Everything that was appended is handled and committed, once (L2)."""
        ids = Counter(body for queue in self.queues.values() for body, _ in queue.stored.values())
        for body, count in ids.items():
            if count > 1:
                self.fail("T5", f"message {body} is stored {count} times")
        if missing := sorted(acked.keys() - ids.keys()):
            self.fail("P1", f"acknowledged messages are lost: {missing}")
        for key, queue in sorted(self.queues.items()):
            if unhandled := self.unhandled(queue):
                self.fail("L2", f"{key}: never handled: {unhandled[:10]}")
            committed = queue.durable.committed_offset if queue.durable else 0
            if committed != len(queue.stored):
                self.fail("L2", f"{key}: C is {committed} of {len(queue.stored)}")

    def complete(self) -> bool:
        """Whether nothing is left to be done."""
        return all(
            (queue.durable.committed_offset if queue.durable else 0) == len(queue.stored)
            for queue in self.queues.values()
        )

    def unhandled(self, queue: Queue) -> list[int]:
        """Offsets that somebody should have handled and nobody has."""
        return [
            offset
            for offset, (_, tag) in sorted(queue.stored.items())
            if offset not in queue.handled and self._wanted(tag)
        ]

    def _queue_key(self, queue: QueueId) -> QueueKey:
        return QueueKey(self._group, queue.topic, queue.broker, queue.queue_id)


_WATCHED = ("fence", "record_delivered", "touch", "commit", "close")
