"""Goal: no state of an output queue ends the sender of a transformer.

Method: the sender without storage; its retries are called as after a failed request.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import cast

from batonmq._connection.directory import Directory
from batonmq._consumer.output_sender import BrokerOutputs, OutputResults
from batonmq._consumer.session import Session
from batonmq._core.compression import RecordCompressor
from batonmq._core.output_lanes import OutputLane, OutputQueue, PendingOutputs, TopicQueues
from batonmq._core.outputs import OutputHead, OutputSource
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, encode_record
from batonmq.errors import Overloaded
from batonmq_server.testing import run_virtual


def queue_with_a_failed_batch() -> OutputQueue[object]:
    topic = TopicQueues()
    topic.change((QueueRef("out", "b", 0),))
    outputs: PendingOutputs[object] = PendingOutputs(0, "out", None)
    outputs.add(0, encode_record(Message(b"0")))
    outputs.digests.append(0)
    queue = OutputLane[object]({"out": topic}).add(outputs)
    assert queue is not None
    queue.take(OutputHead(OutputSource("g", 1, "b", 0), 0, 1, 0), 0, RecordCompressor())
    queue.failed(unsure=False)
    return queue


def test_queue_that_is_revoked_before_its_retry_does_not_end_the_sender() -> None:
    woken: list[OutputQueue[object]] = []
    results = cast(OutputResults, SimpleNamespace(wake=woken.append))
    session = cast(Session, SimpleNamespace(directory=Directory("ns:1", Random(1))))
    failed, revoked = queue_with_a_failed_batch(), queue_with_a_failed_batch()
    revoked.clear()

    async def back_off() -> None:
        sender = BrokerOutputs("b", session, results)
        for queues in ([revoked], [failed, revoked]):
            await sender._back_off(queues, Overloaded("the node is busy"))

    run_virtual(back_off())
    assert woken == [revoked, failed, revoked]
    assert not failed.backing_off
    assert failed.ready
    assert not revoked.ready
