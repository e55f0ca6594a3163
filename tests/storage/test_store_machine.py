"""Goal: after any sequence of events a node serves what a list of batches would serve.

Method: a Hypothesis state machine. The node is real, from recovery to retention, on a disk in
memory that may be cut at every unsynced byte. The model is a list of batches in log order; it
decides what can be read, found by time or key, retried or lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._core.records import Message, decode_records, read_header, tag_hash
from batonmq.errors import DataLoss, OffsetAheadOfLog
from batonmq_server.storage.core.commitlog import FILLER
from batonmq_server.storage.core.producers import BATCHES_KEPT, StoreReceipt
from batonmq_server.storage.core.query import MessageQueries, TimeWindow
from batonmq_server.storage.core.queue_reader import ReadSpec
from batonmq_server.storage.core.retention import Retention, RetentionPolicy
from batonmq_server.storage.core.tag_filter import HashFilter
from batonmq_server.storage.log_cleaner import CleaningBounds, LogCleaner
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, append, batch

SEGMENT_BYTES = 800
QUEUES = 2
PRODUCERS = (0, 5, 6)
TAGS = ("", "a", "b", "c")
KEYS = ("k1", "k2", "k3")
EMPTY_BATCH_BYTES = len(batch(b""))
NOT_YET = StoreReceipt(-1, -1, -1, -1)

queue_ids = st.integers(0, QUEUES - 1)
producers = st.sampled_from(PRODUCERS)
messages = st.builds(
    lambda tag, keys, size: Message(b"x" * size, tag, tuple(keys)),
    st.sampled_from(TAGS),
    st.lists(st.sampled_from(KEYS), max_size=2, unique=True),
    st.integers(0, 40),
)
spoilt = st.sampled_from(("", "checkpoint", "consumequeue", "keyindex"))


class Crash(Exception):
    """The node crashed during a call."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch of the model; `raw` is the batch that was sent."""

    queue_id: int
    producer_id: int
    sequence: int
    messages: tuple[Message, ...]
    raw: bytes
    receipt: StoreReceipt

    @property
    def offsets(self) -> range:
        first = self.receipt.first_offset
        return range(first, first + len(self.messages))


class StoreMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.log: list[Stored] = []
        self.message_count = 0
        self.sequences: dict[tuple[int, int], int] = {}
        self.synced_count = 0
        self.now = NOW
        self.opening: AbstractContextManager[StorageNode] | None = None

    @initialize()
    def start(self) -> None:
        self.opening = recover_directory(
            self.disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0
        )
        self.node = self.opening.__enter__()
        self.store = self.node.store

    # Writes.

    @rule(
        batches=st.lists(
            st.tuples(queue_ids, producers, st.lists(messages, min_size=1, max_size=4)),
            min_size=1,
            max_size=6,
        )
    )
    def append(self, batches: list[tuple[int, int, list[Message]]]) -> None:
        self._append(*batches)

    @rule(queue_id=queue_ids, left=st.integers(0, FILLER.size + 2))
    def append_nearly_to_the_end_of_the_segment(self, queue_id: int, left: int) -> None:
        log = self.store.log
        room = log.segment_end(log.next_position) - log.next_position
        size = room - EMPTY_BATCH_BYTES - len(self._numbered(b"")) - left
        if size >= 0:
            self._append((queue_id, 0, [Message(b"y" * size)]))
            assert log.segment_end(self.log[-1].receipt.position) - log.next_position == left

    @precondition(lambda self: self._retriable())
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        again = data.draw(st.sampled_from(self._retriable()))
        before = self.store.log.next_position
        (receipt,) = append(self.store, again.raw, now=self.now)
        assert isinstance(receipt, StoreReceipt), receipt
        assert receipt.duplicate
        assert receipt.first_offset == again.receipt.first_offset
        assert receipt.position == again.receipt.position
        assert self.store.log.next_position == before

    @rule(step_ms=st.integers(-20, 100))
    def time_passes_or_jumps_back(self, step_ms: int) -> None:
        self.now += step_ms

    @rule()
    def sync(self) -> None:
        unsynced = self.store.log.unsynced()
        self.node.sync(unsynced)
        self.store.synced(unsynced.position)
        self.synced_count = len(self.log)

    @rule()
    def checkpoint(self) -> None:
        self.sync()
        self.node.checkpointing.run()

    # Crashes and restarts.

    @rule(spoil=spoilt)
    def kill(self, spoil: str) -> None:
        written = len(self.log)
        self._restart(self.disk.killed(), spoil)
        assert len(self.log) == written

    @rule(data=st.data(), spoil=spoilt)
    def power_cut(self, data: st.DataObject, spoil: str) -> None:
        cut = self.disk.power_cut(lambda length: data.draw(st.integers(0, length)))
        self._restart(cut, spoil)

    @precondition(lambda self: len(self.store.log.sealed()) > 0)
    @rule(kept_segments=st.integers(0, 2), steps=st.one_of(st.none(), st.integers(1, 4)))
    def drop(self, kept_segments: int, steps: int | None) -> None:
        """Run retention by size; with `steps`, crash at the disk call with that number."""
        log, bytes_max = self.store.log, kept_segments * SEGMENT_BYTES
        may_go_to, end = log.sealed()[-1][1], log.end_position
        policy = RetentionPolicy(age_ms_max=0, hours=frozenset(), log_bytes_max=max(bytes_max, 1))
        bounds = CleaningBounds(
            needed_from=(),
            checkpointed=lambda: self.node.checkpointing.position,
            checkpoint=self._checkpoint_taken,
            wait_until_safe=self._synced_to,
            is_gone=lambda _topic, _topic_id: False,
            remove_later=self.node.checkpointing.remove_later,
        )
        cleaner = LogCleaner(
            self.store,
            self.disk,
            Retention(policy, SEGMENT_BYTES),
            bounds,
            StorageMetrics(CollectorRegistry()),
            clock=Clock(),
            interval_ms=0,
            in_thread=_calls(steps),
        )
        try:
            asyncio.run(cleaner.clean())
        except Crash:
            self._restart(self.disk.killed(), "")
        else:
            assert end - log.first_position <= max(bytes_max, end - may_go_to)

    # Reads.

    @rule(
        queue_id=queue_ids,
        tags=st.one_of(st.none(), st.frozensets(st.sampled_from(TAGS[1:]), min_size=1)),
        bytes_max=st.integers(1, 600),
        messages_max=st.integers(1, 6),
        keeps_last_batch=st.booleans(),
    )
    def pull_everything(
        self,
        queue_id: int,
        tags: frozenset[str] | None,
        bytes_max: int,
        messages_max: int,
        keeps_last_batch: bool = True,
    ) -> None:
        hashes = None if tags is None else frozenset(map(tag_hash, tags))
        offset, served, lost = 0, [], 0
        last, kept_position = b"", -1
        while True:
            spec = ReadSpec(offset, bytes_max, messages_max, HashFilter(hashes), kept_position)
            reading = self.store.pull((TOPIC_ID, queue_id), spec)
            if reading is None:
                break
            assert offset < reading.next_offset
            assert len(reading.batches) <= 1 or sum(map(len, reading.batches)) <= bytes_max
            batches = [last] * reading.continues_batch + reading.batches
            delivered = list(_delivered(batches, range(offset, reading.next_offset), tags))
            if batches and keeps_last_batch:
                last = batches[-1]
                kept_position = read_header(last).position
            assert len(delivered) == reading.message_count <= messages_max
            scanned = reading.next_offset - offset - reading.lost_count
            assert reading.filtered_count == scanned - len(delivered)
            lost += reading.lost_count
            served += delivered
            offset = reading.next_offset
        visible = self._visible(queue_id)
        assert served == [pair for pair in visible if tags is None or pair[1].tag in tags]
        assert offset == self._visible_end(queue_id)
        assert lost == self._first_offset(queue_id)

    @rule(queue_id=queue_ids, beyond=st.integers(1, 3))
    def pull_beyond_the_end(self, queue_id: int, beyond: int) -> None:
        spec = ReadSpec(self._next_offset(queue_id) + beyond, 100, 1, HashFilter(None))
        with pytest.raises(OffsetAheadOfLog):
            self.store.pull((TOPIC_ID, queue_id), spec)

    @rule(queue_id=queue_ids, step_ms=st.integers(-60, 60))
    def search_time(self, queue_id: int, step_ms: int) -> None:
        unix_ms = self.now + step_ms
        later = [
            one.receipt.first_offset
            for one in self._safe()
            if one.queue_id == queue_id and one.receipt.store_unix_ms >= unix_ms
        ]
        expected = later[0] if later else self._visible_end(queue_id)
        assert MessageQueries(self.store).search_offset((TOPIC_ID, queue_id), unix_ms) == expected

    @rule(
        key=st.sampled_from((*KEYS, "none")),
        back_ms=st.integers(0, 200),
        span_ms=st.integers(1, 200),
    )
    def search_key(self, key: str, back_ms: int, span_ms: int) -> None:
        window = TimeWindow(self.now - back_ms, self.now - back_ms + span_ms)
        matches = MessageQueries(self.store).find(
            TOPIC_ID, key, window, messages_max=10_000, bytes_max=1 << 30
        )
        places = [(read_header(one.batch).position, one.index) for one in matches.messages]
        expected = [
            (one.receipt.position, index)
            for one in self._safe()
            if window.from_unix_ms <= one.receipt.store_unix_ms < window.to_unix_ms
            for index, message in enumerate(one.messages)
            if key in message.keys
        ]
        assert places == expected[::-1]
        assert not matches.more

    @precondition(lambda self: self._safe())
    @rule(data=st.data())
    def a_flipped_bit_is_not_served(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self._safe()))
        at = data.draw(st.integers(one.receipt.position, one.receipt.next_position - 1))
        starts = [int(name) for name in self.disk.names("log")]
        start = max(start for start in starts if start <= at)
        content = self.disk.files[f"log/{start:020d}"].content
        bit = 1 << data.draw(st.integers(0, 7))
        content[at - start] ^= bit
        with pytest.raises(DataLoss):
            spec = ReadSpec(one.receipt.first_offset, 1, 1, HashFilter(None))
            self.store.read((TOPIC_ID, one.queue_id), spec)
        content[at - start] ^= bit

    @invariant()
    def offsets_are_those_of_the_model(self) -> None:
        for queue_id in range(QUEUES):
            offsets = self.store.offsets((TOPIC_ID, queue_id))
            if (TOPIC_ID, queue_id) in self.store.queues:
                expected = self._first_offset(queue_id), self._visible_end(queue_id)
                assert (offsets.first_offset, offsets.next_offset) == expected

    def teardown(self) -> None:
        if self.opening is not None:
            self.kill("")
            for queue_id in range(QUEUES):
                self.pull_everything(queue_id, None, 500, 5)

    def _append(self, *items: tuple[int, int, list[Message]]) -> None:
        """Append batches in one call; each is queue id, producer id, messages."""
        batches = [self._sent(*one) for one in items]
        before = self.store.log.next_position
        outcomes = append(self.store, *(one.raw for one in batches), now=self.now)
        for one, receipt in zip(batches, outcomes, strict=True):
            assert isinstance(receipt, StoreReceipt), receipt
            assert not receipt.duplicate
            assert receipt.first_offset == self._next_offset(one.queue_id)
            assert receipt.position >= before
            before = receipt.next_position
            assert before == receipt.position + len(one.raw)
            times = [earlier.receipt.store_unix_ms for earlier in self.log[-1:]]
            assert receipt.store_unix_ms >= max(self.now, *times, 0)
            self.log.append(replace(one, receipt=receipt))
        assert self.store.log.next_position == before

    def _sent(self, queue_id: int, producer_id: int, batched: list[Message]) -> Stored:
        numbered = []
        for message in batched:
            numbered.append(Message(self._numbered(message.body), message.tag, message.keys))
            self.message_count += 1
        sequence = self.sequences.get((producer_id, queue_id), 0)
        self.sequences[producer_id, queue_id] = sequence + len(numbered)
        raw = batch(
            *numbered, queue_id=queue_id, topic=TOPIC, producer=(producer_id, 1), sequence=sequence
        )
        return Stored(queue_id, producer_id, sequence, tuple(numbered), raw, NOT_YET)

    def _numbered(self, body: bytes) -> bytes:
        return b"%d:%s" % (self.message_count, body)

    async def _synced_to(self, position: int) -> None:
        self.sync()
        assert self.store.log.synced_position >= position
        self._append((0, 0, [Message(b"meanwhile")]))

    async def _checkpoint_taken(self) -> bool:
        self.checkpoint()
        return True

    def _restart(self, disk: MemoryDisk, spoil: str) -> None:
        paths = sorted(path for path in disk.files if path.startswith(spoil)) if spoil else []
        if paths:
            disk.remove(paths[0])
        self.disk = disk
        self.start()
        end = self.node.report.next_position
        survived = [one for one in self.log if one.receipt.next_position <= end]
        assert survived == self.log[: len(survived)]
        assert len(survived) >= self.synced_count
        self.log, self.synced_count = survived, len(survived)
        self.sequences = {
            (one.producer_id, one.queue_id): one.sequence + len(one.messages) for one in survived
        }

    def _safe(self) -> list[Stored]:
        """Return the visible batches in log order."""
        first_position = self.store.log.first_position
        return [
            one for one in self.log[: self.synced_count] if one.receipt.position >= first_position
        ]

    def _of_queue(self, queue_id: int) -> list[Stored]:
        return [one for one in self.log if one.queue_id == queue_id]

    def _visible(self, queue_id: int) -> list[tuple[int, Message]]:
        return [
            pair
            for one in self._safe()
            if one.queue_id == queue_id
            for pair in zip(one.offsets, one.messages, strict=True)
        ]

    def _visible_end(self, queue_id: int) -> int:
        ends = [
            one.offsets.stop for one in self.log[: self.synced_count] if one.queue_id == queue_id
        ]
        return ends[-1] if ends else 0

    def _first_offset(self, queue_id: int) -> int:
        remaining = [
            one.offsets.start
            for one in self._of_queue(queue_id)
            if one.receipt.position >= self.store.log.first_position
        ]
        return remaining[0] if remaining else self._next_offset(queue_id)

    def _next_offset(self, queue_id: int) -> int:
        batches = self._of_queue(queue_id)
        return batches[-1].offsets.stop if batches else 0

    def _retriable(self) -> list[Stored]:
        """Return the batches with a receipt that the log still contains."""
        batches = []
        for queue_id in range(QUEUES):
            for producer_id in PRODUCERS[1:]:
                of_producer = [
                    one for one in self._of_queue(queue_id) if one.producer_id == producer_id
                ]
                batches += of_producer[-BATCHES_KEPT:]
        first_position = self.store.log.first_position
        return [one for one in batches if one.receipt.position >= first_position]


def _delivered(
    batches: list[bytes], offsets: range, tags: frozenset[str] | None
) -> Iterator[tuple[int, Message]]:
    """Return the messages that a consumer takes from an answer."""
    for raw in batches:
        header = read_header(raw)
        for record in decode_records(raw, header, range(header.count)):
            if record.offset in offsets and (tags is None or record.tag in tags):
                yield record.offset, Message(record.body, record.tag, record.keys)


def _calls(steps: int | None) -> Callable[[Callable[[Any], None], Any], Any]:
    """Run calls at once; instead of the call with number `steps` the node crashes."""
    call_count = 0

    async def call(function: Callable[[Any], None], argument: Any) -> None:
        nonlocal call_count
        call_count += 1
        if call_count == steps:
            raise Crash
        function(argument)

    return call


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase


def test_lost_index_after_retention_loses_no_message() -> None:
    machine = StoreMachine()
    machine.start()
    machine.append_nearly_to_the_end_of_the_segment(queue_id=0, left=0)
    machine.checkpoint()
    machine.append([(0, 0, [Message(b"kept")])])
    machine.sync()
    machine.drop(kept_segments=1, steps=None)
    assert machine.store.log.first_position == SEGMENT_BYTES
    machine.kill("consumequeue")
    assert "consumequeue" in machine.node.report.rebuilt
    machine.pull_everything(0, None, 500, 5)
    machine.teardown()


def test_offsets_continue_if_the_remaining_messages_of_a_queue_were_never_synced() -> None:
    machine = StoreMachine()
    machine.start()
    machine.append_nearly_to_the_end_of_the_segment(queue_id=0, left=0)
    machine.checkpoint()
    machine.append([(1, 0, [Message(b"of another queue")])])
    machine.drop(kept_segments=1, steps=None)
    assert [one.queue_id for one in machine.log] == [0, 1, 0], "the last one is not synced"
    machine._restart(machine.disk.power_cut(lambda _: 0), "checkpoint")
    assert len(machine.log) == 2
    machine.append([(0, 0, [Message(b"next")])])
    assert machine.log[-1].receipt.first_offset == 1
    machine.teardown()
