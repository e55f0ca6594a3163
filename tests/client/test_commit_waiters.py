"""A wait for an acknowledgement ends when offsets has it, and fails when the queue is lost."""

from __future__ import annotations

from random import Random

import pytest

from baton.common.v1 import queue_pb2
from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.commit_waiters import CommitWaiters
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.held_messages import HeldMessage, HeldMessages
from batonmq._consumer.queue_acquirer import AcquiredQueue, GrantedLease
from batonmq._consumer.retry_sender import RetrySender
from batonmq._consumer.session import Session
from batonmq._core.queue_progress import GrantedProgress, QueueProgress
from batonmq.errors import Fenced
from tests.idempotence.messages import message


def progress_of(count: int) -> QueueProgress:
    """Return progress on which `count` messages have been started."""
    progress = QueueProgress(GrantedProgress(token=1, reset_epoch=0, committed=0))
    progress.receive(count, [(0, count)])
    for offset in range(count):
        assert progress.start(offset, offset + 1)
    return progress


async def test_wait_ends_with_the_commit_that_includes_the_message() -> None:
    progress, waiters = progress_of(4), CommitWaiters()
    progress.finish(2, 3)
    above = waiters.add(2)
    acks = progress.acks()
    progress.finish(0, 1)
    first = waiters.add(0)
    waiters.settle(progress)
    assert (above.done(), first.done(), len(waiters)) == (False, False, 2)
    progress.confirm(acks)
    waiters.settle(progress)
    assert (above.done(), first.done(), len(waiters)) == (True, False, 1)
    progress.confirm(progress.acks())
    waiters.settle(progress)
    assert (first.done(), len(waiters)) == (True, 0)
    assert [progress.is_confirmed(offset) for offset in range(4)] == [True, False, True, False]


async def test_wait_outlives_a_new_token_under_which_the_message_is_committed() -> None:
    progress, waiters = progress_of(2), CommitWaiters()
    progress.finish(1, 2)
    wait = waiters.add(1)
    renewed = progress.renewed(GrantedProgress(token=2, reset_epoch=0, committed=0))
    waiters.settle(renewed)
    assert not wait.done()
    renewed.confirm(renewed.acks())
    waiters.settle(renewed)
    assert wait.done()


async def test_wait_fails_when_the_queue_is_lost() -> None:
    waiters = CommitWaiters()
    wait, gone = waiters.add(0), waiters.add(1)
    gone.cancel()
    waiters.fail()
    assert len(waiters) == 0
    with pytest.raises(Fenced):
        await wait


async def test_acknowledgement_of_a_message_that_another_owner_has_handled_is_not_waited_for() -> (
    None
):
    """Its holder had it while the consumer was cut off; no commit follows then."""
    received = message()
    session = Session(
        group="g",
        incarnation=queue_pb2.Incarnation(client_id="a", incarnation_id=1),
        settings=ConsumerSettings(),
        directory=Directory("127.0.0.1:1", Random(1)),
        clock=Clock(),
        random=Random(1),
        on_ownership=lambda _: None,
    )
    queue, lease = AssignedQueue(session, received.queue), GrantedLease(0, 3_600_000, 0)
    queue.begin(AcquiredQueue(GrantedProgress(token=1, reset_epoch=0, committed=0), lease))
    assert queue.progress is not None
    queue.progress.receive(1, [(0, 1)])
    queue.progress.start(0, 1)
    call = session.running.begin(queue.ref, 0, 0)
    queue.fence()
    queue.stop()
    queue.begin(AcquiredQueue(GrantedProgress(token=3, reset_epoch=0, committed=1), lease))
    held = HeldMessages(session, RetrySender(session, lambda _: None), lambda _: None)
    assert held.finish(HeldMessage(received, queue, call)).done()
    assert not queue.commit_waiters
