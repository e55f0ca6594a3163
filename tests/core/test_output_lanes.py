"""Goal: outputs keep their order, and a repeated batch has the same outputs.

Method: lanes without a network; batches are decoded again.
"""

from __future__ import annotations

from batonmq._core.compression import RecordCompressor
from batonmq._core.output_lanes import OutputLane, OutputQueue, PendingOutput, TopicQueues
from batonmq._core.outputs import OutputHead, OutputRow, OutputSource
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, decode_records, encode_record, read_header

HEAD = OutputHead(OutputSource("g", 1, "b", 0), 0, 1, 0)
QUEUES = tuple(QueueRef("out", "b", number) for number in range(4))


def output(number: int, key: str | None = None) -> PendingOutput[int]:
    """Return an output; its body is the number of its input."""
    message = Message(b"%d" % number)
    return PendingOutput(
        number, OutputRow(number, 0, number), "out", key, message, encode_record(message)
    )


def lane_of(count: int) -> tuple[OutputLane[int], TopicQueues]:
    topic = TopicQueues()
    topic.change(QUEUES[:count])
    return OutputLane({"out": topic}), topic


def sent(queue: OutputQueue[int]) -> list[int]:
    """Put the next batch in flight and return its inputs."""
    raw = queue.take(HEAD, 0, RecordCompressor())
    header = read_header(raw)
    return [int(one.body) for one in decode_records(raw, header, range(header.count))]


def added(lane: OutputLane[int], one: PendingOutput[int]) -> OutputQueue[int]:
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
    assert [one.input for one in queue.stored()] == [0]
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
    assert [one.input for one in lane.clear()] == [0]
