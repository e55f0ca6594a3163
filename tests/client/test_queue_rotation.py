"""Goal: queues that have messages get turns of a bounded number of messages; others cost nothing.

Method: assigned queues of one session, without services.
"""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest

from baton.common.v1 import queue_pb2
from batonmq import ConsumerSettings, Message
from batonmq._common.clock import Clock
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.delivered_run import Delivery
from batonmq._consumer.group_view import GroupView
from batonmq._consumer.queue_acquirer import AcquiredQueue
from batonmq._consumer.queue_rotation import RUN_MESSAGES_MAX, QueueRotation
from batonmq._consumer.session import Session
from batonmq._consumer.stored_batch import StoredBatch
from batonmq._core.queue_progress import GrantedProgress
from batonmq._core.queues import QueueRef
from batonmq._core.records import BODY_FROM, BatchBuilder, encode_record, stamped_head
from batonmq._core.subscription import TagFilter

TOPIC = "orders"


def stored(first_offset: int, count: int) -> bytes:
    """Return a batch as storage has it."""
    builder = BatchBuilder()
    for _ in range(count):
        message = Message(b"x")
        builder.add(message, encode_record(message))
    batch = builder.encode(topic=TOPIC, queue_id=0)
    head = stamped_head(
        batch, position=0, first_offset=first_offset, store_unix_ms=0, topic_id=1, epoch=1
    )
    return head + batch[BODY_FROM:]


class Scene:
    """A rotation, and the queues that it has."""

    def __init__(self, queue_count: int) -> None:
        session = Session(
            group="billing",
            incarnation=queue_pb2.Incarnation(client_id="me"),
            settings=ConsumerSettings(),
            directory=cast(Any, None),
            clock=Clock(),
            random=Random(1),
            on_ownership=lambda _: None,
            view=GroupView(owned=False),
        )
        self.rotation, self.ends = QueueRotation(session), [0] * queue_count
        self.queues = [
            AssignedQueue(session, QueueRef(TOPIC, "broker-0", number))
            for number in range(queue_count)
        ]
        for queue in self.queues:
            queue.begin(AcquiredQueue(GrantedProgress(0, 0, 0)))
            self.rotation.add(queue)

    def deliver(self, number: int, count: int) -> None:
        queue, begin = self.queues[number], self.ends[number]
        self.ends[number] = end = begin + count
        assert queue.progress is not None
        queue.progress.receive(end, [(begin, end)])
        delivery = Delivery(queue.ref, 0, queue.lineage, [(begin, end)], TagFilter(None), None)
        for run in delivery.runs([StoredBatch(stored(begin, count))]):
            queue.buffer.add(run)
        queue.notify_arrived()

    def take_all(self) -> list[tuple[int, int]]:
        """Take messages until none waits; return the number of the queue and the offset of each."""
        taken: list[tuple[int, int]] = []
        while (message := self.rotation.take()) is not None:
            taken.append((message.queue.queue_id, message.offset))
            assert self.rotation.finish() is message
        return taken


async def test_queues_take_turns_of_a_bounded_number_of_messages() -> None:
    scene, run = Scene(3), RUN_MESSAGES_MAX
    scene.deliver(2, run + 2)
    scene.deliver(0, run + 1)
    assert scene.take_all() == [
        *((2, offset) for offset in range(run)),
        *((0, offset) for offset in range(run)),
        *((2, offset) for offset in range(run, run + 2)),
        (0, run),
    ]


async def test_queue_that_gets_messages_again_has_its_turn_again() -> None:
    scene = Scene(2)
    scene.deliver(0, 1)
    scene.deliver(1, 1)
    assert sorted(scene.take_all()) == [(0, 0), (1, 0)]
    scene.deliver(1, 1)
    assert scene.take_all() == [(1, 1)]


async def test_paused_queue_has_no_turn_until_it_is_resumed() -> None:
    scene = Scene(2)
    for number in range(2):
        scene.deliver(number, 1)
    scene.queues[0].pause()
    assert scene.take_all() == [(1, 0)]
    scene.queues[0].resume()
    assert scene.take_all() == [(0, 0)]


async def test_removed_queue_has_no_turn() -> None:
    scene = Scene(2)
    for number in range(2):
        scene.deliver(number, 1)
    scene.rotation.remove(scene.queues[0])
    assert scene.take_all() == [(1, 0)]


async def test_queues_without_messages_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, looks = Scene(1_000), [0]
    take_one = AssignedQueue.take_one

    def counted(queue: AssignedQueue) -> Any:
        looks[0] += 1
        return take_one(queue)

    monkeypatch.setattr(AssignedQueue, "take_one", counted)
    for number in (1, 500, 999):
        scene.deliver(number, 2)
    assert len(scene.take_all()) == 6
    assert looks[0] == 9, "each message, and that there is no other in its queue"
