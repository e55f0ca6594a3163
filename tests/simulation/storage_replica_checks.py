"""Checks a replica set of storage at every write to a disk or to etcd (section 12).

Each electable node has every message that was visible or acknowledged; two copies have the same
bytes wherever the same epoch wrote; only the acting leader writes. The checker keeps its own record
of what each epoch wrote, and where. A message counts as stored once it is visible: before that its
leader may lose it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from baton.common.v1 import queue_pb2
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._core.records import read_header
from batonmq.errors import BatonError
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic
from batonmq_server.storage.core.commitlog import FOLDER
from batonmq_server.storage.core.epochs import EpochHistory
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt
from batonmq_server.storage.core.store import VisibleRange
from batonmq_server.storage.node import StorageNode
from batonmq_server.testing.memory_disks import MemoryDisk
from batonmq_server.testing.memory_network import MemoryCall
from tests.simulation.expected_state import ExpectedState
from tests.simulation.offsets_replica_checks import CopyPosition, OffsetsReplicaChecks, says_nothing

SET_KEY, LEADER_KEY = "replicas/storage/broker-a", "elections/storage/broker-a"
_SERVICES = "/baton.storage.v1."
_ANYWHERE = frozenset(
    {"Deliver", "Describe", "Pull", "SearchOffset", "Read", "FindByKey", "GetMessage"}
)
WAIT_MS_MAX = 10_000
"""Longest time for which pulls at followers may find nothing of what the leader has."""
_SAFE = (pb.DURABILITY_FSYNCED, pb.DURABILITY_REPLICATED)


@dataclass(frozen=True, slots=True)
class LogPosition(CopyPosition):
    """The durable position of a copy of the log; its version is its end in bytes.

    Attributes:
        damaged: Whether the node has found that data is lost.
    """

    damaged: bool = False

    @property
    def position(self) -> ReplicaPosition:
        """See base."""
        if self.damaged or not self.history:
            return NO_POSITION
        return ReplicaPosition(self.history[-1][0], self.version)

    def epoch_before(self, end: int) -> int:
        """Return the epoch that wrote the last byte before `end`; 0 for none."""
        return max((epoch for epoch, first in self.history if first < end), default=0)

    def has(self, change: ReplicaPosition) -> bool:
        """Return whether the copy has the log up to this position, written by that epoch."""
        return change.version <= self.version and self.epoch_before(change.version) == change.epoch

    def same_until(self, other: LogPosition) -> int:
        """Return the position up to which the same epochs wrote both copies."""
        end = min(self.version, other.version)
        starts = {first for _, first in (*self.history, *other.history) if first < end}
        for at in sorted({*starts, 0}):
            if self.epoch_before(at + 1) != other.epoch_before(at + 1):
                return min(at, end)
        return end


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """A batch that a leader wrote in its epoch."""

    epoch: int
    checked: CheckedBatch
    receipt: StoreReceipt
    topic_id: int

    @property
    def place(self) -> ReplicaPosition:
        """The position of a copy that ends with this batch."""
        return ReplicaPosition(self.epoch, self.receipt.next_position)


class StorageReplicaChecks(OffsetsReplicaChecks):
    """Checks the copies of all nodes of the set, its keys in etcd, and its responses.

    Args:
        leader: Reads the leader from etcd; empty without one.
        kept: Called with every visible batch, in the order of the log.
    """

    def __init__(
        self,
        expected: ExpectedState,
        leader: Callable[[], str],
        kept: Callable[[WrittenBatch], None],
    ) -> None:
        super().__init__(expected, leader)
        self._kept = kept
        self._nodes: dict[str, StorageNode] = {}
        self._rotten: dict[str, int] = {}
        self._bytes: dict[int, tuple[int, bytearray]] = {}
        self._waiting: list[WrittenBatch] = []
        self._seen = LogPosition(0, ())
        self._batches: list[StoreReceipt] = []
        self._waits: dict[tuple[str, str, int], tuple[int, int]] = {}
        self._deliveries: dict[tuple[int, int], tuple[queue_pb2.QueueRef, int]] = {}

    # ---- copies

    def copy_opened(self, name: str, node: StorageNode) -> None:
        """Check a copy that was opened after a restart or a truncation."""
        before = self._stand(name)
        self._nodes[name] = node
        end = node.store.log.next_position
        if end < before.version and not node.history.damaged:
            self._fail(f"the copy of {name} has come back with {end} of {before.version} bytes")
        self._stands[name] = LogPosition(min(end, before.version), before.history, before.damaged)
        self._stood(name, node)
        self._shown(name, node)
        self._watch(name, node)

    def lost(self, name: str) -> None:
        """Note that the disk of a node is empty."""
        self._stands[name] = LogPosition(0, ())
        self._rotten.pop(name, None)

    def rot(self, name: str, disk: MemoryDisk, random: Random) -> bool:
        """Flip a bit of a batch on the disk of a stopped node; return whether a batch exists."""
        stand = self._stand(name)
        batches = [one for one in self._batches if one.next_position <= stand.version]
        if not batches:
            return False
        batch = random.choice(batches)
        position = random.randrange(batch.position, batch.next_position)
        first, segment = max(
            (int(segment), segment) for segment in disk.names(FOLDER) if int(segment) <= position
        )
        file, bit = disk.files[f"{FOLDER}/{segment}"], 1 << random.randrange(8)
        for content in (file.content, file.durable):
            content[position - first] ^= bit
        self._rotten[name] = min(batch.position, self._rotten.get(name, batch.position))
        return True

    def may_lose(self, node: str) -> bool:
        """See base; a damaged copy does not count."""
        others = [one for one in self._standing.in_sync if one != node]
        return any(self._electable(one) and one not in self._rotten for one in others)

    def all_electable(self, names: Sequence[str]) -> bool:
        """See base; a damaged copy can't be elected."""
        return super().all_electable(names) and not self._rotten.keys() & set(names)

    def alike(self) -> bool:
        """Return whether every node is in sync and all copies are undamaged and equally long."""
        if self._rotten or {*self._standing.in_sync} != self._nodes.keys() or not self.quiet():
            return False
        copies = [(self._stand(name), _queues(node)) for name, node in self._nodes.items()]
        return all(copy == copies[0] for copy in copies)

    def quiet(self) -> bool:
        """Return whether all messages of all nodes are visible."""
        return all(stand.version == self._seen.version for stand in self._stands.values())

    def _stand(self, name: str) -> LogPosition:
        stand = self._stands.get(name, LogPosition(0, ()))
        assert isinstance(stand, LogPosition)
        return stand

    def _stood(self, name: str, node: StorageNode) -> None:
        """Check what a node has made durable or truncated."""
        log, before, history = node.store.log, self._stand(name), node.history
        end = min(log.synced_position, log.next_position)
        now = LogPosition(end, history.starts, history.damaged)
        if self._nodes[name] is not node:
            return
        if self._rotten.get(name, end) >= end:
            self._rotten.pop(name, None)
        if now == before:
            return
        self._stands[name] = now
        self._compare(name, node, now, now.same_until(before))
        self._check_electable(f"{name} stands at {now.position}")

    def _compare(self, name: str, node: StorageNode, stand: LogPosition, at: int) -> None:
        """Check that the bytes from `at` on equal those of the same epoch in other copies."""
        while at < stand.version:
            epoch = stand.epoch_before(at + 1)
            ends = [first for _, first in stand.history if first > at]
            end = min([stand.version, node.store.log.segment_end(at), *ends])
            begin, content = self._bytes.setdefault(epoch, (at, bytearray()))
            raw, inside = node.store.log.read(at, end - at), at - begin
            written = bytes(content[inside : inside + len(raw)]) if inside >= 0 else b""
            if not epoch or not 0 <= inside <= len(content):
                self._fail(f"{name} has {at} to {end} of epoch {epoch}, which did not write that")
            elif len(raw) < end - at or raw[: len(written)] != written:
                self._fail(f"{name} has other bytes of epoch {epoch} at {at} to {end}")
            else:
                content[inside : inside + len(raw)] = raw
            at = end

    # ---- what is seen

    def _shown(self, name: str, node: StorageNode) -> None:
        """Check the visible part of the log of a node."""
        stand, end = self._stand(name), node.store.readable_position
        if not end or self._nodes[name] is not node:
            return
        place = ReplicaPosition(stand.epoch_before(end), end)
        if end <= self._seen.version:
            if not self._seen.has(place):
                self._fail(f"{name} shows {place}, and another node has shown something else")
            return
        if not stand.has(place) or not stand.has(self._confirmed):
            self._fail(f"{name} shows {place}, stands at {stand.position}, had {self._confirmed}")
        self._seen, self._confirmed = LogPosition(end, stand.history), place
        self._check_electable(f"{name} shows {place}")
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if one.receipt.next_position > end:
                self._waiting.append(one)
            elif self._seen.has(one.place):
                self._batches.append(one.receipt)
                self._kept(one)
            else:
                self._expected.counts["given up"] += 1

    def _watch(self, name: str, node: StorageNode) -> None:
        """Observe all changes of a node's copy."""
        store = node.store
        real = {each: getattr(store, each) for each in ("append", "synced", "confirmed")}
        keep, cut, begin_epoch = node.save_history, node.cut, node.begin_epoch

        def append(
            batches: Sequence[CheckedBatch], topics: Mapping[str, LocalTopic], *more: Any
        ) -> Any:
            outcomes = real["append"](batches, topics, *more)
            self._appended(name, node, batches, outcomes, topics)
            return outcomes

        def synced(position: int) -> Any:
            grown = real["synced"](position)
            self._stood(name, node)
            self._shown(name, node)
            return grown

        def confirmed(position: int) -> Any:
            grown = real["confirmed"](position)
            self._shown(name, node)
            return grown

        def kept(history: EpochHistory) -> None:
            keep(history)
            self._stood(name, node)

        def was_cut(position: int, *, damaged: bool = False) -> None:
            cut(position, damaged=damaged)
            self._expected.counts["copies cut"] += 1
            self._stood(name, node)

        def began(epoch: int) -> None:
            begin_epoch(epoch)
            self._expected.trace.note(name, f"begins epoch {epoch}")
            self._expected.counts["leaderships of storage"] += 1
            if not self._stand(name).has(self._confirmed):
                self._fail(f"{name} is leader, and lacks {self._confirmed}, which was confirmed")

        vars(store).update(append=append, synced=synced, confirmed=confirmed)
        vars(node).update(save_history=kept, cut=was_cut, begin_epoch=began)

    def _appended(
        self,
        name: str,
        node: StorageNode,
        batches: Sequence[CheckedBatch],
        outcomes: Sequence[StoreReceipt | BatonError],
        topics: Mapping[str, LocalTopic],
    ) -> None:
        """Check that only the acting leader writes; a write counts once it is visible."""
        fresh = [
            WrittenBatch(node.store.epoch, checked, outcome, topics[checked.header.topic].topic_id)
            for checked, outcome in zip(batches, outcomes, strict=True)
            if isinstance(outcome, StoreReceipt) and not outcome.duplicate
        ]
        self._waiting += fresh
        if fresh and (leader := self._leader()) != name and not self.deposed(name):
            self._expected.fail("section 8", f"{name} writes, and the leader is {leader or 'none'}")

    # ---- answers

    def served(self, call: MemoryCall, request: Any, answer: Any) -> None:
        """Check a response: it claims leadership and durability only if true."""
        if call.target not in self._nodes or not call.path.startswith(_SERVICES):
            return
        if isinstance(answer, BatonError) and says_nothing(answer):
            return
        leader = self._leader()
        deposed = self.deposed(call.target)
        if call.method not in _ANYWHERE and leader != call.target and not deposed:
            text = f"{call.target} answers {call.method}, and the leader is {leader or 'none'}"
            self._expected.fail("section 8", text)
        if isinstance(answer, pb.AppendResponse):
            for batch, outcome in zip(request.batches, answer.outcomes, strict=True):
                if outcome.HasField("receipt"):
                    self._check_receipt(call.target, outcome.receipt, len(batch))
        elif isinstance(answer, pb.PullResponse):
            self._check_read(call, request.queue.queue, request.offset, answer, leader)
        elif isinstance(answer, pb.DeliverResponse):
            for frame in answer.frames:
                self._check_frame(call, frame, leader)

    def called(self, call: MemoryCall, request: Any) -> None:
        """Note where deliveries begin."""
        if isinstance(request, pb.DeliverRequest):
            for command in request.commands:
                if command.HasField("start"):
                    pull = command.start.pull
                    place = (pull.queue.queue, pull.offset)
                    self._deliveries[call.number, command.delivery_id] = place

    def _check_frame(self, call: MemoryCall, frame: pb.DeliveryFrame, leader: str) -> None:
        delivery = call.number, frame.delivery_id
        if not frame.HasField("messages"):
            self._deliveries.pop(delivery, None)
            return
        queue, offset = self._deliveries[delivery]
        self._check_read(call, queue, offset, frame.messages, leader)
        self._deliveries[delivery] = queue, frame.messages.next_offset

    def _check_read(
        self,
        call: MemoryCall,
        queue: queue_pb2.QueueRef,
        offset: int,
        answer: pb.PullResponse,
        leader: str,
    ) -> None:
        if answer.batches and leader != call.target:
            self._expected.counts["pulls from followers"] += 1
        self._check_wait(call, queue, offset, answer, leader)
        for batch in answer.batches:
            self._check_delivered(call.target, batch)

    def _check_wait(
        self,
        call: MemoryCall,
        queue: queue_pb2.QueueRef,
        offset: int,
        answer: pb.PullResponse,
        leader: str,
    ) -> None:
        """Check that no follower keeps a consumer waiting for messages that the leader has."""
        now_ms = self._expected.now_ms()
        client = (call.source, queue.topic, queue.queue_id)
        node = self._nodes.get(leader)
        topic_id = self._expected.topic_ids.get(queue.topic, 0)
        key = (topic_id, queue.queue_id)
        backlog = node is not None and node.store.offsets(key).next_offset > offset
        if answer.batches or leader == call.target or not backlog:
            self._waits.pop(client, None)
            return
        since_ms, last_ms = self._waits.get(client, (now_ms, now_ms))
        if now_ms - last_ms > WAIT_MS_MAX:
            since_ms = now_ms  # the client was frozen, or had another node meanwhile
        self._waits[client] = since_ms, now_ms
        self._expected.counts["waits at followers"] += 1
        if now_ms - since_ms > WAIT_MS_MAX:
            self._expected.fail(
                "readers",
                f"{call.source} waits at {call.target} for {now_ms - since_ms} ms for "
                f"{queue.topic}/{queue.queue_id}@{offset}, which the leader {leader} has",
            )

    def _check_receipt(self, name: str, receipt: pb.AppendReceipt, length: int) -> None:
        end = receipt.position + length
        text = f"{name} says {pb.Durability.Name(receipt.durability)} of what ends at {end}"
        if receipt.durability in _SAFE and end > self._seen.version:
            self._expected.fail("receipts", f"{text}; confirmed is {self._confirmed}")
        elif receipt.durability == pb.DURABILITY_REPLICATED:
            place = ReplicaPosition(self._seen.epoch_before(end), end)
            self._expected.counts["replicated receipts"] += 1
            if sum(stand.has(place) for stand in self._stands.values()) < 2:
                self._expected.fail("receipts", f"{text}; no other node has it")

    def _check_delivered(self, name: str, batch: bytes) -> None:
        header = read_header(batch)
        epoch = self._seen.epoch_before(header.position + 1)
        begin, content = self._bytes.get(epoch, (0, bytearray()))
        at = header.position - begin
        if header.position + header.length > self._seen.version:
            self._fail(f"{name} delivers what is at {header.position}, beyond {self._confirmed}")
        elif content[at : at + header.length] != batch:
            self._fail(f"{name} delivers other bytes than epoch {epoch} wrote at {header.position}")


def _queues(node: StorageNode) -> dict[QueueKey, VisibleRange]:
    """Return the visible end of each queue of a copy."""
    return {key: node.store.offsets(key) for key in sorted(node.store.queues)}
