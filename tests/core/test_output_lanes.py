"""Goal: outputs keep their order, and a repeated batch has the same outputs.

Method: lanes without a network; batches are decoded again.
"""

from __future__ import annotations

from batonmq._core.compression import RecordCompressor
from batonmq._core.output_lanes import OutputLane, OutputQueue, PendingOutputs, TopicQueues
from batonmq._core.outputs import OutputHead, OutputSource, row_key, rows_of
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    Message,
    check_batch,
    decode_records,
    encode_record,
    read_header,
    tag_hash,
    tag_hashes,
)

HEAD = OutputHead(OutputSource("g", 1, "b", 0), 0, 1, 0)
QUEUES = tuple(QueueRef("out", "b", number) for number in range(4))


def output(number: int, key: str | None = None, *, count: int = 1) -> PendingOutputs[int]:
    """Return an output, or several of consecutive inputs; a body is the number of its input."""
    made = PendingOutputs(number, "out", key)
    for offset in range(number, number + count):
        made.add(row_key(offset, 0), encode_record(Message(b"%d" % offset)))
        made.digests.append(offset)
    return made


def lane_of(count: int) -> tuple[OutputLane[int], TopicQueues]:
    topic = TopicQueues()
    topic.change(QUEUES[:count])
    return OutputLane({"out": topic}), topic


def sent(queue: OutputQueue[int]) -> list[int]:
    """Put the next batch in flight and return its inputs."""
    raw = queue.take(HEAD, 0, RecordCompressor())
    header = read_header(raw)
    return [int(one.body) for one in decode_records(raw, header, range(header.count))]


def added(lane: OutputLane[int], one: PendingOutputs[int]) -> OutputQueue[int]:
    queue = lane.add(one)
    assert queue is not None
    return queue


def test_repeated_batch_has_the_same_outputs() -> None:
    lane, _ = lane_of(1)
    queue = added(lane, output(0, "k"))
    assert sent(queue) == [0]
    queue.failed(unsure=True)
    lane.add(output(1, "k"))
    queue.backing_off = False
    assert sent(queue) == [0]
    assert [one.inputs for one in queue.stored()] == [0]
    assert sent(queue) == [1]


def test_outputs_without_a_key_fill_one_batch_after_the_other() -> None:
    lane, _ = lane_of(4)
    first = added(lane, output(0))
    assert added(lane, output(1)) is first
    assert sent(first) == [0, 1]
    assert added(lane, output(2)) is not first


def test_key_waits_for_its_earlier_outputs_while_queues_are_added() -> None:
    lane, topic = lane_of(2)
    keys = [f"key-{number}" for number in range(40)]
    before = {key: added(lane, output(number, key)) for number, key in enumerate(keys)}
    topic.change(QUEUES)
    assert all(lane.add(output(100 + number, key)) is None for number, key in enumerate(keys))
    for queue in set(before.values()):
        sent(queue)
        queue.stored()
    released = lane.release_held("out")
    assert {queue.queue for queue in released} > {queue.queue for queue in before.values()}
    assert sorted(one for queue in released for one in sent(queue)) == list(range(100, 140))


def test_outputs_of_a_closed_queue_move_in_front_of_later_ones() -> None:
    lane, topic = lane_of(1)
    queue = added(lane, output(0, "k"))
    sent(queue)
    queue.failed(unsure=False)
    topic.change(QUEUES[1:2])
    assert lane.add(output(1, "k")) is None
    (to,) = lane.move(queue)
    assert (to.queue, sent(to)) == (QUEUES[1], [0, 1])


def test_closed_lane_sends_nothing() -> None:
    lane, _ = lane_of(1)
    queue = added(lane, output(0))
    lane.closed = True
    assert not queue.ready
    assert [one.inputs for one in lane.clear()] == [0]


def test_outputs_that_were_made_together_keep_their_rows_tags_and_keys() -> None:
    lane, _ = lane_of(1)
    made = output(5, count=2)
    tagged = Message(b"7", "red", ("a", "b"))
    made.add(row_key(6, 1), encode_record(tagged), tagged)
    made.digests.append(70)
    queue = added(lane, made)
    lane.add(output(8))
    raw = queue.take(HEAD, 0, RecordCompressor())
    header = check_batch(raw, stamped=False)
    assert [tuple(row) for row in rows_of(raw, header)] == [
        (5, 0, 5), (6, 0, 6), (6, 1, 70), (8, 0, 8),
    ]  # fmt: skip
    assert [one.tag for one in decode_records(raw, header, range(4))] == ["", "", "red", ""]
    assert tag_hashes(raw, header) == (0, 0, tag_hash("red"), 0)
    assert header.extra_key_count == 1


def test_part_of_outputs_has_their_tags_and_keys() -> None:
    made = output(5, count=2)
    tagged = Message(b"7", "red")
    made.add(row_key(7, 0), encode_record(tagged), tagged)
    made.digests.append(70)
    part = made.part([0, 2])
    assert (part.keys, part.digests) == ([row_key(5, 0), row_key(7, 0)], [5, 70])
    assert [one.tag for one in part.messages] == ["", "red"]
    assert part.bytes_count == sum(map(len, part.records))


def test_batch_has_no_more_outputs_than_its_limit() -> None:
    lane, _ = lane_of(1)
    queue = added(lane, output(0, "k", count=3_000))
    lane.add(output(3_000, "k", count=2_000))
    lane.add(output(5_000, "k"))
    assert len(sent(queue)) == 5_000
    queue.stored()
    assert sent(queue) == [5_000]
    assert (queue.waiting_count, queue.waiting_bytes) == (0, 0)
