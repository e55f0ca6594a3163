"""Goal: the log alone decides which transactions are open and how the others have ended.

Method: stores on a disk in memory that tears unsynced writes at any byte, beside a model; a node
whose clock and checks the test controls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.metrics.v1.metrics_service_pb2 import TransactionCounts
from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq._common.aio import STEP_ITEMS
from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.names import UNRESOLVED_TOPIC
from batonmq._core.records import (
    BATCH_BYTES_MAX,
    BODY_BYTES_MAX,
    HEADER_BYTES,
    RECORD,
    BatchBuilder,
    Message,
    Record,
    bare_record,
    check_batch,
    decode_records,
    read_header,
)
from batonmq.errors import BadBatch, LimitExceeded
from batonmq_server.storage import schedule_server, transaction_server
from batonmq_server.storage.core import open_transactions, transactions
from batonmq_server.storage.core.checkpoint_writer import CheckpointWriter
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic
from batonmq_server.storage.core.fsck import Fsck
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.schedule import SCHEDULED_BYTES_MAX
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.transactions import (
    FIRST,
    CheckMark,
    HalfMessage,
    Mark,
    Outcome,
    RollbackMark,
    commit_batch,
    decode_half,
    decode_marks,
    discard_batch,
    encode_half,
    encode_marks,
    ended_by,
    read_half_head,
    read_halves,
)
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage import schedule_scene
from tests.storage.batches import (
    NOW,
    TOPIC_ID,
    TOPICS,
    batch,
    bodies,
    open_store,
    read_spec,
    sync,
)
from tests.storage.schedule_scene import UNRESOLVED_ID, Scene, new_scene

FIRST_SEGMENT = f"log/{0:020d}"
ALL_TOPICS = {**SYSTEM_TOPICS, **TOPICS, UNRESOLVED_TOPIC: LocalTopic(UNRESOLVED_ID, 1)}
HOUR_MS = 3_600_000


def half(body: bytes, group: str = "shop", **options: int) -> HalfMessage:
    """Return a half message."""
    fields = {"transaction_id": FIRST, "begin_unix_ms": NOW, "check_unix_s": 7, "checks": 0}
    return HalfMessage(topic_id=TOPIC_ID, group=group, batch=batch(body), **(fields | options))


def write(store: MessageStore, *batches: bytes) -> list[int]:
    """Append batches of any topic with one write, without a sync; return their positions."""
    checked = [CheckedBatch(read_header(one), one) for one in batches]
    outcomes = store.append(checked, ALL_TOPICS, NOW)
    assert all(isinstance(one, StoreReceipt) for one in outcomes), outcomes
    return [one.position for one in outcomes if isinstance(one, StoreReceipt)]


def state(store: MessageStore) -> tuple[dict[int, tuple[int, str, int, int]], dict[int, Outcome]]:
    """Return the open transactions and the outcomes of the ended ones."""
    opened = store.transactions.open.page(-1, 10_000)
    ended = store.transactions.ended
    return (
        {one[0]: (one.position, one.group, one.check_unix_s, one.checks) for one in opened},
        {name: one.outcome for name, one in ended.items()},
    )


class LogMachine(RuleBasedStateMachine):
    """A store beside a model: dicts of the open and the ended transactions."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = open_store(MemoryDisk())
        self.open: dict[int, tuple[int, str, int, int]] = {}
        self.ended: dict[int, Outcome] = {}
        self.visible: list[bytes] = []
        self.number = 0

    @property
    def store(self) -> MessageStore:
        """The store."""
        return self.opened.store

    def some(self, choice: int) -> int | None:
        """Return an open transaction."""
        return sorted(self.open)[choice % len(self.open)] if self.open else None

    @rule(count=st.integers(1, 5), group=st.sampled_from(["shop", "mail"]))
    def begin(self, count: int, group: str) -> None:
        halves = [half(b"%d" % (self.number + n), group) for n in range(count)]
        self.number += count
        for position in write(self.store, *map(encode_half, halves)):
            self.open[position] = (position, group, 7, 0)

    def read(self, name: int) -> HalfMessage:
        """Read a half message."""
        sync(self.store)
        (found,) = read_halves(self.store.log, [self.open[name][0]])
        assert isinstance(found, HalfMessage)
        head = read_half_head(self.store.log, self.open[name][0])
        assert head == (read_header(found.batch).topic, found.begin_unix_ms)
        return found

    @rule(choice=st.integers(0, 99))
    def commit(self, choice: int) -> None:
        name = self.some(choice)
        if name is None:
            return
        found = self.read(name)
        write(self.store, commit_batch(name, found, 0))
        header = read_header(found.batch)
        self.visible += [one.body for one in decode_records(found.batch, header, range(1))]
        self.ended[name] = Outcome.COMMITTED
        del self.open[name]

    @rule(choice=st.integers(0, 99))
    def discard(self, choice: int) -> None:
        name = self.some(choice)
        if name is None:
            return
        write(self.store, discard_batch(name, self.read(name), 0, name="a-1", reason="why"))
        self.ended[name] = Outcome.DISCARDED
        del self.open[name]

    @rule(choices=st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=5))
    def mark(self, choices: list[tuple[int, bool]]) -> None:
        marks: list[Mark] = []
        for choice, rolls_back in choices:
            name = self.some(choice)
            if name is None:
                break
            position, group, _, checks = self.open[name]
            if rolls_back:
                marks.append(RollbackMark(name))
                self.ended[name] = Outcome.ROLLED_BACK
                del self.open[name]
            else:
                self.open[name] = (position, group, choice, checks + 1)
                marks.append(CheckMark(name, choice, checks + 1))
        if marks:
            write(self.store, encode_marks(marks))

    @rule(choice=st.integers(0, 99))
    def rewrite(self, choice: int) -> None:
        name = self.some(choice)
        if name is None:
            return
        _, group, check_unix_s, checks = self.open[name]
        old = self.read(name)
        moved = HalfMessage(
            old.topic_id, name, old.begin_unix_ms, check_unix_s, checks, group, old.batch
        )
        (position,) = write(self.store, encode_half(moved))
        self.open[name] = (position, group, check_unix_s, checks)

    @rule(seed=st.integers(0, 1_000))
    def kill(self, seed: int) -> None:
        """Kill the process; what is written stays."""
        sync(self.store)
        self.opened = open_store(self.opened.disk.killed())

    @rule()
    def checkpoint(self) -> None:
        sync(self.store)
        CheckpointWriter(self.opened.disk, self.store, 0).run()

    @rule()
    def lose_the_checkpoint(self) -> None:
        sync(self.store)
        self.opened.disk.remove("checkpoint")
        self.opened = open_store(self.opened.disk.killed())

    @invariant()
    def agrees(self) -> None:
        assert state(self.store) == (self.open, self.ended)
        sync(self.store)
        assert bodies(self.store) == self.visible


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_writes_torn_at_any_byte_leave_each_transaction_open_or_ended() -> None:
    opened = open_store(MemoryDisk())
    names = write(opened.store, *(encode_half(half(b"%d" % n)) for n in range(4)))
    sync(opened.store)
    halves = list(read_halves(opened.store.log, names))
    commits = [
        commit_batch(name, one, 0)
        for name, one in zip(names, halves, strict=True)
        if isinstance(one, HalfMessage)
    ]
    write(opened.store, commits[0], commits[1], encode_marks([RollbackMark(names[2])]))
    length = len(opened.disk.files[FIRST_SEGMENT].unsynced[0][1])
    seen = set()
    for kept_bytes in range(length + 1):
        again = open_store(opened.disk.power_cut(lambda _, kept_bytes=kept_bytes: kept_bytes))  # type: ignore[misc]
        found, ended = state(again.store)
        assert sorted([*found, *ended]) == names
        assert bodies(again.store) == [b"0", b"1"][: len(bodies(again.store))]
        committed = [name for name, outcome in ended.items() if outcome is Outcome.COMMITTED]
        assert len(committed) == len(bodies(again.store))
        seen.add(len(ended))
    assert seen == {0, 1, 2, 3}


def test_committed_batch_keeps_what_its_producer_wrote() -> None:
    message = Message(b"body", "eu", ("k1", "k2"), {"total": "7"})
    raw = batch(message, producer=(5, 1), sequence=9)
    one = HalfMessage(TOPIC_ID, FIRST, NOW, 7, 0, "shop", raw)
    committed = commit_batch(77, one, 3)
    header = check_batch(committed, stamped=False)
    assert ended_by(header) == (77, Outcome.COMMITTED)
    assert (header.queue_id, header.born_unix_ms) == (3, read_header(raw).born_unix_ms)
    (record,) = decode_records(committed, header, range(1))
    assert (record.body, record.tag, record.keys) == (b"body", "eu", ("k1", "k2"))
    assert record.properties == {"total": "7"}
    assert ended_by(read_header(raw)) is None


def test_half_message_of_any_length_is_read_back_and_a_longer_one_is_rejected() -> None:
    bare = len(batch(b""))
    one = half(b"x" * (4 * 1024 * 1024 - 100))
    raw = encode_half(one)
    assert decode_half(read_header(raw), raw) == one
    long = HalfMessage(TOPIC_ID, FIRST, NOW, 7, 0, "g" * 127, bytes(SCHEDULED_BYTES_MAX))
    raw = encode_half(long)
    assert decode_half(read_header(raw), raw) == long
    check_batch(raw, stamped=False)
    with pytest.raises(LimitExceeded):
        encode_half(HalfMessage(0, 0, 0, 0, 0, "g", bytes(SCHEDULED_BYTES_MAX + 1)))
    assert bare < 200


def test_unknown_mark_is_rejected() -> None:
    raw = bytearray(encode_marks([CheckMark(1, 2, 3)]))
    raw[-14] = 9
    with pytest.raises(BadBatch):
        decode_marks(read_header(bytes(raw)), bytes(raw))


def test_only_the_last_ends_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "ENDED_MAX", 3)
    opened = open_store(MemoryDisk())
    names = write(opened.store, *(encode_half(half(b"%d" % n)) for n in range(5)))
    write(opened.store, encode_marks([RollbackMark(name) for name in names]))
    assert list(opened.store.transactions.ended) == names[2:]
    write(opened.store, encode_marks([RollbackMark(names[3])]))
    assert list(opened.store.transactions.ended) == names[2:]


# ---- a node


async def test_ends_of_one_call_are_answered_in_order() -> None:
    async with new_scene() as scene:
        a, b, c = await scene.begin(batch(b"a"), batch(b"b"), batch(b"c"))
        ends = [
            (a, "COMMITTED"), (b, "ROLLED_BACK"), (a, "COMMITTED"), (a, "ROLLED_BACK"),
            (b, "COMMITTED"), (b, "ROLLED_BACK"), (c, "UNKNOWN"), ("broker-a-ffff", "COMMITTED"),
            ("broker-b-1", "COMMITTED"), ("nothing", "COMMITTED"),
        ]  # fmt: skip
        assert await scene.end_all(*ends) == [
            "COMMITTED 0", "ROLLED_BACK", "COMMITTED 0 again", "TRANSACTION_ENDED",
            "TRANSACTION_ENDED", "ROLLED_BACK again", "UNKNOWN", "TRANSACTION_NOT_FOUND",
            "WRONG_BROKER", "INVALID_ARGUMENT",
        ]  # fmt: skip
        assert scene.bodies() == [b"a"]
        assert scene.open_count() == 1
        assert scene.metric("ended_transactions_total", outcome="committed") == 1
        assert scene.metric("ended_transactions_total", outcome="rolled_back") == 1


class CountedLog:
    """Counts the bytes that are read from a log, and the most between two turns of the loop."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes_read, read = 0, scene.store.log.read

        def counted(position: int, bytes_max: int) -> bytes:
            found = read(position, bytes_max)
            self.bytes_read += len(found)
            return found

        monkeypatch.setattr(scene.store.log, "read", counted)

    async def most_in_a_turn(self, work: Coroutine[Any, Any, object]) -> int:
        """Return the most bytes that `work` reads without letting others go on."""
        most = 0
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(work)
            while not running.done():
                before = self.bytes_read
                await asyncio.sleep(0)
                most = max(most, self.bytes_read - before)
        return most


BODY_BYTES, LARGE_COUNT = 100_000, 40


@asynccontextmanager
async def large_transactions(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Scene, CountedLog, list[str]]]:
    """Yield a node with many open transactions of large messages; reads are bounded."""
    monkeypatch.setattr(schedule_scene, "SEGMENT_BYTES", 1 << 20)
    monkeypatch.setattr(transaction_server, "READ_BYTES_MAX", 5 * BODY_BYTES)
    async with new_scene() as scene:
        names = [
            name
            for number in range(LARGE_COUNT)
            for name in await scene.begin(batch(b"%d" % number + b"x" * BODY_BYTES))
        ]
        yield scene, CountedLog(scene, monkeypatch), names


@pytest.mark.parametrize("reverse", [False, True])
async def test_large_messages_are_committed_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch, *, reverse: bool
) -> None:
    async with large_transactions(monkeypatch) as (scene, log, names):
        ends = [(name, "COMMITTED") for name in names]
        ends = [*ends[::-1], ends[0]] if reverse else [*ends, ends[0]]
        outcomes = list[str]()

        async def end() -> None:
            outcomes.extend(await scene.end_all(*ends))

        assert await log.most_in_a_turn(end()) < LARGE_COUNT / 2 * BODY_BYTES
        again = LARGE_COUNT - 1 if reverse else 0
        committed = [f"COMMITTED {number}" for number in range(LARGE_COUNT)]
        assert outcomes == [*committed, f"COMMITTED {again} again"]
        assert len(scene.bodies()) == LARGE_COUNT


@pytest.mark.parametrize("servicer", [transaction_server, schedule_server])
async def test_other_calls_go_on_while_many_batches_are_checked(
    servicer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, checked, original = 0, Counter[int](), servicer.check

    def counted(*arguments: Any) -> CheckedBatch:
        checked[turn] += 1
        found: CheckedBatch = original(*arguments)
        return found

    monkeypatch.setattr(servicer, "check", counted)
    batches = [batch(b"%d" % number) for number in range(200)]
    async with new_scene() as scene, asyncio.TaskGroup() as tasks:
        call: Coroutine[Any, Any, object]
        if servicer is transaction_server:
            call = scene.begin(*batches)
        else:
            call = scene.outcomes(*((one, NOW + HOUR_MS) for one in batches))
        running = tasks.create_task(call)
        while not running.done():
            await asyncio.sleep(0)
            turn += 1
    assert checked.total() == 200
    assert max(checked.values()) <= STEP_ITEMS


async def test_page_of_large_transactions_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    async with large_transactions(monkeypatch) as (scene, log, names):
        listed, after_id, pages = list[str](), "", 0
        while not pages or after_id:
            before, pages = log.bytes_read, pages + 1
            request = pb.ListTransactionsRequest(after_id=after_id, transactions_max=1_000)
            answer = await scene.transactions.ListTransactions(request, None)  # type: ignore[arg-type]
            assert log.bytes_read - before < LARGE_COUNT / 2 * BODY_BYTES
            listed += [one.transaction_id for one in answer.transactions]
            after_id = answer.next_after_id
        assert listed == names
        assert pages > 1


async def test_rounds_of_the_checker_read_a_bounded_part_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with large_transactions(monkeypatch) as (scene, log, names):
        most = LARGE_COUNT / 2 * BODY_BYTES
        assert await log.most_in_a_turn(scene.checker.discard_old()) < LARGE_COUNT * 1_000
        stream = scene.streams.open("shop", lambda _: True, lambda: None)
        scene.clock.pass_ms(10_000)
        asked = list[str]()
        while True:
            before = log.bytes_read
            if not await scene.checker.check():
                break
            assert log.bytes_read - before < most
            asked += [check.transaction_id for check in stream.take()]
        assert sorted(asked) == sorted(names)
        scene.clock.pass_ms(24 * HOUR_MS)
        await scene.add_unresolved()
        going_on = True
        while going_on:
            before = log.bytes_read
            going_on = await scene.checker.discard_old()
            assert log.bytes_read - before < most
        assert len(await discarded(scene)) == LARGE_COUNT


async def test_repeated_begin_has_the_first_id() -> None:
    async with new_scene() as scene:
        raw = batch(b"a", producer=(5, 1))
        first = await scene.begin(raw)
        assert await scene.begin(raw, raw) == first * 2
        disk = scene.disk.power_cut(lambda _: 0)
    async with new_scene(disk, scene.clock) as scene:
        assert await scene.begin(raw) == first
        assert scene.open_count() == 1
        assert await scene.begin(batch(b""), group="not good") == ["INVALID_NAME"]


async def test_groups_of_one_call_beyond_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_transactions, "GROUPS_MAX", 2)
    async with new_scene() as scene:
        items = [
            pb.BeginItem(batch=batch(b"%d" % number), group=f"group-{number % 3}")
            for number in range(4)
        ]
        answer = await scene.transactions.Begin(pb.BeginRequest(items=items), None)  # type: ignore[arg-type]
        assert [one.HasField("error") for one in answer.outcomes] == [False, False, True, False]
        assert scene.open_count() == 3


async def test_half_message_that_blocks_retention_is_written_again() -> None:
    async with new_scene() as scene:
        (name,) = await scene.begin(batch(b"kept", producer=(5, 1)))
        fill = batch(b"x" * 3_000)
        await scene.schedule(fill, NOW)
        await scene.schedule(fill, NOW)
        await scene.deliver()
        await scene.checker.rewrite_old()
        assert scene.store.transactions.open.oldest_position() == 0
        scene.clock.pass_ms(24 * HOUR_MS)
        end = scene.store.log.next_position
        assert await scene.checker.rewrite_old()
        oldest = scene.store.transactions.open.oldest_position()
        assert oldest is not None
        assert oldest >= end
        disk = scene.disk.power_cut(lambda _: 0)
    async with new_scene(disk, scene.clock) as scene:
        assert scene.store.transactions.open.oldest_position() == oldest
        assert await scene.end_all((name, "COMMITTED")) == ["COMMITTED 2"]
        assert scene.bodies()[-1] == b"kept"


async def test_permissions_of_the_producers_are_looked_up_once_for_a_round_of_checks() -> None:
    looked_up = 0

    def may_ask(_: str) -> bool:
        nonlocal looked_up
        looked_up += 1
        return True

    async with new_scene() as scene:
        begun = await scene.begin(*(batch(b"%d" % number) for number in range(50)))
        streams = [scene.streams.open("shop", may_ask, lambda: None) for _ in range(100)]
        scene.clock.pass_ms(10_000)
        await scene.checker.check()
        asked = [check.transaction_id for stream in streams for check in stream.take()]
        assert sorted(asked) == sorted(begun)
        assert looked_up < 3 * len(streams)


async def test_damaged_half_message_is_reported_in_the_topic_of_unresolved_messages() -> None:
    async with new_scene() as scene:
        good, bad = await scene.begin(batch(b"good"), batch(b"bad" * 100))
        position = int(bad.rpartition("-")[2], 16)
        segment = scene.disk.files[FIRST_SEGMENT]
        segment.content[position + 200] ^= 1
        assert await scene.end_all((bad, "COMMITTED")) == ["DATA_LOSS"]
        stream = scene.streams.open("shop", lambda _: True, lambda: None)
        scene.clock.pass_ms(10_000)
        await scene.checker.check()
        assert [check.transaction_id for check in stream.take()] == [good]
        assert scene.open_count() == 2, "the topic of unresolved messages did not exist"
        scene.clock.pass_ms(3_000)
        await scene.checker.check()
        (told,) = records_of(scene.store, UNRESOLVED_ID)
        assert told.body == b""
        assert told.properties[transactions.TRANSACTION_ID] == bad
        assert told.properties[transactions.GROUP] == "shop"
        assert "the half message is damaged" in told.properties[transactions.REASON]
        assert scene.metric("ended_transactions_total", outcome="damaged") == 1
        assert await scene.end_all((bad, "ROLLED_BACK")) == ["TRANSACTION_ENDED"]
        disk = scene.disk.power_cut(lambda _: 0)
    async with new_scene(disk, scene.clock) as scene:
        assert [one.transaction_id for one in scene.store.transactions.open.page(-1, 9)] == [
            int(good.rpartition("-")[2], 16)
        ]


async def test_first_check_comes_when_its_producer_wants_it() -> None:
    async with new_scene() as scene:
        (soon,) = await scene.begin(batch(b"soon"), check_after_ms=1_000)
        stream = scene.streams.open("shop", lambda _: True, lambda: None)
        (late,) = await scene.begin(batch(b"late"), check_after_ms=60_000)
        scene.clock.pass_ms(2_000)
        await scene.checker.check()
        assert [check.transaction_id for check in stream.take()] == [soon]
        await scene.end_all((soon, "COMMITTED"))
        scene.clock.pass_ms(57_000)
        await scene.checker.check()
        assert stream.take() == []
        scene.clock.pass_ms(2_000)
        await scene.checker.check()
        assert [check.transaction_id for check in stream.take()] == [late]
        for wrong in (-1, 86_400_001):
            assert await scene.begin(batch(b"no"), check_after_ms=wrong) == ["INVALID_ARGUMENT"]


async def test_steps_of_transactions_are_counted_in_one_event_for_a_group_and_topic() -> None:
    async with new_scene() as scene:
        with scene.appender.stream.hub.listen() as buffer:
            names = await scene.begin(*(batch(b"%d" % n) for n in range(6)))
            repeated = batch(b"r", producer=(5, 1))
            await scene.begin(repeated, group="mail")
            await scene.begin(repeated, group="mail")
            await scene.end_all(
                *((name, "COMMITTED") for name in names[:3]), (names[3], "ROLLED_BACK")
            )
            await scene.end_all((names[0], "COMMITTED"))
            stream = scene.streams.open("shop", lambda _: True, lambda: None)
            scene.clock.pass_ms(10_000)
            await scene.checker.check()
            scene.appender.stream.hub.gather()
            found = {
                one.transactions.group: one
                for one in buffer.take(1 << 20)
                if one.HasField("transactions")
            }
            stream.take()
    shop, mail = found["shop"], found["mail"]
    assert (shop.queue.queue.topic, shop.queue.queue.broker) == ("orders", "broker-a")
    assert shop.transactions == TransactionCounts(
        group="shop", opened_count=6, committed_count=3, rolled_back_count=1, checked_count=2,
        open_count=3,
    )  # fmt: skip
    assert mail.transactions == TransactionCounts(group="mail", opened_count=1, open_count=3)


async def discarded(scene: Scene) -> Sequence[bytes]:
    """Return the bodies in the topic of unresolved messages."""
    return bodies_of(scene.store, UNRESOLVED_ID)


def bodies_of(store: MessageStore, topic_id: int) -> list[bytes]:
    """Return the bodies of queue 0 of a topic, whether visible or not."""
    return [one.body for one in records_of(store, topic_id)]


def records_of(store: MessageStore, topic_id: int) -> list[Record]:
    """Return the messages of queue 0 of a topic, whether visible or not."""
    queue = store.queues.get((topic_id, 0))
    if queue is None:
        return []
    entries = queue.read(queue.first_offset, queue.next_offset)
    found: list[Record] = []
    for position, size in zip(entries.positions.tolist(), entries.sizes.tolist(), strict=True):
        raw = store.log.read(position, size)
        header = read_header(raw)
        found += decode_records(raw, header, range(header.count))
    return found


async def test_checks_are_recorded_before_they_are_sent_and_end_in_a_discard() -> None:
    async with new_scene() as scene:
        (name,) = await scene.begin(batch(b"a"))
        scene.clock.pass_ms(60_000)
        assert not await scene.checker.check(), "no producer is alive"
        stream = scene.streams.open("shop", lambda _: True, lambda: None)
        for number in (1, 2, 3):
            assert await scene.checker.check()
            (check,) = stream.take()
            assert (check.transaction_id, check.check) == (name, number)
            recovered = open_store(scene.disk.power_cut(lambda _: 0))
            assert [one.checks for one in recovered.store.transactions.open.page(-1, 9)] == [number]
            assert not await scene.checker.check(), "it was asked again within the interval"
            scene.clock.pass_ms(29_000)
            assert not await scene.checker.check(), "it was asked again within the interval"
            scene.clock.pass_ms(2_000)
        scene.streams.close(stream)
        await scene.checker.check()
        scene.clock.pass_ms(3_000)
        await scene.checker.check()
        assert await discarded(scene) == [b"a"]
        assert scene.metric("ended_transactions_total", outcome="discarded") == 1
        assert scene.metric("transaction_checks_total") == 3
        assert await scene.end_all((name, "COMMITTED")) == ["TRANSACTION_ENDED"]


async def test_stream_that_may_not_read_the_topic_is_not_asked() -> None:
    async with new_scene() as scene:
        (name,) = await scene.begin(batch(b"a"))
        scene.clock.pass_ms(10_000)
        other = scene.streams.open("shop", lambda _: False, lambda: None)
        await scene.checker.check()
        assert other.take() == []
        stream = scene.streams.open("shop", lambda _: True, lambda: None)
        scene.clock.pass_ms(31_000)
        await scene.checker.check()
        assert [check.transaction_id for check in stream.take()] == [name]
        assert other.take() == []


async def test_unsent_checks_of_a_closed_stream_go_to_another_one() -> None:
    async with new_scene() as scene:
        names = await scene.begin(*(batch(b"%d" % n) for n in range(6)))
        first = scene.streams.open("shop", lambda _: True, lambda: None)
        second = scene.streams.open("shop", lambda _: True, lambda: None)
        scene.clock.pass_ms(10_000)
        await scene.checker.check()
        assert first.waiting
        assert len(first.waiting) + len(second.waiting) == len(names)
        scene.streams.close(first)
        assert sorted(check.transaction_id for check in second.take()) == sorted(names)


async def test_age_limit_discards_without_a_live_producer() -> None:
    async with new_scene() as scene:
        await scene.begin(batch(b"old"))
        scene.clock.pass_ms(23 * HOUR_MS)
        await scene.begin(batch(b"young"))
        await scene.checker.discard_old()
        assert scene.open_count() == 2
        for _ in range(2):  # the first round asks for the topic
            scene.clock.pass_ms(HOUR_MS)
            await scene.checker.discard_old()
        assert await discarded(scene) == [b"old"]
        assert scene.open_count() == 1


async def test_message_that_another_client_has_encoded_is_discarded_as_it_is() -> None:
    properties = b"\x01a name is missing\x02"
    builder = BatchBuilder()
    record = RECORD.pack(0, 3, len(properties)) + b"a b" + properties + b"odd"
    builder.add(Message(b""), record)
    async with new_scene() as scene:
        await scene.add_unresolved()
        await scene.begin(builder.encode(topic="orders", queue_id=0))
        scene.clock.pass_ms(24 * HOUR_MS)
        await scene.checker.discard_old()
        reading = scene.store.read((UNRESOLVED_ID, 0), read_spec())
        assert reading is not None
        header = check_batch(reading.batches[0], stamped=True)
        assert header.topic == UNRESOLVED_TOPIC
        (message,) = decode_records(reading.batches[0], header, range(1))
        assert (message.body, message.tag) == (b"odd", "a b")
        assert scene.metric("ended_transactions_total", outcome="discarded") == 1


async def test_message_that_gets_too_long_by_its_new_topic_does_not_end_the_checks() -> None:
    builder = BatchBuilder(RecordCompressor(Compression.ZSTD))
    size = BATCH_BYTES_MAX - HEADER_BYTES - len("orders") - 12 * 2 - 2 * RECORD.size
    for length in (BODY_BYTES_MAX, size - BODY_BYTES_MAX):
        builder.add(Message(b""), bare_record(bytes(length)))
    async with new_scene() as scene:
        await scene.add_unresolved()
        await scene.begin(builder.encode(topic="orders", queue_id=0))
        assert scene.open_count() == 1
        scene.clock.pass_ms(24 * HOUR_MS)
        await scene.checker.discard_old()
        assert scene.open_count() == 0
        assert scene.metric("ended_transactions_total", outcome="damaged") == 1


def test_fsck_finds_no_problem_in_transactions() -> None:
    opened = open_store(MemoryDisk())
    names = write(opened.store, *(encode_half(half(b"%d" % n)) for n in range(3)))
    sync(opened.store)
    (first, *_) = read_halves(opened.store.log, names)
    assert isinstance(first, HalfMessage)
    write(opened.store, commit_batch(names[0], first, 0))
    write(opened.store, encode_marks([RollbackMark(names[1])]))
    sync(opened.store)
    CheckpointWriter(opened.disk, opened.store, 0).run()
    report = Fsck(opened.disk.killed(), opened.store.log.next_position).run()
    assert report.problem_count == 0, report
