"""Goal: storage stores each output once, and forgets none that may come again without saying so.

Method: a store on a memory disk; batches of outputs as owners send them. A random sequence of
batches, opens, floors and restarts is compared with a model of two dictionaries.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from baton.storage.v1 import output_service_pb2 as pb
from batonmq._common.aio import STEP_ITEMS
from batonmq._core.outputs import (
    OFFSET_MAX,
    OutputHead,
    OutputSource,
    digest_of,
    encode_head,
    encode_rows,
    head_of,
    row_key,
    rows_of,
)
from batonmq._core.records import (
    BatchBuilder,
    Message,
    check_batch,
    decode_records,
    encode_record,
    read_header,
)
from batonmq.errors import (
    BadBatch,
    BatonError,
    DuplicateSequence,
    OutputMismatch,
    Overloaded,
    ProducerFenced,
)
from batonmq_server.storage.core import outputs as core
from batonmq_server.storage.core import schedule
from batonmq_server.storage.core.checkpoint_writer import CheckpointWriter
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic, check
from batonmq_server.storage.core.outputs import (
    OutputTable,
    SourceOutputs,
    StoredOutput,
    encode_opened,
    parse_outputs,
)
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.output_server import OutputServicer
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, append, bodies, open_store, stored, sync
from tests.storage.schedule_scene import new_scene

SOURCE = OutputSource("doubler", 3, "broker-0", 1)
Made = tuple[int, int, bytes]


def head(token: int = 1, floor: int = 0, epoch: int = 0) -> OutputHead:
    """Return the head of an owner's batch."""
    return OutputHead(SOURCE, epoch, token, floor)


def of_queue(number: int) -> OutputHead:
    """Return the head of a batch of another input queue."""
    return head()._replace(source=SOURCE._replace(queue_id=number))


def batch(at: OutputHead, *made: Made, queue_id: int = 0) -> bytes:
    """Return a batch of outputs: offset of the input, number and body of each."""
    builder, keys, digests = BatchBuilder(), list[int](), list[int]()
    for offset, number, body in made:
        record = encode_record(Message(body, keys=("a", "b")))
        builder.add(Message(body, keys=("a", "b")), record)
        keys.append(row_key(offset, number))
        digests.append(digest_of(TOPIC, record))
    columns = encode_head(at), encode_rows(keys, digests, at.floor)
    return builder.encode(topic=TOPIC, queue_id=queue_id, outputs=columns)


def open_outputs(store: MessageStore, at: OutputHead) -> None:
    """Store the token of an owner, as the servicer does."""
    raw = encode_opened([at])
    topics: dict[str, LocalTopic | BatonError] = {
        core.TOPIC: LocalTopic(schedule.TOPIC_ID, core.QUEUE_COUNT)
    }
    (outcome,) = store.append([CheckedBatch(read_header(raw), raw)], topics, NOW)
    assert isinstance(outcome, StoreReceipt)
    sync(store)


def refusal(store: MessageStore, *batches: bytes) -> BatonError:
    """Return the error of the last batch; nothing of it is stored."""
    before = store.log.next_position
    outcome = append(store, *batches)[-1]
    assert isinstance(outcome, BatonError), outcome
    assert store.log.next_position == before or len(batches) > 1
    return outcome


@pytest.fixture
def store() -> MessageStore:
    return open_store(MemoryDisk()).store


def test_columns_are_decoded_as_they_were_encoded() -> None:
    raw = batch(head(7, 10, 2), (12, 3, b"x"), (10, 0, b"y"))
    header = check_batch(raw, stamped=False)
    assert head_of(raw, header) == head(7, 10, 2)
    assert [row[:2] for row in rows_of(raw, header)] == [(12, 3), (10, 0)]
    assert [one.body for one in decode_records(raw, header, range(2))] == [b"x", b"y"]


def test_repeated_batch_gets_its_receipt(store: MessageStore) -> None:
    first, again = [stored(store, batch(head(), (0, 0, b"x"), (1, 0, b"y"))) for _ in range(2)]
    assert [one.duplicate for one in (*first, *again)] == [False, True]
    assert first[0].first_offset == again[0].first_offset
    assert bodies(store) == [b"x", b"y"]


def test_output_that_is_stored_in_another_batch_is_a_duplicate(store: MessageStore) -> None:
    stored(store, batch(head(), (0, 0, b"x"), (1, 0, b"y"), (1, 1, b"z")))
    (receipt,) = stored(store, batch(head(2), (1, 1, b"z"), (1, 0, b"y"), queue_id=3))
    assert receipt.duplicate
    assert bodies(store, 3) == []


def test_batch_of_old_and_new_outputs_is_refused_whole(store: MessageStore) -> None:
    stored(store, batch(head(), (0, 0, b"x")))
    error = refusal(store, batch(head(), (0, 0, b"x"), (1, 0, b"y")))
    assert isinstance(error, DuplicateSequence)
    assert error.facts["content"] == "some"


def test_other_output_of_the_same_input_is_refused(store: MessageStore) -> None:
    stored(store, batch(head(), (5, 1, b"x")))
    error = refusal(store, batch(head(), (5, 1, b"other")))
    assert isinstance(error, OutputMismatch)
    assert (str(error.facts["offset"]), str(error.facts["number"])) == ("5", "1")


@pytest.mark.parametrize("opens", [False, True])
def test_batch_of_an_earlier_owner_is_refused(store: MessageStore, *, opens: bool) -> None:
    if opens:
        open_outputs(store, head(3))
    else:
        stored(store, batch(head(3), (0, 0, b"x")))
    assert isinstance(refusal(store, batch(head(2), (1, 0, b"y"))), ProducerFenced)
    stored(store, batch(head(3), (1, 0, b"y")))


def test_input_below_the_floor_is_refused(store: MessageStore) -> None:
    stored(store, batch(head(floor=5), (6, 0, b"x")))
    assert isinstance(refusal(store, batch(head(), (4, 0, b"late"))), ProducerFenced)


def test_rising_floor_empties_the_memory(store: MessageStore) -> None:
    stored(store, batch(head(), *((offset, 0, b"%d" % offset) for offset in range(50))))
    stored(store, batch(head(floor=48), (50, 0, b"x")))
    assert len(store.outputs) == 3
    known = store.outputs.get(SOURCE)
    assert known is not None
    assert [one.offset for one in known.stored()] == [48, 49, 50]


def test_new_reset_epoch_stores_the_outputs_again(store: MessageStore) -> None:
    stored(store, batch(head(), (0, 0, b"x")))
    (receipt,) = stored(store, batch(head(2, epoch=1), (0, 0, b"x")))
    assert not receipt.duplicate
    assert isinstance(refusal(store, batch(head(9), (1, 0, b"y"))), ProducerFenced)


def test_batches_of_one_request_are_compared_with_each_other(store: MessageStore) -> None:
    outcomes = append(
        store, batch(head(), (0, 0, b"x")), batch(head(), (0, 0, b"x"), queue_id=1),
        batch(head(), (1, 0, b"y"), queue_id=1), batch(head(2), (2, 0, b"z")),
        batch(head(1), (3, 0, b"late")),
    )  # fmt: skip
    assert isinstance(outcomes[0], StoreReceipt) and not outcomes[0].duplicate
    assert isinstance(outcomes[1], StoreReceipt) and outcomes[1].duplicate
    assert isinstance(outcomes[2], StoreReceipt) and not outcomes[2].duplicate
    assert isinstance(outcomes[4], ProducerFenced)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_restart_keeps_the_memory(*, checkpointed: bool) -> None:
    opened = open_store(MemoryDisk())
    open_outputs(opened.store, head(4))
    stored(opened.store, batch(head(4, 1), (1, 0, b"x"), (2, 0, b"y")))
    if checkpointed:
        CheckpointWriter(opened.disk, opened.store, 0).run()
    again = open_store(opened.disk)
    assert (again.report.checkpoint_position > 0) is checkpointed
    assert stored(again.store, batch(head(4), (2, 0, b"y")))[0].duplicate
    assert isinstance(refusal(again.store, batch(head(3), (3, 0, b"late"))), ProducerFenced)


def test_rebuilt_memory_says_that_outputs_of_removed_segments_are_not_known() -> None:
    opened = open_store(MemoryDisk(), segment_bytes=1_024)
    for offset in range(12):
        stored(opened.store, batch(head(), (offset, 0, b"x" * 200)))
    whole = open_store(opened.disk, segment_bytes=1_024).store
    assert whole.outputs.forgotten_unix_ms == 0, "nothing was removed"
    for path in whole.log.drop_before(whole.log.segment_end(0)):
        opened.disk.remove(path)
    rebuilt = open_store(opened.disk, segment_bytes=1_024).store
    assert rebuilt.outputs.forgotten_unix_ms == NOW
    known = rebuilt.outputs.get(SOURCE)
    assert known is not None and known.forgotten_unix_ms == NOW


def test_forgotten_source_is_not_taken_for_a_new_one() -> None:
    table = OutputTable(outputs_max=10)
    for number in range(4):
        source = SOURCE._replace(queue_id=number)
        made = batch(head()._replace(source=source), *((o, 0, b"x") for o in range(4)))
        take(table, made, NOW + number)
    assert len(table) <= 10
    assert table.get(SOURCE._replace(queue_id=0)) is None
    assert table.forgotten_unix_ms == NOW + 1
    take(table, batch(head()._replace(source=SOURCE._replace(queue_id=9)), (0, 0, b"x")), NOW + 9)
    known = table.get(SOURCE._replace(queue_id=9))
    assert known is not None and known.forgotten_unix_ms == NOW + 1


def test_full_memory_refuses_outputs_while_its_sources_are_in_use() -> None:
    table = OutputTable(outputs_max=3)
    take(table, batch(head(), *((offset, 0, b"x") for offset in range(3))), NOW)
    other = check(batch(head()._replace(source=SOURCE._replace(queue_id=9)), (0, 0, b"x")))
    assert other.outputs is not None
    with pytest.raises(Overloaded):
        table.check(other.outputs, NOW + core.IDLE_MS_MIN - 1)
    assert table.check(other.outputs, NOW + core.IDLE_MS_MIN) is None


def test_batches_of_one_request_forget_no_source_in_use(store: MessageStore) -> None:
    store.outputs = OutputTable(outputs_max=5)
    made = [(offset, 0, b"x") for offset in range(2)]
    batches = [batch(of_queue(number), *made) for number in range(3)]
    stored(store, batches[0])
    assert isinstance(refusal(store, *batches[1:]), Overloaded)
    assert store.outputs.get(SOURCE._replace(queue_id=0)) is not None
    (again,) = stored(store, batches[0])
    assert again.duplicate, "the producer repeats it, as it has got no answer"


def test_idle_source_with_few_outputs_makes_no_room_for_many() -> None:
    table = OutputTable(outputs_max=5)
    take(table, batch(of_queue(0), (0, 0, b"x")), NOW)
    now = NOW + core.IDLE_MS_MIN
    take(table, batch(of_queue(1), *((offset, 0, b"x") for offset in range(3))), now)
    for count, refused in ((2, False), (3, True)):
        other = check(batch(of_queue(2), *((offset, 0, b"x") for offset in range(count))))
        assert other.outputs is not None
        if refused:
            with pytest.raises(Overloaded):
                table.check(other.outputs, now)
        else:
            assert table.check(other.outputs, now) is None


@pytest.mark.parametrize(("epoch", "floor"), [(0, 3), (1, 0)])
def test_batch_makes_room_by_its_floor(*, epoch: int, floor: int) -> None:
    table = OutputTable(outputs_max=4)
    for offset in range(4):
        take(table, batch(head(), (offset, 0, b"x")), NOW)
    made = [(offset, 0, b"x") for offset in range(4, 7)]
    for at, refused in ((head(), True), (head(1, floor, epoch), False)):
        more = check(batch(at, *made))
        assert more.outputs is not None
        if refused:
            with pytest.raises(Overloaded):
                table.check(more.outputs, NOW)
        else:
            assert table.check(more.outputs, NOW) is None
            take(table, more.batch, NOW)
    assert len(table) == 4 - epoch
    assert table.get(SOURCE) is not None


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, -1), (8, 0), (16, -1), (16, OFFSET_MAX), (24, -1)],
    ids=["reset epoch", "token", "floor", "large floor", "topic id"],
)
def test_bad_head_is_refused(at: int, value: int) -> None:
    raw = bytearray(encode_head(head()))
    struct.pack_into(">q", raw, at, value)
    builder = BatchBuilder()
    builder.add(Message(b"x"), encode_record(Message(b"x")))
    with pytest.raises(BadBatch):
        check(builder.encode(topic=TOPIC, queue_id=0, outputs=(bytes(raw), bytes(16))))


def test_same_output_twice_in_a_batch_is_refused() -> None:
    with pytest.raises(BadBatch, match="same output"):
        check(batch(head(), (0, 0, b"x"), (0, 0, b"x")))


async def test_other_calls_go_on_while_many_outputs_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, turn, turns = 5_000, 0, Counter[int]()
    original = SourceOutputs.stored

    def counted(self: SourceOutputs) -> Iterator[StoredOutput]:
        for one in original(self):
            turns[turn] += 1
            yield one

    async with new_scene() as scene:
        for begin in range(0, count, 100):
            offsets = range(begin, begin + 100)
            take(scene.store.outputs, batch(head(), *((o, 7, b"%d" % o) for o in offsets)), NOW)
        monkeypatch.setattr(SourceOutputs, "stored", counted)
        monkeypatch.setattr(core, "DECODED_ROWS", 300)
        source = pb.OutputSource(group="doubler", topic_id=3, broker="broker-0", queue_id=1)
        owner = pb.OutputOwner(source=source, token=2)
        call = OutputServicer(scene.appender, None).OpenOutputs(
            pb.OpenOutputsRequest(owners=[owner]),
            None,  # type: ignore[arg-type]
        )
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(call)
            while not opening.done():
                await asyncio.sleep(0)
                turn += 1
        (outcome,) = opening.result().outcomes
    assert [(one.offset, one.number) for one in outcome.stored.outputs] == [
        (offset, 7) for offset in range(count)
    ]
    assert max(turns.values()) <= STEP_ITEMS


def test_memory_agrees_with_a_model() -> None:
    random, disk = Random(4), MemoryDisk()
    store = open_store(disk, segment_bytes=1 << 20).store
    model: dict[tuple[int, int], bytes] = {}
    expected: list[bytes] = []
    token = floor = 0
    for step in range(400):
        kind = random.random()
        if kind < 0.1:
            token += 1
            open_outputs(store, head(token + 1, floor))
        elif kind < 0.2:
            floor += random.randrange(8)
            model = {key: body for key, body in model.items() if key[0] >= floor}
        elif kind < 0.25:
            if random.random() < 0.5:
                CheckpointWriter(disk, store, 0).run()
            store = open_store(disk, segment_bytes=1 << 20).store
        else:
            made = _draw(random, floor)
            (outcome,) = append(store, batch(head(token + 1, floor), *made), now=NOW + step)
            sync(store)
            known = [model.get((offset, number)) for offset, number, _ in made]
            if not any(known):
                assert isinstance(outcome, StoreReceipt) and not outcome.duplicate
                model |= {(offset, number): body for offset, number, body in made}
                expected += [body for _, _, body in made]
            elif any(one and one != body for one, (_, _, body) in zip(known, made, strict=True)):
                assert isinstance(outcome, OutputMismatch)
            elif all(known):
                assert isinstance(outcome, StoreReceipt) and outcome.duplicate
            else:
                assert isinstance(outcome, DuplicateSequence)
    assert bodies(store) == expected


def _draw(random: Random, floor: int) -> Sequence[Made]:
    keys = {(floor + random.randrange(12), random.randrange(2)) for _ in range(3)}
    other = random.random() < 0.1
    return [(*key, b"other" if other else b"%d/%d" % key) for key in keys]


def take(table: OutputTable, raw: bytes, store_unix_ms: int) -> None:
    """Remember a batch as the store does."""
    header = read_header(raw)
    table.take(parse_outputs(raw, header), StoreReceipt(0, 0, header.length, store_unix_ms))
