"""Goal: each message of a queue is in the target once, in order, whatever happens to a mirror; and
a mirror that starts anew finds where to continue.

Method: `QueueMirror` with two queues in memory. The target checks sequences with the real producer
table. Answers are lost, appends of a killed mirror arrive late, messages are removed, and others
produce to the target, all as Hypothesis chooses. The whole way is in tests/e2e/test_mirror.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.mirror_marks import marked_batch, next_mark, source_id
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    BatchBuilder,
    Message,
    check_batch,
    decode_records,
    encode_record,
    read_header,
    stamped_head,
)
from batonmq.admin._queue_log import QueueLog
from batonmq.admin._queue_mirror import QueueMirror, Start
from batonmq.admin.admin import Admin
from batonmq.errors import (
    BatonError,
    InvalidArgument,
    OffsetAheadOfLog,
    OffsetOutOfRange,
    Unreachable,
)
from batonmq_server.storage.core.producers import ProducerTable, StoreReceipt
from tests.support.conditions import until

HERE, THERE = QueueRef("t", "a", 0), QueueRef("t", "b", 0)
HERE_ID, THERE_ID = source_id("here", 1, 1, HERE), source_id("there", 1, 1, THERE)
KEY = (1, 0)


class Broker:
    """One queue in memory that takes appends and reads as storage does.

    Attributes:
        reads: Number of reads.
        losses: Appends from now on that are stored and not answered.
        late: Appends that a killed mirror has sent and that have not arrived.
    """

    def __init__(self, queue: QueueRef) -> None:
        self.queue, self.batches, self.producers = queue, list[bytes](), ProducerTable()
        self.first = self.end = self.reads = self.losses = 0
        self.late: list[list[bytes]] = []
        self.keep_late = False
        self.directory, self.random = self, Random(0)

    # ---- what the mirror calls

    async def ask(
        self, ask: Callable[[float], Awaitable[Any]], *, timeout_s: float | None = None
    ) -> Any:
        return await ask(1.0)

    async def storage(self, _: str) -> Broker:
        return self

    async def query(self, _: str) -> Broker:
        return self

    async def extents(
        self, queues: Collection[QueueRef]
    ) -> tuple[dict[QueueRef, tuple[int, int]], tuple[str, ...]]:
        return {self.queue: (self.first, self.end)}, ()

    async def Append(self, request: pb.AppendRequest, **_: float) -> pb.AppendResponse:
        if self.keep_late:
            self.late.append(list(request.batches))
            await asyncio.Event().wait()
        answer = pb.AppendResponse(outcomes=[self.append(one) for one in request.batches])
        if self.losses:
            self.losses -= 1
            raise Unreachable("the answer is lost")
        return answer

    async def Read(self, request: query_pb.ReadRequest, **_: float) -> query_pb.ReadResponse:
        self.reads += 1
        if not self.first <= request.offset <= self.end:
            raise OffsetOutOfRange(f"{request.offset} is not in {self.first} to {self.end}")
        chosen, next_offset, left = list[bytes](), request.offset, request.messages_max
        for batch in self.batches:
            header = read_header(batch)
            if header.next_offset > request.offset and left > 0 and len(chosen) < 4:
                chosen.append(batch)
                left -= header.next_offset - max(request.offset, header.first_offset)
                next_offset = header.next_offset
        return query_pb.ReadResponse(batches=chosen, next_offset=next_offset)

    # ---- what happens

    def append(self, batch: bytes) -> pb.AppendOutcome:
        header = check_batch(batch, stamped=False)
        try:
            known = self.producers.check(header, KEY)
        except BatonError as error:
            return pb.AppendOutcome(error=error_to_pb(error))
        if known is None:
            known = StoreReceipt(self.end, self.end, self.end + 1, 1)
            self.producers.record(header, KEY, known)
            stamp = stamped_head(
                batch,
                position=self.end,
                first_offset=self.end,
                store_unix_ms=1,
                topic_id=1,
                epoch=1,
            )
            self.batches.append(stamp + batch[len(stamp) :])
            self.end += header.count
        return pb.AppendOutcome(receipt=pb.AppendReceipt(first_offset=known.first_offset))

    def produce(self, *bodies: bytes) -> None:
        builder = BatchBuilder()
        for body in bodies:
            builder.add(Message(body), encode_record(Message(body)))
        self.append(builder.encode(topic="t", queue_id=0))

    def remove_first(self) -> None:
        if self.batches:
            self.first = read_header(self.batches.pop(0)).next_offset

    def cut_last(self) -> None:
        self.end = read_header(self.batches.pop()).first_offset

    @property
    def bodies(self) -> list[bytes]:
        return [
            record.body
            for batch in self.batches
            for header in [read_header(batch)]
            for record in decode_records(batch, header, range(header.count))
        ]


def mirror(source: Broker, target: Broker, *, back: bool = False, start: Start = "") -> QueueMirror:
    logs = QueueLog(cast(Admin, source)), QueueLog(cast(Admin, target))
    ids = (THERE_ID, HERE_ID) if back else (HERE_ID, THERE_ID)
    queues = source.queue, target.queue
    return QueueMirror(logs, queues, ids, asyncio.Semaphore(1), start=start)


async def copy(one: QueueMirror, source: Broker, *, handled: int | None = 0) -> QueueMirror:
    await one.open(handled)
    one.note_end(source.end)
    await one.run(source.end)
    return one


async def kill_while_it_appends(source: Broker, target: Broker) -> None:
    """Start a mirror, and kill it when its append is on its way."""
    target.keep_late, count = True, len(target.late)
    one = mirror(source, target)
    await one.open(0)
    one.note_end(source.end)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(one.run(source.end))
        await until(lambda: running.done() or len(target.late) > count)
        running.cancel()
    target.keep_late = False


def assert_map_is_true(one: QueueMirror, source: Broker, target: Broker) -> None:
    here = dict(zip(range(source.end - len(source.bodies), source.end), source.bodies, strict=True))
    for known in (one.forward, one.own):
        for run in known.runs:
            for index in range(run.message_count):
                if (offset := run.source_offset + index) in here:
                    assert target.bodies[run.target_offset + index] == here[offset]


STEPS = st.lists(
    st.sampled_from(["produce", "copy", "late", "arrive", "remove", "other", "lose", "again"]),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_each_message_is_in_the_target_once_and_in_order(steps: list[str]) -> None:
    async def run() -> None:
        source, target = Broker(HERE), Broker(THERE)
        produced, removed, number = list[bytes](), set[bytes](), 0
        current = await copy(mirror(source, target), source)
        for step in [*steps, "produce", "copy", "arrive"]:
            if step == "produce":
                batch = [b"%d" % n for n in range(number, number + 1 + number % 3)]
                number += len(batch)
                produced += batch
                source.produce(*batch)
            elif step == "copy":
                current = await copy(mirror(source, target), source)
            elif step == "again":
                current.note_end(source.end)
                await current.run(source.end)
            elif step == "late":
                await kill_while_it_appends(source, target)
            elif step == "arrive":
                for batches in target.late:
                    for one in batches:
                        target.append(one)
                target.late.clear()
            elif step == "remove":
                before = source.bodies
                source.remove_first()
                removed |= set(before) - set(source.bodies)
            elif step == "other":
                target.produce(b"other")
            elif step == "lose":
                target.losses = 1
        mirrored = [body for body in target.bodies if body != b"other"]
        assert len(mirrored) == len(set(mirrored)), "twice"
        assert mirrored == sorted(mirrored, key=int), "out of order"
        assert set(produced) - removed <= set(mirrored), "lost"
        current = await copy(mirror(source, target), source)
        assert current.copied_count == 0
        assert_map_is_true(current, source, target)

    asyncio.run(run())


async def test_late_append_of_a_killed_mirror_is_rejected() -> None:
    source, target = Broker(HERE), Broker(THERE)
    source.produce(b"1")
    source.produce(b"2")
    await kill_while_it_appends(source, target)
    await copy(mirror(source, target), source)
    assert target.late
    outcomes = [target.append(one) for one in target.late[0]]
    assert target.bodies == [b"1", b"2"]
    assert all(one.receipt.first_offset < 2 for one in outcomes)


async def test_lost_answer_is_found_in_the_target() -> None:
    source, target = Broker(HERE), Broker(THERE)
    source.produce(b"1", b"2")
    target.losses = 1
    one = await copy(mirror(source, target), source)
    assert target.bodies == [b"1", b"2"]
    assert one.forward.runs == [(0, 0, 2)]


async def test_messages_removed_before_they_are_copied_are_counted() -> None:
    source, target = Broker(HERE), Broker(THERE)
    source.produce(b"1")
    one = await copy(mirror(source, target), source)
    for number in range(2, 6):
        source.produce(b"%d" % number)
    for _ in range(3):
        source.remove_first()
    one.note_end(source.end)
    await one.run(source.end)
    assert one.removed_count == 2
    assert target.bodies == [b"1", b"4", b"5"]
    assert one.forward.runs == [(0, 0, 1), (3, 1, 2)]


async def test_message_is_never_copied_back_and_both_maps_know_it() -> None:
    here, there = Broker(HERE), Broker(THERE)
    here.produce(b"a1", b"a2")
    await copy(mirror(here, there), here)
    there.produce(b"b1")
    back = await copy(mirror(there, here, back=True), there)
    assert here.bodies == [b"a1", b"a2", b"b1"]
    assert back.skipped_count == 2
    assert back.own.runs == [(0, 0, 2)]
    assert back.forward.runs == [(2, 2, 1)]
    again = await copy(mirror(here, there), here)
    assert there.bodies == [b"a1", b"a2", b"b1"]
    assert (again.copied_count, again.skipped_count) == (0, 1)
    started_anew = await copy(mirror(there, here, back=True), there)
    assert_map_is_true(started_anew, there, here)
    assert started_anew.own.runs == [(0, 0, 2)]


async def test_map_has_what_the_source_has_handled_and_the_target_has_not() -> None:
    here, there = Broker(HERE), Broker(THERE)
    here.produce(b"a1", b"a2")
    await copy(mirror(here, there), here)
    there.produce(b"b1", b"b2")
    await copy(mirror(there, here, back=True), there)
    here.produce(b"a3")
    await copy(mirror(here, there), here)
    assert there.bodies == [b"a1", b"a2", b"b1", b"b2", b"a3"]
    # A group has handled all of it in the source; in the target it is known of the first three.
    started_anew = await copy(mirror(here, there), here, handled=3)
    assert_map_is_true(started_anew, here, there)
    assert started_anew.own.runs == [(2, 2, 2)]
    assert started_anew.forward.runs == [(4, 4, 1)]


async def test_last_marked_batch_of_a_range_is_not_one_behind_it() -> None:
    source, target = Broker(HERE), Broker(THERE)
    for _ in range(3):
        target.produce(b"other")
    source.produce(b"1")
    await copy(mirror(source, target), source)
    log = QueueLog(cast(Admin, target))
    assert await log.last_marked(THERE, [HERE_ID], 0, 3) is None
    found = await log.last_marked(THERE, [HERE_ID], 0, 4)
    assert found is not None
    assert found.first_offset == 3


async def test_new_cluster_in_place_of_a_lost_one_gets_what_was_mirrored_from_that() -> None:
    lost, there, new = Broker(HERE), Broker(THERE), Broker(QueueRef("t", "new", 0))
    lost.produce(b"a1", b"a2")
    await copy(mirror(lost, there), lost)
    there.produce(b"b1")
    new_id = source_id("new", 1, 1, new.queue)

    def to_new(*, include_mirrored: bool) -> QueueMirror:
        logs = QueueLog(cast(Admin, there)), QueueLog(cast(Admin, new))
        return QueueMirror(
            logs,
            (there.queue, new.queue),
            (THERE_ID, new_id),
            asyncio.Semaphore(1),
            include_mirrored=include_mirrored,
        )

    assert (await copy(to_new(include_mirrored=True), there)).forward.runs == [(0, 0, 3)]
    assert new.bodies == [b"a1", b"a2", b"b1"]
    assert (await copy(to_new(include_mirrored=True), there)).copied_count == 0


async def test_long_run_is_found_with_few_reads() -> None:
    source, target = Broker(HERE), Broker(THERE)
    for number in range(150):
        source.produce(b"%d" % number)
    await copy(mirror(source, target), source)
    target.reads = 0
    one = mirror(source, target)
    await one.open(0)
    assert one.forward.runs == [(0, 0, 150)]
    assert target.reads <= 3
    target.produce(b"other")
    source.produce(b"150")
    await copy(mirror(source, target), source)
    target.reads = 0
    one = mirror(source, target)
    await one.open(0)
    assert one.forward.runs == [(0, 0, 150), (150, 151, 1)]
    assert target.reads <= 20


async def test_as_many_removed_messages_as_others_in_between_are_not_one_run() -> None:
    source, target = Broker(HERE), Broker(THERE)
    for number in range(20):
        source.produce(b"%d" % number)
    await copy(mirror(source, target), source)
    target.produce(b"other")
    source.produce(b"gone")
    while source.batches:
        source.remove_first()
    for number in range(20):
        source.produce(b"%d" % (100 + number))
    await copy(mirror(source, target), source)
    one = mirror(source, target)
    await one.open(0)
    assert one.forward.runs == [(0, 0, 20), (21, 21, 20)]


async def test_mirror_without_groups_reads_only_the_end_of_the_target() -> None:
    source, target = Broker(HERE), Broker(THERE)
    for number in range(150):
        source.produce(b"%d" % number)
    await copy(mirror(source, target), source)
    target.reads = 0
    one = mirror(source, target)
    await one.open(None)
    assert (one.offset, target.reads) == (150, 1)


async def test_source_that_has_lost_messages_is_an_error_with_both_offsets() -> None:
    source, target = Broker(HERE), Broker(THERE)
    source.produce(b"1")
    source.produce(b"2")
    await copy(mirror(source, target), source)
    source.cut_last()
    one = mirror(source, target)
    await one.open(None)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(one.run())
        await until(lambda: one.problem)
        running.cancel()
    assert OffsetAheadOfLog.reason in one.problem
    assert "ends at 1, and the target has its messages up to 2" in one.problem


async def test_target_that_has_lost_messages_gets_them_again() -> None:
    source, target = Broker(HERE), Broker(THERE)
    source.produce(b"1")
    source.produce(b"2")
    one = await copy(mirror(source, target), source)
    target.cut_last()
    target.producers = ProducerTable()
    for batch in target.batches:
        target.producers.record(check_batch(batch, stamped=True), KEY, StoreReceipt(0, 0, 1, 1))
    source.produce(b"3")
    one.note_end(source.end)
    await one.run(source.end)
    assert target.bodies == [b"1", b"2", b"3"]
    assert one.forward.runs == [(0, 0, 3)]


async def test_copy_that_shall_end_raises_what_can_not_be_repeated() -> None:
    source, target = Broker(HERE), Broker(THERE)
    source.produce(b"1")
    target.produce(b"1")
    one = mirror(source, target)

    async def refuse(request: pb.AppendRequest, **_: float) -> pb.AppendResponse:
        raise OffsetAheadOfLog("for good")

    target.Append = refuse  # type: ignore[method-assign]
    with pytest.raises(OffsetAheadOfLog, match="for good"):
        await copy(one, source)


def long_source(*, gaps: int = 0) -> tuple[Broker, Broker]:
    """Return a source with 20 messages, and an empty target.

    Args:
        gaps: Messages of another cluster in the source, which are not mirrored.
    """
    source, target = Broker(HERE), Broker(THERE)
    other = Broker(QueueRef("t", "other", 0))
    other.produce(b"other")
    for number in range(20):
        source.produce(b"%d" % number)
        if number < gaps:
            (batch,) = other.batches
            header = read_header(batch)
            mark = next_mark(None, source_id("other", 1, 1, other.queue), header)
            mark = mark._replace(first_offset=number)
            source.append(marked_batch(batch, header, 0, mark))
    return source, target


async def empty_target(source: Broker, target: Broker) -> None:
    """Mirror, then remove all in the target, and produce two new messages in the source."""
    await copy(mirror(source, target), source)
    while target.batches:
        target.remove_first()
    source.produce(b"new 1")
    source.produce(b"new 2")


@pytest.mark.parametrize("start", ["first", "end"])
@pytest.mark.parametrize("gaps", [0, 3])
async def test_target_emptied_by_retention_gets_only_what_is_new(start: Start, gaps: int) -> None:
    source, target = long_source(gaps=gaps)
    await empty_target(source, target)
    one = await copy(mirror(source, target, start=start), source)
    source.produce(b"new 3")
    one.note_end(source.end)
    await one.run(source.end)
    assert target.bodies == [b"new 1", b"new 2", b"new 3"], one.problem


@pytest.mark.parametrize(
    ("start", "bodies"),
    [("first", [b"%d" % n for n in range(20)] + [b"new 1", b"new 2"]), ("end", [])],
)
async def test_target_that_has_forgotten_all_needs_a_chosen_start(
    start: Start, bodies: list[bytes]
) -> None:
    source, target = long_source()
    await empty_target(source, target)
    target.producers = ProducerTable()
    with pytest.raises(InvalidArgument, match="not known what was mirrored") as caught:
        await copy(mirror(source, target), source)
    assert "--start=first" in caught.value.remedy
    assert target.bodies == []
    one = await copy(mirror(source, target, start=start), source)
    assert target.bodies == bodies
    source.produce(b"new 3")
    one.note_end(source.end)
    await one.run(source.end)
    assert target.bodies == [*bodies, b"new 3"]


async def test_both_queues_emptied_by_retention_need_no_chosen_start() -> None:
    source, target = long_source(gaps=3)
    await copy(mirror(source, target), source)
    for broker in (source, target):
        while broker.batches:
            broker.remove_first()
    one = await copy(mirror(source, target), source)
    source.produce(b"new 1")
    one.note_end(source.end)
    await one.run(source.end)
    assert target.bodies == [b"new 1"]
